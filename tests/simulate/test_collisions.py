"""Counts of what ranks share, against sets of ids and against the planner that training uses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from freescale.kernels.planning import native_plan, rank_mesh
from freescale.kernels.planning.native_plan import GRADIENT_ARRAYS, BatchPlan, Room
from freescale.kernels.planning.owners import ExchangeTables, Shard, owner_map
from freescale.simulate.collisions import CollisionCounter, Counts
from freescale.simulate.workload import Batch, Generated, Workload
from ranks import run_ranks

SMALL = Workload(ranks=6, batch=5, median=30, cap=200, rows=5000, collision=0.3)
STEPS = 3


def counted(source: Generated, owners: int) -> tuple[list[Batch], list[Counts]]:
    w, counter = source.workload, CollisionCounter()
    order, each = np.arange(w.ranks * w.batch), np.full(w.ranks, w.batch)
    batches = [source.batch(step, owners) for step in range(STEPS)]
    counts = [c for b in batches if (c := counter.count(b, order, each)) is not None]
    return batches, [*counts, counter.last()]


def ids_of_ranks(batch: Batch, samples: int) -> list[np.ndarray]:
    return np.split(batch.ids, np.cumsum(batch.counts)[samples - 1 :: samples])[:-1]


def test_counts_are_what_sets_of_ids_say():
    source = Generated(SMALL)
    batches, counts = counted(source, SMALL.ranks)
    ids = [ids_of_ranks(b, SMALL.batch) for b in batches]
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


def _planned(w: Workload) -> list[list[int]]:
    """By this rank's planner, with those of the other ranks: a row of counts for each batch, as in `Counts`."""
    rank, block = dist.get_rank(), -(-w.rows // w.ranks)
    sizes = [min(block, w.rows - r * block) for r in range(w.ranks)]
    owners = owner_map([Shard(0, r * block, n, r, 0) for r, n in enumerate(sizes)], [w.rows], w.ranks)
    plan = BatchPlan(rank_mesh.open_mesh(dist.group.WORLD), [ExchangeTables([0], [w.rows], owners)], 30.0)
    found: list[list[int]] = []
    values_of_row = np.empty(0)  # of each row that this rank requests, in the batch before
    for step in range(STEPS + 1):
        last = step == STEPS  # only the gradients of the batch before it are left
        if not last:
            ids = torch.from_numpy(ids_of_ranks(Generated(w).batch(step, w.ranks), w.batch)[rank].copy())
            assert plan.request(0, [ids]) is None
        memory = np.zeros(plan.needed_for_last if last else plan.needed, dtype=np.int64)
        _, (x,) = (plan.plan_last if last else plan.plan)(Room(native_plan.address_of(memory), len(memory)))
        if step:
            place, size = x.gradients[GRADIENT_ARRAYS.index("urgent_keys")]
            found[-1] += [int(x.gradient_counts.urgent_recv.sum()), int(values_of_row[memory[place:][:size]].sum())]
        if not last:
            early, urgent = int(x.row_counts.other_recv.sum()), int(x.row_counts.urgent_recv.sum())
            found.append([len(ids), early + urgent, urgent, x.urgent_entries])
            values_of_row = np.unique(ids.numpy(), return_counts=True)[1]
    return found


def test_counts_are_those_of_the_planner():
    w = Workload(ranks=3, batch=8, median=40, cap=300, rows=3001, collision=0.3)
    _, counts = counted(Generated(w), w.ranks)
    of_ranks = [[list(c) for c in zip(*(f.tolist() for f in x), strict=True)] for x in counts]
    planned = run_ranks(_planned, w.ranks, w)
    assert [list(batch) for batch in zip(*planned, strict=True)] == of_ranks
    assert 0 < counts[1].urgent.sum() < counts[1].unique.sum() < counts[1].values.sum()


def test_some_owners_stand_for_all():
    w = Workload(ranks=16, batch=64, median=100, cap=1000, rows=2_000_000)
    (_, every), (_, some) = (counted(Generated(w), owners) for owners in (16, 4))
    for name in ("values", "unique", "urgent", "urgent_gradients"):
        a, b = (getattr(c[1], name).sum() for c in (every, some))
        assert b == pytest.approx(a, rel=0.08), name
    assert some[1].values == pytest.approx(every[1].values)  # lengths are known


@pytest.mark.parametrize("share", (0.06, 0.12, 0.4))
def test_the_wanted_share_of_rows_collides(share):
    w = Workload(ranks=8, batch=64, median=100, cap=1000, rows=2_000_000, collision=share)
    _, counts = counted(Generated(w), 8)
    assert counts[1].urgent.sum() / counts[1].unique.sum() == pytest.approx(share, rel=0.1)
