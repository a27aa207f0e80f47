"""Steps that begin before their rank has heard of the others: the same numbers, and the same words where ranks do not do
the same. On the CPU, where nobody does so by himself, the host waits for rows; all else is as on a GPU."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any
from unittest import mock

import pytest
import test_lookahead_loop
import test_without_overlap
import torch
import torch.distributed as dist
from test_lookahead_loop import LOOPS
from test_without_overlap import WithAnyChoice, WithoutOverlap

from freescale.runtime.lookahead import begun_step, loop_state, rank_status
from loops import Training, batch_of, compare, data, threads
from ranks import run_ranks
from shared_ranks import Outcomes, run_together
from two_tables import Trainer, same


def _begins_early(check: Any, only_over_copies: bool = False) -> int:
    """Run it so. Returns how many steps did."""
    begun: list[int] = []
    say = rank_status.RankSync.say_begun

    def counted(self: Any, own: Any) -> None:
        begun.append(own.batch)
        say(self, own)

    with _allowed(only_over_copies), mock.patch.object(rank_status.RankSync, "say_begun", counted):
        with mock.patch.object(test_lookahead_loop, "Training", WithoutOverlap):
            check()
    assert begun
    return len(begun)


def _allowed(only_over_copies: bool = False) -> Any:
    """Over whatever carries the rows."""
    return mock.patch.object(begun_step, "only_over_copies", only_over_copies)


def _leave_alone() -> None:
    _begins_early(test_lookahead_loop._leave_alone)


def _bad_input() -> None:
    _begins_early(test_lookahead_loop._bad_input)


def _loader_failures() -> None:
    _begins_early(test_lookahead_loop._loader_failures)


def _uneven() -> None:
    _begins_early(test_lookahead_loop._uneven)


def _epochs() -> None:
    _begins_early(partial(compare, LOOPS[0], WithoutOverlap))


def _steps_apart() -> None:
    """Where a loader chooses from batch to batch: those between two batches that are kept apart."""
    _begins_early(partial(compare, LOOPS[0], WithAnyChoice))


def _loops() -> None:
    for loop in LOOPS:
        with _allowed():
            compare(loop, WithoutOverlap)
            compare(loop, WithAnyChoice)


def _not_by_himself() -> None:
    """Over the process group's own all-to-all."""
    with mock.patch.object(rank_status.RankSync, "say_begun", side_effect=AssertionError):
        compare(LOOPS[0], WithoutOverlap)


def _without_shared_memory() -> None:
    """Nobody could read later what a rank has posted."""
    with _allowed(), mock.patch.object(rank_status, "open_board", return_value=None):
        with mock.patch.object(rank_status.RankSync, "say_begun", side_effect=AssertionError):
            compare(LOOPS[0], WithoutOverlap)


def _goes_on() -> None:
    """One rank brings a wrong batch; all catch the error, bring the right one, and nothing is lost."""

    def loop() -> None:
        t, plain, caught = WithoutOverlap(True), Training(False), 0
        for i, batch in enumerate(t.loader(data(9))):
            if i in (4, 6):
                wrong = batch_of(77) if dist.get_rank() == i // 2 - 2 else batch
                with pytest.raises(RuntimeError, match=f"rank {i // 2 - 2}: the model expected batch {i}, .*did not come"):
                    t.step(wrong)
                caught += 1
            t.step(batch)
        for batch in data(9):
            plain.step(batch)
        assert caught == 2 and t.losses == plain.losses
        assert torch.equal(t.model.table.weight, plain.model.table.weight) and threads() == []

    # Without the first, one that was taken back, and those around the first run of the graph for batches without ids.
    found = _begins_early(loop)
    assert found == 7, found


def _one_rank_evaluates() -> None:
    """The batch that the others have begun."""
    t, rank = WithoutOverlap(True), dist.get_rank()

    def loop() -> None:
        for i, batch in enumerate(t.loader(data(8))):
            t.evaluate(batch) if i == 4 and rank == 1 else t.step(batch)

    def check() -> None:
        with pytest.raises(RuntimeError, match="rank 0: trains at batch 4; rank 1: evaluates at batch 4"):
            loop()

    _begins_early(check)
    plain = Training(False)
    for batch in data(4):
        plain.step(batch)
    assert torch.equal(t.model.table.weight, plain.model.table.weight) and threads() == []


