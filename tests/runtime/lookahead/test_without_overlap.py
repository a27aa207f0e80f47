"""Planned ahead, but nothing of a step travels in another (overlap=False). The same numbers."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_lookahead_loop import LOOPS

import trec
from listening import listen
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
    with pytest.raises(TypeError, match="overlap must be True or False, found str"):
        freescale.LookaheadLoader(data(3), training.run, overlap="no")
    for batch in freescale.LookaheadLoader(data(3), training.run):
        training.step(batch)


def _reports_host_bound_steps() -> None:
    """Once per loader, on rank 0, where steps overlap."""
    import freescale

    name = "freescale.runtime.lookahead.loader"
    training, said = Training(True), listen(name, logging.INFO)
    logging.getLogger(name).setLevel(logging.INFO)
    for overlap, share, times in ((True, 0.1, 0), (False, 0.5, 0), (True, 0.5, 1)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(freescale.meter), "host_bound_share", lambda self, share=share: share)
            loader = training.loader(data(3), overlap=overlap)
            for _ in range(2):
                for batch in loader:
                    training.step(batch)
        expected = times if dist.get_rank() == 0 else 0
        assert sum("50% of the last steps because of the host" in m for m in said) == expected, said


def _none_means_true() -> None:
    import freescale

    training = Training(True)
    with pytest.warns(UserWarning, match="overlap=None. is deprecated and means True"):
        loader = freescale.LookaheadLoader(data(3), training.run, overlap=None)
    assert loader.overlap is True and freescale.LookaheadLoader(data(3), training.run).overlap is True


_QUICK = (_epochs, _launches, _ranks_differ, _reports_host_bound_steps, _none_means_true)
CHECKS = {check.__name__.strip("_"): check for check in _QUICK}


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


def _torchrec(layout: str) -> bool:
    import freescale

    runs = []
    for how in ("plain", "without overlap"):
        torch._dynamo.reset()
        model = trec.build(layout, "rowwise_adagrad")
        run = torch.compile(model, backend="freescale", fullgraph=True, options={"codegen": "eager"})
        loader: Any = [trec.batch(step, dist.get_rank()) for step in range(8)]
        if how != "plain":
            loader = freescale.LookaheadLoader(loader, run, overlap=False)
        losses = trec.train_on(model, run, loader)
        runs.append((losses, {**trec.snapshot(model), **trec.optimizer_state(model)}))
    return same(*runs)


@pytest.mark.thorough
@pytest.mark.skipif(not HAS_TORCHREC, reason="torchrec or fbgemm_gpu is not installed")
def test_torchrec_without_overlap():
    assert run_ranks(_torchrec, 2, "mixed") == [True, True]
