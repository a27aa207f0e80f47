"""The pure functions of benchmarks/dense_allreduce.py. No test asserts a speed."""

from __future__ import annotations

import sys

import pytest

from repo import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import dense_allreduce  # noqa: E402


def _steps(*milliseconds: float, dense: float, urgent: float) -> list[list[float]]:
    return [[t, dense, urgent, 1e6, 1.5e6] for t in milliseconds]


def test_a_row_per_link():
    found = {"ddp": _steps(30, 34, 32, 90, dense=0, urgent=3), "in graph": _steps(20, 24, 22, 23, dense=2, urgent=1)}
    link = {"ratio": 0.5, "bits_per_second": 800e6, "found": found}
    (row,) = dense_allreduce.rows_of({"links": [link], "dense_bytes": 1e6})
    assert (row["ddp_ms"], row["graph_ms"], row["wire_ms"]) == (33, 22.5, pytest.approx(10))
    assert row["best_ms"] == row["compute_ms"] == 19.5 and row["hidden"] == pytest.approx(0.8)
    assert row["ratio"] == pytest.approx(10 / 19.5)
    assert row["dense_exposed_ms"] == 2 and (row["urgent_exposed_ms"], row["ddp_urgent_exposed_ms"]) == (1, 3)
    assert len(dense_allreduce.table([row]).splitlines()) == 2


def test_figures_of_the_meter():
    step = {
        "seconds": 0.1, "waits": {"dense gradients": 0.01, "urgent rows of item": 0.002, "loader": 0.5},
        "bytes": {"dense gradients": 100, "early rows of item": 20},
    }  # fmt: skip
    assert dense_allreduce.figures([step]) == [[pytest.approx(100), pytest.approx(10), pytest.approx(2), 100, 120]]
