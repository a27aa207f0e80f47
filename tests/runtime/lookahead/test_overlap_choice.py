"""Steps that overlap or are kept apart, as is faster: who decides, on what, and that no number changes."""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_lookahead_loop import LOOPS

import trec
from freescale.runtime.lookahead import overlap_choice
from freescale.runtime.lookahead.overlap_choice import BLOCK, BLOCKS, EVERY, SETTLING, WARM_UP, OverlapChoice
from freescale.runtime.meter import FinishedStep
from loops import Training, compare, data
from ranks import HAS_TORCHREC, run_ranks
from shared_ranks import Outcomes, run_together
from two_tables import Trainer, same

# ---- the decision ----------------------------------------------------------------------------------------------------


class DeviceTime:
    """Of a step on a device that is three steps behind the host."""

    host_is_at = 0

    def __init__(self, number: int, seconds: float) -> None:
        self._number, self.seconds = number, seconds

    def read(self) -> bool:
        return self._number + 3 <= DeviceTime.host_is_at


def train(choice: OverlapChoice, batches: int, seconds: Any, on_device: bool = False) -> list[bool]:
    """Which batches are kept apart. Planning is two batches ahead; `seconds(number, apart)` of a step."""
    apart: list[bool] = []
    for number in range(batches):
        DeviceTime.host_is_at = number
        while len(apart) < number + 2:
            apart.append(choice.keep_apart())
        if apart[number] == apart[number + 1]:
            took = seconds(number, apart[number])
            step = FinishedStep(number, 99.0, [], DeviceTime(number, took)) if on_device else FinishedStep(number, took, [])
            choice.step_finished(apart[number], step)
    return apart


TRIAL = range(WARM_UP, WARM_UP + BLOCKS * BLOCK)
DECIDED = TRIAL.stop + SETTLING + 1


@pytest.mark.parametrize("on_device", (False, True))
@pytest.mark.parametrize("apart_takes, kept_apart", [(0.8, True), (0.98, True), (0.995, False), (1.0, False), (1.2, False)])
def test_the_faster_way_is_kept(apart_takes, kept_apart, on_device):
    noise = random.Random(0)

    def seconds(number: int, apart: bool) -> float:
        compiling = 50.0 if number < 4 else 0.0
        return (apart_takes if apart else 1.0) * noise.uniform(0.999, 1.001) + compiling + (number % 13 == 0) * 7

    choice = OverlapChoice()
    apart = train(choice, DECIDED + 100, seconds, on_device)
    assert not any(apart[: TRIAL.start]) and sum(apart[i] for i in TRIAL) == len(TRIAL) // 2
    assert not any(apart[TRIAL.stop : DECIDED - 1]) and set(apart[DECIDED:]) == {kept_apart}
    assert choice.overlap == (not kept_apart)


def test_it_is_tried_again():
    """What is right at the beginning need not be right later."""
    choice, change = OverlapChoice(), DECIDED + EVERY // 2
    apart = train(choice, DECIDED + EVERY + DECIDED, lambda n, apart: 1.0 + 0.3 * (apart == (n > change)))
    assert set(apart[DECIDED : DECIDED + 100]) == {True} and set(apart[-10:]) == {False}
    assert sum(a != b for a, b in zip(apart, apart[1:], strict=False)) < 4 * BLOCKS  # two trials, no more


def test_nothing_is_decided_on_a_few_steps():
    choice = OverlapChoice()
    for _ in range(DECIDED + 10):
        choice.keep_apart()  # batches that nobody trains on
    assert choice.overlap


# ---- the same numbers ------------------------------------------------------------------------------------------------


class AnyChoice:
    """On each rank another one, for any batch: rank 0's counts."""

    def __init__(self) -> None:
        self._random, self.told = random.Random(dist.get_rank()), deque()
        self.overlap = True

    def keep_apart(self) -> bool:
        return self._random.random() < 0.5

    def step_finished(self, apart: bool, step: FinishedStep) -> None:
        self.told.append(apart)


class WithAnyChoice(Training):
    def loader(self, batches: Any, **kwargs: Any) -> Any:
        loader = super().loader(batches, **kwargs)
        if self.wrapped:
            loader._choice = AnyChoice()
        return loader


def _loops() -> None:
    """Break, exceptions, evaluation in the loop, checkpoints, steps without backward, schedules."""
    for loop in LOOPS:
        compare(loop, WithAnyChoice)


