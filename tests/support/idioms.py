"""Small models, each with one idiom of torch users, and what a backend makes of them: values, gradients, or an error.

`x` [n, 4] and `y` [m, 4] come from linear layers, so every idiom has a backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import trec

DIM, ROWS = 4, 11
SIZES = ((5, 7), (4, 3), (9, 2))  # of x and y, per batch
SMALL_SIZES = ((1, 6), (0, 5))

Idiom = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
IDIOMS: dict[str, Idiom] = {}


def _idiom(fn: Idiom) -> Idiom:
    IDIOMS[fn.__name__] = fn
    return fn


def _lengths(x: torch.Tensor) -> torch.Tensor:
    """Lengths that sum to the rows of x."""
    n = x.shape[0]
    return torch.stack([torch.tensor(n // 3), torch.tensor(n - n // 3 - n // 2), torch.tensor(n // 2)])


def _offsets(x: torch.Tensor) -> torch.Tensor:
    return F.pad(_lengths(x).cumsum(0), (1, 0))


# ---- retrieval losses ----------------------------------------------------------------------------------------


@_idiom
def in_batch_negatives(x, y):
    return F.cross_entropy(x @ x.T, torch.arange(x.size(0)))


@_idiom
def in_batch_negatives_of_another_tower(x, y):
    return F.cross_entropy(x @ (x * 2).T / 0.07, torch.arange(x.shape[0], device=x.device))


@_idiom
def softmax_over_candidates(x, y):
    return torch.softmax(x @ y.T, dim=-1)


@_idiom
def normalized_similarities(x, y):
    return torch.logsumexp(F.normalize(x, dim=-1) @ F.normalize(y, dim=-1).T, dim=1)


@_idiom
def sampled_softmax(x, y):
    negatives = (x @ y.T).masked_fill(torch.eye(x.shape[0], y.shape[0], dtype=torch.bool), -1e9)
    return torch.logsumexp(negatives, 1) - x.sum(1)


@_idiom
def pairwise_ranking(x, y):
    s = x.sum(1)
    return F.softplus(-(s[:, None] - s[None, :])).triu(1)


@_idiom
def bce_with_positives_and_negatives(x, y):
    return F.binary_cross_entropy_with_logits(torch.cat([x.sum(1), y.sum(1)]), torch.cat([torch.ones(x.size(0)), torch.zeros(y.size(0))]))


@_idiom
def weighted_mean_of_losses(x, y):
    w = torch.linspace(0, 1, x.shape[0])
    return (F.mse_loss(x, x.detach() + 1, reduction="none").mean(1) * w).sum() / w.sum().clamp(min=1e-6)


# ---- slices --------------------------------------------------------------------------------------------------


@_idiom
def slice_assigned(x, y):
    out = torch.zeros(x.size(0) + 3, DIM)
    out[: x.size(0), :] = x
    return out


@_idiom
def slice_assigned_up_to_the_other(x, y):
    out = y.new_zeros(x.size(0) + y.size(0), DIM)
    out[: x.size(0)] = x
    out[x.size(0) :] = y
    return out


@_idiom
def first_two_unbound(x, y):
    a, b = y[:2].unbind(0)
    return a * b


@_idiom
def last_row(x, y):
    return y[-1] + y[0]


@_idiom
def shifted_by_one(x, y):
    return y[1:] * y[:-1]


@_idiom
def every_other(x, y):
    return y[::2]


@_idiom
def slice_of_the_other_size(x, y):
    n = min(x.shape[0], y.shape[0])
    return x[:n] + y[:n]


@_idiom
def narrow(x, y):
    return torch.narrow(y, 0, 1, y.shape[0] - 1)


@_idiom
def chunked(x, y):
    return sum(c.sum(0) for c in x.chunk(2))


@_idiom
def split_in_two(x, y):
    a, b = torch.split(y, [1, y.shape[0] - 1])
    return a.sum() * b


@_idiom
def concatenated_and_split(x, y):
    a, b = torch.split(torch.tanh(torch.cat([x, y])), [x.shape[0], y.shape[0]])
    return a.sum(0) * b.sum(0)


# ---- shapes --------------------------------------------------------------------------------------------------


@_idiom
def tiled(x, y):
    return y.tile(2, 1) + 1


@_idiom
def repeated_rows(x, y):
    return y.repeat_interleave(2, dim=0)


@_idiom
def expanded(x, y):
    return y[:, None, :].expand(-1, 3, -1) * 2


@_idiom
def padded(x, y):
    return F.pad(y, (0, 0, 2, 1))


@_idiom
def heads(x, y):
    return y.view(-1, 2, DIM // 2).transpose(0, 1).reshape(2, -1)


@_idiom
def flattened(x, y):
    return y.flatten() * torch.arange(y.numel())


@_idiom
def stacked(x, y):
    return torch.stack([y, y * 2], dim=1).mean(1)


@_idiom
def outer_sum(x, y):
    return x.sum(1)[:, None] + y.sum(1)[None, :]


@_idiom
def unfolded(x, y):
    return y.unfold(0, 2, 1).sum(-1)


@_idiom
def rolled_and_flipped(x, y):
    return y.roll(1, 0) * y.flip(0)


@_idiom
def einsum_of_both_sizes(x, y):
    return torch.einsum("nd,md->nm", x, y)


@_idiom
def einsum_over_the_batch(x, y):
    return torch.einsum("nd,ne->de", x, x * 2)


@_idiom
def batched_product(x, y):
    return torch.bmm(y[:, None, :], y[:, :, None]).squeeze()


# ---- attention ------------------------------------------------------------------------------------------------


@_idiom
def causal_mask(x, y):
    n = y.shape[0]
    mask = torch.ones(n, n, dtype=torch.bool).tril()
    return torch.softmax((y @ y.T).masked_fill(~mask, -math.inf), -1) @ y


@_idiom
def causal_scores_of_two_towers(x, y):
    scores = y @ (y * 3).T
    return scores + torch.triu(torch.full_like(scores, -1e9), diagonal=1)


@_idiom
def attention_of_torch(x, y):
    q = y.view(1, -1, 2, 2).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


@_idiom
def attention_across(x, y):
    return torch.softmax(x @ y.T / math.sqrt(DIM), -1) @ y


@_idiom
def relative_positions(x, y):
    n = y.shape[0]
    distance = (torch.arange(n)[:, None] - torch.arange(n)[None, :]).clamp(0, 3)
    return F.silu(y @ y.T + distance) / n


@_idiom
def mask_of_lengths(x, y):
    n = y.shape[0]
    mask = torch.arange(n)[None, :] < torch.arange(1, 4)[:, None]
    return (y[None] * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


# ---- jagged ---------------------------------------------------------------------------------------------------


@_idiom
def jagged_to_padded_and_back(x, y):
    lengths = torch.tensor([2, 0, 1]).clamp(max=y.shape[0])
    position = torch.arange(3)
    mask = position[None, :] < lengths[:, None]
    index = (F.pad(lengths.cumsum(0), (1, 0))[:-1, None] + position).clamp(max=y.shape[0] - 1)
    return (y[index] * mask[..., None]).sum(1)


@_idiom
def segments_summed(x, y):
    segment = torch.arange(y.shape[0]) // 2
    return torch.zeros(y.shape[0], DIM).index_add(0, segment, y)


@_idiom
def scattered(x, y):
    index = (torch.arange(y.shape[0]) % 2)[:, None].expand(-1, DIM)
    return torch.zeros(2, DIM).scatter_add(0, index, y)


@_idiom
def cumulated(x, y):
    return y.cumsum(0) / torch.arange(1, y.shape[0] + 1)[:, None]


# ---- selection ------------------------------------------------------------------------------------------------


@_idiom
def masked_selection(x, y):
    return torch.masked_select(y, y > 0)


@_idiom
def rows_where(x, y):
    return y[y.sum(1) > 0].sum(0)


@_idiom
def positions_that_are_not_zero(x, y):
    return y.index_select(0, torch.nonzero(y.sum(1) > 0).squeeze(1)).sum()


@_idiom
def best_two(x, y):
    return y.topk(2, dim=0).values


@_idiom
def sorted_rows(x, y):
    values, order = y.sum(1).sort()
    return values * y[order, 0]


@_idiom
def gathered_by_position(x, y):
    return torch.gather(y, 1, torch.arange(y.shape[0])[:, None] % DIM)


@_idiom
def one_hot(x, y):
    return F.one_hot(torch.arange(y.shape[0]) % 3, 3).to(y.dtype).T @ y


@_idiom
def value_of_a_tensor(x, y):
    n = int((y.detach().sum(1) > -100).sum())
    return y.sum() * n


# ---- whatever else ---------------------------------------------------------------------------------------------


@_idiom
def normalized_over_the_batch(x, y):
    return (y - y.mean(0)) / (y.std(0, unbiased=False) + 1e-5)


@_idiom
def layer_norm(x, y):
    return F.layer_norm(y, (DIM,)) + F.gelu(y)


@_idiom
def positional_rows(x, y):
    table = torch.linspace(-1, 1, 64 * DIM).view(64, DIM)
    return y + table[: y.shape[0]]


@_idiom
def a_loop_over_features(x, y):
    return torch.cat([F.relu(y[:, i : i + 1]) for i in range(DIM)], 1).sum(1)


@_idiom
def branch_on_the_size(x, y):
    return y.mean(0) if y.shape[0] > 2 else y.sum(0)


class OneIdiom(nn.Module):
    """`embed`: x are rows of a sharded table, "native" or "torchrec"."""

    def __init__(self, idiom: Idiom, embed: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.of_x, self.of_y, self.idiom = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), idiom
        self.table: Any = None
        if embed == "native":
            import freescale

            self.table = freescale.ShardedEmbedding(ROWS, DIM, name="item", lr=0.1)
        elif embed == "torchrec":
            from torchrec import EmbeddingCollection, EmbeddingConfig

            configs = [
                EmbeddingConfig(name=name, feature_names=[name], num_embeddings=ROWS, embedding_dim=DIM)
                for name in ("item", "user")
            ]
            self.collection = EmbeddingCollection(configs)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        if hasattr(self, "collection"):
            rows = self.collection(batch["ids"])
            return self.idiom(self.of_x(rows["item"].values()), self.of_y(rows["user"].values()))
        x = batch["item"] if self.table is None else self.table(batch["item"])
        return self.idiom(self.of_x(x), self.of_y(batch["y"]))


def _batch(n: int, m: int, embed: str) -> dict[str, Any]:
    g = torch.Generator().manual_seed(n * 10 + m)
    if embed == "torchrec":
        from torchrec import KeyedJaggedTensor

        values = torch.randint(0, ROWS, (n + m,), generator=g)
        lengths = torch.tensor([n // 2, n - n // 2, m // 2, m - m // 2])
        return {"ids": KeyedJaggedTensor(keys=["item", "user"], values=values, lengths=lengths)}
    item = torch.randint(0, ROWS, (n,), generator=g) if embed else torch.randn(n, DIM, generator=g)
    return {"item": item, "y": torch.randn(m, DIM, generator=g)}


def results(
    names: Iterable[str], sizes: Any = SIZES, embed: str = "", planned: bool = False, **compile_args: Any
) -> dict[str, list[Any]]:
    """For each idiom and batch, the output and the gradients of all parameters; a failing idiom ends with the error.

    Without `compile_args`, in eager mode. `planned`: by a LookaheadLoader. With fullgraph=True, except for TorchRec's
    rows without a loader: there the model may depend on sizes that are unbacked."""
    import freescale

    found: dict[str, list[Any]] = {}
    for name in names:
        torch._dynamo.reset()
        model: Any = OneIdiom(IDIOMS[name], embed)
        if embed == "torchrec":
            model = trec.shard(model, {"item": "row_wise", "user": "row_wise"}, "sgd")
        whole = embed != "torchrec" or planned
        run = torch.compile(model, fullgraph=whole, **compile_args) if compile_args else model
        dense = [p for p in model.parameters() if not hasattr(p, "_in_backward_optimizers")]
        batches, seen = [_batch(n, m, embed) for n, m in sizes], found.setdefault(name, [])
        try:
            for batch in freescale.LookaheadLoader(batches, run) if planned else batches:
                model.zero_grad()
                out = run(batch)
                (out.float() ** 2).sum().backward()
                grads = [p.grad for p in dense]
                if embed == "torchrec":  # between two graphs, a missing gradient is zeros
                    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in dense]
                seen.append([out.detach(), *(None if g is None else g.clone() for g in grads)])
        except Exception as error:  # noqa: BLE001
            seen.append(f"{type(error).__name__}: {str(error)[:500]}")
    return found
