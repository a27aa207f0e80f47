"""A short text form of a graph, for tests, logs and artifacts: `name = op(args)  # shape`.

It is the same on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from freescale.passes.exchange_meta import EXCHANGE_KEY


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
    if EXCHANGE_KEY in node.meta:
        x = node.meta[EXCHANGE_KEY]
        notes.append(f"{x.priority} {x.payload}, {x.kind}, {x.bytes} bytes")
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