def _fails_in_the_graph() -> None:
    """On one rank, before its rows are launched, while another leaves: both hear it, and the next loop trains."""
    t, rank = WithoutOverlap(True), dist.get_rank()

    def fails(*args: Any) -> None:
        raise OSError("no memory")

    def check() -> None:
        with pytest.raises(OSError if rank == 0 else ZeroDivisionError):
            for i, batch in enumerate(t.loader(data(8))):
                if i == 4 and rank == 1:
                    _ = 1 / 0
                with mock.patch.object(loop_state.LoopState, "begin_step", fails) if i == 4 else mock.MagicMock():
                    t.step(batch)

    _begins_early(check)
    compare(LOOPS[0], WithoutOverlap)


def _two_tables() -> None:
    """Rows of several exchanges, in the order in which the graph launches them; compiled by Inductor."""

    def train() -> None:
        trainer = Trainer("rowwise_adagrad", codegen="inductor")
        plain = trainer.train(0.5, 12, False)
        assert same(trainer.train(0.5, 12, True, overlap=False), plain)

    assert _begins_early(train) >= 8


class Broken(test_without_overlap.WithoutOverlap):
    """Its forward is two graphs, with a collective of the user's between them."""

    class kind(Training.kind):  # noqa: N801
        def forward(self, batch: Any) -> Any:
            torch._dynamo.graph_break()
            return super().forward(batch)

    def __init__(self, wrapped: bool) -> None:
        with mock.patch("torch.compile", partial(_compile_in_parts, torch.compile)):
            super().__init__(wrapped)


def _compile_in_parts(compile_: Any, *args: Any, **kwargs: Any) -> Any:
    return compile_(*args, **{**kwargs, "fullgraph": False})


def _more_than_one_graph() -> None:
    """What else the call does is not known, and could need the others: it meets before it begins."""
    with _allowed(), mock.patch.object(rank_status.RankSync, "say_begun", side_effect=AssertionError):
        compare(LOOPS[0], Broken)


class InParts(torch.nn.Module):
    """Not compiled itself: what its forward does beside its compiled parts is not known."""

    def __init__(self) -> None:
        super().__init__()
        import freescale

        tables = [freescale.ShardedEmbedding(31, 4, name=name, lr=0.1) for name in ("item", "user")]
        options = {"codegen": "eager"}
        self.parts = torch.nn.ModuleList(torch.compile(t, backend="freescale", options=options) for t in tables)

    def forward(self, batch: Any) -> Any:
        dist.barrier()
        return sum(part(batch[name]).sum() for part, name in zip(self.parts, ("item", "user"), strict=True))


def _a_model_in_parts() -> None:
    import freescale

    model, ids = InParts(), torch.arange(5)
    with _allowed(), mock.patch.object(rank_status.RankSync, "say_begun", side_effect=AssertionError):
        for batch in freescale.LookaheadLoader([{"item": ids, "user": ids}] * 6, model, overlap=False):
            model(batch).backward()


def _hook_of_the_user() -> None:
    """It may need the other ranks, too."""
    t = WithoutOverlap(True)
    handle = t.run.register_forward_hook(lambda *_: dist.barrier())
    with _allowed(), mock.patch.object(rank_status.RankSync, "say_begun", side_effect=AssertionError):
        for batch in t.loader(data(6)):
            t.step(batch)
    handle.remove()


# ---- a GPU -----------------------------------------------------------------------------------------------------------


class OnGpu(WithoutOverlap):
    """Over `staged`, where steps begin early by themselves."""

    options = {"transport": "staged"}

    class kind(Training.kind):  # noqa: N801
        def __init__(self) -> None:
            super().__init__()
            self.to("cuda")

    def step(self, batch: Any, **kwargs: Any) -> None:
        super().step({name: x.cuda() for name, x in batch.items()}, **kwargs)

    def evaluate(self, batch: Any) -> None:
        super().evaluate({name: x.cuda() for name, x in batch.items()})


