"""Activation checkpointing computes a part of the forward pass again in the backward pass: not the exchange."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from loops import Model, data
from ranks import run_ranks


class AfterTheLookup(Model):
    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return checkpoint(self.rest, self.table(batch["item"]), batch["pick"], use_reentrant=False)

    def rest(self, found: torch.Tensor, pick: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(self.out(found)) * found).sum() / 8 + self.out.bias.index_select(0, pick).sum()


class Everything(Model):
    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return checkpoint(super().forward, batch, use_reentrant=False)


def _train(kind: type[Model], wrapped: bool) -> tuple[list[float], torch.Tensor]:
    import freescale

    torch._dynamo.reset()
    model = kind()
    run = torch.compile(model, backend="freescale", options={"codegen": "eager"})
    losses = []
    batches = data(4)  # none without ids, which would be a graph of its own
    for batch in freescale.LookaheadLoader(batches, run) if wrapped else batches:
        loss = run(batch)
        loss.backward()
        losses.append(loss.item())
    return losses, model.table.weight.clone()


def _checkpointed() -> bool:
    expected = _train(Model, False)

    def same(found: Any) -> bool:
        return found[0] == expected[0] and torch.equal(found[1], expected[1])

    assert same(_train(AfterTheLookup, False)) and same(_train(AfterTheLookup, True)) and same(_train(Everything, False))
    with pytest.raises(RuntimeError, match="Activation checkpointing does so if the lookup is inside"):
        _train(Everything, True)
    return True


def test_same_bits_or_an_error():
    assert run_ranks(_checkpointed, 2) == [True, True]
