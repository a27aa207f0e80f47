"""Compress exchanges: send only the largest values of rows and gradients, or all of them in a narrower dtype. Opt-in.

Needs:    split_exchanges has run if rows are compressed, bucket_gradients if dense gradients are.
Promises: the same launches in the same order with the same result shapes, identical on every rank. Without a share
          (FREESCALE_COMPRESS) or a dtype (FREESCALE_WIRE) the graph is unchanged.
Leaves:   urgent rows and gradients, unless which=all; plain all-to-alls; dense gradients outside buckets.
Before:   chunk = all_to_all_launch(grad, ...) ; bucket = all_reduce_launch([g0, g1], ...)
After:    chunk = all_to_all_launch(grad, ..., packing="largest:32/15:16")
          bucket = all_reduce_launch([g0, g1], ..., packing="largest:1/150:8192")

kernels/compression.py defines the packings.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import sympy
import torch
from torch import fx

from freescale.compat import distributed
from freescale.config import Compression, Config
from freescale.kernels import compression
from freescale.kernels.compression import ENTRY_BYTES, MAX_BLOCK, Packing
from freescale.passes.graph import EXCHANGE_KEY, CannotApply, GraphExchange, argument, exchanges

log = logging.getLogger(__name__)

fs = torch.ops.freescale
ROW_BLOCK = 1024  # values per block, approximately
DENSE_BLOCK = 8192  # the same for dense gradients, at most

Site = tuple[GraphExchange, Packing, sympy.Expr]  # what, how, and its bytes including the rank's own rows


def compress_exchange(gm: fx.GraphModule, cfg: Config) -> int:
    """Return the number of compressed launches."""
    asked = cfg.compression()
    if not asked.sends_less:
        _say_that_nothing_is_lost()
        return 0
    sites: list[Site] = []
    if asked.rows is not None or asked.wire != "fp32":
        sites += [_row_site(x, asked) for x in _row_exchanges(gm.graph, asked)]
    if asked.dense is not None:
        sites += [_dense_site(x, asked.dense) for x in _buckets(gm.graph)]
    for x, packing, size in sites:
        x.launch.kwargs = {"packing": str(packing)}
        x.launch.meta[EXCHANGE_KEY] = replace(x, bytes=size)
    return len(sites)


@cache
def _say_that_nothing_is_lost() -> None:
    log.warning(
        "compress_exchange was requested without a share (FREESCALE_COMPRESS) or a dtype (FREESCALE_WIRE): nothing is "
        "compressed"
    )


def _row_exchanges(graph: fx.Graph, asked: Compression) -> list[GraphExchange]:
    found = exchanges(graph)
    for x in found:
        if x.kind == "composite":
            raise CannotApply(f"{x} is not split: compress_exchange needs split_exchanges")
    chunks = [x for x in found if x.kind == "chunk" and (asked.which == "all" or x.priority != "urgent")]
    for x in chunks:
        _check(x, _sent(x).dtype)
        if _sent(x).shape[1] > MAX_BLOCK:
            raise CannotApply(f"{x}: rows of more than {MAX_BLOCK} values cannot be compressed")
    return chunks


def _buckets(graph: fx.Graph) -> list[GraphExchange]:
    for node in graph.nodes:
        if node.target is fs.average_gradient.default and all(u.op == "output" for u in node.users):
            name = argument(node, "name")
            raise CannotApply(f"the gradient of {name} is not in a bucket: compress_exchange needs bucket_gradients")
    buckets = [x for x in exchanges(graph) if x.kind == "dense"]
    for x in buckets:
        _check(x, x.launch.meta["val"].dtype)
    return buckets


def _check(x: GraphExchange, dtype: torch.dtype) -> None:
    if dtype != torch.float32:
        raise CannotApply(f"{x} are {str(dtype).removeprefix('torch.')}: only float32 can be compressed")
    if packing := x.launch.kwargs.get("packing"):
        kind = compression.parse(str(packing)).kind
        raise CannotApply(f"{x} are sent as {kind} already, by the collection's QCommsConfig: use one of the two")
    if x.launch.kwargs:
        raise CannotApply(f"{x.launch.name} is called with keyword arguments")


def _sent(x: GraphExchange) -> Any:
    """The token or the gradients, with the width and dtype of the rows."""
    sent = x.launch.args[0]
    assert isinstance(sent, fx.Node)
    return sent.meta["val"]


def _row_site(x: GraphExchange, asked: Compression) -> Site:
    dim = int(_sent(x).shape[1])
    rows = x.bytes / (4 * dim) if dim else sympy.Integer(0)
    if asked.rows is None:
        packing = Packing(asked.wire, stochastic=asked.wire == "fp8" and x.payload == "gradients")
        return x, packing, rows * compression.row_bytes(packing, dim)
    entries = asked.rows * 4 * dim / ENTRY_BYTES  # per row
    packing = Packing("largest", entries.numerator, entries.denominator, max(1, ROW_BLOCK // max(dim, 1)))
    return x, packing, sympy.floor(rows * packing.num / packing.den) * ENTRY_BYTES


def _dense_site(x: GraphExchange, share: Fraction) -> Site:
    n = int(x.launch.meta["val"].numel())
    packing = dense_packing(n, share)
    entries = n * packing.num // packing.den
    world = distributed.group_by_name(argument(x.launch, "group_name")).size()
    return x, packing, sympy.Integer((world - 1) * entries * ENTRY_BYTES)


def dense_packing(n: int, share: Fraction) -> Packing:
    """The packing of a bucket of n values. Each block is large enough to send something every time; otherwise some
    values would never reach the parameters."""
    most = MAX_BLOCK if share < Fraction(1, 1000) else DENSE_BLOCK
    height = n if n <= most else next(h for h in range(most, 0, -1) if n % h == 0 or 2 * (n % h) >= h)
    entries = max(share * 4 / ENTRY_BYTES, Fraction(1, max(min(height, n % height or height), 1)))
    return Packing("largest", entries.numerator, entries.denominator, max(height, 1))
