"""As many ranks as a cluster has in two hosts, on one machine: the training of two ranks, bit for bit.

The numbers are chosen so that every sum is exact, in whatever order and on however many ranks it is made.
MANY_RANKS="64" in the environment: with so many ranks instead, on a machine that has the memory (300 MiB for each).
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks

ROWS, DIM, STEPS = 300, 4, 5
WORLDS = [int(n) for n in os.environ.get("MANY_RANKS", "16 32").split()]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        import freescale

        self.item = freescale.ShardedEmbedding(
            ROWS, DIM, name="item", lr=0.5, gradient_division=False, dtype=torch.float64
        )

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.item(batch["item"]).square().sum() / 16


def batch_of(step: int, rank: int, world: int, samples: int) -> dict[str, torch.Tensor]:
    """This rank's samples of a batch that does not depend on the ranks."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 30, (samples,), generator=generator)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator).split(lengths.tolist())
    mine = range(rank * samples // world, (rank + 1) * samples // world)
    return {"item": torch.cat([ids[i] for i in mine]), "item_lengths": lengths[list(mine)]}


def _trained(balance: bool, samples: int):
    import freescale

    rank, world = dist.get_rank(), dist.get_world_size()
    model = Model()
    first = model.item.shards[rank].first
    rows = torch.arange(first, first + model.item.weight.shape[0], dtype=torch.float64)
    model.item.weight.copy_(((rows * 7) % 16 - 8)[:, None] / 8 + torch.arange(DIM) / 16)
    model.compile(backend="freescale", options={"codegen": "eager", "timeout": 400.0})
    losses = []
    data = [batch_of(s, rank, world, samples) for s in range(STEPS)]
    loader = freescale.LookaheadLoader(data, model, balance=balance)
    for batch in loader:
        loss = model(batch)
        loss.backward()
        losses.append(loss.detach())
    total = torch.stack(losses)
    dist.all_reduce(total)
    moved = sum(s["moved_samples"] for s in loader.balance_stats())
    return model.state_dict()["item.weight"], total, moved


def trained(world: int, balance: bool, samples: int):
    ranks = run_ranks(_trained, world, balance, samples, timeout=550)
    return torch.cat([r[0] for r in ranks]), ranks[0][1], ranks[0][2]


def check(world: int) -> None:
    samples = max(64, 2 * world)
    table, losses, _ = trained(2, False, samples)
    for balance in (False, True):
        found, found_losses, moved = trained(world, balance, samples)
        assert torch.equal(found, table) and torch.equal(found_losses, losses)
        assert (moved > 0) == balance
    assert int((table != trained_nothing()).any(1).sum()) > ROWS // 2  # something was trained at all


def trained_nothing() -> torch.Tensor:
    rows = torch.arange(ROWS, dtype=torch.float64)
    return ((rows * 7) % 16 - 8)[:, None] / 8 + torch.arange(DIM) / 16


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_many_ranks(world):
    check(world)
