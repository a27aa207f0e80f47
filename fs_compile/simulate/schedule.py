"""What a step does, as a program of compute, launches and waits: made by the pass that orders the compiled graphs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import sympy
from torch import fx

from freescale.passes.exchange_meta import EXCHANGE_KEY, WAIT, waits_of
from freescale.passes.overlap_attention import best_order
from freescale.simulate.events import Compute, Launch, Program, Wait
from freescale.simulate.traced_model import TracedGraph

Graphs = Mapping[str, TracedGraph]
# The step of whose batch a transfer is, seen from the step that launches it.
STEP_OF = {"early rows": 1, "late gradients": -1}


def program_of(
    graphs: Graphs, per_token: float, per_square: float, traced_bytes: Mapping[str, float], bytes_per_second: float
) -> Program:
    """The order that `overlap_attention` gives both graphs on a rank that computes so many seconds in a step, if the
    first batch sends so many bytes ("urgent rows", ...), and the launches, waits and compute of it.
    """
    total = {square: sum(_flops(g, square) for g in graphs.values()) for square in (False, True)}
    program: list[Compute | Launch | Wait] = []
    for direction in ("forward", "backward"):
        graph = graphs[direction]
        shares = {n: graph.flops[n] / max(total[n in graph.square], 1e-30) for n in graph.nodes}
        seconds = {n: share * (per_square if n in graph.square else per_token) for n, share in shares.items()}
        sized = [replace(x, bytes=sympy.Integer(round(traced_bytes[_name(x)]))) for x in graph.exchanges]
        order = best_order(graph.nodes, sized, seconds, bytes_per_second, graph.max_bytes)
        program += _instructions(order, graph, shares)
    return _joined(program)


def _flops(graph: TracedGraph, square: bool) -> float:
    return sum(f for n, f in graph.flops.items() if (n in graph.square) == square)


def _name(x: object) -> str:
    return f"{x.priority} {x.payload}"  # type: ignore[attr-defined]


def _instructions(order: list[fx.Node], graph: TracedGraph, shares: Mapping[fx.Node, float]) -> Iterable:
    launched = {w: x for x in graph.exchanges for w in waits_of(x.launch)}
    for node in order:
        if EXCHANGE_KEY in node.meta:
            name = _name(node.meta[EXCHANGE_KEY])
            yield Launch(name, STEP_OF.get(name, 0))
        elif node in launched:
            name = _name(launched[node])
            yield Wait(name, STEP_OF.get(name, 0))
        elif node.target is WAIT:  # launched by the step before
            yield Wait("early rows")
        elif "plan_now" in str(node.target):
            yield from (Launch("requests"), Wait("requests"))
        elif shares[node]:
            yield Compute(0.0, shares[node]) if node in graph.square else Compute(shares[node], 0.0)


def _joined(program: list) -> Program:
    """Compute that nothing comes between becomes one."""
    joined: list = []
    for instruction in program:
        if joined and isinstance(instruction, Compute) and isinstance(joined[-1], Compute):
            joined[-1] = Compute(*(a + b for a, b in zip(joined[-1], instruction, strict=True)))
        else:
            joined.append(instruction)
    return joined
