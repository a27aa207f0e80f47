"""Batches and their plans for many ranks in one process, against what sets of ids say."""

from __future__ import annotations

import numpy as np
import pytest

from freescale.__main__ import main
from freescale.simulate.assignments import Assigner
from freescale.simulate.cluster import PRESETS, InputError
from freescale.simulate.planned_world import PlannedWorld
from freescale.simulate.workload import Generated, Recorded, Workload, colliding_share, exponent_for

SMALL = Workload(ranks=6, batch=5, median=30, cap=200, rows=5000, collision=0.3)


def planned(source, owners, steps=3):
    w = source.workload
    world, order, each = PlannedWorld(w.ranks, owners, w.rows), np.arange(w.ranks * w.batch), np.full(w.ranks, w.batch)
    batches = [source.batch(step, owners) for step in range(steps)]
    counts = [c for b in batches if (c := world.plan(b, order, each)) is not None]
    return batches, [*counts, world.last()]


def test_plans_are_what_sets_of_ids_say():
    source = Generated(SMALL)
    batches, counts = planned(source, SMALL.ranks)
    ids = [np.split(b.ids, np.cumsum(b.counts)[SMALL.batch - 1 :: SMALL.batch])[:-1] for b in batches]
    everyone = [set(b.ids.tolist()) for b in batches]
    for step, c in enumerate(counts):
        assert c.values.tolist() == [len(i) for i in ids[step]]
        assert c.unique.tolist() == [len(set(i.tolist())) for i in ids[step]]
        before = everyone[step - 1] if step else everyone[0]
        assert c.urgent.tolist() == [len(set(i.tolist()) & before) for i in ids[step]]
        assert c.urgent_values.tolist() == [sum(x in before for x in i.tolist()) for i in ids[step]]
        after = everyone[step + 1] if step + 1 < len(counts) else everyone[step]
        assert c.urgent_gradients.tolist() == [len(set(i.tolist()) & after) for i in ids[step]]
        assert c.urgent_gradient_values.tolist() == [sum(x in after for x in i.tolist()) for i in ids[step]]


def test_some_owners_stand_for_all():
    w = Workload(ranks=16, batch=64, median=100, cap=1000, rows=2_000_000)
    (_, every), (_, some) = (planned(Generated(w), owners) for owners in (16, 4))
    for name in ("values", "unique", "urgent", "urgent_gradients"):
        a, b = (getattr(c[1], name).sum() for c in (every, some))
        assert b == pytest.approx(a, rel=0.08), name
    assert some[1].values == pytest.approx(every[1].values)  # lengths are known


@pytest.mark.parametrize("share", (0.06, 0.12, 0.4))
def test_the_wanted_share_of_rows_collides(share):
    w = Workload(ranks=8, batch=64, median=100, cap=1000, rows=2_000_000, collision=share)
    _, counts = planned(Generated(w), 8)
    assert counts[1].urgent.sum() / counts[1].unique.sum() == pytest.approx(share, rel=0.1)


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
    batches, counts = planned(source, 3)
    assert batches[0].counts.tolist() == batches[0].values.tolist() == source.lengths(0).tolist()
    assert source.workload.rows == 10 and set(batches[0].ids) <= set(range(10))
    assert sum(counts[0].values) == batches[0].values.sum()


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"lengths": np.array([1])}, "the array ids is missing"),
        ({"lengths": np.array([3]), "ids": np.array([1])}, "lengths add up to 3, but there are 1 ids"),
        ({"lengths": np.array([1]), "ids": np.array([-1])}, "ids must be whole numbers"),
        ({"lengths": np.array([1.5]), "ids": np.array([1])}, "lengths must be whole numbers"),
    ],
)
def test_bad_histories_are_named(tmp_path, capsys, arrays, sentence):
    path = tmp_path / "h.npz"
    np.savez(path, **arrays)
    with pytest.raises(InputError, match=sentence):
        Recorded(SMALL, path)
    assert main(["simulate", "--histories", str(path)]) == 2
    assert f"{path}: " in capsys.readouterr().err
