"""A short text of a graph, for tests, logs and artifacts: `name = op(args)  # shape`.

Long runs of nodes that no exchange touches can be shortened; the text does not depend on the rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from freescale.passes.facts import KEY


def graph_text(graph: fx.Graph, keep: Callable[[fx.Node], bool] | None = None) -> str:
    """`keep` chooses the nodes to show; the others become `... n nodes`."""
    lines: list[str] = []
    hidden = 0
    for node in graph.nodes:
        if node.op == "placeholder" and not node.users:
            continue
        if keep is not None and node.op != "output" and not keep(node):
            hidden += 1
            continue
        if hidden:
            lines.append(f"... {hidden} nodes")
            hidden = 0
        lines.append(_line(node))
    return "\n".join(lines)


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
    if KEY in node.meta:
        x = node.meta[KEY]
        notes.append(f"{x.priority} {x.way}, {x.kind}, {x.bytes} bytes")
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
