"""What benchmarks/step_gpu.py trains: the dense part, the batches, and the exchange as TorchRec does it by hand.

All variants train one and the same table: it is made once, and drawn anew from the same seed before every block, so
losses and tables of two variants can be compared bit by bit.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from hstu import HSTUBlock  # noqa: E402

LR, EPS, INIT = 0.05, 1e-8, 0.1
SIGMA = 0.9  # of the lognormal lengths, as in KuaiRand
SCATTER = 2654435761  # a prime: popular rows are spread over the table, and so over the ranks


@dataclass(frozen=True)
class Shape:
    """Of the model; the same for every size, so that one compilation serves all of them."""

    rows: int
    dim: int
    heads: int
    layers: int
    max_distance: int
    dense: str  # hstu or transformer
    further_tables: int = 0  # that a batch has ids for; variants look them up or not
    further_rows: int = 0  # of each


class Size(NamedTuple):
    """A batch of one rank."""

    name: str
    samples: int
    length: int  # mean

    @property
    def positions(self) -> int:
        return self.samples * self.length


# ---- dense part ------------------------------------------------------------------------------------------------------


class HstuDense(nn.Module):
    """The example's blocks in bfloat16. The last id of a history is the candidate; the row before it scores it."""

    def __init__(self, shape: Shape, normalizer: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(HSTUBlock(shape.dim, shape.heads, shape.max_distance) for _ in range(shape.layers))
        self.head = nn.Linear(shape.dim, shape.dim)
        self.normalizer = normalizer

    def forward(self, rows: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        x = rows.to(torch.bfloat16)
        for block in self.blocks:
            x = block(x, offsets)
        last = lengths.cumsum(0) - 1
        return loss_of(self.head(x.index_select(0, last - 1)), rows.index_select(0, last), labels, self.normalizer)


class TransformerBlock(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, dim // heads
        self.norm, self.norm_out = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.project = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, dim = x.shape
        parts = self.qkv(self.norm(x)).view(samples, length, 3, self.heads, self.width)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.project(attended.reshape(samples, length, dim))
        return x + self.down(F.gelu(self.up(self.norm_out(x))))


class TransformerDense(nn.Module):
    """Softmax attention on histories of one length, for where the fused jagged kernel is not there."""

    def __init__(self, shape: Shape, normalizer: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TransformerBlock(shape.dim, shape.heads) for _ in range(shape.layers))
        self.head = nn.Linear(shape.dim, shape.dim)
        self.normalizer = normalizer

    def forward(self, rows: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        histories = rows.view(lengths.shape[0], rows.shape[0] // lengths.shape[0], rows.shape[1])
        x = histories.to(torch.bfloat16)
        for block in self.blocks:
            x = block(x)
        return loss_of(self.head(x[:, -2]), histories[:, -1], labels, self.normalizer)


def loss_of(user: torch.Tensor, candidate: torch.Tensor, labels: torch.Tensor, normalizer: int) -> torch.Tensor:
    scores = (user.float() * candidate).sum(1)
    return F.binary_cross_entropy_with_logits(scores, labels, reduction="sum") / normalizer


def dense_part(shape: Shape, normalizer: int, device: torch.device) -> nn.Module:
    """The same weights every time."""
    torch.manual_seed(0)
    kind = HstuDense if shape.dense == "hstu" else TransformerDense
    return kind(shape, normalizer).to(device, torch.bfloat16)


# ---- table -----------------------------------------------------------------------------------------------------------


class Storage:
    """This rank's rows of the one table, and their optimizer's state."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.block = shape, -(-shape.rows // dist.get_world_size())
        mine = min(self.block, shape.rows - dist.get_rank() * self.block)
        self.weight = torch.empty(mine, shape.dim, device=device)
        self.momentum = torch.empty(mine, device=device)
        self.random = torch.Generator(device)

    def reset(self) -> None:
        self.weight.uniform_(-INIT, INIT, generator=self.random.manual_seed(dist.get_rank()))
        self.momentum.zero_()

    def digest(self) -> tuple[int, int]:
        """Differs if any bit does, or as good as."""
        return tuple(int(t.view(torch.int32).sum(dtype=torch.int64)) for t in (self.weight, self.momentum))


class Planned(nn.Module):
    """freescale's table and the dense part; `further` tables, each with an exchange of its own, add to the rows."""

    def __init__(self, shape: Shape, storage: Storage, dense: nn.Module, further: int = 0) -> None:
        super().__init__()
        import freescale

        # The table draws all rows of all ranks on the host to throw most of them away; here they have a place already.
        with mock.patch.object(torch, "empty", partial(torch.empty, device="meta")):
            self.item = freescale.ShardedEmbedding(
                shape.rows, shape.dim, name="item", optimizer="rowwise_adagrad", lr=LR, eps=EPS, device="meta"
            )
        assert self.item.weight.shape == storage.weight.shape and self.item.momentum.shape == storage.momentum.shape
        self.item.weight, self.item.momentum = storage.weight, storage.momentum
        self.item._exchange.update_anchor()
        tables = (
            freescale.ShardedEmbedding(
                shape.further_rows, shape.dim, name=f"further{i}", optimizer="rowwise_adagrad", lr=LR, eps=EPS,
                device=storage.weight.device,
            )
            for i in range(further)
        )  # fmt: skip
        self.further = nn.ModuleList(tables)
        self.dense = dense

    def reset_further(self) -> None:
        random = torch.Generator(self.item.weight.device)
        for i, table in enumerate(self.further):
            table.weight.uniform_(-INIT, INIT, generator=random.manual_seed(1000 * (1 + i) + dist.get_rank()))
            table.momentum.zero_()

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        rows = self.item(batch["item"])
        for i, table in enumerate(self.further):
            rows = rows + table(batch[f"further{i}"])
        return self.dense(rows, batch["item_lengths"], batch["labels"])


class PlainExchange(torch.autograd.Function):
    """As TorchRec's row-wise sharding: ids to their owners, a row back for each value, a gradient for each value.

    The only waits of the host are those for the counts, which TorchRec has too. The update is row-wise Adagrad on the
    sums of duplicates, of which there is no count: what is left over adds zeros.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, ids: torch.Tensor, storage: Storage) -> torch.Tensor:  # type: ignore[override]
        world = dist.get_world_size()
        owner = ids // storage.block
        order = owner.argsort(stable=True)
        counts = torch.bincount(owner, minlength=world)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        send, recv = torch.stack([counts, theirs]).tolist()
        wanted = ids.new_empty(sum(recv))
        dist.all_to_all_single(wanted, (ids - owner * storage.block)[order], recv, send)
        arrived = storage.weight.new_empty(ids.shape[0], storage.weight.shape[1])
        dist.all_to_all_single(arrived, storage.weight.index_select(0, wanted), send, recv)
        place = torch.empty_like(order)
        place[order] = torch.arange(order.shape[0], device=order.device)
        ctx.state = order, wanted, send, recv, storage
        return arrived.index_select(0, place)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        order, wanted, send, recv, storage = ctx.state
        arrived = grad.new_empty(wanted.shape[0], grad.shape[1])
        dist.all_to_all_single(arrived, grad.index_select(0, order), recv, send)
        plain_update(storage, wanted, arrived / dist.get_world_size())
        return grad.new_zeros(0), None, None


def plain_update(storage: Storage, rows: torch.Tensor, grads: torch.Tensor) -> None:
    ordered, order = rows.sort(stable=True)
    first = torch.ones_like(ordered, dtype=torch.bool)
    torch.ne(ordered[1:], ordered[:-1], out=first[1:])
    segment = first.cumsum(0) - 1
    # Behind the last segment nothing is summed; rows spread out, so that their zeros do not queue for one row.
    target = torch.arange(rows.shape[0], device=rows.device) % storage.weight.shape[0]
    target.index_copy_(0, segment, ordered)
    sums = torch.zeros_like(grads).index_add_(0, segment, grads.index_select(0, order))
    storage.momentum.index_add_(0, target, sums.square().mean(1))
    scale = -LR / (storage.momentum.index_select(0, target).sqrt() + EPS)
    storage.weight.index_add_(0, target, sums * scale.unsqueeze(1))


# ---- batches ---------------------------------------------------------------------------------------------------------


def zipf(random: np.random.Generator, count: int, rows: int, exponent: float) -> np.ndarray:
    """Ids of popularity rank^-exponent, by the inverse of the continuous distribution."""
    u, power = random.random(count), 1.0 - exponent
    ranks = rows**u if abs(power) < 1e-6 else ((float(rows) ** power - 1) * u + 1) ** (1 / power)
    return np.clip(ranks.astype(np.int64) - 1, 0, rows - 1) * SCATTER % rows


def lengths_of(random: np.random.Generator, size: Size, equal: bool) -> np.ndarray:
    """Lognormal, all together about `size.positions`; at least 2, a history and its candidate."""
    drawn = np.ones(size.samples) if equal else random.lognormal(0.0, SIGMA, size.samples)
    return np.maximum(np.rint(drawn * size.positions / drawn.sum()), 2).astype(np.int64)


def collision_share(rows: int, positions: int, ranks: int, exponent: float) -> float:
    """Share of one rank's unique rows that some rank used in the batch before."""
    random = np.random.default_rng(5)
    shares = []
    for _ in range(3):
        before = zipf(random, positions * ranks, rows, exponent)
        mine = np.unique(zipf(random, positions, rows, exponent))
        shares.append(np.isin(mine, before).mean())
    return float(np.mean(shares))


def exponent_for(share: float, rows: int, positions: int, ranks: int) -> float:
    """The exponent at which about `share` of the rows collide."""
    low, high = 0.0, 1.3
    for _ in range(9):
        middle = (low + high) / 2
        if collision_share(rows, positions, ranks, middle) < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def batches(shape: Shape, size: Size, exponent: float, count: int, device: torch.device) -> list[dict[str, Any]]:
    """This rank's batches, in pinned memory, as a DataLoader would leave them."""
    made = []
    for step in range(count):
        random = np.random.default_rng([dist.get_rank(), step])
        lengths = lengths_of(random, size, equal=shape.dense == "transformer")
        batch = {
            "item": torch.from_numpy(zipf(random, int(lengths.sum()), shape.rows, exponent)),
            "item_lengths": torch.from_numpy(lengths),
            "labels": torch.from_numpy((random.random(size.samples) < 0.5).astype(np.float32)),
        }
        for i in range(shape.further_tables):
            ids = zipf(random, int(lengths.sum()), shape.further_rows, exponent)
            batch[f"further{i}"] = torch.from_numpy(ids)
        made.append({k: v.pin_memory() if device.type == "cuda" else v for k, v in batch.items()})
    return made
