"""Where overlap_attention puts launches, waits and updates; what it must not move; what the compiler keeps of it."""

from __future__ import annotations

import random
import re
from unittest import mock

import expecttest
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fake_world import fake_world, golden_text, graphs_of
from freescale.compat import version
from freescale.config import Config
from freescale.passes import node_cost
from freescale.passes.find_exchanges import find_exchanges
from freescale.passes.graph import EXCHANGE_KEY, GraphExchange, exchanges, first_user, last_wait, size_in_bytes
from freescale.passes.node_order import control_dependencies
from freescale.passes.overlap_attention import overlap_attention
from ranks import run_ranks

TORCH = version.torch_version()
SLOW = node_cost.MachineSpeed(flops=1e9, memory=1e9)


class Tower(nn.Module):
    """A lookup, three layers, and a layer that does not need the lookup."""

    def __init__(self) -> None:
        super().__init__()
        import freescale

        self.table = freescale.ShardedEmbedding(2048, 32, name="item")
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(3))
        self.side = nn.Linear(32, 32, bias=False)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x = self.table(batch["item"])
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x.sum(0) * self.side(batch["dense"]).sum(0)).sum()


def _train(codegen: str, gbps: float, machine: node_cost.MachineSpeed = SLOW) -> list[str]:
    """Two planned steps; the generated code of every graph, if any was generated. In caches that have no such graph."""
    import freescale

    codes: list[str] = []
    generator = torch.Generator().manual_seed(0)
    data = [
        {"item": torch.randint(0, 300, (200 + i,), generator=generator), "dense": torch.rand(200 + i, 32)}
        for i in range(3)
    ]
    options = {"codegen": codegen, "link_gbps": gbps, "strict": True}
    model = torch.compile(Tower(), backend="freescale", fullgraph=True, options=options)
    keep = mock.patch("torch._inductor.graph.GraphLowering.save_output_code", staticmethod(codes.append))
    with mock.patch.object(node_cost, "machine", lambda device: machine), keep:
        for batch in freescale.LookaheadLoader(data, model):
            model(batch).backward()
    return codes


def _planned_graphs(gbps: float) -> dict[tuple[str, str], str]:
    with fresh_cache():
        return graphs_of(lambda: _train("eager", gbps))


def _planned_graphs_of_both() -> list[dict[tuple[str, str], str]]:
    return [_planned_graphs(100.0), _planned_graphs(0.001)]


SHORT = re.compile(r"^(\w+) = (freescale\.\w+|_c10d_functional\.\w+|aten\.mm|aten\.addmm)\(", re.MULTILINE)


def _schedule(text: str) -> str:
    return "\n".join(m.group(1) for m in SHORT.finditer(text) if "expect_ids" not in m.group(2))


@golden_text
class Golden(expecttest.TestCase):
    maxDiff = None

    @classmethod
    def setUpClass(cls):
        ((cls.fast, cls.slow),) = run_ranks(_planned_graphs_of_both, 1)

    def test_forward_before(self):
        self.assertExpectedInline(_schedule(self.fast["forward", "split_exchanges"]), """\
wait_tensor
all_to_all_rows_launch_default
wait_tensor_default
all_to_all_launch_default
wait_tensor_default_1
update__default
all_to_all_rows_launch
mm
mm_1
mm_2
mm_3""")

    def test_forward(self):
        """Urgent rows leave first, the layer that does not need them runs meanwhile; late gradients and early rows go
        under the layers."""
        self.assertExpectedInline(_schedule(self.fast["forward", "overlap_attention"]), """\
all_to_all_rows_launch_default
mm_3
wait_tensor
wait_tensor_default
all_to_all_launch_default
mm
mm_1
wait_tensor_default_1
update__default
all_to_all_rows_launch
mm_2""")

    def test_forward_on_a_slow_link(self):
        """Late gradients arrive after all compute: they are waited for at the end."""
        self.assertExpectedInline(_schedule(self.slow["forward", "overlap_attention"]), """\
all_to_all_rows_launch_default
mm_3
wait_tensor
wait_tensor_default
all_to_all_launch_default
mm
mm_1
mm_2
wait_tensor_default_1
update__default
all_to_all_rows_launch""")

    def test_backward_before(self):
        self.assertExpectedInline(_schedule(self.slow["backward", "split_exchanges"]), """\
mm_4
mm_5
mm_6
mm_7
mm_8
mm_9
mm_10
sum_rows
all_to_all_launch_default
wait_tensor_default
update__default""")

    def test_backward(self):
        """Weight gradients that the urgent gradients do not need are computed while those travel."""
        self.assertExpectedInline(_schedule(self.slow["backward", "overlap_attention"]), """\
mm_4
mm_5
mm_6
mm_7
mm_8
mm_10
sum_rows
all_to_all_launch_default
mm_9
wait_tensor_default
update__default""")


