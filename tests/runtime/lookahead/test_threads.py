"""A LookaheadLoader's threads: what one of them does while another is in the middle of something, stops or fails."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from freescale.kernels.planning import rank_mesh
from freescale.kernels.planning.native_plan import BatchPlan
from freescale.runtime.lookahead import planning as batch_planning
from freescale.runtime.lookahead.planning import PlannedBatch, PlanningConnection
from freescale.runtime.samples import batch_balancer
from loops import DIM, Training, data, threads
from ranks import run_ranks

# ---- what one thread hands to the other --------------------------------------------------------------------------


def _read_by_step(planned: PlannedBatch) -> list[Any]:
    """Everything that the graph of a step reads of its plans, and of the next batch's."""
    read: list[Any] = [planned.batch]
    for p in planned.plans:
        assert p.next is not None and p.late_slot is not None
        read += [p.late_slot, p.late_index, *p.late_update, *p.urgent_gradients, *p.late_counts, p.next]
        for q in (p, p.next):
            read += [q.step, q.ids, q.inverse, q.order, q.ends, q.early_rows, *q.urgent, *q.early_counts, q.early_slots]
    return read


def _planned_batches() -> bool:
    exchange = Training(True).model.table._exchange
    group = dist.group.WORLD
    planning = batch_planning.BatchPlanning(data(5), [exchange], PlanningConnection(group), False, None)
    handed_out = []
    with contextlib.suppress(batch_planning.EndOfPlanning):
        while True:
            if (planned := planning.advance()) is not None:
                planned.complete([exchange])
                handed_out.append((planned, _read_by_step(planned)))
            for planned, read in handed_out:
                assert all(a is b for a, b in zip(_read_by_step(planned), read, strict=True))
    last = planning.finish()
    assert last is not None
    last.complete([exchange])
    assert len(_read_by_step(last)) == len(handed_out[-1][1])
    for planned, read in handed_out:
        assert all(a is b for a, b in zip(_read_by_step(planned), read, strict=True))
    assert len(handed_out) == 4
    return True


def test_the_planning_thread_leaves_alone_what_it_has_handed_out():
    assert run_ranks(_planned_batches, 2) == [True, True]


# ---- ranks that are slow, and ranks that stop --------------------------------------------------------------------


def _slow_at_the_end() -> bool:
    """Rank 1 takes longer than FREESCALE_TIMEOUT in its last step, between two loops, and before it leaves one."""
    plain, wrapped = Training(False), Training(True)
    for t in (plain, wrapped):
        for epoch in range(4):
            # The first epoch has all that is compiled: on each rank also a batch without ids, a graph of its own.
            for i, batch in enumerate(t.loader(data(4 if epoch else 6, 10 * epoch))):
                t.step(batch)
                if t.wrapped and dist.get_rank() == 1 and (epoch, i) in ((1, 3), (3, 2)):
                    time.sleep(3)
                if (epoch, i) == (3, 2):
                    break
            if t.wrapped:
                os.environ["FREESCALE_TIMEOUT"] = "1"  # now that everything is compiled
                if dist.get_rank() == 1 and epoch == 2:
                    time.sleep(3)
    assert plain.losses == wrapped.losses
    assert all(torch.equal(v, wrapped.now()[k]) for k, v in plain.now().items())
    assert threads() == []
    return True


@pytest.mark.thorough
def test_a_rank_that_is_slow_at_the_end_of_a_loop_fails_nobody():
    assert run_ranks(_slow_at_the_end, 2) == [True, True]


def _stops(during: str) -> None:
    """Rank 1 is stopped, by its loader or by its loop; ended when both others have raised."""
    from freescale.compat import distributed

    rank, pids = dist.get_rank(), [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())

    def loader() -> Any:
        for i, batch in enumerate(data(9)):
            if during == "load" and i == 5 and rank == 1:
                time.sleep(2)  # until all loops wait for a batch: what the user's own collectives say is not ours
                os.kill(os.getpid(), signal.SIGSTOP)
            yield batch

    t = Training(True)
    try:
        for i, batch in enumerate(t.loader(loader())):
            if during == "step" and i == 5 and rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            t.step(batch)
    finally:
        if distributed.default_store().add("raised", 1) == 2:
            os.kill(pids[1], signal.SIGKILL)