def _last_rank_leaves(kind: type[Training]) -> int:
    """The batch that the others have begun; then all train."""
    leaves, last = dist.get_rank() == dist.get_world_size() - 1, dist.get_world_size() - 1
    plain = kind(False)
    for batch in data(4):
        plain.step(batch)
    expected_rows = plain.model.table.weight.clone()

    def train(t: Training, how: str) -> None:
        for i, batch in enumerate(t.loader(data(8))):
            if i == 4 and leaves:
                if how == "break":
                    break
                if how == "raise":
                    raise ZeroDivisionError
                if how == "continue":
                    continue
                t.evaluate(batch)
            t.step(batch)

    words = {"break": f"rank {last}: leaves its loop at batch 4", "continue": f"rank {last}: trains at batch 5"}
    words |= {"raise": words["break"], "evaluate": f"rank {last}: evaluates at batch 4"}

    def leave() -> None:
        for how in words:
            t = kind(True)
            if leaves and how == "break":
                train(t, how)
            else:
                expected = ZeroDivisionError if leaves and how == "raise" else RuntimeError
                with pytest.raises(expected, match="" if expected is ZeroDivisionError else words[how]):
                    train(t, how)
            assert torch.equal(t.model.table.weight, expected_rows), how
            assert "freescale-lookahead" not in threads()
        again, plain_again = kind(True), kind(False)
        for training in (again, plain_again):
            for batch in training.loader(data(20)):
                training.step(batch)
        assert again.losses == plain_again.losses
        assert torch.equal(again.model.table.weight, plain_again.model.table.weight)

    return _begins_early(leave, only_over_copies=kind is OnGpu)


def _leaves_on_a_gpu() -> int:
    torch.cuda.set_device(0)
    return _last_rank_leaves(OnGpu)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("world", (2, 3))
def test_a_rank_leaves_what_others_have_begun_on_a_gpu(world):
    """The others' devices get their rows, and every rank its sentence."""
    assert min(run_ranks(_leaves_on_a_gpu, world, timeout=150, group_timeout=60)) > 20


def _dies_on_a_gpu() -> None:
    torch.cuda.set_device(0)
    t = OnGpu(True)
    for i, batch in enumerate(t.loader(data(8))):
        if i == 4 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        t.step(batch)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_rank_that_dies_is_missed_by_those_who_have_begun_on_a_gpu():
    alive, dead = run_ranks(_dies_on_a_gpu, 2, expect_errors=True, timeout=100, group_timeout=60)
    assert dead == "died" and "did not come to the same place within 60 s, or are gone: rank 1 is gone" in alive


# ---- the CPU ---------------------------------------------------------------------------------------------------------

_QUICK = (_leave_alone, _goes_on, _one_rank_evaluates)
CHECKS = {check.__name__.strip("_"): check for check in _QUICK}
MORE = (
    _epochs, _fails_in_the_graph, _more_than_one_graph, _a_model_in_parts, _hook_of_the_user, _bad_input,
    _loader_failures, _uneven, _steps_apart, _not_by_himself, _without_shared_memory, _loops, _two_tables,
)  # fmt: skip


@pytest.fixture(scope="module")
def checked() -> Outcomes:
    return run_together(CHECKS, 2, timeout=300)


@pytest.mark.parametrize("name", CHECKS)
def test_steps_that_begin_early(name, checked):
    checked.of(name)


@pytest.mark.thorough
@pytest.mark.parametrize("check", MORE)
def test_more_steps_that_begin_early(check):
    run_ranks(check, 2, timeout=300)


@pytest.mark.thorough
def test_one_of_four_ranks_leaves_what_the_others_have_begun():
    assert min(run_ranks(_last_rank_leaves, 4, WithoutOverlap, timeout=300)) > 20
