"""What find_exchanges marks and what it leaves alone, on graphs that AOTAutograd and Inductor really make.

The world is a fake one of 4 ranks. Its collectives return memory that nobody wrote: only graphs are compared.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from unittest import mock

import expecttest
import pytest
import sympy
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.nn.functional as F
from torch import fx, nn
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from freescale.compat.version import torch_version
from freescale.config import Config
from freescale.driver import observe
from freescale.passes.find_exchanges import find_exchanges
from freescale.passes.graph import exchanges, graph_text
from freescale.runtime import agreement

WORLD, ROWS, DIM, BATCH = 4, 32, 8, 12
NOTE = re.compile(r"; urgent (rows|gradients), plain, .* bytes$", re.MULTILINE)


@pytest.fixture(scope="module", autouse=True)
def fake_world():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    with mock.patch.object(agreement, "agree", lambda *a, **k: None):  # there is nobody to agree with
        yield
    dist.destroy_process_group()


# ---- looking at graphs -------------------------------------------------------------------------------------


@dataclass
class Found:
    """An exchange in words; nodes by name, and the consumer's op."""

    kind: str
    payload: str
    bytes: sympy.Expr
    launch: str
    wait: str
    consumer: str


@dataclass
class Seen:
    before: str
    after: str = ""
    found: tuple[Found, ...] = ()


def _found(graph: fx.Graph) -> tuple[Found, ...]:
    return tuple(
        Found(x.kind, x.payload, x.bytes, x.launch.name, x.wait.name, str(x.consumer and x.consumer.target))
        for x in exchanges(graph)
    )


def look(model: nn.Module, *inputs: torch.Tensor, dynamic: bool | None = None) -> tuple[Seen, Seen]:
    """The forward and the backward graph of a training step, before and after the pass.

    Sizes are symbolic, as the backend sets it, unless `dynamic` is False.
    """
    seen: dict[str, Seen] = {}

    def observer(direction: str, name: str, graph: fx.Graph) -> None:
        if name == "before":
            assert direction not in seen, f"a second {direction} graph"
            seen[direction] = Seen(graph_text(graph))
        elif name == "find_exchanges":
            seen[direction].after, seen[direction].found = graph_text(graph), _found(graph)

    torch._dynamo.reset()
    end = observe(observer)
    try:
        options = {"codegen": "eager", "passes": "find_exchanges", "strict": True}
        step = torch.compile(model, backend="freescale", fullgraph=True, dynamic=dynamic, options=options)
        step(*inputs).sum().backward()
    finally:
        end()
    for graph in seen.values():
        assert NOTE.sub("", graph.after) == graph.before  # nothing but the marks
    return seen["forward"], seen["backward"]


def bytes_at(x: Found, batch: int) -> int:
    """What `x` receives when the batch has that many ids; its size must depend on nothing else."""
    (symbol,) = x.bytes.free_symbols
    return int(x.bytes.subs({symbol: batch}))


def assert_left_alone(graph: Seen, all_to_alls: int) -> None:
    assert graph.before.count("_c10d_functional.all_to_all_single(") == all_to_alls
    assert graph.found == ()
    assert graph.after == graph.before


# ---- models ------------------------------------------------------------------------------------------------


def all_to_all(x: torch.Tensor) -> torch.Tensor:
    return fc.all_to_all_single_autograd(x, None, None, dist.group.WORLD)


class DividedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / WORLD


LOOKUPS = {
    "embedding": lambda table, ids: table(ids),
    "index_select": lambda table, ids: table.weight.index_select(0, ids),
    "index": lambda table, ids: table.weight[ids],
}
WIRES = {
    "plain": lambda look_up, ids: all_to_all(look_up(ids)),
    "bf16": lambda look_up, ids: all_to_all(look_up(ids).bfloat16()).float(),
    "cat": lambda look_up, ids: all_to_all(torch.cat([look_up(ids), look_up(ids + 1)])),
    "divided": lambda look_up, ids: all_to_all(DividedGradient.apply(look_up(ids))),
    "waited_twice": lambda look_up, ids: fc.wait_tensor(all_to_all(look_up(ids))),
}
ON_THE_WAY_BACK = {
    "bf16": "prims.convert_element_type.default",
    "cat": "aten.slice.Tensor",
    "divided": "aten.div.Tensor",
}


