"""Run late gradients and early rows on a stream of their own, where the graph has no compute to hide them under.

That is so where embedding collections are compiled alone: the dense part runs after their graph.

Needs:    find_exchanges and split_exchanges have run; rows are on a GPU.
Promises: same values; launches of one group are in the same order on every rank: what applies depends on the ops of the
          graph only.
Before:   late = all_to_all_launch(grad, ...) ; arrived = wait_tensor(late) ; done = update_(token, arrived, ...)
          early = all_to_all_rows_launch(done, ...)
After:    early = all_to_all_background_launch(grad, token, ...)

Neither touches a row of this step. The next op on the table waits for that stream (kernels/background.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

from freescale.config import Config
from freescale.passes import node_cost
from freescale.passes.graph import (
    EXCHANGE_KEY,
    LATE_KEY,
    PINNED_KEY,
    WAIT,
    GraphExchange,
    add_call,
    argument,
    exchanges,
)  # fmt: skip

fs = torch.ops.freescale


class _Site(NamedTuple):
    late: GraphExchange
    wait: fx.Node
    update: fx.Node
    early: GraphExchange


def move_background(gm: fx.GraphModule, cfg: Config) -> int:
    """Return the number of pairs of late gradients and early rows moved."""
    if not _is_on_gpu(gm.graph) or any(map(node_cost.is_compute, gm.graph.nodes)):
        return 0
    by_launch = {x.launch: x for x in exchanges(gm.graph)}
    sites = [site for x in by_launch.values() if (site := _site(x, by_launch)) is not None]
    for site in sites:
        _rewrite(gm.graph, site)
    return len(sites)


def _is_on_gpu(graph: fx.Graph) -> bool:
    return any(x.launch.meta["val"].device.type == "cuda" for x in exchanges(graph))


def _site(early: GraphExchange, by_launch: dict[fx.Node, GraphExchange]) -> _Site | None:
    """The update that these early rows come after, and the late gradients that it applies, if nothing else needs
    them."""
    if early.kind != "chunk" or early.priority != "early" or early.payload != "rows":
        return None
    update = argument(early.launch, "token")
    if update.target is not fs.update_.default or len(update.users) > 1:
        return None
    wait = argument(update, "grad")
    if wait.target is not WAIT or len(wait.users) > 1 or len(wait.args[0].users) > 1:
        return None
    late = by_launch.get(wait.args[0])
    return _Site(late, wait, update, early) if late is not None and late.priority == "late" else None


def _rewrite(graph: fx.Graph, site: _Site) -> None:
    late, update, early = site.late.launch, site.update, site.early.launch

    def given(node: fx.Node, *names: str) -> list[Any]:
        return [argument(node, name) for name in names]

    arguments = [
        late.args[0], *given(update, "token", "rows", "order", "ends"),
        *given(late, "send_counts", "recv_counts", "n_recv"),
        *given(early, "rows", "send_counts", "recv_counts", "n_recv", "table", "group_name"),
    ]  # fmt: skip
    how = dict(early.kwargs)
    if packing := late.kwargs.get("packing"):
        how["gradient_packing"] = packing
    with graph.inserting_before(early):
        node = add_call(graph, early, fs.all_to_all_background_launch.default, *arguments, **how)
    node.meta[EXCHANGE_KEY] = replace(site.early, launch=node)
    node.meta[LATE_KEY] = replace(site.late, launch=node, wait=node)
    node.meta[PINNED_KEY] = True
    early.replace_all_uses_with(node)
    for old in (early, update, site.wait, late):
        graph.erase_node(old)