@pytest.mark.thorough
@pytest.mark.parametrize("during", ("load", "step"))
def test_a_rank_that_stops_is_an_error_on_the_others(during):
    said = run_ranks(_stops, 3, during, timeout=150, group_timeout=8, expect_errors=True)
    assert said[1] == "died"
    for rank in (0, 2):
        assert said[rank].startswith("RuntimeError: freescale: "), said[rank]


# ---- planning that fails on one rank -----------------------------------------------------------------------------


# Where, at which call (all are of batch 4), of what.
FAILURES = {
    "before the first exchange": (BatchPlan, "request", 5, IndexError),
    "between exchanges": (BatchPlan, "plan", 5, MemoryError),
    "after the last exchange": (BatchPlan, "_read_results", 5, TypeError),
    "over gloo, in the first collective": (rank_mesh, "all_to_all_cpu", 12, IndexError),
    "over gloo, between two collectives of asking": (rank_mesh, "all_to_all_cpu", 13, MemoryError),
    "over gloo, before the answer": (rank_mesh, "all_to_all_cpu", 14, MemoryError),
    "balancing, between its collectives": (batch_balancer.solver, "balance", 5, ZeroDivisionError),
}


def _fails_in(module: Any, name: str, call: int, kind: type[Exception]) -> Any:
    """On rank 1, one call that the planning thread makes raises."""
    original, calls = getattr(module, name), 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += threading.current_thread().name == "freescale-lookahead"
        if calls == call and dist.get_rank() == 1:
            calls += 1
            raise kind("no room")
        return original(*args, **kwargs)

    return mock.patch.object(module, name, failing)


