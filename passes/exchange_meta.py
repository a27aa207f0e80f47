"""What passes know of a graph and tell each other: the exchanges, and why a pass could not apply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

# Keys of node.meta.
EXCHANGE_KEY = "freescale"  # the GraphExchange that the node starts
PINNED_KEY = "freescale_pinned"  # set on a node whose place among the compute the compiler must keep
# Where a node came from. What torch noted about the call itself (its arguments' layouts) is not true of new nodes.
ORIGIN_KEYS = ("stack_trace", "nn_module_stack", "custom", "seq_nr")
WAIT = torch.ops._c10d_functional.wait_tensor.default


class CannotApply(Exception):
    """A pass met something it does not handle. The graph is untouched; the message says what and why."""


@dataclass(frozen=True)
class GraphExchange:
    """One embedding all-to-all of a graph, or one bucket of dense gradients.

    kind      "composite" for the dialect's exchange, "chunk" for one of its launches, "plain" for
              `_c10d_functional.all_to_all_single`, "dense" for an all-reduce
    payload   "rows" (owner to requester) or "gradients" (requester to owner)
    priority  "urgent", "late", "early" or "dense"
    bytes     received by this rank, symbolic
    launch    the node that starts it
    wait      the node that waits for it; of a composite, the composite itself; None if this graph does not wait
    table     whose rows or gradients; empty for a plain one; parameters of a dense one
    consumer  the first node that needs what arrived, None if nothing in this graph does
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
    """Those that `find_exchanges` marked, in graph order."""
    return [n.meta[EXCHANGE_KEY] for n in graph.nodes if EXCHANGE_KEY in n.meta]


def dense_collectives(graph: fx.Graph) -> list[fx.Node]:
    """What averages dense gradients, in graph order: launches of buckets, and gradients that are in none."""
    fs = torch.ops.freescale
    ops = (fs.all_reduce_launch.default, fs.average_gradient.default)
    return [n for n in graph.nodes if n.target in ops]


def argument(node: fx.Node, name: str) -> Any:
    """The argument `name` of a node that calls an op of ours."""
    target: Any = node.target
    names = [a.name for a in target._schema.arguments]
    position = names.index(name)
    return node.args[position] if position < len(node.args) else node.kwargs[name]


def last_wait(launch: fx.Node) -> fx.Node | None:
    """The last wait of a launched tensor, None if the graph has none."""
    waits = waits_of(launch)
    return waits[-1] if waits else None


def waits_of(launch: fx.Node) -> list[fx.Node]:
    """The wait of a launch, and the wait of that, which happens: in the order of the graph."""
    waits: list[fx.Node] = []
    node = launch
    while (wait := next((u for u in node.users if u.target is WAIT), None)) is not None:
        waits.append(wait)
        node = wait
    return waits


def size_in_bytes(value: torch.Tensor, rows: Any = None) -> sympy.Expr:
    """Of a tensor, or of `rows` rows like those of the tensor."""
    total = sympy.Integer(value.element_size())
    for s in value.shape if rows is None else (rows, *value.shape[1:]):
        total *= s.node.expr if isinstance(s, torch.SymInt) else sympy.Integer(s)
    return total


def first_user(node: fx.Node) -> fx.Node | None:
    """The first user in graph order that is not the output."""
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    users = [u for u in node.users if u.op != "output"]
    return min(users, key=order.__getitem__) if users else None
