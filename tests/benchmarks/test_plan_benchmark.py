"""benchmarks/plan.py: one process says what all other ranks would say, so it has to speak as they do."""

from __future__ import annotations

import sys

import pytest

from repo import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import plan  # noqa: E402


@pytest.mark.parametrize("world", (2, 5))
def test_stands_in_for_the_other_ranks(world):
    rank = plan.OneRank(plan.Ids(1.05, 400, seed=0), world)
    times, finished = plan.measure(rank, 2)
    row = plan.row(world, 1.05, times, finished)
    assert len(times) == 2 and row["ms_per_million_ids"] > 0
    assert 0 < row["colliding_rows"] < row["unique_rows"] <= 400
