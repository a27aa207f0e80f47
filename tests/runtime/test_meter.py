"""The meter: every launch and wait is counted, bytes are the plan's, names reach the profiler."""

from __future__ import annotations

import threading
import time
from functools import cache

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from shared_ranks import Outcomes, run_together
from two_tables import Batches, Trainer


@cache
def _trainer(device: str = "cpu") -> Trainer:
    return Trainer("sgd", device=device)


def _steps():
    import freescale

    trainer = _trainer()
    freescale.meter.clear()
    loader = freescale.LookaheadLoader(Batches(6, 0.3), trainer.compiled)
    for i, batch in enumerate(loader):
        if i == 3 and dist.get_rank() == 1:
            time.sleep(0.3)  # a straggler: the others wait
        trainer.compiled(batch).backward()
    return freescale.meter.steps(), loader.stats()


def test_steps_waits_and_bytes(checked):
    ranks = checked.of("steps")
    for steps, stats in ranks:
        assert [s["step"] for s in steps] == list(range(6))
        for s in steps:
            assert s["seconds"] > 0 and s["exposed"] >= 0
            parts = sum(s[part] for part in ("compute", "exposed", "loader", "straggler", "host_bound"))
            assert abs(parts - s["seconds"]) < 1e-9 and s["compute"] >= 0 and s["host_bound"] == 0
            assert set(s["waits"]) == set(s["bytes"]) == set(s["flight"])
        planned = {(s["step"], s["exchange"]): s for s in stats}
        for s in steps:
            for table in ("item", "user"):
                plan = planned[s["step"], table]
                assert s["bytes"][f"urgent rows of {table}"] == plan["bytes_urgent"]
                if s["step"]:
                    assert s["bytes"][f"early rows of {table}"] == plan["bytes_early"]
    waited = sum(ranks[0][0][3]["waits"].values())
    assert waited >= 0.25  # for the straggler, wherever the two met


def _slow_loader(device: str = "cpu"):
    """A loader that begins to work on a batch when the loop asks for the one before it."""
    import freescale

    asked = threading.Semaphore(2)

    class Slow(Batches):
        def __iter__(self):
            for batch in super().__iter__():
                assert asked.acquire(timeout=60)
                time.sleep(0.2)
                yield batch
            assert asked.acquire(timeout=60)

    trainer, seconds = _trainer(device), []
    freescale.meter.clear()
    assert freescale.meter.steps() == []
    loop = iter(freescale.LookaheadLoader(Slow(6, 0.3), trainer.compiled))
    while True:
        began = time.perf_counter()
        if (batch := next(loop, None)) is None:
            return freescale.meter.steps(), seconds
        seconds.append(time.perf_counter() - began)
        trainer.compiled(batch).backward()
        asked.release()


def test_waiting_for_the_loader_is_not_compute(checked):
    """What the loop waited in `next` is the loader's or the planner's, but for handing the batch out."""
    for steps, asked in checked.of("slow loader"):
        assert [s["step"] for s in steps] == list(range(6))
        assert all(s["loader"] <= seconds for s, seconds in zip(steps, asked, strict=True))
        for s, seconds in list(zip(steps, asked, strict=True))[1:-1]:  # the first also begins the loop
            assert s["loader"] > 0.8 * seconds and s["waits"]["loader"] > 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_waiting_for_the_loader_on_a_gpu():
    """The stream stands still while the host waits, since a step of this model is short."""
    for steps, asked in run_ranks(_slow_loader, 2, "cuda"):
        for s, seconds in list(zip(steps, asked, strict=True))[1:-1]:
            assert abs(s["loader"] / seconds - 1) < 0.1, (s, seconds)
            parts = sum(s[part] for part in ("compute", "exposed", "loader", "straggler", "host_bound"))
            assert abs(parts - s["seconds"]) < 1e-9 and s["compute"] >= 0


def test_a_loader_that_fails_leaves_no_step_behind(checked):
    for names in checked.of("failing loader"):
        assert names == [0, 1, 2]


def _failing_loader():
    import freescale

    class Failing(Batches):
        def __iter__(self):
            for number, batch in enumerate(super().__iter__()):
                if number == 3:
                    raise ValueError("no more")
                yield batch

    trainer = _trainer()
    freescale.meter.clear()
    with pytest.raises((ValueError, RuntimeError), match="no more"):
        for batch in freescale.LookaheadLoader(Failing(6, 0.3), trainer.compiled):
            trainer.compiled(batch).backward()
    return [s["step"] for s in freescale.meter.steps()]


def _profiled():
    import freescale

    trainer = _trainer()
    for i, batch in enumerate(freescale.LookaheadLoader(Batches(3, 0.3), trainer.compiled)):
        if i < 2:
            trainer.compiled(batch).backward()
            continue
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            trainer.compiled(batch).backward()
    return sorted({e.name for e in profile.events() if e.name.startswith("freescale: ")})


@pytest.fixture(scope="module")
def checked() -> Outcomes:
    checks = {"steps": _steps, "profiled": _profiled, "slow loader": _slow_loader, "failing loader": _failing_loader}
    return run_together(checks, 2)


def test_names_in_the_profiler(checked):
    for names in checked.of("profiled"):
        for what in ("urgent rows of item", "early rows of item", "late gradients of item", "urgent gradients of user"):
            assert f"freescale: launch {what}" in names or what.startswith("early")
            assert f"freescale: wait for {what}" in names


def _dies():
    import freescale

    trainer = _trainer()
    for i, batch in enumerate(freescale.LookaheadLoader(Batches(6, 0.3), trainer.compiled)):
        loss = trainer.compiled(batch)
        if i == 2 and dist.get_rank() == 1:
            import os

            os._exit(3)
        loss.backward()


def test_a_wait_in_vain_says_what_for():
    first, _ = run_ranks(_dies, 2, expect_errors=True)
    assert "waited for urgent gradients of" in first and "which did not arrive" in first


def _marks():
    import freescale

    freescale.meter.clear()
    freescale.meter.mark("a")
    time.sleep(0.01)
    freescale.meter.mark("b")
    freescale.meter.pause()
    freescale.meter.mark("c")
    return [s["step"] for s in freescale.meter.steps()]


def test_marks_of_the_user():
    assert run_ranks(_marks, 1) == [["a", "b"]]


class _Writer:
    def __init__(self) -> None:
        self.written: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.written.append((name, value, step))


def test_scalars():
    import freescale

    writer = _Writer()
    end = freescale.log_to(writer, every=2)
    for name in (*range(10, 15), None):
        freescale.meter.mark(name)
    freescale.meter.pause()
    end()
    freescale.meter.mark(99)
    freescale.meter.pause()
    assert [s for name, _, s in writer.written if name == "freescale/step_seconds"] == [10, 12, 14]
    shares = [value for name, value, s in writer.written if s == 12 and name.endswith("_share")]
    assert len(shares) == 5 and sum(shares) == pytest.approx(1)
    with pytest.raises(TypeError, match="needs a writer with add_scalar"):
        freescale.log_to(print)
    with pytest.raises(ValueError, match="at least 1, found 0"):
        freescale.log_to(writer, every=0)
