"""Expand each composite exchange into explicit launches, waits and updates; split plain ones by consumer.

Needs:    find_exchanges has run.
Promises: same values; launches of one group are in the same order on every rank.
Before:   emb = exchange_forward(token, rows, ...)
          done = exchange_backward(token, grad, rows, order, ends, ...)
After:    chunk = all_to_all_rows_launch(token, rows, ...) ; emb = wait_tensor(chunk)
          chunk = all_to_all_launch(grad, ...) ; arrived = wait_tensor(chunk) ; done = update_(token, arrived, ...)

          a plain all-to-all whose result is sliced for consumers: one per consumer (split_by_consumer.py)

A composite is expanded by running its reference implementation on the graph's nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from freescale.config import Config
from freescale.kernels import reference
from freescale.passes import split_by_consumer
from freescale.passes.graph import EXCHANGE_KEY, CannotApply, GraphExchange, annotate, exchanges, first_user, last_wait

REFERENCES: dict[Any, Callable[..., Any]] = {
    torch.ops.freescale.exchange_forward.default: reference.exchange_forward,
    torch.ops.freescale.exchange_backward.default: reference.exchange_backward,
}


def split_exchanges(gm: fx.GraphModule, cfg: Config) -> int:
    """Return the number of exchanges expanded or split."""
    composites = [x for x in exchanges(gm.graph) if x.kind == "composite"]
    for x in composites:
        if x.launch.kwargs.keys() - {"packing"}:
            raise CannotApply(f"{x.launch.name} is called with keyword arguments")
    plain = [x for x in exchanges(gm.graph) if x.kind == "plain" and split_by_consumer.bytes_of_row(x) >= cfg.min_bytes]
    splits = [split for x in plain if (split := split_by_consumer.plan(x)) is not None]
    for x in composites:
        _open(gm.graph, x)
    for split in splits:
        split_by_consumer.apply(gm.graph, split)
    return len(composites) + len(splits)


def _open(graph: fx.Graph, x: GraphExchange) -> None:
    """Replace a composite by the ops of its reference implementation."""
    old = x.launch
    tracer = fx.proxy.GraphAppendingTracer(graph)
    before = old.prev
    with graph.inserting_before(old):
        args = [fx.Proxy(a, tracer) if isinstance(a, fx.Node) else a for a in old.args]
        result = REFERENCES[old.target](*args, **old.kwargs)
    node = launch = before.next
    while node is not old:
        node = annotate(node, old).next
    old.replace_all_uses_with(result.node)
    graph.erase_node(old)
    wait = last_wait(launch)
    assert wait is not None
    chunk = GraphExchange("chunk", x.payload, x.priority, x.bytes, launch, wait, first_user(wait), x.table)
    launch.meta[EXCHANGE_KEY] = chunk
