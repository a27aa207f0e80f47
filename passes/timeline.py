"""A graph as a sequence of launches, waits and blocks of compute with times predicted by node_cost.py, for display."""

from __future__ import annotations

from typing import Any

from torch import fx

from freescale.kernels.transports import link_speed
from freescale.passes import node_cost
from freescale.passes.graph import GraphExchange, argument, exchanges, exchanges_at, waits_of


def timeline(graph: fx.Graph, bytes_per_second: float = 0.0) -> list[dict[str, Any]]:
    """In graph order. `bytes_per_second`: bandwidth of the link; 0: as measured.

    {"do": "launch", "what": "urgent rows of item", "payload", "priority", "table", "kind", "bytes", "size", "seconds"}
    {"do": "wait", "what": ...}
    {"do": "compute", "what": its first kernel that is not fused, or node, "nodes", "seconds"}
    """
    machine = node_cost.machine(node_cost.device_of(graph.nodes))
    waits = {wait: str(x) for x in exchanges(graph) for wait in waits_of(x.launch)[:1]}
    found: list[dict[str, Any]] = []
    for node in graph.nodes:
        if launched := exchanges_at(node):
            found += [_launch(x, bytes_per_second) for x in launched]
        elif node in waits:
            found.append({"do": "wait", "what": waits[node]})
        elif node.op == "call_function":
            _add_compute(found, node, node_cost.seconds(node, machine))
    return found


def _launch(x: GraphExchange, bytes_per_second: float) -> dict[str, Any]:
    if not bytes_per_second:
        bytes_per_second = link_speed.estimate(argument(x.launch, "group_name"))
    return {
        "do": "launch",
        "what": str(x),
        "payload": x.payload,
        "priority": x.priority,
        "table": x.table,
        "kind": x.kind,
        "bytes": max(node_cost.hint(x.bytes), 0),
        "size": str(x.bytes),
        "seconds": node_cost.wire_seconds(x.bytes, bytes_per_second),
    }


def _add_compute(found: list[dict[str, Any]], node: fx.Node, seconds: float) -> None:
    if not seconds:
        return
    if not found or found[-1]["do"] != "compute":
        found.append({"do": "compute", "what": node.name, "nodes": 0, "seconds": 0.0, "longest": 0.0})
    block = found[-1]
    block["nodes"] += 1
    block["seconds"] += seconds
    if seconds > block["longest"]:
        block["what"], block["longest"] = node.name, seconds
