"""Reorder a graph to overlap transfers with compute, so that compute waits only for data it needs.

Needs:    find_exchanges has run, and split_exchanges if there are composites: a graph with one is left unchanged.
Promises: same nodes, same values. The order of launches depends only on the graph: urgent ones and other collectives
          in their original order, then dense gradients, late gradients, early rows. Reads and updates of a table,
          in-place changes and random numbers keep their order. Peak memory grows at most by the launched buffers.
By rank:  where launches and waits are placed among the compute depends on the batch sizes that this rank traced and on
          its measurements (link, FLOPS, memory bandwidth, ops without a formula), so it may differ between ranks. The
          order of launches does not differ, which the graph's `agree` op checks.
Before:   launch u ; wait u ; launch late ; wait late ; update ; launch early ; dense forward
After:    launch u ; what does not need u ; wait u ; launch late ; attention ; wait late ; update ; launch early ;
          attention
Before:   dense backward with weight gradients ; launch u ; wait u ; update
After:    dense backward ; launch u ; weight gradients ; wait u ; update
Before:   dense backward with weight gradients and a launch of each bucket of them ; launch u ; wait u ; update
After:    dense backward ; launch u ; weight gradients, each bucket launched when it is full and u has arrived ;
          wait u ; update ; wait for the buckets

See list_scheduler.py for the algorithm, node_order.py for ordering constraints, node_cost.py for costs.
"""

from __future__ import annotations

from torch import fx

from freescale.config import Config
from freescale.passes import node_cost
from freescale.passes.graph import PINNED_KEY, GraphExchange, exchanges, waits_of
from freescale.passes.list_scheduler import ListScheduler
from freescale.passes.node_order import Order

# (sink_share, hoist) of a ListScheduler, most overlap first: the first one within the memory bound is taken.
_ATTEMPTS = ((1.0, True), (0.5, True), (0.25, True), (0.125, True), (0.0, True), (0.0, False))


def overlap_attention(gm: fx.GraphModule, cfg: Config) -> int:
    """Return the number of exchanges placed."""
    to_place = exchanges(gm.graph)
    if not to_place or any(x.kind == "composite" for x in to_place):
        return 0
    nodes = list(gm.graph.nodes)
    machine = node_cost.machine(node_cost.device_of(nodes))
    seconds = {n: node_cost.seconds(n, machine) for n in nodes}
    max_bytes = memory_bound(nodes, to_place)
    *rest, output = best_order(nodes, to_place, seconds, cfg.link_gbps * 1e9 / 8, max_bytes)
    for node in rest:
        output.prepend(node)
    for x in to_place:
        for node in (x.launch, *waits_of(x.launch)):
            node.meta[PINNED_KEY] = True
    return len(to_place)


def memory_bound(nodes: Order, to_place: list[GraphExchange]) -> int:
    """Memory limit of a schedule in bytes: the peak of the original order, plus the launched buffers."""
    return node_cost.peak_bytes(nodes) + sum(node_cost.hint(x.bytes) for x in to_place)


def best_order(
    nodes: Order, to_place: list[GraphExchange], seconds: dict[fx.Node, float], bytes_per_second: float, max_bytes: int
) -> Order:
    """The order with the most overlap within the memory bound; other arguments as for ListScheduler."""
    for sink_share, hoist in _ATTEMPTS:
        order = ListScheduler(nodes, to_place, seconds, bytes_per_second, sink_share, hoist).run()
        if node_cost.peak_bytes(order) <= max_bytes:
            break
    return order
