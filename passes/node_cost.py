"""Cost model: seconds per node, as pure functions of a graph's sizes and the machine's speed.

Symbolic sizes use their hints, the sizes of the traced batch. Estimates only affect where nodes are placed among this
rank's compute, never what is launched or in which order.

    floating-point work    torch's formulas (torch.utils.flop_counter); user ops are added with
                           `register_flop_formula`
    everything else        bytes accessed; for pointwise ops, which are fused, the output only
    a user op without      measured once, on random data of the hinted sizes, if all its tensors are floating-point
    a formula              (others may hold offsets or ids); otherwise bytes accessed, with a log line
"""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from freescale.compat import dynamo, fx_values
from freescale.passes.graph import WAIT

log = logging.getLogger(__name__)

UNKNOWN_SIZE = 4096  # of a data-dependent symbol
KNOWN_NAMESPACES = ("aten", "prims", "fbgemm", "freescale", "_c10d_functional")  # all other ops are user ops
_REPETITIONS = 3


@dataclass(frozen=True)
class MachineSpeed:
    flops: float  # floating-point operations
    memory: float  # bytes read or written


def wire_seconds(size: sympy.Expr, bytes_per_second: float) -> float:
    return max(hint(size), 0) / bytes_per_second


def hint(size: Any) -> int:
    return fx_values.size_hint(size, UNKNOWN_SIZE)


def bytes_of(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(bytes_of(v) for v in value)
    if not isinstance(value, torch.Tensor):
        return 0
    total = value.element_size()
    for s in value.shape:
        total *= hint(s)
    return total


def is_view(node: fx.Node) -> bool:
    """Whether the node's result aliases an argument's storage."""
    if node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)


def is_compute(node: fx.Node) -> bool:
    """Whether the node is never fused: matrix products, attention, user ops."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    if node.target in (torch.ops.higher_order.triton_kernel_wrapper_functional,):
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target.namespace not in KNOWN_NAMESPACES:
        return True
    return node.target.overloadpacket in flop_registry


def seconds(node: fx.Node, machine: MachineSpeed) -> float:
    value = node.meta.get("val")
    if node.op != "call_function" or node.target is WAIT or is_view(node) or not _has_tensors(value):
        return 0.0
    target: Any = node.target
    out = bytes_of(value)
    if torch.Tag.pointwise in getattr(target, "tags", ()):
        return out / machine.memory
    touched = (out + sum(bytes_of(n.meta.get("val")) for n in node.all_input_nodes)) / machine.memory
    if isinstance(target, torch._ops.OpOverload):
        if target.overloadpacket in flop_registry:
            return max(_flops(node) / machine.flops, touched)
        if target.namespace not in KNOWN_NAMESPACES:
            return max(_measured(node), touched)
    return touched


def _has_tensors(value: Any) -> bool:
    values = value if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(v, torch.Tensor) for v in values)


def _flops(node: fx.Node) -> float:
    target: Any = node.target

    def sized(n: fx.Node) -> Any:
        return _with_hinted_sizes(n.meta.get("val"), lambda shape, v: torch.empty(shape, dtype=v.dtype, device="meta"))

    with dynamo.no_modes():
        args, kwargs = fx.map_arg(node.args, sized), fx.map_arg(node.kwargs, sized)
        return float(flop_registry[target.overloadpacket](*args, **kwargs, out_val=sized(node)))


def _with_hinted_sizes(value: Any, make: Callable[[list[int], torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_with_hinted_sizes(v, make) for v in value)
    if isinstance(value, torch.Tensor):
        return make([hint(s) for s in value.shape], value)
    return hint(value) if isinstance(value, torch.SymInt) else value


_seconds_of_op: dict[tuple[Any, ...], float] = {}


def _measured(node: fx.Node) -> float:
    """Time of a user op on random data, measured once per op and sizes in a process."""
    values = [n.meta.get("val") for n in node.all_input_nodes]
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    key = (str(node.target), *((str(v.dtype), *map(hint, v.shape)) for v in tensors))
    if key not in _seconds_of_op:
        _seconds_of_op[key] = _time_op(node) if all(v.is_floating_point() for v in tensors) else 0.0
        if _seconds_of_op[key] == 0.0:
            log.info(
                "the cost of %s is estimated from its bytes; register its FLOPs with torch.utils.flop_counter",
                node.target,
            )
    return _seconds_of_op[key]


def _time_op(node: fx.Node) -> float:
    """Seconds of the op on random data; 0 if it fails."""
    def real(n: fx.Node) -> Any:
        return _with_hinted_sizes(n.meta.get("val"), lambda shape, v: torch.rand(shape, device=v.device).to(v.dtype))

    try:
        with dynamo.no_modes(), torch.no_grad():
            args, kwargs = fx.map_arg(node.args, real), fx.map_arg(node.kwargs, real)
            return fastest(lambda: node.target(*args, **kwargs), node.meta["val"])  # type: ignore[operator]
    except Exception as error:  # noqa: BLE001  (whatever an op does with data that it was not made for)
        log.info("%s measurement failed: %s", node.target, error)
        return 0.0


def fastest(run: Callable[[], Any], result: Any) -> float:
    """The shortest of a few runs, in seconds; `result` is on the device of the run."""
    values = result if isinstance(result, (list, tuple)) else [result]
    cuda = any(isinstance(v, torch.Tensor) and v.device.type == "cuda" for v in values)
    best = float("inf")
    for _ in range(_REPETITIONS):
        start = time.perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


@cache
def machine(device_type: str) -> MachineSpeed:
    """Speed of this rank, measured once per process with one matrix product and one copy."""
    n = 4096 if device_type == "cuda" else 384
    with dynamo.no_modes(), torch.no_grad():
        a = torch.rand(n, n, device=device_type)
        b = torch.rand(1 << (28 if device_type == "cuda" else 22), device=device_type)
        product = fastest(lambda: a @ a, a)
        copy = fastest(lambda: b.clone(), b)
    return MachineSpeed(flops=2 * n**3 / product, memory=2 * b.numel() * b.element_size() / copy)


def device_of(nodes: Iterable[fx.Node]) -> str:
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            return str(value.device.type)
    return "cpu"


def peak_bytes(order: list[fx.Node]) -> int:
    """Peak memory if the nodes run in this order: results, and what the forward pass saved. (AOTAutograd names inputs
    that a graph may not free, parameters and the batch, `primals_*`.)"""
    position = {n: i for i, n in enumerate(order)}
    frees: list[int] = [0] * (len(order) + 1)
    held = peak = 0
    for i, node in enumerate(order):
        saved = node.op == "placeholder" and not node.name.startswith("primals")
        if saved or node.op == "call_function" and not is_view(node) and node.target is not WAIT:
            size = bytes_of(node.meta.get("val"))
            held += size
            frees[last_use(node, position)] += size
        peak = max(peak, held)
        held -= frees[i]
    return peak


def last_use(node: fx.Node, position: dict[fx.Node, int]) -> int:
    """Position of the last use of a result, directly or through its views."""
    last, todo, seen = position[node], [node], {node}
    while todo:
        for user in todo.pop().users:
            if user in seen:
                continue
            seen.add(user)
            last = max(last, position.get(user, last))
            if user.op == "call_function" and (is_view(user) or user.target is WAIT):
                todo.append(user)
    return last