def _over_gloo() -> Any:
    """Planning as where ranks cannot connect to each other."""
    new_plan = PlanningConnection.new_plan

    def without_mesh(self: Any, *args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(self, "_mesh", None):
            return new_plan(self, *args, **kwargs)

    return mock.patch.object(PlanningConnection, "new_plan", without_mesh)


def _planning_fails() -> dict[str, str]:
    told = {}
    for where, (module, name, call, kind) in FAILURES.items():
        balance = batch_balancer.BalanceOptions(method="none") if module is batch_balancer.solver else False
        batches = [{"item": b["item"], "pick": b["item"] % DIM} for b in data(9)]
        t = Training(True)
        own = dist.get_rank() == 1
        words = "^no room$" if own else f"^freescale: rank 1 failed while it planned batch 4: {kind.__name__}: no room$"
        expected = kind if own else RuntimeError
        with (
            _over_gloo() if module is rank_mesh else contextlib.nullcontext(),
            _fails_in(module, name, call, kind),
            pytest.raises(expected, match=words) as caught,
        ):
            for batch in t.loader(batches, balance=balance):
                t.step(batch)
        assert not own or "failing" in [entry.name for entry in caught.traceback]
        assert threads() == []
        again = Training(True)  # the next loop is none the worse, and nothing of the one that failed is lost
        for batch in again.loader(batches[: len(t.losses)], balance=balance):
            again.step(batch)
        assert t.losses == again.losses and len(t.losses) >= 2, where
        assert all(torch.equal(v, again.now()[k]) for k, v in t.now().items()), where
        told[where] = "good"
    return told


def test_planning_that_fails_on_one_rank_is_the_same_error_on_all():
    for told in run_ranks(_planning_fails, 3, timeout=200):
        assert told == dict.fromkeys(FAILURES, "good")


def _loop_fails_to_begin() -> None:
    t = Training(True)
    own = dist.get_rank() == 1
    words = "^no room$" if own else "^freescale: rank 1 failed while it planned batch 0: MemoryError: no room$"
    with _fails_in(PlanningConnection, "new_plan", 1, MemoryError):
        with pytest.raises(MemoryError if own else RuntimeError, match=words):
            next(iter(t.loader(data(3))))
    with mock.patch.object(type(t.loader([])._hooks), "install", side_effect=MemoryError("no hook")):
        with pytest.raises(MemoryError, match="no hook"):
            next(iter(t.loader(data(3))))
    assert threads() == []
    for batch in t.loader(data(3)):
        t.step(batch)
    assert len(t.losses) == 3


def test_a_loop_that_fails_to_begin_on_one_rank_is_an_error_on_all():
    run_ranks(_loop_fails_to_begin, 2, timeout=60)


def _stop_iteration_in_planning() -> None:
    with mock.patch.object(batch_planning, "packable_tensors", side_effect=StopIteration("not the end")):
        with pytest.raises(RuntimeError, match="StopIteration"):
            list(Training(True).loader(data(3)))


def test_a_stop_iteration_in_planning_is_not_the_end_of_the_loader():
    run_ranks(_stop_iteration_in_planning, 1)


def _thread_of_an_ended_loop() -> None:
    let_go, t = threading.Event(), Training(True)

    class Slow:
        def __iter__(self) -> Any:
            yield from data(2)
            let_go.wait()

    slow = Slow()
    for _ in t.loader(slow):
        break
    (thread,) = (found for found in threading.enumerate() if found.name == "freescale-lookahead")
    let_go.set()
    thread.join()
    kept = weakref.ref(slow)
    del thread, slow
    gc.collect()
    assert kept() is None


def test_the_loader_of_an_ended_loop_is_let_go():
    run_ranks(_thread_of_an_ended_loop, 1, env={"FREESCALE_TIMEOUT": "0.5"})


def _planning_is_stuck() -> bool:
    """The user's loader may take longer than the group's time-out, what comes after it may not."""

    def slow() -> Any:
        for i, batch in enumerate(data(5)):
            time.sleep(2.5 if i == 3 else 0.0)
            yield batch

    t = Training(True)
    for batch in t.loader(slow()):
        t.step(batch)
    assert len(t.losses) == 5
    let_go = threading.Event()
    with mock.patch.object(BatchPlan, "plan", lambda *args: let_go.wait()):
        with pytest.raises(RuntimeError, match="^freescale: rank 0: batch 0 is not planned after .* timeout is 1 s$"):
            next(iter(t.loader(data(5))))
        let_go.set()
    return True


@pytest.mark.thorough
def test_planning_that_is_stuck_ends_with_the_time_out():
    assert run_ranks(_planning_is_stuck, 1, group_timeout=1, env={"FREESCALE_TIMEOUT": "1"}) == [True]


# ---- the device of a loader's thread -----------------------------------------------------------------------------


def _device_of_the_thread() -> list[tuple[str, Any]]:
    """torch.cuda as it would answer on a machine with GPUs, where this thread is on GPU 3."""
    seen: list[tuple[str, Any]] = []

    def loader() -> Any:
        seen.append(("loads in", threading.current_thread().name))
        yield from data(3)

    t = Training(True)

    def loop() -> None:
        for batch in t.loader(loader()):
            assert batch

    def set_device(device: Any) -> None:
        seen.append((threading.current_thread().name, device))

    with mock.patch("torch.cuda.set_device", set_device), mock.patch("torch.cuda.current_device", lambda: 3):
        loop()  # CUDA is not initialised, and is not to be
        with mock.patch("torch.cuda.is_initialized", lambda: True):
            loop()
    return seen


def test_a_loader_runs_on_the_device_of_the_loop():
    (seen,) = run_ranks(_device_of_the_thread, 1)
    loads = ("loads in", "freescale-lookahead")
    assert seen == [loads, ("freescale-lookahead", 3), loads]


# ---- when a batch is planned -----------------------------------------------------------------------------------------


class Asked:
    """A loader that says how many batches it has been asked for."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.times = batches, 0

    def __iter__(self) -> Any:
        for batch in self.batches:
            self.times += 1
            yield batch

    def wait_for(self, times: int) -> None:
        end = time.monotonic() + 20
        while self.times < times and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(0.05)  # nor is it asked for more
        assert self.times == times


def _when_batches_are_asked_for() -> None:
    """Two for the first batch, and one more for each that is taken, whatever the step does."""
    for overlap in (False, True):
        t, loader = Training(True), Asked(data(9))
        for i, batch in enumerate(t.loader(loader, overlap=overlap)):
            loader.wait_for(min(i + 3, 9))
            loss = t.run(batch)
            if i != 4:
                loss.backward()
            loader.wait_for(min(i + 3, 9))
        assert threads() == []


@pytest.mark.thorough
def test_a_batch_is_planned_when_another_one_is_taken():
    run_ranks(_when_batches_are_asked_for, 2, timeout=120)