class Rows(nn.Module):
    """Rows of a table, sent to the ranks that asked for them, into a dense layer."""

    def __init__(self, lookup: str = "embedding", wire: str = "plain") -> None:
        super().__init__()
        self.table, self.dense = nn.Embedding(ROWS, DIM), nn.Linear(DIM, 1)
        self.lookup, self.wire = LOOKUPS[lookup], WIRES[wire]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.dense(self.wire(lambda i: self.lookup(self.table, i), ids))


class Experts(nn.Module):
    """Tokens in the order of their experts, to the experts and back."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.ReLU(), nn.Linear(2 * DIM, DIM))

    def forward(self, tokens: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return all_to_all(self.expert(all_to_all(tokens[order])))[torch.argsort(order)]


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.experts = nn.Linear(DIM, DIM), Experts()

    def forward(self, x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return self.experts(self.mix(x), order)


class RowsThenMoE(nn.Module):
    def __init__(self, behind: nn.Module) -> None:
        super().__init__()
        self.table, self.behind = nn.Embedding(ROWS, DIM), behind

    def forward(self, ids: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return self.behind(all_to_all(self.table(ids)), order)


class Ulysses(nn.Module):
    """Attention with the sequence split over the ranks outside and the heads split over them inside."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WORLD * DIM, WORLD * DIM) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, part, _ = x.shape

        def to_heads(y: torch.Tensor) -> torch.Tensor:
            y = y.view(batch, part, WORLD, DIM).permute(2, 1, 0, 3).reshape(WORLD * part, batch, DIM)
            return all_to_all(y).permute(1, 0, 2).unsqueeze(1)

        heads = F.scaled_dot_product_attention(to_heads(self.q(x)), to_heads(self.k(x)), to_heads(self.v(x)))
        back = all_to_all(heads.squeeze(1).permute(1, 0, 2).contiguous())
        back = back.view(WORLD, part, batch, DIM).permute(2, 1, 0, 3)
        return self.out(back.reshape(batch, part, WORLD * DIM))


