"""HSTU: a sequence recommendation model on jagged histories.

The model follows "Actions Speak Louder than Words" (Zhai et al., 2024): blocks of pointwise SiLU attention
with a relative position bias and a gate.  Nothing in it is padded: histories stay concatenated as one
``[N, dim]`` tensor with ``B + 1`` ``offsets``, so ``N`` and ``B`` change at every step and
either may be zero.

Two parts depend on the values of ``offsets`` and are therefore custom operators, opaque to the compiler:

* ``hstu::attention`` and its backward: a loop over sequences without padding to the longest one.  The loop is the
  reference; on a GPU with Triton, the fused kernels of ``hstu_triton.py`` replace it.  They take their work from
  ``hstu::tiles``, a list shared by all layers;
* ``hstu::segment_sum``, the sum of each sequence's rows.

Everything else is ordinary PyTorch with explicit dimensions, and traces once under
``torch.compile(fullgraph=True, dynamic=True)``.  The module requires PyTorch only: embeddings can be any module that
maps the batch's features to a mapping of jagged tensors, such as a TorchRec ``EmbeddingCollection`` or its sharded
form.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

# Query rows per block; bounds the score matrix to [heads, QUERY_ROWS, length].
QUERY_ROWS = 256
TILE = 128  # rows per tile of the fused kernels
HAS_TRITON = importlib.util.find_spec("triton") is not None


def _spans(offsets: Tensor) -> list[tuple[int, int]]:
    """The (start, end) of every non-empty sequence; copies ``offsets`` to the host once."""
    bounds = offsets.tolist()
    return [(start, end) for start, end in pairwise(bounds) if end > start]


def _blocks(length: int) -> Iterator[tuple[int, int]]:
    """The (first, last) query rows of each block of a sequence."""
    for first in range(0, length, QUERY_ROWS):
        yield first, min(first + QUERY_ROWS, length)


class _BiasTiles:
    """Relative position biases ``[H, last - first, last]`` of a block of query rows.

    Every sequence has a block that starts at row 0, so the largest of those is cached and sliced.
    """

    def __init__(self, bias: Tensor, spans: list[tuple[int, int]]) -> None:
        self.bias = bias
        longest = max((end - start for start, end in spans), default=0)
        self.head = self._make(0, min(longest, QUERY_ROWS))

    def _make(self, first: int, last: int) -> Tensor:
        rows = torch.arange(first, last, device=self.bias.device)
        columns = torch.arange(last, device=self.bias.device)
        distance = (rows.unsqueeze(1) - columns.unsqueeze(0)).clamp_(0, self.bias.shape[1] - 1)
        return self.bias[:, distance]

    def __call__(self, first: int, last: int) -> Tensor:
        return self.head[:, :last, :last] if first == 0 else self._make(first, last)


def _sum_by_distance(scores: Tensor, max_distance: int) -> Tensor:
    """Sums ``scores`` [H, R, C] over each diagonal, C - R + row - column, into [H, max_distance].

    Scores of future keys must be zero.  The columns are reversed and padded by R columns; dropping the last R entries
    then shifts each row by one place relative to the row above it.  This turns diagonals into columns, whose sum is
    deterministic on every device.
    """
    heads, rows, columns = scores.shape
    skewed = F.pad(scores.flip(2), (0, rows)).flatten(1)[:, : rows * (columns + rows - 1)]
    sums = skewed.view(heads, rows, columns + rows - 1).sum(1)[:, rows - 1 :]
    total = scores.new_zeros((heads, max_distance))
    near = min(columns, max_distance - 1)
    total[:, :near] = sums[:, :near]
    total[:, max_distance - 1] += sums[:, near:].sum(1)
    return total


def _attention_loop(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, bias: Tensor, alpha: float) -> Tensor:
    out = q.new_zeros(v.shape)
    spans = _spans(offsets)
    tiles = _BiasTiles(bias, spans)
    for start, end in spans:
        queries, keys, values = (x[start:end].transpose(0, 1) for x in (q, k, v))
        for first, last in _blocks(end - start):
            scores = torch.baddbmm(
                tiles(first, last), queries[:, first:last], keys[:, :last].transpose(1, 2), alpha=alpha
            )
            weights = F.silu(scores).tril_(first).div_(end - start)
            out[start + first : start + last] = torch.bmm(weights, values[:, :last]).transpose(0, 1)
    return out


def _attention_backward_loop(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, bias: Tensor, alpha: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_q, grad_k, grad_v, grad_bias = (x.new_zeros(x.shape) for x in (q, k, v, bias))
    spans = _spans(offsets)
    tiles = _BiasTiles(bias, spans)
    for start, end in spans:
        queries, keys, values, grads = (x[start:end].transpose(0, 1) for x in (q, k, v, grad))
        to_q, to_k, to_v = (x[start:end].transpose(0, 1) for x in (grad_q, grad_k, grad_v))
        for first, last in _blocks(end - start):
            block, block_grads = queries[:, first:last], grads[:, first:last]
            scores = torch.baddbmm(tiles(first, last), block, keys[:, :last].transpose(1, 2), alpha=alpha)
            gate = torch.sigmoid(scores)
            weights = (scores * gate).tril_(first).div_(end - start)
            to_v[:, :last] += torch.bmm(weights.transpose(1, 2), block_grads)
            slope = gate * (1 + scores * (1 - gate))
            slope *= torch.bmm(block_grads, values[:, :last].transpose(1, 2))
            slope.tril_(first).div_(end - start)
            grad_bias += _sum_by_distance(slope, bias.shape[1])
            slope *= alpha
            to_q[:, first:last] = torch.bmm(slope, keys[:, :last])
            to_k[:, :last] += torch.bmm(slope.transpose(1, 2), block)
    return grad_q, grad_k, grad_v, grad_bias


def tile_capacity(sequences: int, rows: int) -> int:
    """Upper bound of the number of tiles."""
    return (rows + (TILE - 1) * sequences) // TILE


@torch.library.custom_op("hstu::tiles", mutates_args=())
def _tiles(offsets: Tensor, rows: int) -> Tensor:
    spans = _spans(offsets)
    most = max((end - start for start, end in spans), default=0)
    tiles = [
        (start, end - start, first // TILE)
        for first in reversed(range(0, most, TILE))
        for start, end in spans
        if end - start > first
    ]
    out = offsets.new_zeros((tile_capacity(offsets.shape[0] - 1, rows) + 1, 3), dtype=torch.int32)
    out[: len(tiles) + 1] = torch.tensor([(len(tiles), 0, 0), *tiles])
    return out


@_tiles.register_fake
def _(offsets: Tensor, rows: int) -> Tensor:
    return offsets.new_empty((tile_capacity(offsets.shape[0] - 1, rows) + 1, 3), dtype=torch.int32)


def attention_tiles(offsets: Tensor, rows: int) -> Tensor | None:
    """The tiles of ``TILE`` rows of all sequences, for ``hstu_attention`` on a GPU; shared by all layers.

    The first row is their number, followed by (start of the sequence, its length, index of the tile in it) per tile.
    Last tiles of the sequences come first, since they attend to the most keys.  None if the loop is used.
    """
    return _tiles(offsets, rows) if HAS_TRITON and offsets.is_cuda else None


@torch.library.custom_op("hstu::attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, bias: Tensor, alpha: float, tiles: Tensor | None = None
) -> Tensor:
    return _attention_loop(q, k, v, offsets, bias, alpha)


@_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, bias: Tensor, alpha: float, tiles: Tensor | None = None
) -> Tensor:
    return q.new_empty(v.shape)


@torch.library.custom_op("hstu::attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    bias: Tensor,
    alpha: float,
    tiles: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _attention_backward_loop(grad, q, k, v, offsets, bias, alpha)


@_attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, bias: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), bias.new_empty(bias.shape)


def _register_fused_kernels() -> None:
    """Register the GPU kernels for inputs that `hstu_triton` supports; Triton is imported on first call."""

    @_tiles.register_kernel("cuda")
    def _(offsets: Tensor, rows: int) -> Tensor:
        import hstu_triton

        return hstu_triton.list_tiles(offsets, rows)

    @_attention.register_kernel("cuda")
    def _(
        q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, bias: Tensor, alpha: float, tiles: Tensor | None = None
    ) -> Tensor:
        import hstu_triton

        if not hstu_triton.supports(q, k, v):
            return _attention_loop(q, k, v, offsets, bias, alpha)
        tiles = hstu_triton.list_tiles(offsets, q.shape[0]) if tiles is None else tiles
        return hstu_triton.attention(q, k, v, tiles, bias, alpha)

    @_attention_backward.register_kernel("cuda")
    def _(grad, q, k, v, offsets, bias, alpha, tiles=None):
        import hstu_triton

        if not hstu_triton.supports(q, k, v):
            return _attention_backward_loop(grad, q, k, v, offsets, bias, alpha)
        tiles = hstu_triton.list_tiles(offsets, q.shape[0]) if tiles is None else tiles
        return hstu_triton.attention_backward(grad, q, k, v, tiles, bias, alpha)


if HAS_TRITON:
    _register_fused_kernels()


def _attention_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.alpha, tiles = inputs
    ctx.save_for_backward(*tensors, tiles)


def _attention_grad(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, tiles = ctx.saved_tensors
    q, k, v, bias = _attention_backward(grad, *tensors, ctx.alpha, tiles)
    return q, k, v, None, bias, None, None


_attention.register_autograd(_attention_grad, setup_context=_attention_setup)


@register_flop_formula(torch.ops.hstu.attention)
def _attention_flops(q: Any, k: Any, v: Any, offsets: Any, *args: Any, **kwargs: Any) -> int:
    """Two products of each query with all preceding keys; assumes sequences of equal length."""
    rows, heads, width = q
    return 2 * rows * (rows // max(offsets[0] - 1, 1)) * heads * (width + v[2])


@register_flop_formula(torch.ops.hstu.attention_backward)
def _attention_backward_flops(grad: Any, q: Any, k: Any, v: Any, offsets: Any, *args: Any, **kwargs: Any) -> int:
    return 5 * _attention_flops(q, k, v, offsets) // 2


def hstu_attention(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, bias: Tensor, alpha: float, tiles: Tensor | None = None
) -> Tensor:
    """Causal pointwise SiLU attention within each jagged sequence.

    For position i of a sequence of length n, ``out_i`` is the sum over j <= i of
    ``silu(alpha * q_i . k_j + bias[h, min(i - j, max_distance - 1)]) * v_j``, divided by n.

    Args:
        q, k: ``[N, H, Dqk]``, the sequences' rows, concatenated.
        v: ``[N, H, Dv]``.
        offsets: ``[B + 1]`` integers, the start of each sequence, followed by N.
        bias: ``[H, max_distance]``, learned; the last entry is used for all larger distances.
        alpha: scale of the dot products.
        tiles: ``attention_tiles(offsets, N)``, to share between layers.

    Returns:
        ``[N, H, Dv]``; differentiable in q, k, v and bias.
    """
    return _attention(q, k, v, offsets, bias, alpha, tiles)


@torch.library.custom_op("hstu::segment_sum", mutates_args=())
def _segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    if values.shape[0] == 0:
        return values.new_zeros((offsets.shape[0] - 1, values.shape[1]))
    return torch.segment_reduce(values, "sum", offsets=offsets, axis=0, initial=0)


@_segment_sum.register_fake
def _(values: Tensor, offsets: Tensor) -> Tensor:
    return values.new_empty((offsets.shape[0] - 1, values.shape[1]))


def _segment_sum_setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    values, offsets = inputs
    ctx.rows = values.shape[0]
    ctx.save_for_backward(offsets)


def _segment_sum_grad(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (offsets,) = ctx.saved_tensors
    rows = torch.arange(ctx.rows, device=offsets.device, dtype=offsets.dtype)
    segments = torch.searchsorted(offsets, rows, right=True) - 1
    return grad.index_select(0, segments), None


_segment_sum.register_autograd(_segment_sum_grad, setup_context=_segment_sum_setup)


def segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """The sum of the rows of each sequence: ``[N, D]`` and ``[B + 1]`` to ``[B, D]``; 0 if it is empty."""
    return _segment_sum(values, offsets)


class HSTUBlock(nn.Module):
    """One block on jagged rows: normalize, project to (u, v, q, k), attend, gate with u, project, add."""

    def __init__(self, dim: int, heads: int, max_distance: int) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim {dim} is not a multiple of heads {heads}")
        self.dim = dim
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.project_in = nn.Linear(dim, 4 * dim)
        self.relative_bias = nn.Parameter(torch.empty(heads, max_distance))
        self.norm_out = nn.LayerNorm(dim)
        self.project_out = nn.Linear(dim, dim)
        nn.init.normal_(self.relative_bias, std=0.02)

    def forward(self, x: Tensor, offsets: Tensor, tiles: Tensor | None = None) -> Tensor:
        """``[N, dim]`` to ``[N, dim]``; each row attends to earlier rows of its sequence."""
        return self.around(x, lambda q, k, v, bias, alpha: hstu_attention(q, k, v, offsets, bias, alpha, tiles))

    def around(self, x: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """The block, with ``attend(q, k, v, bias, alpha)`` as its attention."""
        rows, head_dim = x.shape[0], self.dim // self.heads
        u, v, q, k = F.silu(self.project_in(self.norm(x))).split(self.dim, dim=1)
        v, q, k = (part.reshape(rows, self.heads, head_dim) for part in (v, q, k))
        attended = attend(q, k, v, self.relative_bias, head_dim**-0.5)
        gated = self.norm_out(attended.reshape(rows, self.dim)) * u
        return x + self.project_out(gated)


class HSTU(nn.Module):
    """Scores a candidate against a history and returns the training loss.

    Args:
        embeddings: maps ``batch.features`` to a mapping from feature to a jagged tensor with ``values()``,
            ``lengths()`` and ``offsets()``, of ``dim`` columns; e.g. a TorchRec ``EmbeddingCollection``.
        dim, heads, blocks, max_distance: the model's width, attention heads, depth and number of distinct
            relative positions.
        history, candidate: names of the features; each sample has exactly one candidate.
        action: an optional feature with as many ids as the history, embedded and added to it.
        normalizer: the loss is a sum over samples divided by this constant, the nominal number of samples per rank.
            So for a rank without samples the loss is well defined, exactly 0 and connected to every parameter, and the
            mean over ranks weighs every sample equally.
    """

    def __init__(
        self,
        embeddings: nn.Module,
        dim: int,
        heads: int,
        blocks: int,
        max_distance: int,
        history: str = "history",
        candidate: str = "candidate",
        action: str = "action",
        normalizer: int = 1,
    ) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.blocks = nn.ModuleList(HSTUBlock(dim, heads, max_distance) for _ in range(blocks))
        self.head = nn.Linear(dim, dim)
        self.history = history
        self.candidate = candidate
        self.action = action
        self.normalizer = normalizer

    def rows(self, features: Any) -> tuple[Tensor, Any, Any]:
        """The rows of histories plus actions, ``[N, dim]``; the jagged histories; the jagged candidates."""
        embedded = self.embeddings(features)
        x = embedded[self.history].values()
        if self.action in features.keys():  # noqa: SIM118 (a KeyedJaggedTensor is not a mapping)
            x = x + embedded[self.action].values()
        return x, embedded[self.history], embedded[self.candidate]

    def logits(self, features: Any) -> Tensor:
        """The score of each sample's candidate, ``[B]``."""
        x, history, candidate = self.rows(features)
        offsets = history.offsets().to(torch.int64)
        tiles = attention_tiles(offsets, x.shape[0])
        for block in self.blocks:
            x = block(x, offsets, tiles)
        pooled = segment_sum(x, offsets) / history.lengths().clamp(min=1).unsqueeze(1)
        return (self.head(pooled) * candidate.values()).sum(dim=1)

    def forward(self, batch: Any) -> Tensor:
        """The loss of a batch with ``features`` and float ``labels`` [B], a scalar."""
        loss = F.binary_cross_entropy_with_logits(self.logits(batch.features), batch.labels, reduction="sum")
        return loss / self.normalizer
