"""The meter tells a rank that has more to do from an exchange that takes long, and DDP's averages from compute."""

from __future__ import annotations

import statistics
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from freescale.kernels.transports.launch_record import LaunchRecord
from freescale.runtime import meter
from ranks import run_ranks
from two_tables import Batches, Trainer

STEPS, MORE = 12, 0.25  # seconds: many times what other programs take of a step
PARTS = ("compute", "exposed", "loader", "straggler", "host_bound")


class _WithAveragedPart(torch.nn.Module):
    """The compiled part, and one that DDP averages."""

    def __init__(self, part: Any) -> None:
        super().__init__()
        self.part = part
        self.averaged = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))

    def forward(self, batch: Any) -> torch.Tensor:
        return self.part(batch) + self.averaged(torch.ones(4)).sum()


def _train(slow_forward: float = 0.0, slow_link: float = 0.0, ddp: bool = False) -> list[dict[str, Any]]:
    """`slow_forward`: seconds that rank 1 has more to do in each step; `slow_link`: that each wait takes longer."""
    import freescale
    from freescale.kernels.transports.launch_record import RecordedWork

    compiled = Trainer("sgd").compiled
    model = _WithAveragedPart(compiled) if ddp else compiled
    freescale.meter.clear()
    wait = RecordedWork._wait

    def slow_wait(self: Any, record: Any) -> None:
        time.sleep(slow_link)
        wait(self, record)

    with mock.patch.object(RecordedWork, "_wait", slow_wait):
        for batch in freescale.LookaheadLoader(Batches(STEPS, 0.3), model, overlap=True):
            loss = model(batch)
            time.sleep(slow_forward if dist.get_rank() == 1 else 0.0)
            loss.backward()
    return freescale.meter.steps()


def _median(steps: list[dict[str, Any]], part: str) -> float:
    """Of those after which ranks had told each other; the first ones compile."""
    return statistics.median(s[part] for s in steps[4:-4])


@pytest.mark.parametrize("ddp", (pytest.param(False, marks=pytest.mark.thorough), True), ids=("tables", "tables and DDP"))
def test_a_rank_that_has_more_to_do(ddp):
    fast, slow = run_ranks(_train, 2, MORE, 0.0, ddp)
    for steps in (fast, slow):
        assert all(abs(sum(s[p] for p in PARTS) - s["seconds"]) < 1e-9 for s in steps)
        assert all(abs(s["busy"] - s["compute"] - s["host_bound"]) < 1e-9 for s in steps)
        assert not ddp or all("dense gradients" in s["waits"] for s in steps)
    assert MORE / 2 < _median(fast, "straggler") < 2 * MORE
    assert _median(fast, "exposed") < MORE / 3 and _median(slow, "straggler") < MORE / 3


@pytest.mark.thorough
def test_a_slow_link():
    for steps in run_ranks(_train, 2, 0.0, MORE / 2):
        assert _median(steps, "exposed") > MORE and _median(steps, "straggler") < MORE / 3


def _step(seconds: float, waited: float = 0.0) -> meter.FinishedStep:
    record = LaunchRecord("urgent rows of item", 8)
    record.wait_began, record.wait_ended = 5.0, 5.0 + waited
    return meter.FinishedStep("a step", seconds, [record])


def test_times_that_ranks_tell_each_other():
    first, second = meter.RankTimes(2), meter.RankTimes(2)
    steps = [_step(1.0, waited=0.4), _step(1.0, waited=0.3)]
    assert first.tell() == second.tell() == (-1, 0)
    first.ended(0, steps[0])
    said = [first.tell(), second.tell()]
    assert said == [(0, 600_000_000), (-1, 0)]
    first.hear(said)
    first.ended(1, steps[1])
    first.hear([first.tell(), (0, 900_000_000)])  # the other rank's times come later
    assert steps[0].longest_busy == 0.9 and steps[1].longest_busy is None
    found = meter.summary(steps[0])
    assert found["busy"] == pytest.approx(0.6) and found["straggler"] == pytest.approx(0.3)
    assert found["exposed"] == pytest.approx(0.1)
    assert meter.summary(steps[1])["exposed"] == pytest.approx(0.3)  # not told: as if no rank had more to do
    first.hear([(-1, 0), (1, 100)])
    assert steps[1].longest_busy == pytest.approx(0.7) and meter.summary(steps[1])["straggler"] == 0.0


def test_times_that_a_rank_never_tells_are_forgotten():
    times = meter.RankTimes(2)
    for number in range(1000):
        times.ended(number, _step(1.0))
        times.hear([times.tell(), (-1, 0)])
    assert len(times._told) <= 64 and len(times._steps) <= 64


def test_what_a_rank_waits_for():
    assert meter.straggling(busy=5.0, waited=3.0, at_begin=0.0, longest_busy=7.0) == 2.0
    assert meter.straggling(busy=5.0, waited=3.0, at_begin=0.0, longest_busy=9.0) == 3.0
    assert meter.straggling(busy=5.0, waited=3.0, at_begin=1.0, longest_busy=None) == 1.0
    assert meter.straggling(busy=9.0, waited=3.0, at_begin=1.0, longest_busy=9.0) == 1.0