# ---- on graphs made for it ---------------------------------------------------------------------------------------


def _trace(fn, *shapes) -> fx.GraphModule:
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [torch.empty(s) if isinstance(s, tuple) else torch.zeros(s, dtype=torch.int64) for s in shapes]
        return make_fx(fn)(*inputs)


def _exchange(x):
    n = x.shape[0] // 4
    launched = torch.ops._c10d_functional.all_to_all_single(x, [n] * 4, [n] * 4, dist.group.WORLD.group_name)
    return torch.ops._c10d_functional.wait_tensor(launched)


def _overlapped(gm: fx.GraphModule, gbps: float = 0.001, machine: node_cost.MachineSpeed = SLOW) -> list[str]:
    cfg = Config(link_gbps=gbps)
    assert find_exchanges(gm, cfg)
    with mock.patch.object(node_cost, "machine", lambda device: machine):
        overlap_attention(gm, cfg)
    gm.graph.lint()
    return [n.name for n in gm.graph.nodes]


def test_independent_work_covers_the_wait(world):
    def step(table, ids, x, w):
        rows = _exchange(table.index_select(0, ids))
        return torch.mm(rows, w), torch.mm(x, w)

    names = _overlapped(_trace(step, (64, 8), 16, (16, 8), (8, 8)))
    launch, wait = names.index("all_to_all_single"), names.index("wait_tensor")
    assert launch < names.index("mm_1") < wait < names.index("mm")


def test_work_that_the_launch_does_not_need_sinks_behind_it(world):
    def backward(table, ids, grad, w, x):
        weight_grad = torch.mm(x.t(), grad)
        arrived = _exchange(torch.mm(grad, w))
        return weight_grad, table.index_add(0, ids, arrived)

    names = _overlapped(_trace(backward, (64, 8), 16, (16, 8), (8, 8), (16, 8)))
    assert names.index("mm_1") < names.index("all_to_all_single") < names.index("mm") < names.index("wait_tensor")


def test_reads_and_updates_of_a_table_keep_their_order(world):
    """The second lookup does not depend on the update by data, and is ready before it; so is the third."""

    def step(table, ids, grad):
        first = _exchange(table.index_select(0, ids))
        table.index_add_(0, ids, grad)
        second = table.index_select(0, ids)
        table.view(-1)[:8].mul_(2.0)
        return first, second, table.index_select(0, ids)

    gm = _trace(step, (64, 8), 16, (16, 8))
    before = [n.name for n in gm.graph.nodes]
    in_order = [n for n in before if "index" in n or "mul_" in n]
    assert len(in_order) == 5
    after = _overlapped(gm)
    assert [n for n in after if n in in_order] == in_order
    assert sorted(after) == sorted(before)


def test_random_numbers_keep_their_order(world):
    def step(table, ids, x):
        rows = _exchange(table.index_select(0, ids))
        noisy = rows * torch.rand_like(rows)
        return noisy, x * torch.rand_like(x)

    names = _overlapped(_trace(step, (64, 8), 16, (16, 8)))
    assert names.index("rand_like") < names.index("rand_like_1")


def test_other_collectives_keep_their_place_among_the_launches(world):
    def step(table, ids, x):
        reduced = torch.ops._c10d_functional.all_reduce(x, "sum", dist.group.WORLD.group_name)
        rows = _exchange(table.index_select(0, ids))
        return rows, torch.ops._c10d_functional.wait_tensor(reduced)

    names = _overlapped(_trace(step, (64, 8), 16, (16, 8)))
    assert names.index("all_reduce") < names.index("all_to_all_single")


def _two_tables(a, b, ids_a, ids_b, grad_a, grad_b, x, w):
    """Urgent rows; then the late gradients of each table, its update and its early rows, one table after the other."""
    found = [torch.mm(_exchange(x), w)]
    for table, ids, grad in ((a, ids_a, grad_a), (b, ids_b, grad_b)):
        found.append(_exchange(table.index_add(0, ids, _exchange(grad)).index_select(0, ids)))
    return tuple(found)


