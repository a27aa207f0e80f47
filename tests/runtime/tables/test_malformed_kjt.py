"""KeyedJaggedTensors whose lengths, offsets or keys are wrong, or change after they were planned: one clear sentence on
every rank, whichever rank has them; with TorchRec's own words for what TorchRec refuses in the first batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from math import isfinite
from typing import Any

import pytest

from keyed_batches import (
    CHANGES,
    MALFORMED,
    TENSORS,
    change_one_batch,
    change_within_keys,
    train_on_malformed,
    train_on_tensors,
)
from ranks import HAS_TORCHREC
from shared_ranks import Outcomes, run_together

pytestmark = pytest.mark.skipif(not HAS_TORCHREC, reason="TorchRec is not installed")


QUICK = (
    "key", "more, ahead: False", "more, ahead: True", "differ, ahead: True", "uneven, ahead: False", "within a key",
    "far more, pooled: True, ahead: True, eager",
)  # fmt: skip


def _tier(name: str) -> str:
    """Of code generation, one case is thorough: the others are of it what they are without."""
    if name in QUICK:
        return "quick"
    return "slow" if name.endswith("inductor") and name != "far more, pooled: True, ahead: True, inductor" else "thorough"


def _marked(name: str) -> Any:
    return name if _tier(name) == "quick" else pytest.param(name, marks=getattr(pytest.mark, _tier(name)))


@pytest.mark.parametrize("change", [_marked(name) for name in CHANGES])
def test_a_batch_that_changes_after_it_was_planned_is_an_error_on_every_rank(change, outcomes):
    for error in outcomes(change).of(change):
        assert "rank 1: the ids or lengths of batch 1 were changed in place" in error


def test_lengths_may_change_within_a_key(outcomes):
    assert all(outcomes("within a key").of("within a key"))


@pytest.mark.parametrize("case", [_marked(f"{name}, ahead: {ahead}") for ahead in (False, True) for name in MALFORMED])
def test_a_malformed_batch_is_an_error_on_every_rank(case, outcomes):
    sentence = MALFORMED[case.split(",")[0]][1]
    for rank, (error, good) in enumerate(outcomes(case).of(case)):
        assert sentence in error and good
        assert "rank 1" in error or (case.endswith("True") and rank == 1)


OF_TENSORS = {
    f"{case}, pooled: {pooled}, ahead: {ahead}, {codegen}": (case, pooled, ahead, codegen)
    for ahead, codegen in ((True, "eager"), (True, "inductor"), (False, "eager"))
    for pooled in (False, True)
    for case in TENSORS
    if pooled or case != "weights"
}


@pytest.mark.parametrize("case", [_marked(name) for name in OF_TENSORS])
def test_a_model_that_makes_it_of_wrong_tensors_is_an_error_on_every_rank(case, outcomes):
    """Under a LookaheadLoader the plan knows the ids alone."""
    sentence = TENSORS[OF_TENSORS[case][0]][1]
    for first, second, error, good in outcomes(case).of(case):
        assert sentence in error and "rank 1" in error
        assert all(isfinite(loss) for loss in (first, second, good))


CHECKS = {
    "within a key": change_within_keys,
    **{name: partial(change_one_batch, change) for name, change in CHANGES.items()},
    **{
        f"{name}, ahead: {ahead}": partial(train_on_malformed, parts, ahead)
        for ahead in (True, False)
        for name, (parts, _) in MALFORMED.items()
    },
    **{name: partial(train_on_tensors, *arguments) for name, arguments in OF_TENSORS.items()},
}


@pytest.fixture(scope="module")
def outcomes() -> Callable[[str], Outcomes]:
    """Those of a tier, when one of them is asked for."""

    @cache
    def checked(tier: str) -> Outcomes:
        return run_together({k: v for k, v in CHECKS.items() if _tier(k) == tier}, 2, group_timeout=30)

    return lambda name: checked(_tier(name))
