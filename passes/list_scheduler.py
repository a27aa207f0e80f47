"""List scheduler of overlap_attention: simulates time over a graph and decides the order of its nodes. Critical nodes
run as early as possible; while one waits for data in flight, other ready work runs. Background work is placed where its
link is idle and where the clock predicts its arrival. Dense gradients are launched when they are complete and the
urgent ones before them have arrived; the waits for them are at the end."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from freescale.kernels.transports import link_speed
from freescale.passes import node_cost
from freescale.passes.graph import WAIT, GraphExchange, argument, waits_of
from freescale.passes.node_order import Order, predecessors

BACKWARD_WORK = 2.0  # cost of the backward pass relative to the forward pass


@dataclass
class _Wire:
    """Arrival times of launches. Those of one group share a link and run one after another."""

    free_at: dict[str, float] = field(default_factory=dict)  # by priority
    arrival: dict[fx.Node, float] = field(default_factory=dict)  # by launch

    def launch(self, x: GraphExchange, now: float, seconds: float) -> None:
        wire = "urgent" if x.priority == "dense" else x.priority
        start = max(now, self.free_at.get(wire, 0.0))
        self.arrival[x.launch] = self.free_at[wire] = start + seconds


class ListScheduler:
    """One schedule of one graph.

    seconds           compute time of each node on this rank
    bytes_per_second  bandwidth of the link; 0: as measured for the group of each launch
    sink_share        share of the work that could cover urgent launches to move after them
    hoist             run work that does not depend on a wait before the wait
    """

    def __init__(
        self,
        nodes: Order,
        exchanges: list[GraphExchange],
        seconds: dict[fx.Node, float],
        bytes_per_second: float,
        sink_share: float,
        hoist: bool,
    ) -> None:
        self.nodes, self.seconds, self.bytes_per_second = nodes, seconds, bytes_per_second
        self.sink_share, self.hoist = sink_share, hoist
        self.position = {n: i for i, n in enumerate(nodes)}
        self.exchange_of_launch = {x.launch: x for x in exchanges}
        self.exchange_of_wait = {w: x for x in exchanges for w in waits_of(x.launch)}
        self.late, self.early, self.urgent, dense_exchanges = (
            [x for x in exchanges if x.priority == p] for p in ("late", "early", "urgent", "dense")
        )
        late, early, dense = ([x.launch for x in which] for which in (self.late, self.early, dense_exchanges))
        self.predecessors = predecessors(nodes, [*dense, *late, *early])
        self.successors: dict[fx.Node, Order] = {n: [] for n in nodes}
        for node, earlier in self.predecessors.items():
            for e in earlier:
                self.successors[e].append(node)
        self.background = {n for n in self._descendants([*late, *early]) if n.op == "call_function"}
        self.dense_launches = dense
        self.dense = self._descendants(dense)  # only the output needs these results
        aside = self.background | self.dense
        self.after_waits = self._descendants([n for n in nodes if n.target is WAIT and n not in aside])
        self.wire, self.now, self.compute_left = _Wire(), 0.0, sum(seconds.values())
        self.order: Order = []
        self.scheduled: set[fx.Node] = set()

    def run(self) -> Order:
        sunk = self._nodes_to_sink()
        aside = self.background | self.dense
        main = [n for n in self.nodes if n not in sunk and n not in aside and n.op != "output"]
        first = [n for n in main if n not in self.after_waits or not self.hoist]
        last = [n for n in main if n in self.after_waits and self.hoist]
        background = sorted(self.background, key=self._background_order)
        dense = list(self.dense_launches)
        for node in self.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._schedule(node)
        for node in [*first, *sorted(sunk, key=self.position.__getitem__), *last]:
            if node.target is not WAIT:  # a wait is placed directly before its first consumer
                for wait in [n for n in self.predecessors[node] if n.target is WAIT]:
                    self._schedule(wait)
                dense = self._schedule_dense(dense)
                self._schedule(node)
                dense = self._schedule_dense(dense)
                background = self._schedule_background(background)
        dense += sorted(self.dense, key=self.position.__getitem__)
        for node in [*main, *dense, *background, self.nodes[-1]]:
            self._schedule(node)
        return self.order

    # -- dependencies ---------------------------------------------------------------------------------------------

    def _descendants(self, start: Order) -> set[fx.Node]:
        reached = set(start)
        for node in self.nodes:
            if node.op != "output" and any(n in reached for n in node.all_input_nodes):
                reached.add(node)
        return reached

    def _ancestors(self, start: Order) -> set[fx.Node]:
        reached, todo = set(start), list(start)
        while todo:
            new = [n for n in self.predecessors[todo.pop()] if n not in reached]
            reached.update(new)
            todo += new
        return reached

    def _nodes_to_sink(self) -> dict[fx.Node, None]:
        """Work before the last urgent launch that no launch needs, latest first: it will cover the urgent launches. All
        of it, regardless of the traced batch's sizes: later batches may send more, and the only cost is memory."""
        sunk: dict[fx.Node, None] = {}
        launches = [x.launch for x in self.urgent]
        needed = self._ancestors(launches)
        for node in reversed(self.nodes[: max(map(self.position.__getitem__, launches), default=0)]):
            if self._may_sink(node, needed, sunk):
                sunk[node] = None
        return dict.fromkeys(list(sunk)[: int(len(sunk) * self.sink_share)])

    def _may_sink(self, node: fx.Node, needed: set[fx.Node], sunk: dict[fx.Node, None]) -> bool:
        if node.op != "call_function" or node in needed or node in self.after_waits:
            return False
        if node in self.background or node in self.dense:
            return False
        return all(u in sunk or u in self.dense or u.op == "output" for u in self.successors[node])

    def _background_order(self, node: fx.Node) -> tuple[int, int]:
        """All late launches, then what depends on them in the original order."""
        x = self.exchange_of_launch.get(node)
        return (0 if x is not None and x.priority == "late" else 1, self.position[node])

    # -- time -----------------------------------------------------------------------------------------------------

    def _wire_seconds(self, x: GraphExchange) -> float:
        """Predicted transfer time. The traced step has no late gradients: assume as many as early rows."""
        same_size = [x]
        if x in self.late and len(self.late) == len(self.early):
            same_size.append(self.early[self.late.index(x)])
        bytes_per_second = self.bytes_per_second or link_speed.estimate(argument(x.launch, "group_name"))
        return max(node_cost.wire_seconds(y.bytes, bytes_per_second) for y in same_size)

    def _schedule_dense(self, pending: Order) -> Order:
        """Launch what is ready after the urgent gradients should have arrived; return the rest."""
        if any(self.now < self.wire.arrival.get(x.launch, self.now + 1.0) for x in self.urgent):
            return pending
        while pending and all(n in self.scheduled for n in self.predecessors[pending[0]]):
            self._schedule(pending[0])
            pending = pending[1:]
        return pending

    def _schedule_background(self, pending: Order) -> Order:
        """Schedule the nodes whose time has come; return the rest."""
        in_flight = (n not in self.scheduled for x in self.urgent for n in (x.launch, *waits_of(x.launch)))
        if pending and any(in_flight):
            return pending
        while pending:
            x = self.exchange_of_wait.get(pending[0])
            if x is not None and self.now < self._wait_time(x):
                break
            self._schedule(pending[0])
            pending = pending[1:]
        return pending

    def _wait_time(self, x: GraphExchange) -> float:
        """When to wait for late gradients: after they arrived, halfway to the deadline: the end of this graph, or the
        point after which early rows would not arrive within the backward pass."""
        arrival = self.wire.arrival[x.launch]
        end = self.now + self.compute_left
        early_rows = sum(self._wire_seconds(y) for y in self.early)
        return max(arrival, (arrival + min(end, end * (1 + BACKWARD_WORK) - early_rows)) / 2)

    def _schedule(self, node: fx.Node) -> None:
        """Append a node after everything that must run before it, in the order of its inputs."""
        if node in self.scheduled:
            return
        path = [(node, iter(self.predecessors[node]))]
        while path:
            node, earlier = path[-1]
            missing = next((n for n in earlier if n not in self.scheduled), None)
            if missing is not None:
                path.append((missing, iter(self.predecessors[missing])))
            else:
                path.pop()
                self._append(node)

    def _append(self, node: fx.Node) -> None:
        if node in self.exchange_of_wait:
            self.now = max(self.now, self.wire.arrival[self.exchange_of_wait[node].launch])
        self.now += self.seconds[node]
        self.compute_left -= self.seconds[node]
        if node in self.exchange_of_launch:
            x = self.exchange_of_launch[node]
            self.wire.launch(x, self.now, self._wire_seconds(x))
        self.order.append(node)
        self.scheduled.add(node)
