"""split_exchanges on plain all-to-alls: one launch per consumer where the result is cut up, nothing else touched."""

from __future__ import annotations

import expecttest
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fake_world import fake_world, golden_text
from freescale.config import Config
from freescale.passes.find_exchanges import find_exchanges
from freescale.passes.graph import exchanges, graph_text
from freescale.passes.split_exchanges import split_exchanges
from ranks import run_ranks


def _exchange(x, counts=None, send=None):
    counts = [x.shape[0] // 2] * 2 if counts is None else counts
    launched = torch.ops._c10d_functional.all_to_all_single(x, counts, send or counts, dist.group.WORLD.group_name)
    return torch.ops._c10d_functional.wait_tensor(launched)


def columns(table, ids, w, v):
    """Two features side by side: the second is needed first."""
    out = _exchange(table.index_select(0, ids))
    candidates = torch.mm(out[:, 8:], v)
    return candidates, torch.mm(out[:, :8], w)


def blocks(table, ids, w, v):
    """Every rank sends 4 rows of history, then 4 rows of candidates."""
    out = _exchange(table.index_select(0, ids)).view(2, 8, 12)
    history, candidates = out.split([4, 4], 1)
    return torch.mm(history.reshape(8, 12)[:, :8], w), torch.mm(candidates.reshape(8, 12)[:, :4], v)


def _trace(fn):
    with FakeTensorMode():
        shapes = (torch.empty(32, 12), torch.zeros(16, dtype=torch.int64), torch.empty(8, 8), torch.empty(4, 4))
        return make_fx(fn)(*shapes)


def _split(fn, min_bytes: float = 0.0):
    gm = _trace(fn)
    cfg = Config(min_bytes=min_bytes)
    assert find_exchanges(gm, cfg) == 1
    before = graph_text(gm.graph)
    n = split_exchanges(gm, cfg)
    gm.graph.lint()
    gm.recompile()
    return n, before, gm


@pytest.fixture
def world():
    with fake_world(0, 2):
        yield


@golden_text
class Golden(expecttest.TestCase):
    maxDiff = None

    def test_columns(self):
        with fake_world(0, 2):
            _, before, gm = _split(columns)
            self.assertExpectedInline(before, """\
table_1: float32[32, 12]
ids_1: int64[16]
w_1: float32[8, 8]
v_1: float32[4, 4]
index_select = aten.index_select(table_1, 0, ids_1)  # float32[16, 12]
all_to_all_single = _c10d_functional.all_to_all_single(index_select, [8, 8], [8, 8], 0)  # float32[16, 12]; urgent rows, plain, 768 bytes
wait_tensor = _c10d_functional.wait_tensor(all_to_all_single)  # float32[16, 12]
slice_1 = aten.slice.Tensor(wait_tensor, 1, 8, 9223372036854775807)  # float32[16, 4]
mm = aten.mm(slice_1, v_1)  # float32[16, 4]
slice_2 = aten.slice.Tensor(wait_tensor, 1, 0, 8)  # float32[16, 8]
mm_1 = aten.mm(slice_2, w_1)  # float32[16, 8]
return [mm, mm_1]""")
            self.assertExpectedInline(graph_text(gm.graph), """\
table_1: float32[32, 12]
ids_1: int64[16]
w_1: float32[8, 8]
v_1: float32[4, 4]
index_select = aten.index_select(table_1, 0, ids_1)  # float32[16, 12]
slice_tensor = aten.slice.Tensor(index_select, 1, 8, 12)  # float32[16, 4]
clone_default = aten.clone(slice_tensor, memory_format=torch.contiguous_format)  # float32[16, 4]
all_to_all_single_default = _c10d_functional.all_to_all_single(clone_default, [8, 8], [8, 8], 0)  # float32[16, 4]; urgent rows, plain, 256 bytes
slice_tensor_1 = aten.slice.Tensor(index_select, 1, 0, 8)  # float32[16, 8]
clone_default_1 = aten.clone(slice_tensor_1, memory_format=torch.contiguous_format)  # float32[16, 8]
all_to_all_single_default_1 = _c10d_functional.all_to_all_single(clone_default_1, [8, 8], [8, 8], 0)  # float32[16, 8]; urgent rows, plain, 512 bytes
wait_tensor_default = _c10d_functional.wait_tensor(all_to_all_single_default)  # float32[16, 4]
wait_tensor_default_1 = _c10d_functional.wait_tensor(all_to_all_single_default_1)  # float32[16, 8]
mm = aten.mm(wait_tensor_default, v_1)  # float32[16, 4]
mm_1 = aten.mm(wait_tensor_default_1, w_1)  # float32[16, 8]
return [mm, mm_1]""")

    def test_blocks(self):
        with fake_world(0, 2):
            _, before, gm = _split(blocks)
            self.assertExpectedInline(graph_text(gm.graph), """\
table_1: float32[32, 12]
ids_1: int64[16]
w_1: float32[8, 8]
v_1: float32[4, 4]
index_select = aten.index_select(table_1, 0, ids_1)  # float32[16, 12]
view_default = aten.view(index_select, [2, -1, 12])  # float32[2, 8, 12]
slice_tensor = aten.slice.Tensor(view_default, 1, 0, 4)  # float32[2, 4, 12]
clone_default = aten.clone(slice_tensor, memory_format=torch.contiguous_format)  # float32[2, 4, 12]
view_default_1 = aten.view(clone_default, [8, 12])  # float32[8, 12]
all_to_all_single_default = _c10d_functional.all_to_all_single(view_default_1, [4, 4], [4, 4], 0)  # float32[8, 12]; urgent rows, plain, 384 bytes
slice_tensor_1 = aten.slice.Tensor(view_default, 1, 4, 8)  # float32[2, 4, 12]
clone_default_1 = aten.clone(slice_tensor_1, memory_format=torch.contiguous_format)  # float32[2, 4, 12]
view_default_2 = aten.view(clone_default_1, [8, 12])  # float32[8, 12]
all_to_all_single_default_1 = _c10d_functional.all_to_all_single(view_default_2, [4, 4], [4, 4], 0)  # float32[8, 12]; urgent rows, plain, 384 bytes
wait_tensor_default = _c10d_functional.wait_tensor(all_to_all_single_default)  # float32[8, 12]
view_default_3 = aten.view(wait_tensor_default, [2, 4, 12])  # float32[2, 4, 12]
wait_tensor_default_1 = _c10d_functional.wait_tensor(all_to_all_single_default_1)  # float32[8, 12]
view_default_4 = aten.view(wait_tensor_default_1, [2, 4, 12])  # float32[2, 4, 12]
clone = aten.clone(view_default_3, memory_format=torch.contiguous_format)  # float32[2, 4, 12]
_unsafe_view = aten._unsafe_view(clone, [8, 12])  # float32[8, 12]
slice_1 = aten.slice.Tensor(_unsafe_view, 1, 0, 8)  # float32[8, 8]
mm = aten.mm(slice_1, w_1)  # float32[8, 8]
clone_1 = aten.clone(view_default_4, memory_format=torch.contiguous_format)  # float32[2, 4, 12]
_unsafe_view_1 = aten._unsafe_view(clone_1, [8, 12])  # float32[8, 12]
slice_2 = aten.slice.Tensor(_unsafe_view_1, 1, 0, 4)  # float32[8, 4]
mm_1 = aten.mm(slice_2, v_1)  # float32[8, 4]
return [mm, mm_1]""")


def test_each_part_is_an_exchange_with_its_own_bytes(world):
    _, _, gm = _split(columns)
    found = exchanges(gm.graph)
    assert [(x.kind, x.payload, x.priority, int(x.bytes)) for x in found] == [
        ("plain", "rows", "urgent", 16 * 4 * 4),
        ("plain", "rows", "urgent", 16 * 8 * 4),
    ]
    assert all(x.consumer is not None and "mm" in str(x.consumer.target) for x in found)


def one_consumer(table, ids, w, v):
    out = _exchange(table.index_select(0, ids))
    return torch.mm(torch.cat([out[:, 4:8], out[:, :4]], 1), w)


def whole_is_used(table, ids, w, v):
    out = _exchange(table.index_select(0, ids))
    return torch.mm(out[:, :8], w), torch.mm(out[:, 8:], v), out.sum()


def overlapping(table, ids, w, v):
    out = _exchange(table.index_select(0, ids))
    return torch.mm(out[:, :8], w), torch.mm(out[:, 6:10], v)


def through_the_ranks(table, ids, w, v):
    out = _exchange(table.index_select(0, ids))
    return torch.mm(out[:5, :8], w), torch.mm(out[5:, :8], w)


def uneven(table, ids, w, v):
    out = _exchange(table.index_select(0, ids), [7, 9]).view(2, 8, 12)
    return torch.mm(out[:, :4].reshape(8, 12)[:, :8], w), torch.mm(out[:, 4:].reshape(8, 12)[:, :8], w)


def _equal_receive(table, ids, w, v, send):
    """As many rows from each rank, so that what arrives looks like `blocks`; what is sent cannot be cut that way."""
    out = _exchange(table.index_select(0, ids[: sum(send)]), [8, 8], send).view(2, 8, 12)
    return torch.mm(out[:, :4].reshape(8, 12)[:, :8], w), torch.mm(out[:, 4:].reshape(8, 12)[:, :8], w)


def uneven_send(table, ids, w, v):
    return _equal_receive(table, ids, w, v, [8, 4])


def fewer_sent(table, ids, w, v):
    return _equal_receive(table, ids, w, v, [4, 4])


def strided(table, ids, w, v):
    out = _exchange(table.index_select(0, ids))
    return torch.mm(out[:, ::3], v), torch.mm(out[:, 1:9], w)


@pytest.mark.parametrize("fn", (one_consumer, whole_is_used, overlapping, through_the_ranks, uneven, uneven_send, fewer_sent, strided))
def test_left_alone(world, fn):
    n, before, gm = _split(fn)
    assert n == 0
    assert graph_text(gm.graph) == before


def test_left_alone_where_a_row_has_fewer_than_min_bytes(world):
    row = 12 * 4
    assert _split(columns, row + 1)[0] == 0
    assert _split(columns, row)[0] == 1


def deep_views(table, ids, w, v):
    """Thousands of views between the exchange and its consumers, and one that nobody needs."""
    out = _exchange(table.index_select(0, ids))
    parts = [out[:, :8], out[:, 8:], out[:, 8:]]
    for i in range(1500):
        parts = [p.reshape(16, -1) if i % 2 else p.reshape(-1) for p in parts]
    return torch.mm(parts[0], w), torch.mm(parts[1].reshape(16, 4), v)


@pytest.mark.thorough
def test_deep_chains_of_views(world):
    n, _, gm = _split(deep_views)
    assert n == 1 and len(exchanges(gm.graph)) == 2


def deep_gradient(table, grad, ids, w):
    """What arrives is scattered into a table's gradient, which leaves the graph thousands of nodes later."""
    out = torch.zeros(32, 12).index_put((ids,), _exchange(grad), accumulate=True)
    for _ in range(3000):
        out = out * 1.0
    return out


def test_a_gradient_that_leaves_the_graph_thousands_of_nodes_later(world):
    with FakeTensorMode():
        gm = make_fx(deep_gradient)(
            torch.empty(32, 12), torch.empty(16, 12), torch.zeros(16, dtype=torch.int64), torch.empty(8, 8)
        )
    assert find_exchanges(gm, Config()) == 1


class Towers(nn.Module):
    """A lookup by hand: each rank holds half of the columns' rows; two towers take different columns."""

    def __init__(self, cut: str) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.table = nn.Parameter(torch.rand(32, 12))
        torch.manual_seed(7)
        self.first, self.second = nn.Linear(8, 3), nn.Linear(4, 3)
        self.cut = cut

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        import torch.distributed._functional_collectives as fc

        sent = torch.nn.functional.embedding(ids, self.table)
        out = fc.all_to_all_single_autograd(sent, [8, 8], [8, 8], dist.group.WORLD)
        if self.cut == "columns":
            history, candidates = out[:, :8], out[:, 8:]
        else:
            seen = out.view(2, 8, 12)
            history, candidates = seen[:, :5, :8].reshape(10, 8), seen[:, 5:, 8:].reshape(6, 4)
        x = torch.tanh(self.first(history))
        return x.sum() + (torch.tanh(self.second(candidates)) ** 2).sum()


def _step(cut: str, codegen: str):
    import freescale

    results = []
    for passes in ("none", "all"):
        model = Towers(cut)
        options = {"passes": passes, "codegen": codegen, "min_bytes": 0, "strict": True}
        loss = torch.compile(model, backend="freescale", fullgraph=True, dynamic=False, options=options)(
            torch.arange(16) * (1 + dist.get_rank()) % 32
        )
        loss.backward()
        results.append((float(loss.detach()), *(p.grad for p in model.parameters())))
        torch._dynamo.reset()
    (a, *p), (b, *q) = results
    assert max(freescale.report()["exchanges"].values()) == 2  # one launch per tower
    assert a == b and all(torch.equal(x, y) for x, y in zip(p, q, strict=True))
    return True


@pytest.mark.parametrize("cut, codegen", (
    ("columns", "eager"), ("blocks", "eager"),
    pytest.param("columns", "inductor", marks=pytest.mark.slow),
    pytest.param("blocks", "inductor", marks=pytest.mark.thorough),
))  # fmt: skip
def test_same_bits_on_two_ranks(cut, codegen):
    assert run_ranks(_step, 2, cut, codegen) == [True, True]


class Wide(nn.Module):
    """Rows of 4 kB for two towers; rank 0 receives 32 of them and rank 1 receives 128."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.table = nn.Parameter(torch.rand(16, 1024))
        self.first, self.second = (nn.Parameter(torch.rand(512, 2)) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        import torch.distributed._functional_collectives as fc

        counts = [16, ids.shape[0] - 16]
        out = fc.all_to_all_single_autograd(
            torch.nn.functional.embedding(ids, self.table), counts, counts, dist.group.WORLD
        )
        return torch.tanh(out[:, :512] @ self.first).sum() + (out[:, 512:] @ self.second).sum()


def _different_batches(dynamic: bool):
    from freescale import driver

    launches: dict[str, int] = {}
    end = driver.observe(lambda direction, name, graph: launches.update({direction: len(exchanges(graph))}))
    results = []
    for passes in ("none", "all"):
        model = Wide()
        options = {"passes": passes, "codegen": "eager", "strict": True}
        ids = torch.arange(32 if dist.get_rank() == 0 else 128) % 16
        loss = torch.compile(model, backend="freescale", fullgraph=True, dynamic=dynamic, options=options)(ids)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
        torch._dynamo.reset()
    end()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return launches


@pytest.mark.parametrize("dynamic", (True, pytest.param(False, marks=pytest.mark.thorough)))
def test_ranks_with_batches_of_different_size_launch_alike(dynamic):
    assert run_ranks(_different_batches, 2, dynamic) == [{"forward": 2, "backward": 1}] * 2

