"""Histories in segments followed by tokens, and the attention between them: an operator for `persrec.py`.

A history is split into `segments` segments of (almost) equal length, except for its last `recent` items. Each segment
is followed by `tokens` rows, which are the same for all users; the recent items come last:

    [items of segment 0][tokens][items of segment 1][tokens] ... [recent items]

A row attends to its own segment up to itself, and to the tokens of all earlier segments, but not to their items. So a
segment is a sequence in the attention of `hstu.py`, and masked work is never listed, neither as a tile of its kernels
nor as an iteration of its loop. This file adds the tokens of earlier segments, a few keys per row. Sums are divided by
the number of rows of the query's segment, which later items do not change, so tokens can be cached.

The loops here are the reference for the operators `persrec::attention` and its backward. On a GPU with Triton, the
kernels of `persrec_triton.py` run after those of `hstu_triton.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

import hstu


class Cut(NamedTuple):
    """Layout of B histories with N items, S segments and k tokens:

    items    ``[B (S + 1) + 1]``: the first item of each segment (a history's last one is the recent items), then N
    rows     the same for rows, including tokens
    number   the segment of each row, ``[N + B S k]``; B (S + 1) for unused rows at the end: short histories have fewer
             tokens, and how many is known only on the device
    source   index of each row into the N items followed by S k tokens per history
    of_item  ``[N]``: the row of each item
    recent   ``[B]``: the segment of each history's recent items
    """

    items: Tensor
    rows: Tensor
    number: Tensor
    source: Tensor
    of_item: Tensor
    segments: int
    tokens: int
    recent: Tensor


def cut(offsets: Tensor, count: int, segments: int, tokens: int, recent: int) -> Cut:
    """Layout of histories of `count` items. A history of at most `recent` items has no segments and no tokens; one with
    fewer other items than `segments` has one segment per item. No host sync."""
    offsets, samples = offsets.to(torch.int64), offsets.shape[0] - 1
    before = (offsets.diff() - recent).clamp(min=0)
    used = before.clamp(max=segments)
    part = torch.arange(segments + 1, device=offsets.device).minimum(used.unsqueeze(1))  # [B, S + 1]
    first = before.unsqueeze(1) * part // used.clamp(min=1).unsqueeze(1)
    added = used * tokens
    items = torch.cat([(offsets[:-1].unsqueeze(1) + first).flatten(), offsets[-1:]])
    begin = offsets[:-1] + added.cumsum(0) - added
    rows = torch.cat([(begin.unsqueeze(1) + first + part * tokens).flatten(), offsets[-1:] + added.sum()])

    row = torch.arange(count + samples * segments * tokens, device=offsets.device)
    number = torch.searchsorted(rows, row, right=True) - 1
    inside = number.clamp(max=samples * (segments + 1) - 1)
    within, size = row - rows[inside], items[inside + 1] - items[inside]
    slot = (inside // (segments + 1) * segments + inside % (segments + 1)) * tokens + within - size
    source = torch.where(within < size, items[inside] + within, count + slot)
    source = torch.where(number > inside, row, source)
    item = torch.arange(count, device=offsets.device)
    segment = torch.searchsorted(items, item, right=True) - 1
    of_item = rows[segment] + item - items[segment]
    last = torch.arange(samples, device=offsets.device) * (segments + 1) + segments
    return Cut(items, rows, number, source, of_item, segments, tokens, last)


def put_tokens(x: Tensor, tokens: Tensor, where: Cut) -> Tensor:
    """Insert the tokens ``[k, dim]`` after each segment of the items' rows ``[N, dim]``: ``[N + B S k, dim]``."""
    copies = where.source.shape[0] - x.shape[0]
    repeated = tokens.repeat(copies // tokens.shape[0], 1)
    return torch.cat([x, repeated]).index_select(0, where.source)


def _with_earlier_tokens(rows: Tensor, segments: int, tokens: int) -> Iterator[tuple[int, int, Tensor]]:
    """The (start, end) of every segment with earlier tokens, and their rows; copies `rows` to the host once."""
    bounds = rows.tolist()
    for history in range(0, len(bounds) - 1, segments + 1):
        ends: list[int] = []  # of the earlier segments
        for start, end in zip(bounds[history:], bounds[history + 1 : history + segments + 2], strict=False):
            if ends and end > start:
                each = torch.tensor(ends).unsqueeze(1) + torch.arange(-tokens, 0)
                yield start, end, each.flatten().to(rows.device)
            if end > start:
                ends.append(end)


def _token_scores(q: Tensor, k: Tensor, start: int, tokens: Tensor, bias: Tensor, alpha: float) -> Tensor:
    """Scores of queries ``[H, R, D]`` and token keys ``[H, T, D]``; `start` and `tokens` are row numbers."""
    row = torch.arange(start, start + q.shape[1], device=q.device)
    distance = (row.unsqueeze(1) - tokens).clamp_(max=bias.shape[1] - 1)
    return torch.baddbmm(bias[:, distance], q, k.transpose(1, 2), alpha=alpha)


def _add_by_distance(total: Tensor, slope: Tensor, start: int, tokens: Tensor) -> None:
    """Adds `slope` [H, R, T] to `total` [H, max_distance] by distance, token by token, so the order is fixed."""
    last = total.shape[1] - 1
    for column, token in enumerate(tokens.tolist()):
        first = min(start - token, last)
        near = min(last - first, slope.shape[1])
        total[:, first : first + near] += slope[:, :near, column]
        total[:, last] += slope[:, near:, column].sum(1)


def attention_loop(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, bias: Tensor, alpha: float, segments: int, tokens: int
) -> Tensor:
    out = hstu._attention_loop(q, k, v, rows, bias, alpha)
    for start, end, earlier in _with_earlier_tokens(rows, segments, tokens):
        queries, keys, values = (x.transpose(0, 1) for x in (q[start:end], k[earlier], v[earlier]))
        weights = F.silu(_token_scores(queries, keys, start, earlier, bias, alpha)).div_(end - start)
        out[start:end] += torch.bmm(weights, values).transpose(0, 1)
    return out


def attention_backward_loop(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, bias: Tensor, alpha: float, segments: int, tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    grad_q, grad_k, grad_v, grad_bias = hstu._attention_backward_loop(grad, q, k, v, rows, bias, alpha)
    for start, end, earlier in _with_earlier_tokens(rows, segments, tokens):
        queries, grads = (x[start:end].transpose(0, 1) for x in (q, grad))
        keys, values = (x[earlier].transpose(0, 1) for x in (k, v))
        scores = _token_scores(queries, keys, start, earlier, bias, alpha)
        gate = torch.sigmoid(scores)
        weights = (scores * gate).div_(end - start)
        grad_v[earlier] += torch.bmm(weights.transpose(1, 2), grads).transpose(0, 1)
        slope = gate * (1 + scores * (1 - gate)) * torch.bmm(grads, values.transpose(1, 2))
        slope.div_(end - start)
        _add_by_distance(grad_bias, slope, start, earlier)
        slope *= alpha
        grad_q[start:end] += torch.bmm(slope, keys).transpose(0, 1)
        grad_k[earlier] += torch.bmm(slope.transpose(1, 2), queries).transpose(0, 1)
    return grad_q, grad_k, grad_v, grad_bias


@torch.library.custom_op("persrec::attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, number: Tensor, bias: Tensor, alpha: float, segments: int,
    tokens: int, tiles: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return attention_loop(q, k, v, rows, bias, alpha, segments, tokens)


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return q.new_empty(v.shape)


@torch.library.custom_op("persrec::attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, number: Tensor, bias: Tensor, alpha: float,
    segments: int, tokens: int, tiles: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return attention_backward_loop(grad, q, k, v, rows, bias, alpha, segments, tokens)


@_attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, number: Tensor, bias: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), bias.new_empty(bias.shape)


def _register_fused_kernels() -> None:
    """Register the GPU kernels for inputs that `hstu_triton` supports; Triton is imported on first call."""

    @_attention.register_kernel("cuda")
    def _(q, k, v, rows, number, bias, alpha, segments, tokens, tiles=None):
        import hstu_triton
        import persrec_triton

        if not hstu_triton.supports(q, k, v):
            return attention_loop(q, k, v, rows, bias, alpha, segments, tokens)
        tiles = hstu_triton.list_tiles(rows, q.shape[0]) if tiles is None else tiles
        return persrec_triton.attention(q, k, v, rows, number, bias, alpha, segments, tokens, tiles)

    @_attention_backward.register_kernel("cuda")
    def _(grad, q, k, v, rows, number, bias, alpha, segments, tokens, tiles=None):
        import hstu_triton
        import persrec_triton

        if not hstu_triton.supports(q, k, v):
            return attention_backward_loop(grad, q, k, v, rows, bias, alpha, segments, tokens)
        tiles = hstu_triton.list_tiles(rows, q.shape[0]) if tiles is None else tiles
        return persrec_triton.attention_backward(grad, q, k, v, rows, number, bias, alpha, segments, tokens, tiles)


if hstu.HAS_TRITON:
    _register_fused_kernels()


def _attention_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.alpha, ctx.segments, ctx.tokens, tiles = inputs
    ctx.save_for_backward(*tensors, tiles)


def _attention_grad(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, tiles = ctx.saved_tensors
    q, k, v, bias = _attention_backward(grad, *tensors, ctx.alpha, ctx.segments, ctx.tokens, tiles)
    return q, k, v, None, None, bias, None, None, None, None


_attention.register_autograd(_attention_grad, setup_context=_attention_setup)


@register_flop_formula(torch.ops.persrec.attention)
def _attention_flops(
    q: Any, k: Any, v: Any, rows: Any, number: Any, bias: Any, alpha: Any, segments: int, tokens: int,
    *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    """As for `hstu::attention`; assumes segments of equal length."""
    count, heads, width = q
    return 2 * count * (count // max(rows[0] - 1, 1) + segments * tokens) * heads * (width + v[2])


@register_flop_formula(torch.ops.persrec.attention_backward)
def _attention_backward_flops(grad: Any, *args: Any, **kwargs: Any) -> int:
    return 5 * _attention_flops(*args) // 2


def segment_attention(
    q: Tensor, k: Tensor, v: Tensor, where: Cut, bias: Tensor, alpha: float, tiles: Tensor | None = None
) -> Tensor:
    """``hstu_attention`` within segments, plus the tokens of earlier ones; sums are divided by the number of rows of
    the query's segment. Unused rows at the end are 0.

    tiles: ``attention_tiles(where.rows, q.shape[0])``, to share between layers.
    """
    return _attention(q, k, v, where.rows, where.number, bias, alpha, where.segments, where.tokens, tiles)