def _launched(rows_a: int, rows_b: int, gbps: float) -> list[str]:
    gm = _trace(_two_tables, (64, 8), (64, 8), rows_a, rows_b, (rows_a, 8), (rows_b, 8), (16, 8), (8, 8))
    names = ("urgent a", "late a", "early a", "late b", "early b")
    launches = [n for n in gm.graph.nodes if "all_to_all" in n.name]
    for launch, name in zip(launches, names, strict=True):
        (priority, table), wait = name.split(), last_wait(launch)
        size = size_in_bytes(launch.meta["val"])
        x = GraphExchange("plain", "rows", priority, size, launch, wait, first_user(wait), table)
        launch.meta[EXCHANGE_KEY] = x
    with mock.patch.object(node_cost, "machine", lambda device: SLOW):
        overlap_attention(gm, Config(link_gbps=gbps))
    gm.graph.lint()
    late = [x for x in exchanges(gm.graph) if x.priority == "late"]
    place = {n: i for i, n in enumerate(gm.graph.nodes)}
    assert max(place[x.launch] for x in late) < min(place[x.wait] for x in late)
    return [f"{x.priority} {x.table}" for x in exchanges(gm.graph)]


@pytest.mark.parametrize("gbps", (0.0001, 100.0))
def test_launches_of_two_tables(world, gbps):
    """All late gradients leave before all early rows, in the order of the graph, whatever this rank's batch sends of
    each: ranks whose batches differ launch alike."""
    for rows_a, rows_b in ((16, 64), (64, 16)):
        assert _launched(rows_a, rows_b, gbps) == ["urgent a", "late a", "late b", "early a", "early b"]


def test_a_graph_without_exchanges_is_left_alone(world):
    gm = _trace(lambda x, w: torch.mm(torch.mm(x, w), w), (16, 8), (8, 8))
    before = [n.name for n in gm.graph.nodes]
    assert overlap_attention(gm, Config()) == 0
    assert [n.name for n in gm.graph.nodes] == before


def _random_step(seed: int):
    """Lookups, products and sums in random order, some of them exchanged, an update in between."""

    def step(table, ids, w):
        choose = random.Random(seed)
        pool = [w]
        for _ in range(12):
            kind, a, b = choose.randrange(4), choose.choice(pool), choose.choice(pool)
            if kind == 0:
                pool.append(_exchange(table.index_select(0, ids)))
            elif kind == 1:
                table.index_add_(0, ids, a)
            else:
                pool.append(torch.mm(a, b) if kind == 2 else torch.tanh(a) + b)
        return (*pool[1:], table.sum())

    return step


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from((1e-6, 1e-3, 1.0)), st.sampled_from((1e6, 1e9, 1e15)))
def test_random_graphs(seed, gbps, flops):
    """Same values, same launches in the same order at any speed, no more memory than promised, binding without a loop."""
    with fake_world(0, 4):
        gm = _trace(_random_step(seed), (64, 16), 16, (16, 16))
        if find_exchanges(gm, Config()) == 0:
            return
        found = exchanges(gm.graph)
        launches = [x.launch.name for x in found]
        before = node_cost.peak_bytes(list(gm.graph.nodes))
        expected = _local(gm)
        with mock.patch.object(node_cost, "machine", lambda device: node_cost.MachineSpeed(flops, 1e9)):
            overlap_attention(gm, Config(link_gbps=gbps))
        gm.graph.lint()
        gm.recompile()
        assert [n.name for n in gm.graph.nodes if n.name in launches] == launches
        assert node_cost.peak_bytes(list(gm.graph.nodes)) <= before + sum(node_cost.hint(x.bytes) for x in found)
        for a, b in zip(_local(gm), expected, strict=True):
            assert torch.equal(a, b)
        place = {n: i for i, n in enumerate(gm.graph.nodes)}
        assert all(place[d] < place[n] for n, deps in control_dependencies(gm.graph).items() for d in deps)


class _Alone(fx.Interpreter):
    """Every all-to-all brings back what was sent, when it is waited for and not before."""

    def call_function(self, target, args, kwargs):
        if target is torch.ops._c10d_functional.all_to_all_single.default:
            return torch.full_like(args[0], float("nan")), args[0].clone()
        if target is torch.ops._c10d_functional.wait_tensor.default:
            return args[0][1]
        return super().call_function(target, args, kwargs)


