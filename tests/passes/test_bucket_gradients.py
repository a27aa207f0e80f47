"""What becomes of gradients that are to be averaged, and where overlap_attention puts them."""

from __future__ import annotations

import re
from unittest import mock

import expecttest
import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fake_world import fake_world, golden_text, graphs_of
from freescale.config import Config
from freescale.passes import node_cost
from freescale.passes.bucket_gradients import bucket_gradients
from freescale.passes.graph import CannotApply, exchanges, graph_text
from freescale.passes.overlap_attention import overlap_attention
from ranks import run_ranks_apart

SLOW = node_cost.MachineSpeed(flops=1e9, memory=1e9)
TWO_EACH = {"bucket_mb": 0.008}  # two layers of the tower in a bucket
average = torch.ops.freescale.average_gradient.default


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        import freescale

        self.table = freescale.ShardedEmbedding(2048, 32, name="item")
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


def _train(codegen: str, gbps: float, rank: int = 0) -> list[str]:
    """One step in a world of 4; the generated code of every graph, if any was generated."""
    codes: list[str] = []
    options = {"codegen": codegen, "link_gbps": gbps, "dense": "allreduce", "strict": True, **TWO_EACH}
    keep = mock.patch("torch._inductor.graph.GraphLowering.save_output_code", staticmethod(codes.append))
    with fake_world(rank, 4), mock.patch.object(node_cost, "machine", lambda device: SLOW), keep:
        with fresh_cache():
            torch.manual_seed(0)
            run = torch.compile(Tower(), backend="freescale", fullgraph=True, options=options)
            run(torch.randint(0, 300, (200,), generator=torch.Generator().manual_seed(0))).backward()
    return codes


def _graphs(gbps: float) -> dict[tuple[str, str], str]:
    return graphs_of(lambda: _train("eager", gbps))


SHORT = re.compile(r"^(\w+) = (freescale\.\w+|_c10d_functional\.\w+|aten\.mm)\(", re.MULTILINE)


def _schedule(text: str) -> str:
    return "\n".join(m.group(1) for m in SHORT.finditer(text))


@golden_text
class Golden(expecttest.TestCase):
    maxDiff = None

    @classmethod
    def setUpClass(cls):
        (cls.fast,) = run_ranks_apart(_graphs, [(100.0,)])

    def test_before(self):
        self.assertExpectedInline(_schedule(self.fast["backward", "gather_parts"]), """\
mm_4
mm_5
mm_6
mm_7
mm_8
mm_9
mm_10
mm_11
sum_rows
all_to_all_launch_default
wait_tensor_default
update__default
average_gradient
average_gradient_1
average_gradient_2
average_gradient_3""")

    def test_buckets(self):
        self.assertExpectedInline(_schedule(self.fast["backward", "bucket_gradients"]), """\
mm_4
mm_5
mm_6
all_reduce_launch_default
mm_7
mm_8
mm_9
mm_10
all_reduce_launch_default_1
mm_11
sum_rows
all_to_all_launch_default
wait_tensor_default
update__default
wait_tensor_default_1
wait_tensor_default_2""")

    def test_fast(self):
        """Urgent gradients leave first, each bucket when its last gradient is there."""
        self.assertExpectedInline(_schedule(self.fast["backward", "overlap_attention"]), """\
mm_5
mm_7
mm_9
mm_11
sum_rows
all_to_all_launch_default
mm_4
mm_6
all_reduce_launch_default
mm_8
mm_10
all_reduce_launch_default_1
wait_tensor_default
update__default
wait_tensor_default_1
wait_tensor_default_2""")


@pytest.mark.thorough
@golden_text
class GoldenOnASlowLink(expecttest.TestCase):
    maxDiff = None

    @classmethod
    def setUpClass(cls):
        (cls.slow,) = run_ranks_apart(_graphs, [(0.001,)])

    def test_slow(self):
        """No bucket stands in front of urgent gradients that are still on the wire."""
        self.assertExpectedInline(_schedule(self.slow["backward", "overlap_attention"]), """\
mm_5
mm_7
mm_9
mm_11
sum_rows
all_to_all_launch_default
mm_4
mm_6
mm_8
mm_10
wait_tensor_default
all_reduce_launch_default
all_reduce_launch_default_1
update__default
wait_tensor_default_1
wait_tensor_default_2""")


# ---- on graphs made for it ---------------------------------------------------------------------------------------


def _trace(fn, *shapes) -> fx.GraphModule:
    with FakeTensorMode():
        return make_fx(fn)(*(torch.empty(s) for s in shapes))


def _averaged(gradient: torch.Tensor, name: str, place: int) -> torch.Tensor:
    return average(gradient, name, place, dist.group.WORLD.group_name)


def _bucketed(gm: fx.GraphModule, bucket_mb: float = 25.0) -> list[str]:
    """The parameters of each bucket, in the order of the launches."""
    count = bucket_gradients(gm, Config(bucket_mb=bucket_mb))
    gm.graph.lint()
    launches = [x.launch for x in exchanges(gm.graph)]
    assert len(launches) == count
    return [n.args[1] for n in launches]


