"""Gradients accumulated under DDP's `no_sync`: tables are updated by each backward pass, as in eager TorchRec, and the
dense part by the sum."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

import trec
from ranks import HAS_TORCHREC, run_ranks

pytestmark = pytest.mark.skipif(not HAS_TORCHREC, reason="torchrec or fbgemm_gpu is not installed")
STEPS = 6


def _batches() -> list[tuple[Any, torch.Tensor]]:
    from torchrec import KeyedJaggedTensor

    draw, found = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(STEPS):
        lengths = torch.randint(2, 5, (9,), generator=draw)
        ids = torch.randint(0, trec.USERS, (int(lengths.sum()),), generator=draw)
        found.append((KeyedJaggedTensor(["history", "candidate", "user"], ids, lengths=lengths), torch.ones(1)))
    return found


def _train(compiled: bool, ahead: dict[str, bool] | None = None) -> list[torch.Tensor]:
    import freescale

    torch._dynamo.reset()
    model = trec.build("row_wise", "rowwise_adagrad", ddp=True, small=True)
    if compiled:
        model.compile(backend="freescale", options={"codegen": "eager", "strict": True})
    ddp = next(m for m in model.modules() if isinstance(m, torch.nn.parallel.DistributedDataParallel))
    dense = [p for p in model.parameters() if not hasattr(p, "_in_backward_optimizers")]
    optimizer, losses = torch.optim.SGD(dense, lr=0.1), []
    batches = _batches()
    for step, batch in enumerate(batches if ahead is None else freescale.LookaheadLoader(batches, model, **ahead)):
        accumulates = step % 3 > 0  # DDP wants its first backward pass synchronized
        with ddp.no_sync() if accumulates else contextlib.nullcontext():
            loss = model(*batch)
            loss.backward()
        if not accumulates:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return [torch.stack(losses), *trec.snapshot(model).values()]


def _compare() -> tuple[float, int]:
    import freescale

    expected, ahead = _train(False), _train(True, {})
    worst = max(float((a - b).abs().max()) for a, b in zip(ahead, expected, strict=True) if a.numel())
    return worst, freescale.report()["graph_breaks"]


def test_equals_eager_torchrec():
    for worst, breaks in run_ranks(_compare, 2):
        assert worst < 1e-6 and breaks == 0, (worst, breaks)


def _same_bits() -> bool:
    planned, ahead = _train(True, {"overlap": False}), _train(True, {})
    return all(torch.equal(a, b) for a, b in zip(ahead, planned, strict=True))


@pytest.mark.thorough
def test_same_bits_with_and_without_overlap():
    assert run_ranks(_same_bits, 2) == [True, True]
