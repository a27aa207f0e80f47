"""Planning against plain Python sets, on several ranks that are threads of this process: in C, and by the oracle."""

from __future__ import annotations

import itertools
import socket
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import planning_oracle
from freescale.kernels.planning import rank_mesh
from freescale.kernels.planning.native_plan import BatchPlan, plan_alone
from freescale.kernels.planning.owners import (
    ExchangeTables,
    Shard,
    first_invalid_id,
    first_row_of_each_table,
    owner_map,
)
from freescale.kernels.planning.rank_mesh import RankMesh
from freescale.runtime.tables import step_plan
from freescale.runtime.tables.plan_block import PlanBlock
from planning_oracle import OraclePlan

DIM = 2
WHO = "C"  # plans
Key = tuple[int, int]  # table, row


@pytest.fixture(params=["C", "the oracle"], scope="module", autouse=True)
def _both_ways(request):
    with mock.patch(f"{__name__}.WHO", request.param):
        yield


class Group(int):
    """Of a rank that is a thread: its number. `all_to_all` takes the place of a process group's."""

    def __new__(cls, rank: int, world: int):
        group = super().__new__(cls, rank)
        group.world = world
        return group

    def rank(self) -> int:
        return int(self)

    def size(self) -> int:
        return self.world


class Threads:
    """Ranks as threads."""

    def __init__(self, world: int, plans: bool = False) -> None:
        self.world, self.box = world, {}
        self.barrier = threading.Barrier(world, timeout=30)
        self.sockets: list[list[socket.socket | None]] = [[None] * world for _ in range(world)]  # closed by RankMesh
        for a, b in itertools.combinations(range(world), 2) if plans and WHO == "C" else ():
            self.sockets[a][b], self.sockets[b][a] = socket.socketpair()

    def batch_plan(self, rank: int, tables: ExchangeTables):
        if WHO == "C":
            return BatchPlan(RankMesh(self.sockets[rank], rank), [tables], 30.0)
        return OraclePlan(rank, [tables])

    def plan_alone(self, rank: int, ids: list[torch.Tensor], tables: ExchangeTables) -> list[torch.Tensor]:
        """What plan_now returns."""
        if WHO == "C":
            return list(plan_alone(ids, tables, "t", Group(rank, self.world)))
        asked = planning_oracle.request_rows(ids, *tables, rank)
        order, ends = asked.needed[1:]
        own = planning_oracle.deduplicate(asked.rows)
        return [asked.inverse, order, ends, asked.recv_counts, asked.rows, asked.send_counts, *own]

    def all_to_all(self, out, x, recv, send, group):
        assert sum(send) == x.shape[0] and sum(recv) == out.shape[0]
        for to, part in enumerate(x.split(list(send))):
            self.box[group, to] = part
        self.barrier.wait()
        for from_, part in enumerate(out.split(list(recv))):
            part.copy_(self.box[from_, group])  # raises where the two ends disagree on a count
            assert part.shape == self.box[from_, group].shape and part.dtype == self.box[from_, group].dtype
        self.barrier.wait()

    def exchange(self, x, recv, send, rank):
        out = x.new_empty(int(recv.sum()), *x.shape[1:])
        self.all_to_all(out, x, recv.tolist(), send.tolist(), rank)
        return out

    def run(self, fn):
        def rank(r):
            try:
                return fn(r)
            except BaseException:
                self.barrier.abort()
                raise

        with mock.patch.object(rank_mesh, "all_to_all_cpu", self.all_to_all), ThreadPoolExecutor(self.world) as pool:
            futures = [pool.submit(rank, r) for r in range(self.world)]
            errors = [e for f in futures if (e := f.exception()) is not None]
            for e in errors:
                if not isinstance(e, threading.BrokenBarrierError):
                    raise e
            return [f.result() for f in futures]


