"""Dense gradients of which a share travels: nothing is lost, and checkpoints hold what has not been sent yet."""

from __future__ import annotations

import copy
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from freescale.kernels import compression, dense_average
from freescale.passes.compress_exchange import dense_packing
from ranks import run_ranks

OPTIONS = {
    "passes": "all,compress_exchange", "compress": "dense:0.1", "dense": "allreduce", "codegen": "eager", "strict": True,
}  # fmt: skip


@pytest.mark.parametrize("n", (*(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 20)), 9000))
def test_nothing_is_lost(n):
    """What was sent and what is left are the sum of all gradients."""
    torch.manual_seed(0)
    packing = dense_packing(n, Fraction(1, 100))
    errors, slab = [torch.zeros(n)], compression.Slabs.of(torch.tensor([n]))
    total, sent = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for _ in range(1000 if n < 9000 else 200):
        gradient = torch.randn(n)
        total += gradient
        packed = dense_average.pack_with_error([gradient], errors, packing)
        places, values = compression.entries_of(packed, slab, packing, 1)
        sent[places] += values
    assert torch.allclose(sent + errors[0], total, atol=2e-4)
    assert n == 1 or bool(errors[0].any())


def test_what_is_not_finite_is_seen_once_and_does_not_stay():
    packing, errors = dense_packing(100, Fraction(1, 10)), [torch.zeros(100)]
    packed = dense_average.pack_with_error([torch.full((100,), float("nan"))], errors, packing)
    _, values = compression.entries_of(packed, compression.Slabs.of(torch.tensor([100])), packing, 1)
    assert values.isnan().all() and not errors[0].any()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def _run(model: nn.Module, optimizer: Any, run: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        g = torch.Generator().manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        loss = run(torch.randn(6, 8, generator=g))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _made(kind: str) -> tuple[nn.Module, Any, Any]:
    model = Model()
    optimizer = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[kind](model.parameters(), lr=0.05)
    return model, optimizer, torch.compile(model, backend="freescale", fullgraph=True, options=OPTIONS)


def _checkpoints(kind: str) -> None:
    model, optimizer, run = _made(kind)
    _run(model, optimizer, run, 0, 5)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    errors = [s["freescale_error"] for s in saved[1]["state"].values()]
    assert len(errors) == 6 and all(bool(e.any()) for e in errors)
    went_on = _run(model, optimizer, run, 5, 10)
    weights = copy.deepcopy(model.state_dict())

    # in the middle of training
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(copy.deepcopy(saved[1]))
    assert _run(model, optimizer, run, 5, 10) == went_on
    # a new model and optimizer, as after a restart
    other, its_optimizer, run_other = _made(kind)
    other.load_state_dict(saved[0])
    its_optimizer.load_state_dict(copy.deepcopy(saved[1]))
    assert _run(other, its_optimizer, run_other, 5, 10) == went_on
    assert all(torch.equal(t, weights[n]) for n, t in other.state_dict().items())
    assert run_other is not run and all(torch.equal(t, weights[n]) for n, t in model.state_dict().items())
    # without what was not sent, or with that of another rank, training goes on from zero: other numbers
    zeros = []
    for change in ({"freescale_error": None}, {"freescale_error_rank": 1 - dist.get_rank()}):
        state = copy.deepcopy(saved[1])
        for entry in state["state"].values():
            entry.update(change)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(state)
        zeros.append(_run(model, optimizer, run, 5, 10))
    assert zeros[0] == zeros[1] != went_on
    _ranks_agree(model)


def _ranks_agree(model: nn.Module) -> None:
    for t in model.state_dict().values():
        mine = t.clone()
        dist.broadcast(mine, 0)
        assert torch.equal(mine, t)


@pytest.mark.parametrize("kind", (pytest.param("adam", marks=pytest.mark.thorough), "sgd"))
def test_checkpoints_hold_what_was_not_sent(kind):
    run_ranks(_checkpoints, 2, kind)


def _average() -> None:
    """One launch against the definition."""
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    all_gradients = [torch.randn(40, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    mine = all_gradients[rank]
    launched = torch.ops.freescale.all_reduce_launch(
        [mine[:24].view(4, 6), mine[24:]], "a, b", group, "largest:1/5:20"
    )
    expected = torch.zeros(40)
    for gradient in all_gradients:
        out = torch.empty(40, 1)
        packing = compression.parse("largest:1/5:20")
        slab = compression.Slabs.of(torch.tensor([40]))
        compression.expand(compression.compress(gradient[:, None], slab, packing), out, slab, packing)
        expected += out.view(-1)
    got = torch.ops._c10d_functional.wait_tensor(launched)
    assert torch.equal(got, expected * (1.0 / world))
    from freescale.kernels.transports import launch_record

    assert launch_record.records[-1].bytes == (world - 1) * 8 * 6


def test_a_launch_averages_what_all_ranks_sent():
    run_ranks(_average, 4)
