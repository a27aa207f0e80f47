"""benchmarks/meter_gpu.py: how the meter's steps are held against the profiler's."""

from __future__ import annotations

import sys

import pytest

from repo import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from meter_gpu import MARKER, PARTS, compare  # noqa: E402


def kernel(name, begin, microseconds, stream=7):
    return {"cat": "kernel", "name": name, "ts": begin, "dur": microseconds, "args": {"stream": stream}}


EVENTS = [
    *(kernel(MARKER, t, 0) for t in (0, 1000, 2000)),
    kernel("mm", 10, 300), kernel("mm", 200, 200), kernel("copy", 0, 900, stream=9), kernel("mm", 1900, 500),
]  # fmt: skip


def test_the_sum_against_the_step():
    metered = [dict.fromkeys(PARTS, 0.0) | {"compute": 0.0007, "loader": 0.0002}] * 2
    found = compare(metered, EVENTS)
    assert found["step_ms"] == pytest.approx(1.0) and found["step_error_percent"] == pytest.approx(10.0)
    # kernels that overlap count once, those of other streams and what is behind the last step not at all
    assert found["busy_ms"] == pytest.approx((390 + 100) / 2 / 1e3)


def test_steps_that_one_of_them_has_not_seen():
    with pytest.raises(RuntimeError, match="the meter has 1 steps, the profiler 2"):
        compare([dict.fromkeys(PARTS, 0.0)], EVENTS)
