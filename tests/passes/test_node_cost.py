"""The cost model alone: numbers of nodes whose cost is known."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import register_flop_formula

from freescale.kernels.transports import link_speed
from freescale.passes import node_cost

MACHINE = node_cost.MachineSpeed(flops=1e9, memory=1e9)
lib = torch.library.Library("fs_test_cost", "DEF")
lib.define("known(Tensor x) -> Tensor")
lib.define("timed(Tensor x) -> Tensor")
lib.define("with_offsets(Tensor x, Tensor offsets) -> Tensor")
calls = {"timed": 0, "with_offsets": 0}


def _timed(x):
    calls["timed"] += 1
    torch.mm(torch.rand(64, 64), torch.rand(64, 64))
    return x.clone()


def _with_offsets(x, offsets):
    calls["with_offsets"] += 1
    return x.clone()


lib.impl("known", lambda x: x.clone(), "CPU")
lib.impl("timed", _timed, "CPU")
lib.impl("with_offsets", _with_offsets, "CPU")
for name in ("known", "timed"):
    torch.library.register_fake(f"fs_test_cost::{name}", torch.empty_like, lib=lib)
torch.library.register_fake("fs_test_cost::with_offsets", lambda x, offsets: torch.empty_like(x), lib=lib)


@register_flop_formula(torch.ops.fs_test_cost.known)
def _known_flops(x_shape, *args, out_shape=None, **kwargs) -> int:
    return 1000 * x_shape[0]


def _node(fn, *inputs):
    with FakeTensorMode() as mode:
        gm = make_fx(fn)(*(mode.from_tensor(i) for i in inputs))
    return next(n for n in reversed(gm.graph.nodes) if n.op == "call_function")


def test_matrix_products_by_their_formula():
    node = _node(torch.mm, torch.rand(100, 200), torch.rand(200, 300))
    assert node_cost.seconds(node, MACHINE) == 2 * 100 * 200 * 300 / 1e9
    assert node_cost.is_compute(node)


def test_pointwise_by_output_and_the_rest_by_all_bytes():
    x, i = torch.rand(100, 10), torch.arange(50)
    assert node_cost.seconds(_node(lambda x: torch.tanh(x), x), MACHINE) == 100 * 10 * 4 / 1e9
    assert node_cost.seconds(_node(lambda x, i: x.index_select(0, i), x, i), MACHINE) == (4000 + 400 + 2000) / 1e9
    assert node_cost.seconds(_node(lambda x: x.view(-1), x), MACHINE) == 0.0
    assert not node_cost.is_compute(_node(lambda x: torch.tanh(x), x))


def test_a_users_op_by_its_formula():
    node = _node(lambda x: torch.ops.fs_test_cost.known(x), torch.rand(100, 10))
    assert node_cost.seconds(node, MACHINE) == 1000 * 100 / 1e9
    assert node_cost.is_compute(node)


def test_a_users_op_without_a_formula_is_measured_once():
    node = _node(lambda x: torch.ops.fs_test_cost.timed(x), torch.rand(7, 3))
    touched = 2 * 7 * 3 * 4 / 1e9
    first = node_cost.seconds(node, MACHINE)
    ran = calls["timed"]
    assert first > touched and ran > 0
    assert node_cost.seconds(node, MACHINE) == first and calls["timed"] == ran


def test_an_op_that_takes_integers_is_not_tried_on_random_data():
    node = _node(lambda x, o: torch.ops.fs_test_cost.with_offsets(x, o), torch.rand(7, 3), torch.arange(3))
    assert node_cost.seconds(node, MACHINE) == (2 * 7 * 3 * 4 + 3 * 8) / 1e9
    assert calls["with_offsets"] == 0


def test_wire_and_hints():
    assert node_cost.wire_seconds(sympy.Integer(10**6), 1e9) == 1e-3
    assert node_cost.hint(7) == 7
    with FakeTensorMode(shape_env=torch.fx.experimental.symbolic_shapes.ShapeEnv()) as mode:
        x = mode.from_tensor(torch.rand(12, 5), symbolic_context=None, static_shapes=False)
        assert node_cost.hint(x.shape[0] * 3) == 36
        unknown = mode.shape_env.create_unbacked_symint()
        assert node_cost.hint(unknown) == node_cost.UNKNOWN_SIZE
        assert node_cost.bytes_of([x, (x,)]) == 2 * 12 * 5 * 4


def test_peak_bytes_counts_what_is_alive():
    def chain(x):
        a = torch.tanh(x)
        b = torch.sin(a)
        return torch.cos(b)

    with FakeTensorMode() as mode:
        gm = make_fx(chain)(mode.from_tensor(torch.rand(256)))
    next(iter(gm.graph.nodes)).name = "primals_1"
    assert node_cost.peak_bytes(list(gm.graph.nodes)) == 2 * 1024  # a node and its input; older ones are gone


def test_a_link_that_is_set_is_not_measured():
    class Group:
        group_name = "set by hand"

        def size(self):
            raise AssertionError("it was measured")

    assert link_speed.measure(Group(), torch.device("cpu"), 8.0) == 1e9
    assert link_speed.estimate("set by hand") == 1e9 and link_speed.estimate("another") == link_speed.DEFAULT
    del link_speed.bytes_per_second["set by hand"]


@pytest.mark.parametrize("found, seen", ((1.0e9, 2**30), (1.4e9, 2**30), (0.77e9, 2**30), (1.6e9, 2**31), (23e9, 2**34)))
def test_a_measured_link_is_rounded_to_a_power_of_two(monkeypatch, found, seen):
    """So the noise of a probe moves nothing."""
    monkeypatch.setattr(link_speed, "_probe", lambda group, device: found)
    group = SimpleNamespace(group_name="measured")
    assert link_speed.measure(group, torch.device("cpu")) == link_speed.estimate("measured") == seen
    del link_speed.bytes_per_second["measured"]
