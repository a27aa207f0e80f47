"""Group the graphs of a record by compilation: a forward and its backward graph.

A compilation with a backward graph is called train, one without is called eval. Each has its own timeline, since a step
never mixes graphs of two compilations.
"""

from __future__ import annotations

from typing import Any


def compilations(graphs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The graphs of each compilation, by name and in order. The second one that trains is "train 2"."""
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
    """Each graph with the name of its compilation, grouped by compilation."""
    return [(name, graph) for name, of_one in compilations(graphs).items() for graph in of_one]


def lacks_late_gradients(timeline: list[dict[str, Any]]) -> bool:
    """Whether the traced batch has none; later batches send some."""
    return any(e["do"] == "launch" and e["priority"] == "late" and not e["bytes"] for e in timeline)
