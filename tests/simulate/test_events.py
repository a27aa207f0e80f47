"""The event simulation against what can be worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.simulate.events import Compute, Launch, Simulation, Transfer, Wait

ALL = Compute(1.0, 0.0)


def transfer(out, into=None, group="a", batches=1, **kwargs) -> Transfer:
    out = np.broadcast_to(np.asarray(out, float), (batches, len(out)))
    into = np.zeros_like(out) if into is None else np.broadcast_to(np.asarray(into, float), out.shape)
    return Transfer(group, out, into, **kwargs)


def work(*seconds, steps=1) -> np.ndarray:
    return np.broadcast_to(np.column_stack([seconds, np.zeros(len(seconds))]), (steps, len(seconds), 2))


class Logged(Simulation):
    """Logs what happens on the ranks."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.log: list[tuple[float, int, str]] = []

    def _computed(self, rank, now):
        self.log.append((now, rank, "computed"))
        super()._computed(rank, now)

    def _launch(self, rank, what, batch, now):
        self.log.append((now, rank, f"launches {what} {batch}"))
        super()._launch(rank, what, batch, now)

    def _is_ready(self, rank, what, batch, now):
        ready = super()._is_ready(rank, what, batch, now)
        if not ready:
            self.log.append((now, rank, f"waits for {what} {batch}"))
        return ready

    def _arrived(self, flight, rank, now):
        what, batch = next(name for name, found in self._flights.items() if found is flight)
        self.log.append((now, rank, f"has {what} {batch}"))
        super()._arrived(flight, rank, now)


def test_two_ranks_by_hand():
    """Rank 0 computes 2 s and rank 1 computes 5 s; then each sends for 3 s. Rank 0 waits 3 s for rank 1 to launch."""
    simulation = Logged([ALL, Launch("rows"), Wait("rows")], {"rows": transfer([3, 3])}, work(2, 5))
    times = simulation.run()
    assert simulation.log == [
        (2.0, 0, "computed"),
        (2.0, 0, "launches rows 0"),
        (2.0, 0, "waits for rows 0"),
        (5.0, 1, "computed"),
        (5.0, 1, "launches rows 0"),
        (5.0, 1, "waits for rows 0"),
        (8.0, 0, "has rows 0"),
        (8.0, 1, "has rows 0"),
    ]
    assert times.end.tolist() == [[8, 8]]
    assert times.compute.tolist() == [[2, 5]]
    assert times.straggler.tolist() == [[3, 0]]
    assert times.exposed.tolist() == [[3, 3]]


def test_a_rank_that_takes_in_more_gets_it_later():
    times = Simulation([Launch("rows"), Wait("rows")], {"rows": transfer([1, 1], [4, 2])}, work(0, 0)).run()
    assert times.end.tolist() == [[4, 2]]


def test_latency_comes_on_top():
    times = Simulation([Launch("rows"), Wait("rows")], {"rows": transfer([1, 1], latency=0.5)}, work(0, 0)).run()
    assert times.end.tolist() == [[1.5, 1.5]]


@pytest.mark.parametrize(("group", "urgent", "bulk"), [("same", 5.0, 4.0), ("other", 2.0, 5.0)])
def test_groups_share_a_link_and_a_group_is_a_queue(group, urgent, bulk):
    """4 s of one transfer, then 1 s of another: behind it on its group; on another group both at half of the speed."""
    kinds = {"bulk": transfer([4, 4], group="same"), "urgent": transfer([1, 1], group=group)}
    program = [Launch("bulk"), Launch("urgent"), Wait("urgent"), Wait("bulk")]
    simulation = Logged(program, kinds, work(0, 0))
    simulation.run()
    log = {what: now for now, rank, what in simulation.log if rank == 0}
    assert log["has urgent 0"] == pytest.approx(urgent)
    assert log["has bulk 0"] == pytest.approx(bulk)


def test_compute_is_slower_while_a_kernel_carries():
    """10 s of compute beside a transfer of 4 s that takes half of the SMs: 4 s bring 2 s of work, then 8 s more."""
    times = Simulation([Launch("x"), ALL, Wait("x")], {"x": transfer([4, 4], tax=0.5)}, work(10, 10)).run()
    assert times.end.tolist() == [[12, 12]]
    assert times.compute.tolist() == [[12, 12]] and not times.exposed.any()


def test_a_transfer_of_the_next_batch_is_waited_for_in_the_next_step():
    """3 s of early rows under 2 s of compute: 1 s is left, and the first step has none to wait for."""
    program = [Wait("early"), Launch("early", 1), ALL]
    times = Simulation(program, {"early": transfer([3, 3], batches=3)}, work(2, 2, steps=3)).run()
    assert times.exposed[:, 0].tolist() == [0, 1, 1]
    assert times.end[:, 0].tolist() == [2, 5, 8]


def test_a_wait_that_nobody_answers_is_an_error():
    class OneSided(Simulation):
        def _launch(self, rank, what, batch, now):
            if rank == 0:
                super()._launch(rank, what, batch, now)

    with pytest.raises(RuntimeError, match="rank 0 waits forever in step 0"):
        OneSided([Launch("x"), Wait("x")], {"x": transfer([1, 1])}, work(0, 0)).run()


def _random_world(seed: int, slower: float):
    random = np.random.default_rng(seed)
    ranks, steps = int(random.integers(2, 6)), 3
    kinds = {
        name: Transfer(
            group, random.random((steps, ranks)) * slower, random.random((steps, ranks)) * slower, 0.01, tax
        )
        for name, group, tax in (("urgent", "a", 0.1), ("late", "b", 0.1), ("early", "b", 0.05))
    }
    program = [
        Launch("urgent"), Wait("early"), Wait("urgent"), Launch("late", -1), Compute(0.5, 0.2), Wait("late", -1),
        Launch("early", 1), Compute(0.5, 0.8),
    ]  # fmt: skip
    return program, kinds, random.random((steps, ranks, 2))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000))
def test_compute_exposed_and_straggler_are_the_step(seed):
    times = Simulation(*_random_world(seed, 1.0)).run()
    np.testing.assert_allclose(times.compute + times.exposed + times.straggler, times.step(), atol=1e-9)
    for kind in (times.compute, times.exposed, times.straggler):
        assert (kind >= -1e-12).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000))
def test_the_same_twice_and_work_is_never_lost(seed):
    program, kinds, seconds = _random_world(seed, 1.0)
    simulations = [Logged(program, kinds, seconds) for _ in range(2)]
    first, second = (simulation.run() for simulation in simulations)
    assert simulations[0].log == simulations[1].log and (first.end == second.end).all()
    assert (first.compute >= seconds.sum(2) - 1e-9).all()
    assert (first.compute <= seconds.sum(2) / 0.9 + 1e-9).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(1.0, 4.0))
def test_a_slower_link_never_makes_a_synchronous_step_faster(seed, slower):
    """(With several groups and taxes on compute, one rank's gain may be another's loss, as on a real machine.)"""
    ends = []
    for factor in (1.0, slower):
        _, kinds, seconds = _random_world(seed, factor)
        program = [Launch("urgent"), Wait("urgent"), ALL, Launch("late"), Wait("late")]
        ends.append(Simulation(program, kinds, seconds).run().end)
    assert (ends[1] >= ends[0] - 1e-9).all()