@dataclass
class Case:
    world: int
    tables: list[int]  # rows of each
    shards: list[Shard]
    features: list[int]  # the table of each
    ids: list[list[list[list[int]]]]  # batch, rank, feature

    def keys(self, batch: int, rank: int) -> list[Key]:
        """What each position asks for."""
        return [(t, i) for t, ids in zip(self.features, self.ids[batch][rank], strict=True) for i in ids]

    def asked_for(self, batch: int) -> set[Key]:
        """R(t); nothing before the first and after the last."""
        return {k for r in range(self.world) for k in self.keys(batch, r)} if 0 <= batch < len(self.ids) else set()

    def place(self, key: Key) -> tuple[int, int]:
        """Owner, row in its storage."""
        for s in self.shards:
            if s.table == key[0] and s.first <= key[1] < s.first + s.rows:
                return s.owner, s.base + key[1] - s.first
        raise AssertionError(key)


@st.composite
def cases(draw) -> Case:
    world = draw(st.integers(2, 5))
    tables = draw(st.lists(st.one_of(st.just(1), st.integers(2, 30)), min_size=1, max_size=3))
    shards, base = [], [0] * world
    for t, size in enumerate(tables):
        kind = draw(st.sampled_from(["table-wise", "row-wise", "uneven"]))
        if kind == "table-wise":
            owner = draw(st.integers(0, world - 1))
            cuts = [0] * owner + [size] * (world - 1 - owner)
        elif kind == "row-wise":
            cuts = [min(size, r * -(-size // world)) for r in range(1, world)]
        else:
            cuts = sorted(draw(st.lists(st.integers(0, size), min_size=world - 1, max_size=world - 1)))
        for owner, (a, b) in enumerate(zip([0, *cuts], [*cuts, size], strict=True)):
            shards.append(Shard(t, a, b - a, owner, base[owner]))
            base[owner] += b - a
    features = draw(st.lists(st.integers(0, len(tables) - 1), min_size=1, max_size=4))
    batches = draw(st.integers(2, 3))
    same, alternate = draw(st.booleans()), draw(st.booleans())

    def ids(batch: int, table: int) -> list[int]:
        size = tables[table]
        if same:
            return [size - 1] * draw(st.integers(0, 4))
        if alternate and size > 1:  # no id is in two consecutive batches
            return draw(st.lists(st.integers(0, (size - 2) // 2).map(lambda i: 2 * i + batch % 2), max_size=12))
        return draw(st.lists(st.integers(0, size - 1), max_size=12))

    def rank(batch: int) -> list[list[int]]:
        if draw(st.integers(0, 4)) == 0:
            return [[] for _ in features]
        return [ids(batch, t) for t in features]

    return Case(world, tables, shards, features, [[rank(b) for _ in range(world)] for b in range(batches)])


@dataclass
class Planned:
    asked: planning_oracle.Requests
    rows: planning_oracle.Split
    gradients: planning_oracle.Split
    step: step_plan.StepPlan


def plan_all(case: Case, threads: Threads, rank: int) -> list[Planned]:
    """What the background thread of a LookaheadLoader does."""
    owners = owner_map(case.shards, case.tables, case.world)
    firsts = first_row_of_each_table(case.tables)
    first_rows, sizes = [firsts[t] for t in case.features], [case.tables[t] for t in case.features]
    plan = threads.batch_plan(rank, ExchangeTables(first_rows, sizes, owners))
    planned: list[Planned] = []
    for number, batch in enumerate(case.ids):
        ids = [torch.tensor(i, dtype=torch.int64) for i in batch[rank]]
        asked = planning_oracle.request_rows(ids, first_rows, sizes, owners, rank)
        if planned:
            gradients, rows = planning_oracle.split_colliding(planned[-1].asked, asked, rank)
            planned[-1].gradients = gradients.split
        else:
            rows = planning_oracle.plan_rows(asked, planning_oracle.all_urgent(asked))
        step = plan_steps(plan, number, ids, planned[-1].step if planned else None)
        planned.append(Planned(asked, rows.split, None, step))
    planned[-1].gradients = planning_oracle.all_urgent(planned[-1].asked)
    block = PlanBlock(plan.needed_for_last)
    block.fill(plan.plan_last)
    (last,) = block.exchanges
    step_plan.plan_gradients(planned[-1].step, block.arrays(last.gradients), last.gradient_counts)
    return planned


def plan_steps(plan, number: int, ids: list[torch.Tensor], before: step_plan.StepPlan | None) -> step_plan.StepPlan:
    """The rows of a step; and the gradients of the step before it."""
    assert plan.request(0, ids) is None
    block = PlanBlock(plan.needed)
    block.fill(plan.plan)
    (planned,) = block.exchanges
    if before is not None:
        step_plan.plan_gradients(before, block.arrays(planned.gradients), planned.gradient_counts)
    arrays = block.arrays(planned.rows)
    assert torch.equal(arrays[0], torch.cat(ids))
    assert all(t.dtype == torch.int64 and t.stride() == (1,) for t in arrays)
    return step_plan.plan_rows(number, arrays, step_plan.count_values({}, None), planned.row_counts, planned.urgent_entries, torch.empty(0, DIM))


def check(case: Case, threads: Threads, rank: int) -> None:
    planned = plan_all(case, threads, rank)
    for t, p in enumerate(planned):
        before = case.asked_for(t - 1) if t else case.asked_for(0)  # all of the first batch is urgent
        after = case.asked_for(t + 1) if t + 1 < len(planned) else case.asked_for(t)
        unique = check_requests(case, threads, rank, t, p.asked)
        for split, other in ((p.rows, before), (p.gradients, after)):
            check_split(case, threads, rank, t, unique, p.asked, split, other)
        check_forward(case, threads, rank, t, p, before)
        check_backward(case, threads, rank, t, p)


def check_requests(case: Case, threads: Threads, rank: int, t: int, asked: planning_oracle.Requests) -> list[Key]:
    """Returns this rank's unique keys in the order of the plan."""
    positions, mine = case.keys(t, rank), asked.needed
    unique = sorted(set(positions), key=case.place)
    assert asked.inverse.tolist() == planning_oracle.inverse_index(mine).tolist()
    assert [unique[i] for i in asked.inverse.tolist()] == positions
    order, start = mine.order.tolist(), 0
    for key, end in zip(unique, mine.ends.tolist(), strict=True):
        assert order[start:end] == [i for i, k in enumerate(positions) if k == key]  # in position order
        start = end
    assert all(t.dtype == torch.int64 and t.stride() == (1,) for t in (*mine, *asked[1:]))
    owned = Counter(case.place(k)[0] for k in unique)
    assert asked.recv_counts.tolist() == [owned[r] for r in range(case.world)]
    wanted = [sorted(row for o, row in map(case.place, set(case.keys(t, r))) if o == rank) for r in range(case.world)]
    assert asked.rows.tolist() == sum(wanted, []) and asked.send_counts.tolist() == [len(w) for w in wanted]
    return unique


def check_split(case, threads, rank, t, unique, asked, split, other):
    """The chosen rows are those in `other`, at both ends, in the same order."""
    for chunk, chosen in ((split.urgent, True), (split.rest, False)):
        keys = [unique[i] for i in chunk.index.tolist()]
        assert keys == [k for k in unique if (k in other) == chosen]
        arrived = threads.exchange(chunk.rows, chunk.recv_counts, chunk.send_counts, rank)  # k-th row: its own number
        assert arrived.tolist() == [case.place(k)[1] for k in keys]
        owned = Counter(case.place(k)[0] for k in keys)
        assert chunk.recv_counts.tolist() == [owned[r] for r in range(case.world)]
        assert all(t.dtype == torch.int64 and t.stride() == (1,) for t in chunk)
    assert torch.equal(split.urgent.recv_counts + split.rest.recv_counts, asked.recv_counts)
    assert torch.equal(split.urgent.send_counts + split.rest.send_counts, asked.send_counts)


def check_forward(case, threads, rank, t, p, before):
    """Rows reach every position; the law: all unique rows travel once, and only the colliding ones are urgent."""
    step, owner = p.step, torch.full((1,), rank)
    early = threads.exchange(number(step.early_rows, owner), step.early_counts[1], step.early_counts[0], rank)
    urgent = threads.exchange(number(step.urgent.rows, owner), step.urgent.recv_counts, step.urgent.send_counts, rank)
    assert early.shape[0] == step.early_slots.shape[0]
    got = torch.cat([early, urgent])[step.inverse].tolist()
    assert [tuple(g) for g in got] == [case.place(k) for k in case.keys(t, rank)]
    mine, row_bytes = set(case.keys(t, rank)), 4 * DIM
    assert step.stats["bytes_urgent"] == row_bytes * len(mine & before) == row_bytes * step.stats["colliding_rows"]
    assert step.stats["bytes_urgent"] + step.stats["bytes_early"] == row_bytes * len(mine)
    assert step.stats["bytes_urgent_per_value"] == row_bytes * sum(k in before for k in case.keys(t, rank))
    on_the_wire = sum(int(c.sum()) for c in (step.urgent.send_counts, step.early_counts.send))
    pairs = {(r, k) for r in range(case.world) for k in case.keys(t, r) if case.place(k)[0] == rank}
    assert on_the_wire == len(pairs)


def number(rows: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    """A row of an owner that says who and which it is."""
    return torch.stack([owner.expand(rows.shape[0]), rows], 1)


def check_backward(case, threads, rank, t, p):
    """Each owner sums a row's gradients in the order of the requesters, each row once and in one class."""
    step, seen = p.step, []
    back_index, *back_own, back_send, back_recv = step.urgent_gradients
    mine = Counter(case.keys(t, rank))
    unique = sorted(mine, key=case.place)
    for index, own, send, recv in (
        (back_index, back_own, back_send, back_recv),
        (step.late_index, step.late_update, *step.late_counts),
    ):
        # instead of a gradient: who sends it, for which row, how often the row occurred there
        said = [[rank, case.place(unique[i])[1], mine[unique[i]]] for i in index.tolist()]
        heard = threads.exchange(torch.tensor(said, dtype=torch.int64).view(-1, 3), recv, send, rank).tolist()
        rows, order, ends = (x.tolist() for x in own)
        start = 0
        for row, end in zip(rows, ends, strict=True):
            parts = [heard[i] for i in order[start:end]]
            who = [r for r in range(case.world) if any(case.place(k) == (rank, row) for k in case.keys(t, r))]
            assert [x[0] for x in parts] == who and {x[1] for x in parts} == {row}
            assert sum(x[2] for x in parts) == sum(case.place(k) == (rank, row) for r in who for k in case.keys(t, r))
            start = end
        assert start == len(heard)
        seen += rows
    assert sorted(seen) == sorted({case.place(k)[1] for k in case.asked_for(t) if case.place(k)[0] == rank})
    n = step.late_index.shape[0]
    assert step.late_slot.shape == (n, DIM) and step.stats["bytes_late"] == 4 * DIM * n


ROW_WISE = [Shard(0, 0, 3, 0, 0), Shard(0, 3, 3, 1, 0)]

# Tables, shards and keys beyond 2**31 and 2**32; the rows of rank 0 begin there too.
LARGE = [Shard(0, 0, 2**32 + 9, 0, 0), Shard(0, 2**32 + 9, 2**32 - 9, 1, 0), Shard(1, 0, 7, 0, 2**32 + 9)]
LARGE_IDS = [0, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 2**32, 2**32 + 8, 2**32 + 9, 2**33 - 1]


def plans_of_consecutive_batches(examples):
    @given(cases())
    @example(Case(2, [2**33, 7], LARGE, [0, 1], [[[LARGE_IDS[r::2], [6, 6]], [LARGE_IDS[r::3], [r]]] for r in range(3)]))
    @example(Case(2, [6], ROW_WISE, [0], [[[[]], [[]]], [[[]], [[]]]]))  # nobody asks for anything
    @example(Case(2, [6], ROW_WISE, [0], [[[[1, 4, 1]], [[]]], [[[]], [[4, 4, 1]]]]))  # another rank needs the rows next
    @example(Case(2, [6], ROW_WISE, [0], [[[[5]], [[5]]], [[[0]], [[0]]], [[[5]], [[5]]]]))  # in, out and in again
    @example(Case(2, [1], [Shard(0, 0, 1, 1, 0)], [0, 0], [[[[0], [0, 0]], [[], []]]] * 2))  # a table of one row
    @settings(max_examples=examples, deadline=None)
    def test(case):
        threads = Threads(case.world, plans=True)
        threads.run(lambda rank: check(case, threads, rank))

    return test


test_plans_of_consecutive_batches = plans_of_consecutive_batches(40)
test_plans_of_many_consecutive_batches = pytest.mark.thorough(plans_of_consecutive_batches(150))


@pytest.mark.parametrize("table", [600, 6_000_000])  # rows are found in a table, or few of many by sorting
def test_plans_of_larger_batches(table):
    world, random = 3, np.random.default_rng(0)
    block = table // world
    shards = [Shard(t, r * block, block, r, t * block) for t in range(2) for r in range(world)]

    def ids() -> list[int]:
        return (random.zipf(1.2, 300) * 7919 % table).tolist()

    batches = [[[ids(), ids(), ids()] for _ in range(world)] for _ in range(3)]
    case = Case(world, [table, table], shards, [0, 1, 0], batches)
    where = {k: case.place(k) for t in range(3) for k in case.asked_for(t)}
    case.place = where.__getitem__  # type: ignore[method-assign]
    threads = Threads(world, plans=True)
    threads.run(lambda rank: plan_and_check_rows(case, threads, rank))


def plan_and_check_rows(case, threads, rank):
    for t, p in enumerate(plan_all(case, threads, rank)):
        before = case.asked_for(t - 1 if t else 0)
        unique = check_requests(case, threads, rank, t, p.asked)
        check_split(case, threads, rank, t, unique, p.asked, p.rows, before)
        check_forward(case, threads, rank, t, p, before)


# ---- the pure functions, one by one ----------------------------------------------------------------------------

numbers = st.one_of(st.integers(0, 20), st.integers(0, 2**31), st.integers(0, 2**62))
lists = st.lists(numbers, max_size=40).map(lambda x: torch.tensor(x, dtype=torch.int64))


@given(lists)
@settings(max_examples=150, deadline=None)
def test_group_keeps_the_order_of_duplicates(values):
    found, x = planning_oracle.deduplicate(values), values.tolist()
    assert found.values.tolist() == sorted(set(x))
    assert found.order.tolist() == sorted(range(len(x)), key=lambda i: (x[i], i))
    assert planning_oracle.segment_sizes(found.ends).tolist() == [x.count(v) for v in found.values.tolist()]
    assert found.values[planning_oracle.inverse_index(found)].tolist() == x
    assert all(t.dtype == torch.int64 and t.stride() == (1,) for t in found)


@given(lists, lists)
@settings(max_examples=150, deadline=None)
def test_shared_is_an_intersection(x, y):
    def requested(rows):
        return planning_oracle.Requests(None, None, rows, torch.tensor([rows.shape[0]]), None)

    in_x, in_y, message = planning_oracle.collide(requested(x), requested(y))
    assert message.tolist() == in_y.tolist() + in_x.tolist()
    assert in_x.tolist() == [v in y.tolist() for v in x.tolist()]
    assert in_y.tolist() == [v in x.tolist() for v in y.tolist()]
    assert in_x.dtype == in_y.dtype == torch.bool


def test_rows_beyond_32_bits():
    rows = 2**33
    owners = owner_map([Shard(0, 0, 2**32, 0, 0), Shard(0, 2**32, 2**32, 1, 0)], [rows], 2)
    case_ids = [[rows - 1, 5, rows - 1], [2**32, 5]]
    threads, tables = Threads(2), ExchangeTables([0], [rows], owners)
    first, second = threads.run(lambda r: threads.plan_alone(r, [torch.tensor(case_ids[r])], tables))
    assert first[4].tolist() == [5, 5] and second[4].tolist() == [2**32 - 1, 0]
    assert first[1].tolist() == [1, 0, 2] and second[1].tolist() == [1, 0]


@pytest.mark.parametrize("popular", [False, True])  # ids: all alike, or small ones far more often than large ones
@pytest.mark.parametrize("rows", [1, 700, 6_000_000, 2**31 - 1, 2**34])
def test_many_ids(rows, popular):
    """So many that they are sorted in parts, one of which may hold nearly all of them; of two features of one table, whose
    shards lie at their owners in another order."""
    world, half = 2, rows // 2
    tables = ExchangeTables([0, 0], [rows, rows], owner_map([Shard(0, 0, half, 1, 0), Shard(0, half, rows - half, 0, 0)], [rows], 2))
    numbers = [_many_numbers(np.random.default_rng((rows, rank)), rows, popular) for rank in range(world)]
    small = np.int32 if rows < 2**31 else np.int64
    ids = [[torch.from_numpy(n[:15_000].astype(small)), torch.from_numpy(n[15_000:])] for n in numbers]
    threads = Threads(world)
    made = threads.run(lambda rank: threads.plan_alone(rank, ids[rank], tables))
    wanted: list[list[np.ndarray]] = [[], []]  # of each owner, by requester
    for n, (inverse, order, ends, recv_counts, *_) in zip(numbers, made, strict=True):
        expected_keys = np.where(n < half, n + rows - half, n - half)
        keys, expected_inverse = np.unique(expected_keys, return_inverse=True)
        of_first = int((keys < rows - half).sum())
        _same((inverse, order, ends), (expected_inverse, np.argsort(expected_keys, kind="stable"), np.cumsum(np.bincount(expected_inverse))))
        assert recv_counts.tolist() == [of_first, keys.shape[0] - of_first]
        for at_owner, of_owner in zip(wanted, (keys[:of_first], keys[of_first:] - (rows - half)), strict=True):
            at_owner.append(of_owner)
    for at_owner, (*_, requested, send_counts, own_rows, own_order, own_ends) in zip(wanted, made, strict=True):
        expected = np.concatenate(at_owner)
        distinct, counts = np.unique(expected, return_counts=True)
        _same((requested, own_rows, own_order, own_ends), (expected, distinct, np.argsort(expected, kind="stable"), np.cumsum(counts)))
        assert send_counts.tolist() == [x.shape[0] for x in at_owner]


def _many_numbers(random: np.random.Generator, rows: int, popular: bool) -> np.ndarray:
    bound = rows ** random.random(40_000) if popular else random.random(40_000) * rows
    return np.minimum(bound.astype(np.int64), rows - 1)


def _same(tensors, arrays):
    for tensor, array in zip(tensors, arrays, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array))


def test_rows_and_ids_that_do_not_fit_in_64_bits_together():
    """A value and its position are sorted as one number."""
    for bits, fits in ((57, True), (58, False)):
        rows = 2**bits
        plan = BatchPlan(RankMesh([None], 0), [ExchangeTables([0], [rows], owner_map([Shard(0, 0, rows, 0, 0)], [rows], 1))], 30.0)
        ids = [torch.arange(rows - 40, rows)]
        if fits:
            assert plan.request(0, ids) is None
        else:
            with pytest.raises(ValueError, match="freescale: a batch has too many ids for tables of this size"):
                plan.request(0, ids)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_first_id_outside_its_table(dtype):
    good, bad = torch.tensor([0, 3], dtype=dtype), torch.tensor([1, 4, -1], dtype=dtype)
    none = torch.tensor([], dtype=dtype)
    assert first_invalid_id([none, good], [0, 4]) is None
    assert first_invalid_id([none, good, bad], [0, 4, 4]) == (2, 4)
    assert first_invalid_id([none, bad, good], [0, 5, 3]) == (1, -1)
    assert first_invalid_id([good, good], [4, 3]) == (1, 3)  # the table's size, and nothing else wrong
    owners = owner_map([Shard(0, 0, 20, 0, 0)], [20], 1)

    def found(ids, first_rows, sizes):
        tables = ExchangeTables(first_rows, sizes, owners)
        if WHO == "C":
            return BatchPlan(RankMesh([None], 0), [tables], 30.0).request(0, ids).invalid_ids
        return [(0, planning_oracle.own_requests(ids, *tables))]

    assert found([none, good, bad], [0, 0, 0], [0, 4, 4]) == [(0, (2, 4))]
    assert found([none, bad, good], [0, 0, 9], [0, 5, 3]) == [(0, (1, -1))]
    assert found([good, good], [0, 4], [4, 3]) == [(0, (1, 3))]
    threads, tables = Threads(1), ExchangeTables([0, 4, 7], [4, 0, 4], owners)
    (own,) = threads.run(lambda rank: threads.plan_alone(rank, [good, none, good], tables))
    assert own[4].tolist() == [0, 3, 7, 10] and own[0].tolist() == [0, 1, 2, 3]
