"""Ordering constraints between nodes that data flow does not express: `predecessors` for the pass that reorders the
graph (list_scheduler.py), `control_dependencies` for the compiler, which might reorder it again."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx

from freescale.passes import node_cost
from freescale.passes.graph import PINNED_KEY, WAIT

Order = list[fx.Node]


def predecessors(nodes: Order, last_launches: Order) -> dict[fx.Node, dict[fx.Node, None]]:
    """For each node, what must run before it. `last_launches` follow all other collectives, in this order."""
    before: dict[fx.Node, dict[fx.Node, None]] = {n: dict.fromkeys(n.all_input_nodes) for n in nodes}

    def chain(nodes_in_order: Iterable[fx.Node]) -> None:
        previous: fx.Node | None = None
        for node in nodes_in_order:
            if previous is not None:
                before[node][previous] = None
            previous = node

    last = set(last_launches)
    chain([*(n for n in nodes if is_collective(n) and n not in last), *last_launches])
    chain(n for n in nodes if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()))
    _keep_mutations(nodes, before)
    output = nodes[-1]
    for node in nodes[:-1]:
        before[output][node] = None
    return before


def is_collective(node: fx.Node) -> bool:
    """Whether all ranks must start it in the same order among collectives. Waits are local."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or node.target is WAIT:
        return False
    if "c10d" in node.target.namespace:
        return True
    return any(a.name in ("group_name", "group") for a in node.target._schema.arguments)


def _keep_mutations(nodes: Order, before: dict[fx.Node, dict[fx.Node, None]]) -> None:
    """In-place changes stay after earlier readers of the tensor and before later ones."""
    storage: dict[fx.Node, fx.Node] = {}  # node -> the node that owns its result's storage
    users: dict[fx.Node, Order] = {}
    writer: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        inputs = node.all_input_nodes
        storage[node] = storage[inputs[0]] if node_cost.is_view(node) and inputs else node
        written = {storage[n] for n in _written_inputs(node)}
        for base in {storage[n]: None for n in inputs}:
            if base in writer:
                before[node][writer[base]] = None
            if base in written:
                before[node].update(dict.fromkeys(u for u in users.get(base, []) if u is not node))
                writer[base] = node
                users[base] = []
            users.setdefault(base, []).append(node)


def _written_inputs(node: fx.Node) -> Order:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    written = []
    for i, a in enumerate(schema.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            value = node.args[i] if i < len(node.args) else node.kwargs.get(a.name)
            values = value if isinstance(value, (list, tuple)) else [value]
            written += [v for v in values if isinstance(v, fx.Node)]
    return written


def control_dependencies(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node, those that must run before it: pins launches and waits to their place among the compute, and
    orders each collective after the previous one. Only unfused kernels are named: pointwise work stays free to be
    fused."""
    dependencies = _pinned_places(graph)
    for node, before in _previous_collectives(graph).items():
        if before not in dependencies.setdefault(node, []):
            dependencies[node].append(before)
    return {n: dependencies[n] for n in graph.nodes if n in dependencies}


def _previous_collectives(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The previous collective of each collective, if data flow does not order the two: the compiler, which sees only
    this rank's sizes, could start them in either order."""
    previous: dict[fx.Node, fx.Node] = {}
    last: fx.Node | None = None
    after_last: set[fx.Node] = set()  # nodes that run after it in any case
    for node in graph.nodes:
        if any(n in after_last for n in node.all_input_nodes):
            after_last.add(node)
        if is_collective(node):
            if last is not None and node not in after_last:
                previous[node] = last
            if result := _nameable_results([node]):
                last, after_last = result[0], {node}
    return previous


def _pinned_places(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    dependencies: dict[fx.Node, list[fx.Node]] = {}
    pin: fx.Node | None = None
    after_last: set[fx.Node] = set()  # nodes that run after the last pin (a launch or a wait) in any case
    compute_since: Order = []  # since the last pin
    for node in graph.nodes:
        if node.meta.get(PINNED_KEY):
            dependencies[node] = [*([pin] if pin is not None else []), *_nameable_results(compute_since)]
            pin, after_last, compute_since = node, {node}, []
        elif any(n in after_last for n in node.all_input_nodes):
            after_last.add(node)
        if node_cost.is_compute(node) and not node.meta.get(PINNED_KEY):
            compute_since.append(node)
            if pin is not None and node not in after_last:
                dependencies[node] = [pin]
                after_last.add(node)
    return {n: deps for n, deps in dependencies.items() if deps}


def _nameable_results(nodes: Order) -> Order:
    """Nodes with several results are represented by the first used one, since only single tensors can be named."""
    results = []
    for node in nodes:
        if isinstance(node.meta.get("val"), (tuple, list)):
            results += [u for u in node.users if u.target is operator.getitem][:1]
        elif node.meta.get("val") is not None:
            results.append(node)
    return results
