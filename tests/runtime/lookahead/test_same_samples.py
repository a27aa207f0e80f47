"""Ranks that all load the same samples, since a DistributedSampler is missing, are warned."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from listening import listen
from ranks import run_ranks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        import freescale

        self.item = freescale.ShardedEmbedding(50, 4, name="item")

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.item(batch["item"]).tanh().sum()


def _warned(seeds: dict[str, int]) -> dict[str, list[str]]:
    import freescale

    heard = listen()
    model = Model()
    model.compile(backend="freescale", options={"codegen": "eager"})
    found = {}
    for name, differs in seeds.items():
        del heard[:]
        draw = torch.Generator().manual_seed(differs * dist.get_rank())
        batches: Any = [{"item": torch.randint(0, 50, (6,), generator=draw)} for _ in range(2)]
        for batch in freescale.LookaheadLoader(batches, model):
            model(batch).backward()
        found[name] = list(heard)
    return found


def test_a_warning_on_rank_0():
    first, second = run_ranks(_warned, 2, {"same": 0, "other": 1})
    assert len(first["same"]) == 1 and "DistributedSampler" in first["same"][0]
    assert not first["other"] and not second["same"] and not second["other"]
