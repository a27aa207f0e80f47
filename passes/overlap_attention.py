"""Order a graph so that the wire works under the compute and the compute waits for what it must wait for alone.

Needs:    find_exchanges has run, and split_exchanges where there are composites: a graph with one is left alone.
Promises: same nodes, same values. Launches leave in an order that follows from the graph alone: urgent ones and other
          collectives as they stood, then late gradients, then early rows. Reads and updates of a table, in-place
          changes and random numbers keep their order. Peak memory grows by the launched buffers at most.
Before:   launch u ; wait u ; launch late ; wait late ; update ; launch early ; dense forward
After:    launch u ; what does not need u ; wait u ; launch late ; attention ; wait late ; update ; launch early ;
          attention
Before:   dense backward with weight gradients ; launch u ; wait u ; update
After:    dense backward ; launch u ; weight gradients ; wait u ; update

A list scheduler walks the graph with a clock (node_cost.py): what is critical runs as soon as it can; where that is a
wait for something not there yet, other work that is ready runs first; background work is put where the wire is free for
it and the clock says that it has arrived.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import fx

from freescale.config import Config
from freescale.kernels.transports import link_speed
from freescale.passes import node_cost
from freescale.passes.exchange_meta import PINNED, WAIT, Exchange, argument, exchanges, wait_of

# The backward pass does this many times the work of the forward pass.
BACKWARD = 2.0
# How much of the work that would cover urgent launches is moved behind them, and whether what does not depend on a wait
# runs before it: the first that keeps the memory bound is taken.
_BOLDNESS = ((1.0, True), (0.5, True), (0.25, True), (0.125, True), (0.0, True), (0.0, False))
Order = list[fx.Node]


def overlap_attention(gm: fx.GraphModule, cfg: Config) -> int:
    """Return the number of exchanges placed."""
    found = exchanges(gm.graph)
    if not found or any(x.kind == "composite" for x in found):
        return 0
    before = list(gm.graph.nodes)
    machine = node_cost.machine(node_cost.device_of(before))
    seconds = {n: node_cost.seconds(n, machine) for n in before}
    limit = node_cost.peak_bytes(before) + sum(node_cost.hint(x.bytes) for x in found)
    for share, hoist in _BOLDNESS:
        order = _Scheduler(before, found, seconds, cfg.link_gbps * 1e9 / 8, share, hoist).run()
        if node_cost.peak_bytes(order) <= limit:
            break
    _apply(order)
    for x in found:
        for node in (x.launch, *_waits(x.launch)):
            node.meta[PINNED] = True
    return len(found)


def _apply(order: Order) -> None:
    *nodes, output = order
    for node in nodes:
        output.prepend(node)


# ---- what must stay in order ------------------------------------------------------------------------------------


def predecessors(nodes: Order, late_launches: Order, early_launches: Order) -> dict[fx.Node, dict[fx.Node, None]]:
    """Per node what must run before it: its inputs, and what data flow does not show."""
    before: dict[fx.Node, dict[fx.Node, None]] = {n: dict.fromkeys(n.all_input_nodes) for n in nodes}

    def chain(some: Iterable[fx.Node]) -> None:
        last: fx.Node | None = None
        for node in some:
            if last is not None:
                before[node][last] = None
            last = node

    background = {*late_launches, *early_launches}
    collectives = [n for n in nodes if is_collective(n) and n not in background]
    chain([*collectives, *late_launches, *early_launches])
    chain(n for n in nodes if _is_random(n))
    _keep_mutations(nodes, before)
    output = nodes[-1]
    for node in nodes[:-1]:
        before[output][node] = None
    return before


def is_collective(node: fx.Node) -> bool:
    """Every rank must start it at the same place among the others. Waits are not: they are about this rank."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or node.target is WAIT:
        return False
    if "c10d" in node.target.namespace:
        return True
    return any(a.name in ("group_name", "group") for a in node.target._schema.arguments)


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _keep_mutations(nodes: Order, before: dict[fx.Node, dict[fx.Node, None]]) -> None:
    """A node that changes a tensor in place stays behind its earlier readers and in front of its later ones."""
    storage: dict[fx.Node, fx.Node] = {}  # node -> the node whose storage its result lies in
    users: dict[fx.Node, Order] = {}
    writer: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        inputs = node.all_input_nodes
        storage[node] = storage[inputs[0]] if node_cost.is_view(node) and inputs else node
        written = {storage[n] for n in _written(node)}
        for base in {storage[n]: None for n in inputs}:
            if base in writer:
                before[node][writer[base]] = None
            if base in written:
                before[node].update(dict.fromkeys(u for u in users.get(base, []) if u is not node))
                writer[base] = node
                users[base] = []
            users.setdefault(base, []).append(node)


