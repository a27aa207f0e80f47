"""What a sweep changes, and what it leaves alone."""

from __future__ import annotations

import pytest

from freescale.simulate.cluster import PRESETS
from freescale.simulate.study import AXES, changed
from freescale.simulate.workload import Generated, Workload, colliding_share

W, C = Workload(ranks=16), PRESETS["h100"]


def test_one_thing_changes():
    assert changed("ranks", 64, W, C) == (Workload(ranks=64), C)
    assert changed("batch", 16, W, C) == (Workload(ranks=16, batch=16), C)
    workload, cluster = changed("link", 3.0, W, C)
    assert workload == W and cluster.between_gb_per_s == 3.0 and cluster.inside_gb_per_s == C.inside_gb_per_s


def test_a_shorter_cap_is_a_shorter_median_too():
    workload, _ = changed("cap", 2100, W, C)
    assert (workload.cap, workload.median) == (2100, 100)


@pytest.mark.parametrize("share", AXES["collision"][1])
@pytest.mark.parametrize("ranks", (16, 256))
def test_the_wanted_collisions_can_be_had(share, ranks):
    workload, _ = changed("collision", share, Workload(ranks=ranks), C)
    source = Generated(workload)
    tokens = source.lengths(0).sum() + ranks * workload.batch
    found = colliding_share(source.exponent, workload.rows, tokens / ranks, tokens)
    assert found == pytest.approx(share, rel=0.06)  # batches differ
