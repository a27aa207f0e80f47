"""Facts about a graph shared between passes: its exchanges, and why a pass could not apply. And its text for tests,
logs and artifacts, `name = op(args)  # shape`, which is the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from freescale.compat import fx_values

# Keys of node.meta.
EXCHANGE_KEY = "freescale"  # the GraphExchange that starts at this node
LATE_KEY = "freescale_late"  # another one that this node starts before: late gradients (move_background.py)
PINNED_KEY = "freescale_pinned"  # this node's place among the compute must be kept by the compiler
# Provenance of a node. torch's other meta (such as the layouts of arguments) does not hold for new nodes.
_ORIGIN_KEYS = ("stack_trace", "nn_module_stack", "custom", "seq_nr")
WAIT = torch.ops._c10d_functional.wait_tensor.default


class CannotApply(Exception):
    """A pass found something it does not support. The graph is unchanged; the message says what and why."""


@dataclass(frozen=True)
class GraphExchange:
    """One embedding all-to-all of a graph, or one bucket of dense gradients.

    kind      "composite" for the dialect's exchange, "chunk" for one of its launches, "plain" for
              `_c10d_functional.all_to_all_single`, "dense" for an all-reduce
    payload   "rows" (owner to requester) or "gradients" (requester to owner)
    priority  "urgent", "late", "early" or "dense"
    bytes     received by this rank, symbolic
    launch    the node that starts it
    wait      the node that waits for it (the composite itself for a composite); None if this graph does not wait
    table     the table of the rows or gradients; empty for a plain one; the parameters of a dense one
    consumer  the first node that needs the result, or None if no node in this graph does
    """

    kind: str
    payload: str
    priority: str
    bytes: sympy.Expr
    launch: fx.Node
    wait: fx.Node | None
    consumer: fx.Node | None
    table: str = ""

    def __str__(self) -> str:
        return f"{self.priority} {self.payload}{f' of {self.table}' if self.table else ''}"


def exchanges(graph: fx.Graph) -> list[GraphExchange]:
    return [x for n in graph.nodes for x in exchanges_at(n)]


def exchanges_at(node: fx.Node) -> list[GraphExchange]:
    return [node.meta[key] for key in (LATE_KEY, EXCHANGE_KEY) if key in node.meta]


def dense_collectives(graph: fx.Graph) -> list[fx.Node]:
    """Averages of dense gradients, in graph order: launches of buckets, and gradients outside buckets."""
    fs = torch.ops.freescale
    ops = (fs.all_reduce_launch.default, fs.average_gradient.default)
    return [n for n in graph.nodes if n.target in ops]


def argument(node: fx.Node, name: str) -> Any:
    target: Any = node.target
    names = [a.name for a in target._schema.arguments]
    position = names.index(name)
    return node.args[position] if position < len(node.args) else node.kwargs[name]


def add_call(graph: fx.Graph, origin: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a call with a fake value and the provenance of `origin`."""
    return annotate(graph.call_function(target, args, kwargs), origin)


def annotate(node: fx.Node, origin: fx.Node) -> fx.Node:
    node.meta.update({k: origin.meta[k] for k in _ORIGIN_KEYS if k in origin.meta})
    node.meta["val"] = fx_values.fake_value(node)
    return node


def last_wait(launch: fx.Node) -> fx.Node | None:
    waits = waits_of(launch)
    return waits[-1] if waits else None


def waits_of(launch: fx.Node) -> list[fx.Node]:
    """The wait for a launch, and a wait for that (which occurs), in graph order."""
    waits: list[fx.Node] = []
    node = launch
    while (wait := next((u for u in node.users if u.target is WAIT), None)) is not None:
        waits.append(wait)
        node = wait
    return waits


def size_in_bytes(value: torch.Tensor, rows: Any = None) -> sympy.Expr:
    """Size of a tensor, or of `rows` rows of its width and dtype."""
    total = sympy.Integer(value.element_size())
    for s in value.shape if rows is None else (rows, *value.shape[1:]):
        total *= s.node.expr if isinstance(s, torch.SymInt) else sympy.Integer(s)
    return total


def first_user(node: fx.Node) -> fx.Node | None:
    """The first user in graph order that is not the output."""
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    users = [u for u in node.users if u.op != "output"]
    return min(users, key=order.__getitem__) if users else None


def graph_text(graph: fx.Graph) -> str:
    """One line per node; unused inputs are omitted."""
    return "\n".join(_line(n) for n in graph.nodes if n.op != "placeholder" or n.users)


def _line(node: fx.Node) -> str:
    shape = _shape(node.meta.get("val"))
    if node.op == "placeholder":
        return f"{node.name}: {shape}"
    if node.op == "output":
        return f"return {_value(node.args[0])}"
    name = str(node.target) if node.op == "call_function" else f"{node.op}[{node.target}]"
    if node.op == "call_function" and not isinstance(node.target, torch._ops.OperatorBase):
        name = getattr(node.target, "__name__", name)
    args = [_value(a) for a in node.args] + [f"{k}={_value(v)}" for k, v in node.kwargs.items()]
    text = f"{node.name} = {name.removesuffix('.default')}({', '.join(args)})"
    notes = [shape] if shape else []
    notes += [f"{x.priority} {x.payload}, {x.kind}, {x.bytes} bytes" for x in exchanges_at(node)]
    return f"{text}  # {'; '.join(notes)}" if notes else text


def _shape(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(_shape(v) or str(v) for v in value) + ")"
    return str(value) if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else ""


def _value(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    return str(value)