class ExchangedIds(nn.Module):
    """Ids, themselves looked up in a table of their new numbers, to the owners of the rows."""

    new_numbers: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, DIM)
        self.register_buffer("new_numbers", torch.arange(ROWS).flip(0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        received = fc.all_to_all_single(self.new_numbers[ids], None, None, dist.group.WORLD)
        return self.table(received % ROWS)  # what the fake world delivers may be out of range


def some_ids() -> torch.Tensor:
    return torch.arange(BATCH)


# ---- marked ------------------------------------------------------------------------------------------------


def test_rows_and_their_gradients_are_found():
    forward, backward = look(Rows(), some_ids())
    (rows,), (gradients,) = forward.found, backward.found

    assert (rows.kind, rows.payload) == ("plain", "rows")
    assert (rows.launch, rows.wait) == ("all_to_all_single", "wait_tensor")
    assert rows.consumer == "aten.addmm.default"
    assert (gradients.kind, gradients.payload) == ("plain", "gradients")
    assert (gradients.launch, gradients.wait) == ("all_to_all_single_1", "wait_tensor_1")
    masked_inside = torch_version() >= "2.13"  # before, an op of its own zeroed the gradient of padding
    first = "aten._unsafe_masked_index_put_accumulate.default" if masked_inside else "aten.where.self"
    assert gradients.consumer == first
    for x in (rows, gradients):
        assert [bytes_at(x, n) for n in (0, 4, BATCH)] == [0, 4 * DIM * 4, BATCH * DIM * 4]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("lookup", LOOKUPS)
def test_every_lookup_and_every_wire_is_found(lookup, wire):
    forward, backward = look(Rows(lookup, wire), some_ids())
    (rows,), (gradients,) = forward.found, backward.found

    assert (rows.payload, gradients.payload) == ("rows", "gradients")
    element, ids = (2 if wire == "bf16" else 4), (2 * BATCH if wire == "cat" else BATCH)
    assert bytes_at(rows, BATCH) == bytes_at(gradients, BATCH) == ids * DIM * element
    assert rows.consumer == ("prims.convert_element_type.default" if wire == "bf16" else "aten.addmm.default")
    assert rows.wait == ("wait_tensor_1" if wire == "waited_twice" else "wait_tensor")
    if wire in ON_THE_WAY_BACK:
        assert gradients.consumer == ON_THE_WAY_BACK[wire]


@pytest.mark.parametrize("behind", [MoE, Experts])
def test_of_experts_behind_a_table_only_the_table_is_found(behind):
    forward, backward = look(RowsThenMoE(behind()), some_ids(), torch.randperm(BATCH))

    assert forward.before.count("_c10d_functional.all_to_all_single(") == 3
    assert [(x.payload, x.launch) for x in forward.found] == [("rows", "all_to_all_single")]
    assert backward.before.count("_c10d_functional.all_to_all_single(") == 3
    assert [(x.payload, x.launch) for x in backward.found] == [("gradients", "all_to_all_single_5")]  # the last


# ---- left alone --------------------------------------------------------------------------------------------


def test_exchanged_ids_are_left_alone():
    forward, backward = look(ExchangedIds(), some_ids())
    assert_left_alone(forward, 1)
    assert_left_alone(backward, 0)


@pytest.mark.parametrize("dynamic", [None, False])
def test_expert_parallelism_is_left_alone(dynamic):
    forward, backward = look(MoE(), torch.randn(BATCH, DIM), torch.randperm(BATCH), dynamic=dynamic)
    assert_left_alone(forward, 2)
    assert_left_alone(backward, 2)


def test_expert_parallelism_on_a_graph_input_is_left_alone():
    """A layer compiled on its own: tokens come in from outside and their gradient leaves, like a table's."""
    forward, backward = look(Experts(), torch.randn(BATCH, DIM, requires_grad=True), torch.randperm(BATCH))
    assert_left_alone(forward, 2)
    assert_left_alone(backward, 2)


def test_sequence_parallelism_is_left_alone():
    forward, backward = look(Ulysses(), torch.randn(2, 6, WORLD * DIM))
    assert_left_alone(forward, 4)
    assert_left_alone(backward, 4)


# ---- FBGEMM ------------------------------------------------------------------------------------------------

LOOKUP = "split_embedding_nobag_codegen_forward_unweighted_pt2_wrapper"
UPDATE = "split_embedding_nobag_backward_codegen_sgd_unweighted_pt2_wrapper"
NEITHER = "jagged_to_padded_dense"
SIZE = sympy.Integer(BATCH * DIM * 4)
NODES = ("all_to_all_single_default", "wait_tensor_default")


class HandBuilt:
    """A graph of a few nodes around one all-to-all; FBGEMM's CPU wheel has no fakes to trace its ops with."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        with FakeTensorMode():
            self.rows = torch.empty(BATCH, DIM)

    def input(self, name: str) -> fx.Node:
        return self._has_rows(self.graph.placeholder(name))

    def call(self, target, *args, **kwargs) -> fx.Node:
        return self._has_rows(self.graph.call_function(target, args, kwargs))

    def fbgemm(self, name: str, functionalized: bool, **kwargs: fx.Node) -> fx.Node:
        """The ops change a tensor in place, so in a post-grad graph they come functionalized."""
        op = getattr(torch.ops.fbgemm, name).default
        if not functionalized:
            return self.call(op, **kwargs)
        return self.call(operator.getitem, self.graph.call_function(auto_functionalized_v2, (op,), kwargs), 0)

    def all_to_all(self, x: fx.Node) -> fx.Node:
        counts = [BATCH // WORLD] * WORLD
        sent = self.call(torch.ops._c10d_functional.all_to_all_single.default, x, counts, counts, "0")
        return self.call(torch.ops._c10d_functional.wait_tensor.default, sent)

    def found(self, result: fx.Node) -> tuple[Found, ...]:
        self.graph.output((result,))
        sites = find_exchanges(fx.GraphModule(nn.Module(), self.graph), Config())
        assert sites == len(exchanges(self.graph))
        return _found(self.graph)

    def _has_rows(self, node: fx.Node) -> fx.Node:
        node.meta["val"] = self.rows
        return node


@pytest.mark.parametrize("functionalized", [False, True])
def test_fbgemm_lookup_is_found(functionalized):
    pytest.importorskip("fbgemm_gpu")
    g = HandBuilt()
    looked_up = g.fbgemm(LOOKUP, functionalized, dev_weights=g.input("weight"), indices=g.input("ids"))
    (x,) = g.found(g.call(torch.ops.aten.relu.default, g.all_to_all(looked_up)))
    assert x == Found("plain", "rows", SIZE, *NODES, "aten.relu.default")


@pytest.mark.parametrize("functionalized", [False, True])
def test_fbgemm_update_is_found(functionalized):
    pytest.importorskip("fbgemm_gpu")
    g = HandBuilt()
    grad = g.all_to_all(g.call(torch.ops.aten.relu.default, g.input("tangents_1")))
    scaled = g.call(torch.ops.aten.div.Tensor, grad, WORLD)
    (x,) = g.found(g.fbgemm(UPDATE, functionalized, grad_output=scaled, dev_weights=g.input("weight")))
    assert x == Found("plain", "gradients", SIZE, *NODES, "aten.div.Tensor")


def test_other_fbgemm_ops_are_left_alone():
    pytest.importorskip("fbgemm_gpu")
    g = HandBuilt()
    sent = g.all_to_all(g.fbgemm(NEITHER, False, values=g.input("values")))
    before = graph_text(g.graph)
    assert g.found(g.fbgemm(NEITHER, False, values=sent)) == ()
    assert graph_text(g.graph).startswith(before)


# ---- golden ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(
    torch_version() < "2.13",
    reason="torch 2.11 orders the inputs otherwise, 2.11 and 2.12 make other ops of the table's gradient",
)
class TestGolden(expecttest.TestCase):
    def test_forward(self):
        forward, _ = look(Rows(), some_ids())
        self.assertExpectedInline(
            forward.after,
            """\
primals_1: float32[32, 8]
primals_2: s23
primals_3: int64[s23]
primals_4: float32[1, 8]
primals_5: float32[1]
embedding = aten.embedding(primals_1, primals_3)  # float32[s23, 8]
floordiv = floordiv(primals_2, 4)  # (s23//4)
all_to_all_single = _c10d_functional.all_to_all_single(embedding, [floordiv, floordiv, floordiv, floordiv], [floordiv, floordiv, floordiv, floordiv], 0)  # float32[4*((s23//4)), 8]; urgent rows, plain, 128*((s23//4)) bytes
wait_tensor = _c10d_functional.wait_tensor(all_to_all_single)  # float32[4*((s23//4)), 8]
permute = aten.permute(primals_4, [1, 0])  # float32[8, 1]
addmm = aten.addmm(primals_5, wait_tensor, permute)  # float32[4*((s23//4)), 1]
return [addmm, primals_3, primals_4, wait_tensor, primals_2, floordiv]""",  # noqa: E501
        )

    def test_backward(self):
        _, backward = look(Rows(), some_ids())
        self.assertExpectedInline(
            backward.after,
            """\
floordiv: (s23//4)
primals_3: int64[s23]
primals_4: float32[1, 8]
wait_tensor: float32[4*((s23//4)), 8]
tangents_1: float32[4*((s23//4)), 1]
permute = aten.permute(primals_4, [1, 0])  # float32[8, 1]
permute_1 = aten.permute(permute, [1, 0])  # float32[1, 8]
mm = aten.mm(tangents_1, permute_1)  # float32[4*((s23//4)), 8]
permute_2 = aten.permute(tangents_1, [1, 0])  # float32[1, 4*((s23//4))]
mm_1 = aten.mm(permute_2, wait_tensor)  # float32[1, 8]
sum_1 = aten.sum.dim_IntList(tangents_1, [0], True)  # float32[1, 1]
view = aten.view(sum_1, [1])  # float32[1]
all_to_all_single_1 = _c10d_functional.all_to_all_single(mm, [floordiv, floordiv, floordiv, floordiv], [floordiv, floordiv, floordiv, floordiv], 0)  # float32[4*((s23//4)), 8]; urgent gradients, plain, 128*((s23//4)) bytes
wait_tensor_1 = _c10d_functional.wait_tensor(all_to_all_single_1)  # float32[4*((s23//4)), 8]
ge = aten.ge.Scalar(primals_3, 0)  # bool[s23]
lt = aten.lt.Scalar(primals_3, 32)  # bool[s23]
bitwise_and = aten.bitwise_and.Tensor(ge, lt)  # bool[s23]
ne = aten.ne.Scalar(primals_3, -1)  # bool[s23]
bitwise_and_1 = aten.bitwise_and.Tensor(bitwise_and, ne)  # bool[s23]
unsqueeze = aten.unsqueeze(bitwise_and_1, -1)  # bool[s23, 1]
full_default = aten.full([32, 8], 0, dtype=torch.float32, layout=torch.strided, device=cpu, pin_memory=False)  # float32[32, 8]
_unsafe_masked_index_put_accumulate = aten._unsafe_masked_index_put_accumulate(full_default, unsqueeze, [primals_3], wait_tensor_1)  # float32[32, 8]
return [_unsafe_masked_index_put_accumulate, None, None, mm_1, view]""",  # noqa: E501
        )