def _local(gm: fx.GraphModule) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return list(_Alone(gm).run(torch.rand(64, 16), torch.arange(16), torch.rand(16, 16)))


# ---- what the compiler makes of it -------------------------------------------------------------------------------

CALLS = re.compile(
    r"(all_to_all_rows_launch|all_to_all_launch|wait_tensor|freescale\.update_|extern_kernels\.(?:add)?mm|"
    r"freescale\.agree)"
)


def _calls(code: str) -> list[str]:
    """Launches, waits, updates and products of a generated program, in order."""
    body = code[code.index("def call") :]
    lines = (line.split("#")[0] for line in body.splitlines() if "assert_" not in line)
    return [m.group(1).split(".")[-1] for line in lines if (m := CALLS.search(line))]


def _generated() -> list[list[list[str]]]:
    """On a fast link and on a slow one: other graphs of the same kernels, which are compiled once."""
    found = []
    with fresh_cache():
        for gbps in (100.0, 0.001):
            torch._dynamo.reset()
            found.append([_calls(code) for code in _train("inductor", gbps)])
    return found


@pytest.fixture(scope="module")
def generated() -> list[list[list[str]]]:
    return run_ranks(_generated, 1)[0]


@pytest.mark.thorough
def test_generated_code_keeps_the_order(generated):
    forward, backward = generated[0]
    assert forward == [
        "agree", "all_to_all_rows_launch", "mm",  # the layer that does not need the rows
        "wait_tensor", "wait_tensor", "all_to_all_launch", "mm", "mm",
        "wait_tensor", "update_", "all_to_all_rows_launch", "mm",
    ]  # fmt: skip
    assert backward.count("agree") == backward.count("all_to_all_launch") == 1


@pytest.mark.thorough
def test_generated_code_sinks_weight_gradients(generated):
    _, backward = generated[1]
    launch, wait = backward.index("all_to_all_launch"), backward.index("wait_tensor")
    assert backward[launch + 1 : wait].count("mm") >= 1
    assert backward[wait:] == ["wait_tensor", "update_"]


def _deep(table, ids, other):
    """Behind the wait a chain of thousands, then a collective; and one that must come after it but needs none of it."""
    group = dist.group.WORLD.group_name
    sent = torch.ops._c10d_functional.all_to_all_single(table.index_select(0, ids), [8, 8], [8, 8], group)
    x = torch.ops._c10d_functional.wait_tensor(sent)
    for _ in range(3000):
        x = x.tanh()
    first = torch.ops._c10d_functional.all_reduce(x, "sum", group)
    second = torch.ops._c10d_functional.all_reduce(other, "sum", group)
    return tuple(torch.ops._c10d_functional.wait_tensor(t) for t in (first, second))


def test_a_chain_of_thousands_of_nodes():
    with fake_world(0, 2), FakeTensorMode():
        gm = make_fx(_deep)(torch.empty(32, 4), torch.zeros(16, dtype=torch.int64), torch.empty(16, 4))
        assert find_exchanges(gm, Config()) == 1
        with mock.patch.object(node_cost, "machine", lambda device: SLOW):
            assert overlap_attention(gm, Config()) == 1
        gm.graph.lint()
    collectives = [n.name for n in gm.graph.nodes if "all_" in n.name]
    assert collectives == ["all_to_all_single", "all_reduce", "all_reduce_1"]

def _unrelated(x, y):
    """Two collectives between which there is no data flow, the second on less data."""
    group = dist.group.WORLD.group_name
    first = torch.ops._c10d_functional.all_reduce(x, "sum", group)
    second = torch.ops._c10d_functional.all_reduce(y, "sum", group)
    return tuple(torch.ops._c10d_functional.wait_tensor(t) for t in (second, first))


def test_every_collective_is_bound_behind_the_one_before_it():
    """Else the compiler, which looks at this rank's sizes, might start them in an order of its own."""
    with fake_world(0, 2), FakeTensorMode():
        gm = make_fx(_unrelated)(torch.empty(32, 4), torch.empty(4))
    first, second = (n for n in gm.graph.nodes if "all_reduce" in n.name)
    assert control_dependencies(gm.graph) == {second: [first]}
