"""Average dense gradients in buckets, overlapped with the rest of the backward pass.

Needs:    a post-grad graph with an `average_gradient` for each gradient to average (FREESCALE_DENSE=allreduce).
Promises: same values up to the order in which the group sums ranks (identical with two ranks). Buckets and their order
          depend only on the parameters and their positions in the model, so graphs of one model for different batch
          sizes agree. A bucket holds one dtype on one device.
Leaves:   a gradient that the graph itself uses: it is averaged in place.
Before:   g0 = mm(...) ; a0 = average_gradient(g0) ; g1 = mm(...) ; a1 = average_gradient(g1) ; return a0, a1
After:    g0 = mm(...) ; g1 = mm(...) ; launched = all_reduce_launch([g0, g1]) ; ... ; flat = wait_tensor(launched)
          a0, a1 = split(flat) ; return a0, a1
"""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch import fx

from freescale.compat import distributed
from freescale.config import Config
from freescale.kernels.launch import all_reduce_bytes
from freescale.passes.graph import EXCHANGE_KEY, WAIT, CannotApply, GraphExchange, add_call, argument

aten = torch.ops.aten
fs = torch.ops.freescale

# Small models also launch their first bucket before the last gradient is ready, but a launch has a fixed cost.
MIN_BUCKETS, MIN_BYTES = 8, 1 << 20

Bucket = list[fx.Node]  # of average_gradient


def bucket_gradients(gm: fx.GraphModule, cfg: Config) -> int:
    """Return the number of buckets."""
    averaged = [n for n in gm.graph.nodes if n.target is fs.average_gradient.default]
    averaged = [n for n in averaged if all(u.op == "output" for u in n.users)]
    for node in averaged:
        if not isinstance(node.meta["val"].numel(), int):
            raise CannotApply(f"the size of the gradient of {argument(node, 'name')} changes with the batch")
    buckets = fill_buckets(sorted(averaged, key=lambda n: argument(n, "place")), cfg.bucket_mb * (1 << 20))
    position = {n: i for i, n in enumerate(gm.graph.nodes)}
    behind, launch = -1, None
    for bucket in buckets:
        last_ready = max(map(_gradient, bucket), key=position.__getitem__)
        # not before the previous bucket, even if this one is full first
        if launch is None or position[last_ready] > behind:
            behind, launch = position[last_ready], last_ready
        launch = _rewrite(gm.graph, bucket, launch)
    return len(buckets)


def fill_buckets(averaged: Bucket, max_bytes: float) -> list[Bucket]:
    """Buckets in the order in which they fill up; a gradient larger than `max_bytes` gets its own bucket."""
    total = sum(_bytes(n) for n in averaged)
    max_bytes = min(max_bytes, max(total / MIN_BUCKETS, MIN_BYTES))
    open_buckets: dict[Any, Bucket] = {}
    full: list[Bucket] = []
    for node in averaged:
        value = node.meta["val"]
        key = (value.dtype, value.device, argument(node, "group_name"))
        bucket = open_buckets.setdefault(key, [])
        if bucket and sum(map(_bytes, bucket)) + _bytes(node) > max_bytes:
            full.append(bucket)
            bucket = open_buckets[key] = []
        bucket.append(node)
    return [*full, *open_buckets.values()]


def _bytes(node: fx.Node) -> int:
    return int(node.meta["val"].nbytes)


def _gradient(node: fx.Node) -> fx.Node:
    gradient = node.args[0]
    assert isinstance(gradient, fx.Node)
    return gradient


def _rewrite(graph: fx.Graph, bucket: Bucket, behind: fx.Node) -> fx.Node:
    """Launch a bucket after the node `behind`, and wait for it at the end of the graph."""
    group_name = argument(bucket[0], "group_name")
    names = [argument(n, "name") for n in bucket]
    gradients = list(map(_gradient, bucket))
    with graph.inserting_before(_first_after(behind)):
        launch = add_call(graph, bucket[0], fs.all_reduce_launch.default, gradients, ", ".join(names), group_name)
    output = next(iter(reversed(graph.nodes)))
    with graph.inserting_before(output):
        wait = add_call(graph, bucket[0], WAIT, launch)
        parts = add_call(graph, bucket[0], aten.split_with_sizes.default, wait, [n.meta["val"].numel() for n in bucket])
        for i, node in enumerate(bucket):
            part = add_call(graph, node, operator.getitem, parts, i)
            node.replace_all_uses_with(add_call(graph, node, aten.view.default, part, list(node.meta["val"].shape)))
    size = all_reduce_bytes(sum(map(_bytes, bucket)), distributed.group_by_name(group_name).size())
    launch.meta[EXCHANGE_KEY] = GraphExchange(
        "dense", "gradients", "dense", sympy.Integer(size), launch, wait, None, _in_short(names)
    )
    for node in bucket:
        graph.erase_node(node)
    return launch


def _first_after(node: fx.Node) -> fx.Node:
    node = node.next
    while node.op in ("placeholder", "get_attr"):
        node = node.next
    return node


def _in_short(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)} parameters)"
