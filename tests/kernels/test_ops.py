"""Every op against its definition, and torch's own checks of schema, fake and functionalization."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

import freescale.kernels  # noqa: F401
import planning_oracle
from freescale.kernels.ops import table_registry
from freescale.kernels.ops.schemas import LATE, URGENT
from freescale.kernels.planning.owners import Shard, owner_map
from ranks import run_ranks

ops = torch.ops.freescale


class PlainSgd:
    """A table whose optimizer is easy to check."""

    def __init__(self, rows: int, dim: int) -> None:
        self.weight = torch.arange(rows * dim, dtype=torch.float32).view(rows, dim)

    def apply_update(self, rows, grads):
        self.weight[rows] -= grads

    def settings(self):
        return None

    def set_settings(self, settings):
        pass

    def describe(self, feature):
        return f"feature {feature}"


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def _plan_args(table: str, group: str):
    owners = owner_map([Shard(0, 0, 6, 0, 0), Shard(1, 0, 4, 0, 6)], [6, 4], 1)
    return ([torch.tensor([3, 1, 3, 5]), torch.tensor([0, 2])], [0, 6], [6, 4], *owners, table, group)


def test_opcheck(one_rank):
    table = PlainSgd(10, 3)
    name = table_registry.register(table, "t")
    counts, token = torch.tensor([3]), torch.empty(0, 3)
    grads, rows = torch.randn(3, 3), torch.tensor([1, 4])
    order, ends = torch.tensor([0, 2, 1]), torch.tensor([2, 3])
    asked = (torch.tensor([1, 4, 1]), counts, counts, 3, 0)
    opcheck(ops.plan_now, _plan_args(name, one_rank))
    opcheck(ops.checked_rows, ([torch.tensor([1, 0])], [0], [4], name, one_rank))
    opcheck(ops.count_values, (torch.ones(6, dtype=torch.int32), None, torch.arange(6), 3, True, "bags"))
    opcheck(ops.checked_weights, (torch.rand(2), torch.tensor([1, 0]), "bags", one_rank))
    expected = token, [torch.tensor([1, 0])], torch.tensor([1, 0]), torch.tensor(7), name
    opcheck(ops.expect_ids, expected)
    opcheck(ops.expect_ids, (*expected, torch.tensor([[2, 0]]), torch.tensor([2])))
    opcheck(ops.exchange_forward, (token, *asked, name, one_rank))
    opcheck(ops.exchange_backward, (token, grads, rows, order, ends, counts, counts, 3, 0, name, one_rank))
    opcheck(ops.sum_rows, (grads, order, ends))
    opcheck(ops.update_, (token, grads, rows, order, ends, 0, name))
    # A launched tensor may only be looked at after its wait, so opcheck's comparison of outputs does not apply.
    launched = ("test_schema", "test_faketensor")
    opcheck(ops.all_to_all_launch, (grads, counts, counts, 3, 0, name, one_rank), test_utils=launched)
    opcheck(ops.all_to_all_rows_launch, (token, *asked, name, one_rank), test_utils=launched)


def test_composites_are_their_small_ops(one_rank):
    table = PlainSgd(10, 3)
    name = table_registry.register(table, "t")
    counts, token = torch.tensor([3]), torch.empty(0, 3)
    rows = torch.tensor([1, 4, 1])
    got = ops.exchange_forward(token, rows, counts, counts, 3, 0, name, one_rank)
    assert torch.equal(got, table.weight[rows])
    before = table.weight.clone()
    order, ends = torch.tensor([0, 2, 1]), torch.tensor([2, 3])
    args = (torch.ones(3, 3), torch.tensor([1, 4]), order, ends, counts, counts, 3, 0, name, one_rank)
    assert ops.exchange_backward(token, *args).shape == token.shape
    assert (before - table.weight)[:, 0].tolist() == [0, 2, 0, 0, 1, 0, 0, 0, 0, 0]


def test_ids_that_were_not_planned_are_refused():
    token, step = torch.empty(0, 3), torch.tensor(7)
    ids = [torch.tensor([1, 2]), torch.tensor([3])]
    ops.expect_ids(token, ids, torch.tensor([1, 2, 3]), step, "t")
    for planned in ([1, 2, 4], [1, 2]):
        with pytest.raises(RuntimeError, match="do not match batch 7"):
            ops.expect_ids(token, ids, torch.tensor(planned), step, "t")
    planned, counts = torch.tensor([1, 2, 3]), torch.tensor([2, 1])
    for lengths in ([[2, 0], [0, 1]], [[1, 1], [0, 1]]):
        ops.expect_ids(token, ids, planned, step, "t", torch.tensor(lengths), counts)
    for lengths in ([[1, 0], [1, 1]], [[3, -1], [0, 1]]):
        with pytest.raises(RuntimeError, match="the lengths passed .* do not match batch 7"):
            ops.expect_ids(token, ids, planned, step, "t", torch.tensor(lengths), counts)


def test_plan_now_of_one_rank(one_rank):
    name = table_registry.register(owner := PlainSgd(10, 3), "t")
    made = ops.plan_now(*_plan_args(name, one_rank))
    inverse, order, ends, recv, rows, send, own_rows, own_order, own_ends = made
    assert rows.tolist() == [1, 3, 5, 6, 8] and recv.tolist() == send.tolist() == [5]
    assert rows[inverse].tolist() == [3, 1, 3, 5, 6, 8]
    assert order.tolist() == [1, 0, 2, 3, 4, 5] and ends.tolist() == [1, 3, 4, 5, 6]
    assert own_rows.tolist() == rows.tolist() and own_order.tolist() == [0, 1, 2, 3, 4]
    assert own_ends.tolist() == [1, 2, 3, 4, 5]
    del owner


def test_update_sums_then_applies():
    table = PlainSgd(10, 2)
    name = table_registry.register(table, "t")
    before = table.weight.clone()
    grads = torch.tensor([[1.0, 1.0], [2.0, 2.0], [4.0, 4.0]])
    ops.update_(torch.empty(0, 2), grads, torch.tensor([7, 9]), torch.tensor([0, 2, 1]), torch.tensor([2, 3]), 0, name)
    change = before - table.weight
    assert change[7].tolist() == [5.0, 5.0] and change[9].tolist() == [2.0, 2.0]
    assert change.abs().sum() == 14.0


def test_a_late_update_without_rows_leaves_the_table_alone():
    """But it counts. One of the step's own may be what counts steps for an optimizer."""
    table = PlainSgd(10, 3)
    table.apply_update = table.set_settings = lambda *_: pytest.fail("nothing is to be done")
    name, before = table_registry.register(table, "t"), table_registry.update_counts.copy()
    none, index = torch.empty(0, 3), torch.empty(0, dtype=torch.int64)
    assert ops.update_(none, none, index, index, index, LATE, name).shape == (0, 3)
    assert table_registry.update_counts[name] == before[name] + 1 and not table_registry.backward_update_counts[name]
    applied: list[list[int]] = []
    table.apply_update = lambda rows, grads: applied.append(rows.tolist())
    ops.update_(none, none, index, index, index, URGENT, name)
    assert applied == [[]] and table_registry.backward_update_counts[name] == 1


