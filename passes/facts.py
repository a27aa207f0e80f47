"""What passes know of a graph and tell each other: the exchanges, and why a pass could not apply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

KEY = "freescale"  # node.meta[KEY] holds the Exchange of a node that starts one


class CannotApply(Exception):
    """A pass met something it does not handle. The graph is untouched; the message says what and why."""


@dataclass(frozen=True)
class Exchange:
    """One embedding all-to-all of a graph.

    kind      "composite" for the dialect's op, "plain" for `_c10d_functional.all_to_all_single`
    way       "rows" (owner to requester) or "gradients" (requester to owner)
    bytes     received by this rank, symbolic
    launch    the node that starts it
    wait      the node that waits for it; of a composite, the composite itself
    consumer  the first node that needs what arrived, None if nothing in this graph does
    """

    kind: str
    way: str
    bytes: sympy.Expr
    launch: fx.Node
    wait: fx.Node
    consumer: fx.Node | None


def exchanges(graph: fx.Graph) -> list[Exchange]:
    """Those that `find_exchanges` marked, in graph order."""
    return [n.meta[KEY] for n in graph.nodes if KEY in n.meta]


def composite_of(node: fx.Node) -> Any:
    """The freescale op that a node calls, seen through functionalization of in-place ops; None for others."""
    if node.op != "call_function":
        return None
    target: Any = node.target
    if getattr(target, "__name__", "") in ("auto_functionalized", "auto_functionalized_v2"):
        target = node.args[0]
    return target if getattr(target, "namespace", None) == "freescale" else None


def argument(node: fx.Node, name: str) -> Any:
    """The argument `name` of a freescale op, functionalized or not; of an in-place one, what it changes."""
    op: Any = composite_of(node)
    target: Any = node.target
    if target is op:
        names = [a.name for a in op._schema.arguments]
        position = names.index(name)
        return node.args[position] if position < len(node.args) else node.kwargs[name]
    if name in node.kwargs:
        return node.kwargs[name]
    return node.kwargs["_all_bases"][node.kwargs[f"_{name}_base_index"]]  # type: ignore[index]


def size_in_bytes(value: torch.Tensor) -> sympy.Expr:
    total = sympy.Integer(value.element_size())
    for s in value.shape:
        total *= s.node.expr if isinstance(s, torch.SymInt) else sympy.Integer(s)
    return total


def first_user(node: fx.Node) -> fx.Node | None:
    """The first user in graph order that is not the output."""
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    users = [u for u in node.users if u.op != "output"]
    return min(users, key=order.__getitem__) if users else None
