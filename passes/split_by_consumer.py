"""Part of split_exchanges: split a plain all-to-all whose result is sliced for several consumers.

Before:   out = wait(all_to_all_single(x, recv, send)) ; history = out[:, :a] ; candidates = out[:, a:]
After:    history = wait(all_to_all_single(x[:, :a])) ; candidates = wait(all_to_all_single(x[:, a:]))

Each consumer gets its own launch, in the order of first use. Slices may be along a trailing dimension of the result or,
if all ranks send equal sizes, along dimension 1 of the result viewed as [ranks, rows per rank, ...].
"""

from __future__ import annotations

import logging
import math
import operator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from freescale.passes.graph import EXCHANGE_KEY, WAIT, GraphExchange, add_call, first_user, size_in_bytes

log = logging.getLogger(__name__)
aten = torch.ops.aten
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
LAUNCH = torch.ops._c10d_functional.all_to_all_single.default


@dataclass(frozen=True)
class ConsumerSlice:
    """The slice that one consumer reads: `node` is result[..., start : start + size, ...]."""

    node: fx.Node
    start: int
    size: int
    needed_at: int  # position in the graph of the first compute node that uses it


@dataclass(frozen=True)
class ConsumerSplit:
    exchange: GraphExchange
    dim: int  # the sliced dimension
    ranks: int | None  # the result is first viewed as [ranks, rows per rank, ...]; None: sliced directly
    slices: tuple[ConsumerSlice, ...]


def plan(x: GraphExchange) -> ConsumerSplit | None:
    """How to split an exchange by consumer; None if there is no gain or the pattern is not supported."""
    wait = x.wait
    if wait is None or not wait.users:
        return None
    result, ranks = wait, None
    if len(wait.users) == 1 and (view := next(iter(wait.users))).target in VIEWS:
        ranks = _equal_ranks(x.launch, view)
        result = view if ranks is not None else wait
    position = {n: i for i, n in enumerate(x.launch.graph.nodes)}
    dim_and_slices = _slices_of(result, position)
    reason = _reason_to_keep_whole(dim_and_slices, ranks)
    if reason:
        log.debug("%s is not split: %s", x.launch.name, reason)
        return None
    dim, slices = dim_and_slices  # type: ignore[misc]
    return ConsumerSplit(x, dim, ranks, tuple(sorted(slices, key=lambda s: (s.needed_at, s.start))))


def _reason_to_keep_whole(dim_and_slices: tuple[int, list[ConsumerSlice]] | None, ranks: int | None) -> str:
    if dim_and_slices is None:
        return "its result is not sliced along one dimension at fixed positions only"
    dim, slices = dim_and_slices
    if dim != 1 if ranks is not None else dim < 1:
        return f"slicing along dimension {dim} would cut through the parts from ranks"
    if len({s.needed_at for s in slices}) < 2:
        return "all slices are needed at the same node"
    bounds = sorted((s.start, s.start + s.size) for s in slices)
    if any(end > next_start for (_, end), (next_start, _) in zip(bounds, bounds[1:], strict=False)):
        return "its slices overlap"
    return ""


def _equal_ranks(launch: fx.Node, view: fx.Node) -> int | None:
    """The number of ranks if `view` is the result as [ranks, rows per rank, ...] and every rank sends equal sizes."""
    recv, send = launch.args[1], launch.args[2]
    shape, whole = view.meta["val"].shape, launch.meta["val"].shape
    if not isinstance(recv, (list, tuple)) or not isinstance(send, (list, tuple)) or len(shape) != len(whole) + 1:
        return None
    if len(set(recv)) != 1 or len(set(send)) != 1 or recv[0] != send[0]:
        return None
    return len(recv) if shape[0] == len(recv) and tuple(shape[2:]) == tuple(whole[1:]) else None


def _slices_of(result: fx.Node, position: dict[fx.Node, int]) -> tuple[int, list[ConsumerSlice]] | None:
    """The dimension and the slices of `result`; None unless all its users slice it at fixed positions."""
    n_dims = result.meta["val"].dim()
    dims: set[int] = set()
    slices: list[ConsumerSlice] = []
    for user in result.users:
        dim_and_bounds = _slice_bounds(user)
        if dim_and_bounds is None:
            return None
        dim, bounds = dim_and_bounds
        dims.add(dim % n_dims)
        for node, start, size in bounds:
            needed_at = _first_compute(node, position)
            if needed_at is not None:
                slices.append(ConsumerSlice(node, start, size, needed_at))
    return (dims.pop(), slices) if len(dims) == 1 else None


