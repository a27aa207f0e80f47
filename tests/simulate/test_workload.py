"""Batches for many ranks: histories, ids, balancing."""

from __future__ import annotations

import numpy as np
import pytest

from freescale.__main__ import main
from freescale.simulate.assignments import Assigner
from freescale.simulate.cluster import PRESETS, InputError
from freescale.simulate.workload import Generated, Recorded, Workload, colliding_share, exponent_for

SMALL = Workload(ranks=6, batch=5, median=30, cap=200, rows=5000, collision=0.3)


def test_a_share_that_cannot_be_had_is_the_nearest():
    assert exponent_for(0.0001, 1000, 1e4, 1e5) == 0.0
    assert colliding_share(0.0, 1000, 1e4, 1e5) == pytest.approx(1.0)


def test_batches_follow_from_the_seed():
    a, b = (Generated(SMALL).batch(2, 3) for _ in range(2))
    assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    other = Generated(Workload(**{**SMALL.__dict__, "seed": 1})).batch(2, 3)
    assert not np.array_equal(a.values, other.values)


def test_balanced_ranks_have_the_same_samples_and_the_same_work():
    w = Workload(ranks=8, batch=256, cap=8000)
    plain, balanced = (Assigner(Generated(w), PRESETS["h100"], on).assign(0) for on in (False, True))
    assert sorted(balanced.order) == sorted(plain.order) and (balanced.per_rank == 256).all()
    assert balanced.seconds.sum() == pytest.approx(plain.seconds.sum(), rel=0.02)
    uneven, even = (a.seconds.sum(1).max() / a.seconds.sum(1).mean() for a in (plain, balanced))
    assert uneven > 1.05 and even < 1.03
    assert balanced.moved_bytes > 0 and plain.moved_bytes == 0


def test_recorded_histories(tmp_path):
    path = tmp_path / "h.npz"
    np.savez(path, lengths=np.array([3, 1, 4]), ids=np.array([5, 6, 7, 9, 1, 2, 3, 4]))
    source = Recorded(Workload(ranks=3, batch=4, cap=3), path)
    assert set(source.lengths(0)) <= {1, 3}
    batch = source.batch(0, 3)
    assert batch.counts.tolist() == batch.values.tolist() == source.lengths(0).tolist()
    assert source.workload.rows == 10 and set(batch.ids) <= set(range(10))


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"lengths": np.array([1])}, "the array ids is missing"),
        ({"lengths": np.array([3]), "ids": np.array([1])}, "lengths add up to 3, but there are 1 ids"),
        ({"lengths": np.array([1]), "ids": np.array([-1])}, "ids must be a nonempty 1-D array of non-negative integers"),
        ({"lengths": np.array([1.5]), "ids": np.array([1])}, "lengths must be a nonempty 1-D array of non-negative integers"),
    ],
)
def test_bad_histories_are_named(tmp_path, capsys, arrays, sentence):
    path = tmp_path / "h.npz"
    np.savez(path, **arrays)
    with pytest.raises(InputError, match=sentence):
        Recorded(SMALL, path)
    assert main(["simulate", "--histories", str(path)]) == 2
    assert f"{path}: " in capsys.readouterr().err
