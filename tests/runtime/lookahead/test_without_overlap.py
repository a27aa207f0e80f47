"""Planned ahead, but nothing of a step travels in another: always (overlap=False), or as a loader chooses from batch to
batch. The same numbers."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_lookahead_loop import LOOPS

import trec
from freescale.runtime.lookahead import overlap_choice
from freescale.runtime.meter import FinishedStep
from loops import Training, compare, data
from ranks import HAS_TORCHREC, run_ranks
from shared_ranks import Outcomes, run_together
from two_tables import Trainer, same


class WithoutOverlap(Training):
    def loader(self, batches: Any, **kwargs: Any) -> Any:
        return super().loader(batches, **kwargs, **({"overlap": False} if self.wrapped else {}))


def _loops() -> None:
    """Break, exceptions, evaluation in the loop, checkpoints, steps without backward, schedules."""
    for loop in LOOPS:
        compare(loop, WithoutOverlap)


def _epochs() -> None:
    compare(LOOPS[0], WithoutOverlap)


def _two_tables() -> None:
    """With a schedule of learning rates. From loop to loop it can be changed."""
    trainer = Trainer("rowwise_adagrad")
    plain = trainer.train(0.5, 12, False)
    found = trainer.train(0.5, 12, True, overlap=False)
    assert same(found, plain) and same(trainer.train(0.5, 12, True), plain)
    assert same(trainer.train(0.5, 12, True, overlap=False), plain)
    assert len(found[2]) == 24 and all(s["bytes_early"] == s["bytes_late"] == 0 for s in found[2])
    assert all(s["colliding_rows"] == s["unique_rows"] for s in found[2])


def _launches() -> None:
    """Two for a step and exchange: none is for another step."""
    import freescale

    training = WithoutOverlap(True)
    freescale.meter.clear()
    for batch in training.loader(data(4)):
        training.step(batch)
    for step in freescale.meter.steps():
        launched = {name.partition("#")[0] for name in step["bytes"] if " of item" in name}
        assert launched == {"urgent rows of item", "urgent gradients of item"}, launched


def _ranks_differ() -> None:
    """Every rank hears of it before anything is exchanged."""
    import freescale

    training = Training(True)
    with pytest.raises(ValueError, match="some ranks overlap steps and others do not; give every LookaheadLoader the same"):
        for batch in freescale.LookaheadLoader(data(3), training.run, overlap=dist.get_rank() == 0):
            training.step(batch)
    with pytest.raises(TypeError, match="overlap must be True, False or None, found str"):
        freescale.LookaheadLoader(data(3), training.run, overlap="no")
    for batch in freescale.LookaheadLoader(data(3), training.run):
        training.step(batch)


class AnyChoice:
    """On each rank another one, for any batch: rank 0's counts."""

    def __init__(self) -> None:
        self._random, self.told = random.Random(dist.get_rank()), []
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


def _loops_of_any_choice() -> None:
    """Break, exceptions, evaluation in the loop, checkpoints, steps without backward, schedules."""
    for loop in LOOPS:
        compare(loop, WithAnyChoice)


def _launches_of_any_choice() -> None:
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
    assert loader._choice.told == [a for a, following in zip(apart, apart[1:], strict=False) if a == following]


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
        assert trainer.compilations == 2  # with ids, and without any
        assert {s["bytes_early"] == 0 for s in found[2][4:] if s["values"] > 20} == {True, False}


def _chosen_for_real() -> None:
    """The loader's own choice, with a trial that fits into a short loop; also on a rank that is not asked."""
    import freescale

    training, plain = Training(True), Training(False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(freescale.LookaheadLoader, "_may_choose_overlap", lambda self: True)
        for name, value in {"WARM_UP": 2, "BLOCK": 4, "BLOCKS": 4, "SETTLING": 5, "EVERY": 10}.items():
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


_OF_ANY_CHOICE = (_launches_of_any_choice, _chosen_for_real, _not_on_the_cpu)
CHECKS = {check.__name__.strip("_"): check for check in (_epochs, _launches, _ranks_differ, *_OF_ANY_CHOICE)}


@pytest.fixture(scope="module")
def checked() -> Outcomes:
    return run_together(CHECKS, 2, timeout=300)


@pytest.mark.parametrize("name", CHECKS)
def test_without_overlap(name, checked):
    checked.of(name)


@pytest.mark.thorough
@pytest.mark.parametrize("check", (_loops, _two_tables))
def test_more_without_overlap(check):
    run_ranks(check, 2)


@pytest.mark.thorough
@pytest.mark.parametrize("world, passes, codegen", [(2, "none", "eager"), (4, "all", "eager"), (2, "all", "inductor")])
def test_any_choice_gives_the_same_bits(world, passes, codegen):
    run_ranks(_tables, world, passes, codegen, timeout=500)


@pytest.mark.thorough
def test_any_choice_in_any_loop():
    run_ranks(_loops_of_any_choice, 2, timeout=400)


def _torchrec(layout: str) -> bool:
    import freescale

    runs = []
    for how in ("plain", "without overlap", "any choice"):
        torch._dynamo.reset()
        model = trec.build(layout, "rowwise_adagrad")
        run = torch.compile(model, backend="freescale", fullgraph=True, options={"codegen": "eager"})
        loader: Any = [trec.batch(step, dist.get_rank()) for step in range(8)]
        if how != "plain":
            loader = freescale.LookaheadLoader(loader, run, overlap=how != "without overlap")
            loader._choice = AnyChoice() if how == "any choice" else None
        losses = trec.train_on(model, run, loader)
        runs.append((losses, {**trec.snapshot(model), **trec.optimizer_state(model)}))
    return same(*runs[:2]) and same(runs[0], runs[2])


@pytest.mark.thorough
@pytest.mark.skipif(not HAS_TORCHREC, reason="torchrec or fbgemm_gpu is not installed")
def test_torchrec_without_overlap():
    assert run_ranks(_torchrec, 2, "mixed") == [True, True]
