"""Three ranks with DDP: the same bits with look-ahead and without, where the order of gradients does not matter.

DDP lays its buckets out in the order in which gradients arrived in the first step; autograd hands the gradients of a
compiled graph over in another order when late gradients are among them; and gloo adds three numbers up in an order that
depends on their place in the bucket.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import freescale
from loops import data
from ranks import run_ranks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = freescale.ShardedEmbedding(31, 8, name="item", lr=0.1)
        self.dense = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.dense(self.table(batch["item"])).sum()


def _train(averaged_by: str, look_ahead: bool) -> list[torch.Tensor]:
    model = Model()
    dense = {"dense": "allreduce"} if averaged_by == "graph" else {}
    model.compile(backend="freescale", options={"codegen": "eager", **dense})
    run: Any = model
    if averaged_by == "DDP":
        run = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for batch in freescale.LookaheadLoader(data(8, 60), run) if look_ahead else data(8, 60):
        optimizer.zero_grad()
        run(batch).backward()
        optimizer.step()
    torch._dynamo.reset()
    return [p.detach() for p in model.parameters()]


def _same_bits() -> list[bool]:
    found = []
    for averaged_by in ("graph", "DDP"):
        plain, ahead = (_train(averaged_by, look_ahead) for look_ahead in (False, True))
        found.append(all(torch.equal(a, b) for a, b in zip(plain, ahead, strict=True)))
    return found


@pytest.mark.thorough
def test_the_same_bits_on_three_ranks():
    assert run_ranks(_same_bits, 3) == [[True, True]] * 3