def _launches() -> None:
    """What nobody sends is not launched; the loader hears of steps that are apart, or overlap, on both sides."""
    import freescale

    training = WithAnyChoice(True)
    freescale.meter.clear()
    loader = training.loader(data(40))
    for batch in loader:
        training.step(batch)
    steps = [[name.partition(" of item")[0] for name in s["bytes"] if " of item" in name] for s in freescale.meter.steps()]
    every = Counter(name for names in steps for name in names)
    assert every["urgent rows"] == every["urgent gradients"] == 40
    draw = random.Random(0)
    apart = [draw.random() < 0.5 for _ in range(40)]
    overlapping = 39 - sum(apart[1:])  # of pairs of batches
    # The first step has no late gradients to send, but launches; what the last one launches for a next is not waited for.
    assert every["early rows"] == overlapping and every["late gradients"] == overlapping + 1, (every, overlapping)
    # Steps that overlap one neighbour are not told, nor is the last one.
    assert list(loader._choice.told) == [a for a, following in zip(apart, apart[1:], strict=False) if a == following]


def _tables(passes: str, codegen: str) -> None:
    """With a schedule of learning rates, in one graph."""
    import freescale

    for optimizer in ("rowwise_adagrad", "sgd"):
        trainer = Trainer(optimizer, passes, codegen)
        plain = Trainer(optimizer, "none").train(0.5, 30, False) if codegen == "eager" else trainer.train(0.5, 30, True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(freescale.LookaheadLoader, "_may_choose_overlap", lambda self: True)
            patch.setattr("freescale.runtime.lookahead.loader.OverlapChoice", AnyChoice)
            found = trainer.train(0.5, 30, True, overlap=None)
        assert same(found, plain)
        assert trainer.compilations == 1
        assert {s["bytes_early"] == 0 for s in found[2][4:] if s["values"] > 20} == {True, False}


def _chosen_for_real() -> None:
    """The loader's own choice, with a trial that fits into a short loop; also on a rank that is not asked."""
    import freescale

    training, plain = Training(True), Training(False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(freescale.LookaheadLoader, "_may_choose_overlap", lambda self: True)
        for name, value in {"WARM_UP": 2, "BLOCK": 3, "SETTLING": 5, "EVERY": 10}.items():
            patch.setattr(overlap_choice, name, value)
        loader = training.loader(data(40))
        for batch in loader:
            training.step(batch)
    for batch in data(40):
        plain.step(batch)
    assert training.losses == plain.losses
    states = [t.model.state_dict() for t in (training, plain)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert loader.overlap is None and isinstance(loader.overlaps, bool)
    early = [s["bytes_early"] > 0 for s in loader.stats() if s["values"]]
    assert {True, False} == set(early[3:20])


def _not_on_the_cpu() -> None:
    import freescale

    training = Training(True)
    assert freescale.LookaheadLoader(data(3), training.run)._choice is None
    assert freescale.LookaheadLoader(data(3), training.run).overlaps
    assert not freescale.LookaheadLoader(data(3), training.run, overlap=False).overlaps


CHECKS = {c.__name__.strip("_"): c for c in (_launches, _chosen_for_real, _not_on_the_cpu)}


@pytest.fixture(scope="module")
def checked() -> Outcomes:
    return run_together(CHECKS, 2, timeout=300)


@pytest.mark.parametrize("name", CHECKS)
def test_choice(name, checked):
    checked.of(name)


@pytest.mark.thorough
@pytest.mark.parametrize("world, passes, codegen", [(2, "none", "eager"), (4, "all", "eager"), (2, "all", "inductor")])
def test_any_choice_gives_the_same_bits(world, passes, codegen):
    run_ranks(_tables, world, passes, codegen, timeout=500)


@pytest.mark.thorough
def test_any_choice_in_any_loop():
    run_ranks(_loops, 2, timeout=400)


def _torchrec(layout: str) -> bool:
    import freescale

    runs = []
    for wrapped in (False, True):
        torch._dynamo.reset()
        model = trec.build(layout, "rowwise_adagrad")
        run = torch.compile(model, backend="freescale", fullgraph=True, options={"codegen": "eager"})
        loader: Any = [trec.batch(step, dist.get_rank()) for step in range(8)]
        if wrapped:
            loader = freescale.LookaheadLoader(loader, run)
            loader._choice = AnyChoice()
        losses = trec.train_on(model, run, loader)
        runs.append((losses, {**trec.snapshot(model), **trec.optimizer_state(model)}))
    return same(*runs)


@pytest.mark.thorough
@pytest.mark.skipif(not HAS_TORCHREC, reason="torchrec or fbgemm_gpu is not installed")
def test_torchrec_with_any_choice():
    assert run_ranks(_torchrec, 2, "mixed") == [True, True]