@pytest.mark.usefixtures("world")
class Text(expecttest.TestCase):
    def test_two_gradients(self):
        def backward(x, y):
            return _averaged(torch.mm(x, y), "b", 1), _averaged(y.sum(1), "a", 0)

        gm = _trace(backward, (4, 8), (8, 2))
        assert _bucketed(gm) == ["a, b"]
        self.assertExpectedInline(graph_text(gm.graph), """\
x_1: float32[4, 8]
y_1: float32[8, 2]
mm = aten.mm(x_1, y_1)  # float32[4, 2]
sum_1 = aten.sum.dim_IntList(y_1, [1])  # float32[8]
all_reduce_launch_default = freescale.all_reduce_launch([sum_1, mm], a, b, 0)  # float32[16]; dense gradients, dense, 96 bytes
wait_tensor_default = _c10d_functional.wait_tensor(all_reduce_launch_default)  # float32[16]
split_with_sizes_default = aten.split_with_sizes(wait_tensor_default, [8, 8])  # (float32[8], float32[8])
getitem = getitem(split_with_sizes_default, 0)  # float32[8]
view_default = aten.view(getitem, [8])  # float32[8]
getitem_1 = getitem(split_with_sizes_default, 1)  # float32[8]
view_default_1 = aten.view(getitem_1, [4, 2])  # float32[4, 2]
return [view_default_1, view_default]""")


def test_buckets_follow_places_and_not_the_graph(world):
    def backward(x, y):
        return _averaged(x * 2, "late", 2), _averaged(x * 3, "first", 0), _averaged(y * 4, "middle", 1)

    assert _bucketed(_trace(backward, (8, 8), (8, 8)), bucket_mb=1e-6) == ["first", "middle", "late"]


def test_data_types_do_not_mix(world):
    def backward(x):
        half = x.bfloat16()
        return tuple(_averaged(t * 2, str(i), i) for i, t in enumerate((x, half, x, half)))

    assert _bucketed(_trace(backward, (8, 8))) == ["0, 2", "1, 3"]


def test_a_bucket_is_no_larger_than_said(world):
    def backward(*xs):
        return tuple(_averaged(x * 2, str(i), i) for i, x in enumerate(xs))

    sizes = [(256,), (256,), (1024,), (128,), (128,)]  # of 4 bytes
    assert _bucketed(_trace(backward, *sizes), bucket_mb=2048 / (1 << 20)) == ["0, 1", "2", "3, 4"]


def test_a_small_model_still_has_several_buckets(world):
    def backward(*xs):
        return tuple(_averaged(x * 2, str(i), i) for i, x in enumerate(xs))

    assert len(_bucketed(_trace(backward, *[(1 << 19,)] * 10))) == 10  # 2 MiB each, 20 in all
    assert len(_bucketed(_trace(backward, *[(1 << 10,)] * 10))) == 1


def test_a_gradient_that_the_graph_computes_with_is_left_where_it_stands(world):
    def backward(x):
        averaged = _averaged(x * 2, "a", 0)
        return averaged, averaged.norm()

    gm = _trace(backward, (8, 8))
    before = graph_text(gm.graph)
    assert bucket_gradients(gm, Config()) == 0 and graph_text(gm.graph) == before


def test_a_gradient_of_symbolic_size_is_refused(world):
    gm = make_fx(lambda x: _averaged(x * 2, "a", 0), tracing_mode="symbolic")(torch.empty(5, 3))
    before = graph_text(gm.graph)
    with pytest.raises(CannotApply, match="the size of the gradient of a changes with the batch"):
        bucket_gradients(gm, Config())
    assert graph_text(gm.graph) == before


def test_a_graph_without_tables_launches_a_bucket_when_it_is_full(world):
    def backward(x, w0, w1):
        first = torch.mm(w0, x)
        return _averaged(first, "a", 0), _averaged(torch.mm(w1, first), "b", 1)

    gm = _trace(backward, (64, 64), (64, 64), (64, 64))
    _bucketed(gm, bucket_mb=1e-6)
    with mock.patch.object(node_cost, "machine", lambda device: SLOW):
        assert overlap_attention(gm, Config(link_gbps=0.001)) == 2
    names = [n.name for n in gm.graph.nodes]
    order = ["mm", "all_reduce_launch_default", "mm_1", "all_reduce_launch_default_1", "wait_tensor_default"]
    assert sorted(order, key=names.index) == order


# ---- what the compiler makes of it -------------------------------------------------------------------------------


CALLS = re.compile(r"(all_reduce_launch|all_to_all_launch|wait_tensor|freescale\.update_|extern_kernels\.mm)")


@pytest.mark.thorough
def test_generated_code_keeps_the_order():
    ((_, backward),) = run_ranks_apart(_train, [("inductor", 100.0)])
    lines = (line.split("#")[0] for line in backward[backward.index("def call") :].splitlines())
    calls = [m.group(1).split(".")[-1] for line in lines if "assert_" not in line and (m := CALLS.search(line))]
    urgent = calls.index("all_to_all_launch")
    assert calls[urgent + 1 :] == [
        "mm", "mm", "all_reduce_launch", "mm", "mm", "all_reduce_launch", "wait_tensor", "update_", "wait_tensor",
        "wait_tensor",
    ]  # fmt: skip


@pytest.mark.thorough
def test_rank_blind():
    def text(found: dict) -> str:
        return found["backward", "overlap_attention"]

    first, last = run_ranks_apart(_graphs_of_rank, [(0,), (3,)])
    assert text(first) == text(last)


def _graphs_of_rank(rank: int) -> dict[tuple[str, str], str]:
    return graphs_of(lambda: _train("eager", 100.0, rank))