def test_a_table_that_is_gone_is_named():
    name = table_registry.register(table := PlainSgd(2, 2), "short-lived")
    del table
    with pytest.raises(RuntimeError, match="table 'short-lived' is no longer registered"):
        table_registry.get_table(name)


def left_to_right(xs):
    total = torch.zeros((), dtype=torch.float32)
    for x in xs:
        total = total + x.float()
    return total


@pytest.mark.parametrize("lengths", ((513,), (1024, 3, 0, 1500), (512, 511)))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_sum_rows_adds_runs_of_512(lengths, dtype):
    flat = torch.randn(sum(lengths)).to(dtype)
    order = torch.randperm(len(flat))
    shuffled = torch.empty_like(flat)
    shuffled[order] = flat
    out = ops.sum_rows(shuffled[:, None], order, torch.tensor(lengths).cumsum(0))
    for got, segment in zip(out[:, 0], flat.split(lengths), strict=True):
        assert got == left_to_right(left_to_right(run) for run in segment.split(512)).to(dtype)


@given(st.lists(st.lists(st.floats(-1e3, 1e3, width=32), min_size=0, max_size=6), max_size=8), st.booleans())
@settings(max_examples=60, deadline=None)
def test_sum_rows_adds_from_left_to_right(groups, half):
    dtype = torch.bfloat16 if half else torch.float32
    flat = torch.tensor([x for g in groups for x in g], dtype=dtype)
    order = torch.randperm(len(flat), generator=torch.Generator().manual_seed(0))
    shuffled = torch.empty_like(flat)
    shuffled[order] = flat
    ends = torch.tensor([len(g) for g in groups], dtype=torch.int64).cumsum(0)
    out = ops.sum_rows(shuffled[:, None], order, ends)
    for i, end in enumerate(ends.tolist()):
        assert out[i, 0] == left_to_right(flat[end - len(groups[i]) : end]).to(dtype)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_owner_map_reaches_every_row_once(data):
    world = data.draw(st.integers(1, 5))
    sizes = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
    shards, base = [], [0] * world
    for t, size in enumerate(sizes):
        cuts = sorted(data.draw(st.lists(st.integers(0, size), min_size=world - 1, max_size=world - 1)))
        for owner, (a, b) in enumerate(zip([0, *cuts], [*cuts, size], strict=True)):
            shards.append(Shard(t, a, b - a, owner, base[owner]))
            base[owner] += b - a
    owners = owner_map(shards, sizes, world)
    keys = planning_oracle.keys_of(torch.arange(sum(sizes)), owners)
    assert sorted(keys.tolist()) == list(range(sum(sizes)))
    assert planning_oracle.counts_per_owner(keys.sort().values, owners).tolist() == base


