"""A model with one native table, and the same training in one plain process."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch import nn

ROWS, DIM, STEPS = 61, 4, 20
CASES = list(itertools.product(("row_wise", "table_wise"), ("sgd", "rowwise_adagrad")))


class Sharded(nn.Module):
    def __init__(self, sharding: str, optimizer: str, dtype: torch.dtype, **kwargs) -> None:
        super().__init__()
        import freescale

        torch.manual_seed(0)
        self.table = freescale.ShardedEmbedding(
            ROWS, DIM, sharding=sharding, owner=dist.get_world_size() - 1, optimizer=optimizer, lr=0.1, dtype=dtype, **kwargs
        )
        torch.manual_seed(1)
        self.out = nn.Linear(DIM, DIM, dtype=dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = self.table(ids)
        return (torch.tanh(self.out(found)) * found).sum() / 8


def whole_table(rows: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """The initial values of a native table, over all shards."""
    from freescale.runtime.tables import sharded_embedding

    whole = torch.empty(rows, dim, dtype=dtype)
    sharded_embedding.fill_uniform(whole, 0, rows**-0.5, sharded_embedding.draw_seed())
    return whole


def ids_of(step: int, rank: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(100 * step + rank)
    n = 0 if (step + rank) % 6 == 5 else 2 + (7 * step + rank) % 9
    high = 2 if step % 4 == 1 else ROWS  # sometimes with many duplicates
    return torch.randint(0, high, (n,), generator=g)


def plain(world: int, optimizer: str, dtype: torch.dtype) -> tuple[list[list[float]], torch.Tensor]:
    """Results of one process with all ranks' ids, sharing only the initial values with freescale."""
    torch.manual_seed(0)
    whole = whole_table(ROWS, DIM, dtype)
    table = nn.Parameter(whole)
    torch.manual_seed(1)
    out = nn.Linear(DIM, DIM, dtype=dtype)
    state = torch.zeros(ROWS, dtype=dtype)
    losses = []
    for step in range(STEPS):
        table.grad = None
        for p in out.parameters():
            p.grad = None
        per_rank = []
        for rank in range(world):
            found = table[ids_of(step, rank)]
            per_rank.append((torch.tanh(out(found)) * found).sum() / 8)
        (sum(per_rank) / world).backward()
        losses.append([float(x.detach()) for x in per_rank])
        with torch.no_grad():
            for p in out.parameters():
                p -= 0.05 * p.grad
            used = table.grad.abs().sum(1) > 0
            step_size = torch.full((ROWS,), 0.1, dtype=dtype)
            if optimizer == "rowwise_adagrad":
                state += table.grad.square().mean(1)
                step_size = 0.1 / (state.sqrt() + 1e-8)
            table[used] -= (step_size[:, None] * table.grad)[used]
    return losses, table.detach()