def _slice_bounds(user: fx.Node) -> tuple[int, list[tuple[fx.Node, int, int]]] | None:
    """(dimension, [(node, start, size)]) of a slice or a split."""
    args: tuple[Any, ...] = user.args
    if user.target is aten.slice.Tensor:
        defaults = (0, 0, 2**63 - 1, 1)
        dim, start, end, step = args[1:] + defaults[len(args) - 1 :]
        size = user.meta["val"].shape[dim]
        if step != 1 or not all(isinstance(v, int) for v in (dim, start, end, size)) or start < 0:
            return None
        return dim, [(user, start, size)]
    if user.target in (aten.split.Tensor, aten.split_with_sizes.default):
        kwargs: dict[str, Any] = user.kwargs
        dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
        sizes = [v.shape[dim] for v in user.meta["val"]]
        if not all(isinstance(s, int) for s in sizes) or any(u.target is not operator.getitem for u in user.users):
            return None
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        indices: dict[fx.Node, Any] = {u: u.args[1] for u in user.users}
        return dim, [(u, starts[i], sizes[i]) for u, i in indices.items()]
    return None


def _first_compute(node: fx.Node, position: dict[fx.Node, int]) -> int | None:
    """The position of the first node that computes with `node`, seen through views; None if there is none."""
    positions, todo = [], [node]
    while todo:
        for user in todo.pop().users:
            if user.target in VIEWS or user.target is aten.clone.default:
                todo.append(user)
            else:
                positions.append(position[user])
    return min(positions, default=None)


def apply(graph: fx.Graph, split: ConsumerSplit) -> None:
    old, wait = split.exchange.launch, split.exchange.wait
    assert wait is not None
    x, recv, send, group = old.args
    make = partial(add_call, graph, old)
    with graph.inserting_before(old):
        whole = x if split.ranks is None else make(aten.view.default, x, [split.ranks, -1, *old.meta["val"].shape[1:]])
        launches = []
        for s in split.slices:
            piece = make(aten.slice.Tensor, whole, split.dim, s.start, s.start + s.size)
            # a contiguous copy: what is sent must be contiguous
            piece = make(aten.clone.default, piece, memory_format=torch.contiguous_format)
            counts = (recv, send)
            if split.ranks is not None:
                piece = make(aten.view.default, piece, [split.ranks * s.size, *old.meta["val"].shape[1:]])
                counts = ([s.size] * split.ranks, [s.size] * split.ranks)
            launches.append(make(LAUNCH, piece, *counts, group))
    with graph.inserting_before(wait):
        for s, launch in zip(split.slices, launches, strict=True):
            arrived = viewed = make(WAIT, launch)
            if split.ranks is not None:
                viewed = make(aten.view.default, arrived, [split.ranks, s.size, *old.meta["val"].shape[1:]])
            s.node.replace_all_uses_with(viewed)
            size = size_in_bytes(launch.meta["val"])
            launch.meta[EXCHANGE_KEY] = GraphExchange(
                "plain", split.exchange.payload, "urgent", size, launch, arrived, first_user(arrived)
            )
    _erase_unused(graph, wait)
    graph.erase_node(wait)
    graph.erase_node(old)


def _erase_unused(graph: fx.Graph, source: fx.Node) -> None:
    """Erase all users of a node, which are now unused."""
    unused, todo = {source}, [source]
    while todo:
        new = [u for u in todo.pop().users if u not in unused]
        unused.update(new)
        todo += new
    unused.remove(source)
    for node in reversed(graph.nodes):
        if node in unused:
            graph.erase_node(node)


def bytes_of_row(x: GraphExchange) -> int:
    """The known factors of a row's size: a fact of the graph, equal on every rank, unlike the number of rows."""
    value = x.launch.meta["val"]
    known = [s for s in value.shape[1:] if isinstance(s, int)]
    return int(value.element_size() * math.prod(known))
