"""Fake values of graph nodes, and hints of symbolic sizes."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx

from freescale.compat import dynamo_settings


def size_hint(size: Any, fallback: int) -> int:
    """Hint of a size (int, SymInt or expression) from the traced batch; `fallback` per unknown symbol."""
    if isinstance(size, torch.SymInt):
        node: Any = size.node
        if node.has_hint():
            return int(node.hint)
        shape_env, size = node.shape_env, node.expr
    elif isinstance(size, sympy.Expr) and size.free_symbols:
        from torch._inductor.virtualized import V

        shape_env = V.fake_mode.shape_env
    else:
        return int(size)
    known, planned = shape_env.backed_var_to_val, dynamo_settings.planned_hints(shape_env)
    values = {s: known.get(s, planned.get(s, fallback)) for s in size.free_symbols}
    return int(size.xreplace({s: sympy.Integer(n) for s, n in values.items()}))


def expression(size: Any) -> Any:
    """A size, symbolic or not, as an object that compares by form."""
    return size.node.expr if isinstance(size, (torch.SymInt, torch.SymFloat)) else sympy.sympify(size)


def fake_value(node: fx.Node) -> Any:
    def value(n: fx.Node) -> Any:
        return n.meta["val"]

    args, kwargs = fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)
    mode: Any = torch._guards.detect_fake_mode([*args, *kwargs.values()])
    with mode:
        return node.target(*args, **kwargs)  # type: ignore[operator]


def detect_fake_mode(gm: fx.GraphModule) -> Any:
    values = [n.meta.get("val") for n in gm.graph.nodes]
    return torch._guards.detect_fake_mode([v for v in values if isinstance(v, torch.Tensor)])
