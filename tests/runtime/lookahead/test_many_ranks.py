"""As many ranks as a cluster has in two hosts, on one machine: the training of two ranks, bit for bit.

The numbers are chosen so that every sum is exact, in whatever order and on however many ranks it is made.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks

ROWS, DIM, SAMPLES, STEPS = 300, 4, 64, 5


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        import freescale

        self.item = freescale.ShardedEmbedding(
            ROWS, DIM, name="item", lr=0.5, gradient_division=False, dtype=torch.float64
        )

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.item(batch["item"]).square().sum() / 16


def batch_of(step: int, rank: int, world: int) -> dict[str, torch.Tensor]:
    """This rank's samples of a batch that does not depend on the ranks."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 30, (SAMPLES,), generator=generator)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator).split(lengths.tolist())
    mine = range(rank * SAMPLES // world, (rank + 1) * SAMPLES // world)
    return {"item": torch.cat([ids[i] for i in mine]), "item_lengths": lengths[list(mine)]}


def _trained(balance: bool):
    import freescale

    rank, world = dist.get_rank(), dist.get_world_size()
    model = Model()
    first = model.item.shards[rank].first
    rows = torch.arange(first, first + model.item.weight.shape[0], dtype=torch.float64)
    model.item.weight.copy_(((rows * 7) % 16 - 8)[:, None] / 8 + torch.arange(DIM) / 16)
    model.compile(backend="freescale", options={"codegen": "eager", "timeout": 400.0})
    losses = []
    loader = freescale.LookaheadLoader([batch_of(s, rank, world) for s in range(STEPS)], model, balance=balance)
    for batch in loader:
        loss = model(batch)
        loss.backward()
        losses.append(loss.detach())
    total = torch.stack(losses)
    dist.all_reduce(total)
    moved = sum(s["moved_samples"] for s in loader.balance_stats())
    return model.state_dict()["item.weight"], total, moved


def trained(world: int, balance: bool):
    ranks = run_ranks(_trained, world, balance, timeout=550)
    return torch.cat([r[0] for r in ranks]), ranks[0][1], ranks[0][2]


def check(world: int) -> None:
    table, losses, _ = trained(2, balance=False)
    for balance in (False, True):
        found, found_losses, moved = trained(world, balance)
        assert torch.equal(found, table) and torch.equal(found_losses, losses)
        assert (moved > 0) == balance
    assert int((table != trained_nothing()).any(1).sum()) > ROWS // 2  # something was trained at all


def trained_nothing() -> torch.Tensor:
    rows = torch.arange(ROWS, dtype=torch.float64)
    return ((rows * 7) % 16 - 8)[:, None] / 8 + torch.arange(DIM) / 16


@pytest.mark.slow
@pytest.mark.parametrize("world", (16, 32))
def test_many_ranks(world):
    check(world)
