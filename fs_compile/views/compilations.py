"""Which graphs of a record belong together: the forward and the backward graph of one compilation.

One with a backward graph is called train. One without is called eval: nothing was trained through it. Each has a
timeline of its own, since a step never runs the forward graph of one and the backward graph of another.
"""

from __future__ import annotations

from typing import Any


def compilations(graphs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The graphs of each, by name and in order. The second compilation that trains is "train 2"."""
    together: dict[str, list[dict[str, Any]]] = {}
    for graph in graphs:
        together.setdefault(graph["compilation"], []).append(graph)
    named: dict[str, list[dict[str, Any]]] = {}
    count = {"train": 0, "eval": 0}
    for of_one in together.values():
        kind = "train" if any(g["direction"] == "backward" for g in of_one) else "eval"
        count[kind] += 1
        named[kind if count[kind] == 1 else f"{kind} {count[kind]}"] = of_one
    return named


def named_graphs(graphs: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Each with the name of its compilation, those of one compilation together."""
    return [(name, graph) for name, of_one in compilations(graphs).items() for graph in of_one]


def lacks_late_gradients(timeline: list[dict[str, Any]]) -> bool:
    """Of the traced batch: later ones send some."""
    return any(e["do"] == "launch" and e["priority"] == "late" and not e["bytes"] for e in timeline)
