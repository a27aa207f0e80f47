"""Gather rows directly from the parts in which they arrived, instead of from a copy that joins the parts.

Needs:    split_exchanges has run; code generation, which fuses the new nodes into one kernel.
Promises: bit-identical; the joined copy is never written.
Before:   rows = cat([early, urgent]) ; values = rows[inverse]
After:    values = where(inverse < len(early), early[inverse], urgent[inverse - len(early)])

Each element is loaded from one part only, since the masks apply to the loads. Applies if the parts are the results of
two waits and nothing else reads the joined rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from freescale.config import Config
from freescale.passes.graph import EXCHANGE_KEY, WAIT, add_call, first_user

aten = torch.ops.aten


@dataclass(frozen=True)
class _Gather:
    node: fx.Node  # the gather node
    joined: fx.Node
    first: fx.Node
    second: fx.Node
    index: fx.Node


def gather_parts(gm: fx.GraphModule, cfg: Config) -> int:
    """Return the number of gathers that read from the parts."""
    if cfg.codegen != "inductor":  # eagerly it would be six passes over memory
        return 0
    gathers = [g for n in gm.graph.nodes if (g := _recognize(n)) is not None]
    for g in gathers:
        _rewrite(gm.graph, g)
    return len(gathers)


def _recognize(node: fx.Node) -> _Gather | None:
    """A gather of rows by one index from two parts, or None."""
    if node.target is aten.index.Tensor:
        joined, indices = node.args
    elif node.target is aten.index_select.default and node.args[1] == 0:
        joined, indices = node.args[0], [node.args[2]]
    else:
        return None
    if not isinstance(joined, fx.Node) or joined.target is not aten.cat.default or len(joined.users) > 1:
        return None
    parts, dim = joined.args[0], joined.args[1] if len(joined.args) > 1 else 0
    if len(parts) != 2 or dim != 0 or any(part.target is not WAIT for part in parts):  # type: ignore
        return None
    if len(indices) != 1 or indices[0].meta["val"].dim() != 1 or joined.meta["val"].dim() != 2:  # type: ignore
        return None
    return _Gather(node, joined, *parts, *indices)  # type: ignore


def _rewrite(graph: fx.Graph, g: _Gather) -> None:
    make = partial(add_call, graph, g.node)

    def size_of(x: fx.Node, dim: int) -> Any:
        size = x.meta["val"].shape[dim]
        return size if isinstance(size, int) else make(aten.sym_size.int, x, dim)

    with graph.inserting_before(g.node):
        size = size_of(g.first, 0)
        in_first = make(aten.lt.Scalar, g.index, size)
        positions, columns = size_of(g.index, 0), size_of(g.first, 1)
        mask = make(aten.expand.default, make(aten.unsqueeze.default, in_first, 1), [positions, columns])
        from_first = make(aten._unsafe_masked_index.default, g.first, mask, [g.index], 0)
        index_in_second = make(aten.sub.Scalar, g.index, size)
        not_mask = make(aten.logical_not.default, mask)
        from_second = make(aten._unsafe_masked_index.default, g.second, not_mask, [index_in_second], 0)
        values = make(aten.where.self, mask, from_first, from_second)
    g.node.replace_all_uses_with(values)
    graph.erase_node(g.node)
    graph.erase_node(g.joined)
    for launch in (n for n in graph.nodes if EXCHANGE_KEY in n.meta):
        exchange = launch.meta[EXCHANGE_KEY]
        if exchange.consumer is g.joined:
            launch.meta[EXCHANGE_KEY] = replace(exchange, consumer=first_user(exchange.wait))