def _written(node: fx.Node) -> Order:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    found = []
    for i, a in enumerate(schema.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            value = node.args[i] if i < len(node.args) else node.kwargs.get(a.name)
            values = value if isinstance(value, (list, tuple)) else [value]
            found += [v for v in values if isinstance(v, fx.Node)]
    return found


# ---- the scheduler ----------------------------------------------------------------------------------------------


@dataclass
class _Wire:
    """When each launch arrives. Launches of one priority share a wire and follow each other."""

    free: dict[str, float] = field(default_factory=dict)
    arrival: dict[fx.Node, float] = field(default_factory=dict)

    def launch(self, x: Exchange, now: float, taken: float) -> None:
        start = max(now, self.free.get(x.priority, 0.0))
        self.arrival[x.launch] = self.free[x.priority] = start + taken


class _Scheduler:
    """One schedule of one graph; `share` and `hoist` as in _BOLDNESS."""

    def __init__(
        self,
        nodes: Order,
        found: list[Exchange],
        seconds: dict[fx.Node, float],
        link: float,
        share: float,
        hoist: bool,
    ) -> None:
        self.nodes, self.seconds, self.link, self.share, self.hoist = nodes, seconds, link, share, hoist
        self.position = {n: i for i, n in enumerate(nodes)}
        self.of_launch = {x.launch: x for x in found}
        self.of_wait = {w: x for x in found for w in _waits(x.launch)}
        self.late, self.early, self.urgent = (
            [x for x in found if x.priority == p] for p in ("late", "early", "urgent")
        )
        late, early = [x.launch for x in self.late], [x.launch for x in self.early]
        self.before = predecessors(nodes, late, early)
        self.after: dict[fx.Node, Order] = {n: [] for n in nodes}
        for node, earlier in self.before.items():
            for e in earlier:
                self.after[e].append(node)
        self.background = {n for n in self._below([*late, *early]) if n.op == "call_function"}
        self.waited = self._below([n for n in nodes if n.target is WAIT and n not in self.background])
        self.wire, self.now, self.compute_left = _Wire(), 0.0, sum(seconds.values())
        self.order: Order = []
        self.done: set[fx.Node] = set()

    def run(self) -> Order:
        sunk = self._sunk()
        main = [n for n in self.nodes if n not in sunk and n not in self.background and n.op != "output"]
        free = [n for n in main if n not in self.waited or not self.hoist]
        waited = [n for n in main if n in self.waited and self.hoist]
        background = sorted(self.background, key=self._background_key)
        for node in self.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._emit(node)
        for node in [*free, *sorted(sunk, key=self.position.__getitem__), *waited]:
            if node.target is not WAIT:  # a wait stands directly before its first consumer
                self._emit(node)
                background = self._emit_background(background)
        for node in [*main, *background, self.nodes[-1]]:
            self._emit(node)
        return self.order

    # -- what belongs to what -------------------------------------------------------------------------------------

    def _below(self, start: Order) -> set[fx.Node]:
        found = set(start)
        for node in self.nodes:
            if node.op != "output" and any(n in found for n in node.all_input_nodes):
                found.add(node)
        return found

    def _above(self, start: Order) -> set[fx.Node]:
        found, todo = set(start), list(start)
        while todo:
            new = [n for n in self.before[todo.pop()] if n not in found]
            found.update(new)
            todo += new
        return found

    def _sunk(self) -> dict[fx.Node, None]:
        """Work in front of the last urgent launch that no launch needs, the last first: it will cover them.

        All of it, whatever the batch that was traced sends: later ones may send more, and only memory is at stake.
        """
        sunk: dict[fx.Node, None] = {}
        launches = [x.launch for x in self.urgent]
        needed = self._above(launches)
        for node in reversed(self.nodes[: max(map(self.position.__getitem__, launches), default=0)]):
            if self._may_sink(node, needed, sunk):
                sunk[node] = None
        return dict.fromkeys(list(sunk)[: int(len(sunk) * self.share)])

    def _may_sink(self, node: fx.Node, needed: set[fx.Node], sunk: dict[fx.Node, None]) -> bool:
        if node.op != "call_function" or node in needed or node in self.background or node in self.waited:
            return False
        return all(u in sunk or u.op == "output" for u in self.after[node])

    def _background_key(self, node: fx.Node) -> tuple[int, int]:
        """All late launches, then what follows from them as it stood."""
        x = self.of_launch.get(node)
        return (0 if x is not None and x.priority == "late" else 1, self.position[node])

    # -- time -----------------------------------------------------------------------------------------------------

    def _wire_seconds(self, x: Exchange) -> float:
        """There are no late gradients in the first step, which is the one traced: as many as early rows will come."""
        like = [x, self.early[self.late.index(x)]] if x in self.late and len(self.late) == len(self.early) else [x]
        link = self.link or link_speed.estimate(argument(x.launch, "group_name"))
        return max(node_cost.wire_seconds(y.bytes, link) for y in like)

    def _urgent_under_way(self) -> bool:
        return any(n not in self.done for x in self.urgent for n in (x.launch, *_waits(x.launch)))

    def _emit_background(self, pending: Order) -> Order:
        """Those whose time has come; the others are returned."""
        if pending and self._urgent_under_way():
            return pending
        while pending and (pending[0] not in self.of_wait or self.now >= self._when(self.of_wait[pending[0]])):
            self._emit(pending[0])
            pending = pending[1:]
        return pending

    def _when(self, x: Exchange) -> float:
        """When to wait for late gradients: after they arrived, half-way to where it would be late for what follows.

        That is the end of this graph, or where the early rows would not arrive before the backward pass ends.
        """
        arrival = self.wire.arrival[x.launch]
        end = self.now + self.compute_left
        follows = sum(self._wire_seconds(y) for y in self.early)
        return max(arrival, (arrival + min(end, end * (1 + BACKWARD) - follows)) / 2)

    def _emit(self, node: fx.Node) -> None:
        """A node, and before it what must run before it, the first of its inputs first."""
        if node in self.done:
            return
        path = [(node, iter(self.before[node]))]
        while path:
            node, earlier = path[-1]
            missing = next((n for n in earlier if n not in self.done), None)
            if missing is not None:
                path.append((missing, iter(self.before[missing])))
            else:
                path.pop()
                self._run(node)

    def _run(self, node: fx.Node) -> None:
        if node in self.of_wait:
            self.now = max(self.now, self.wire.arrival[self.of_wait[node].launch])
        self.now += self.seconds[node]
        self.compute_left -= self.seconds[node]
        if node in self.of_launch:
            x = self.of_launch[node]
            self.wire.launch(x, self.now, self._wire_seconds(x))
        self.order.append(node)
        self.done.add(node)


def _waits(launch: fx.Node) -> Order:
    """A wait of a launch, and a wait of that: it happens."""
    found, node = [], wait_of(launch)
    while node is not None and node is not launch:
        found.append(node)
        node = node.args[0]  # type: ignore[assignment]
    return found


# ---- an order that a compiler must keep -------------------------------------------------------------------------


def bindings(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Per node those that must have run: what pins launches and waits to their place among the compute, and every
    collective behind the one before it.

    Only kernels of their own are named (cost.is_compute): pointwise work stays free to be fused.
    """
    found = _places(graph)
    for node, before in _in_turn(graph).items():
        if before not in found.setdefault(node, []):
            found[node].append(before)
    return {n: found[n] for n in graph.nodes if n in found}


def _in_turn(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Per collective the one before it, where data flow does not say so: a compiler, which looks at this rank's sizes,
    would be free to start the two in either order."""
    found: dict[fx.Node, fx.Node] = {}
    last: fx.Node | None = None
    behind: set[fx.Node] = set()  # nodes that run after it anyway
    for node in graph.nodes:
        if any(n in behind for n in node.all_input_nodes):
            behind.add(node)
        if is_collective(node):
            if last is not None and node not in behind:
                found[node] = last
            if result := _results([node]):
                last, behind = result[0], {node}
    return found


def _places(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    found: dict[fx.Node, list[fx.Node]] = {}
    pin: fx.Node | None = None
    behind: set[fx.Node] = set()  # nodes that run after the last pin anyway
    since: Order = []  # compute since the last pin
    for node in graph.nodes:
        if node.meta.get(PINNED):
            found[node] = [*([pin] if pin is not None else []), *_results(since)]
            pin, behind, since = node, {node}, []
        elif any(n in behind for n in node.all_input_nodes):
            behind.add(node)
        if node_cost.is_compute(node) and not node.meta.get(PINNED):
            since.append(node)
            if pin is not None and node not in behind:
                found[node] = [pin]
                behind.add(node)
    return {n: deps for n, deps in found.items() if deps}


def _results(nodes: Order) -> Order:
    """Of a node with several results the first that is used: only single tensors can be named. Of one without, none."""
    found = []
    for node in nodes:
        if isinstance(node.meta.get("val"), (tuple, list)):
            found += [u for u in node.users if u.target is operator.getitem][:1]
        elif node.meta.get("val") is not None:
            found.append(node)
    return found
