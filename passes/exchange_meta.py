"""What passes know of a graph and tell each other: the exchanges, and why a pass could not apply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

KEY = "freescale"  # node.meta[KEY] holds the Exchange of a node that starts one
# Where a node came from. What torch noted about the call itself (its arguments' layouts) is not true of new nodes.
ORIGIN = ("stack_trace", "nn_module_stack", "custom", "seq_nr")
PINNED = "freescale_pinned"  # set on a node whose place among the compute the compiler must keep
WAIT = torch.ops._c10d_functional.wait_tensor.default


class CannotApply(Exception):
    """A pass met something it does not handle. The graph is untouched; the message says what and why."""


@dataclass(frozen=True)
class Exchange:
    """One embedding all-to-all of a graph.

    kind      "composite" for the dialect's exchange, "chunk" for one of its launches, "plain" for
              `_c10d_functional.all_to_all_single`
    way       "rows" (owner to requester) or "gradients" (requester to owner)
    priority  "urgent", "late" or "early"
    bytes     received by this rank, symbolic
    launch    the node that starts it
    wait      the node that waits for it; of a composite, the composite itself; None if this graph does not wait
    table     whose rows or gradients; empty for a plain one
    consumer  the first node that needs what arrived, None if nothing in this graph does
    """

    kind: str
    way: str
    priority: str
    bytes: sympy.Expr
    launch: fx.Node
    wait: fx.Node | None
    consumer: fx.Node | None
    table: str = ""

    def __str__(self) -> str:
        return f"{self.priority} {self.way}{f' of {self.table}' if self.table else ''}"


def exchanges(graph: fx.Graph) -> list[Exchange]:
    """Those that `find_exchanges` marked, in graph order."""
    return [n.meta[KEY] for n in graph.nodes if KEY in n.meta]


def argument(node: fx.Node, name: str) -> Any:
    """The argument `name` of a node that calls an op of ours."""
    target: Any = node.target
    names = [a.name for a in target._schema.arguments]
    position = names.index(name)
    return node.args[position] if position < len(node.args) else node.kwargs[name]


def wait_of(launch: fx.Node) -> fx.Node | None:
    """The last wait of a launched tensor (a wait of a wait happens), None if the graph has none."""
    found: fx.Node | None = None
    node = launch
    while (after := next((u for u in node.users if u.target is WAIT), None)) is not None:
        found = node = after
    return found


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