@pytest.mark.parametrize("shards, fault", (
    ([(0, 0, 3), (1, 0, 5)], "table 0: no shard holds row 3"),
    ([(0, 0, 4)], "table 1: no shard holds row 0"),
    ([(0, 0, 2), (0, 3, 1), (1, 0, 5)], "table 0: no shard holds row 2"),
    ([(1, 0, 3), (1, 2, 2), (0, 0, 4)], "the one with 5 rows: two shards hold row 2"),  # as many rows as there are
    ([(0, 0, 4), (0, 0, 4), (1, 0, 1)], "table 0: two shards hold row 0"),
    ([(0, 0, 5), (1, 0, 5)], "table 0: one ends with row 4"),
))  # fmt: skip
def test_shards_that_do_not_cover_a_table_are_refused(shards, fault):
    shards = [Shard(*s, owner=0, base=0) for s in shards]
    tables = {1: "the one with 5 rows"} if "the one" in fault else {}
    with pytest.raises(ValueError, match=f"^freescale: the shards do not cover {fault}$"):
        owner_map(shards, [4, 5], 1, tables)


def test_a_shard_without_rows_may_be_anywhere():
    shards = [Shard(0, first, rows, owner, 0) for owner, (first, rows) in enumerate(((0, 0), (0, 4), (4, 0), (2, 0)))]
    assert owner_map(shards, [4], 4).starts.tolist() == [0, 0, 4, 4, 4]


def _launch_under_inductor():
    """The send buffer must survive until the wait, although the graph has other uses for its memory."""
    launch, wait = ops.all_to_all_launch, torch.ops._c10d_functional.wait_tensor
    group, rank = dist.group.WORLD.group_name, dist.get_rank()

    def step(x, counts):
        sent = launch(x * 2 + 1, counts, counts, x.shape[0], 0, "item", group)
        y = x
        for _ in range(4):  # temporaries of the very size of the send buffer
            y = torch.cos(y @ torch.ones(64, 64)) * 3
        return wait(sent), y

    compiled = torch.compile(step, backend="freescale", fullgraph=True)
    for n in (4096, 2048, 6144):
        counts = torch.tensor([n // 2, n // 2])
        x = torch.full((n, 64), float(rank + 1))
        got, y = compiled(x, counts)
        mine = torch.cat([torch.full((n // 2, 64), 3.0), torch.full((n // 2, 64), 5.0)])
        assert torch.equal(got, mine), (got - mine).abs().max()
    return True


def test_launch_keeps_its_send_buffer():
    assert run_ranks(_launch_under_inductor, 2) == [True, True]


def test_what_all_ranks_do_together_is_never_left_out_of_a_graph():
    """A rank without rows uses nothing of what comes out, and the other ranks wait for it."""
    from torch._library.utils import is_impure

    for name in ("plan_now", "exchange_forward", "exchange_backward", "all_to_all_rows_launch", "checked_rows"):
        assert is_impure(getattr(torch.ops.freescale, name).default)
    assert not is_impure(torch.ops.freescale.sum_rows.default)
