"""Part of split_exchanges: a plain all-to-all whose result is cut up for different consumers.

Before:   out = wait(all_to_all_single(x, recv, send)) ; history = out[:, :a] ; candidates = out[:, a:]
After:    history = wait(all_to_all_single(x[:, :a])) ; candidates = wait(all_to_all_single(x[:, a:]))

Each consumer gets a launch of its own, those needed first first; where to wait is overlap_attention's business. Two
cuts are understood: along a trailing dimension of the result, and, where all ranks send equally much, along dimension 1
of the result seen as [ranks, rows per rank, ...].
"""

from __future__ import annotations

import logging
import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from freescale.compat import fx_values
from freescale.passes.exchange_meta import KEY, ORIGIN, WAIT, Exchange, first_user, size_in_bytes

log = logging.getLogger(__name__)
aten = torch.ops.aten
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
LAUNCH = torch.ops._c10d_functional.all_to_all_single.default


@dataclass(frozen=True)
class Part:
    """What one consumer takes: `node` is result[..., first : first + size, ...]."""

    node: fx.Node
    first: int
    size: int
    needed: int  # place in the graph of the first node that computes with it


@dataclass(frozen=True)
class Cut:
    exchange: Exchange
    dim: int
    ranks: int | None  # the result is seen as [ranks, rows per rank, ...]; None: cut as it is
    parts: tuple[Part, ...]


def plan(x: Exchange) -> Cut | None:
    """How to cut an exchange by consumer, None where there is nothing to gain or it is not understood."""
    wait = x.wait
    if wait is None or not wait.users:
        return None
    cut, ranks = wait, None
    if len(wait.users) == 1 and (seen := next(iter(wait.users))).target in VIEWS:
        ranks = _equal_ranks(x.launch, seen)
        cut = seen if ranks is not None else wait
    order = {n: i for i, n in enumerate(x.launch.graph.nodes)}
    found = _parts(cut, order)
    why = _why_not(found, ranks)
    if why:
        log.debug("%s stays whole: %s", x.launch.name, why)
        return None
    dim, parts = found  # type: ignore[misc]
    return Cut(x, dim, ranks, tuple(sorted(parts, key=lambda p: (p.needed, p.first))))


def _why_not(found: tuple[int, list[Part]] | None, ranks: int | None) -> str:
    if found is None:
        return "its result is not only sliced, along one dimension, at fixed places"
    dim, parts = found
    if dim != 1 if ranks is not None else dim < 1:
        return f"a cut along dimension {dim} goes through what the ranks send"
    if len({p.needed for p in parts}) < 2:
        return "one consumer needs all of it"
    ends = sorted((p.first, p.first + p.size) for p in parts)
    if any(a_end > b for (_, a_end), (b, _) in zip(ends, ends[1:], strict=False)):
        return "its parts overlap"
    return ""


def _equal_ranks(launch: fx.Node, seen: fx.Node) -> int | None:
    """The number of ranks if `seen` is the result as [ranks, rows per rank, ...] and every rank sends equally much."""
    recv, send = launch.args[1], launch.args[2]
    shape, whole = seen.meta["val"].shape, launch.meta["val"].shape
    if not isinstance(recv, (list, tuple)) or not isinstance(send, (list, tuple)) or len(shape) != len(whole) + 1:
        return None
    if len(set(recv)) != 1 or len(set(send)) != 1 or recv[0] != send[0]:
        return None
    return len(recv) if shape[0] == len(recv) and tuple(shape[2:]) == tuple(whole[1:]) else None


def _parts(of: fx.Node, order: dict[fx.Node, int]) -> tuple[int, list[Part]] | None:
    """The dimension and the parts that `of` is cut into, None unless all its users cut it at fixed places."""
    rank = of.meta["val"].dim()
    dims: set[int] = set()
    parts: list[Part] = []
    for user in of.users:
        places = _places(user)
        if places is None:
            return None
        dim, pieces = places
        dims.add(dim % rank)
        for node, first, size in pieces:
            needed = _needed(node, order)
            if needed is not None:
                parts.append(Part(node, first, size, needed))
    return (dims.pop(), parts) if len(dims) == 1 else None


def _places(user: fx.Node) -> tuple[int, list[tuple[fx.Node, int, int]]] | None:
    """(dimension, [(node, first, size)]) of a slice or a split."""
    args: tuple[Any, ...] = user.args
    if user.target is aten.slice.Tensor:
        given = (*args[1:], *(0, 0, 2**63 - 1, 1)[len(args) - 1 :])
        dim, first, last, step = given[0], given[1], given[2], given[3]
        size = user.meta["val"].shape[dim]
        if step != 1 or not all(isinstance(v, int) for v in (dim, first, last, size)) or first < 0:
            return None
        return dim, [(user, first, size)]
    if user.target in (aten.split.Tensor, aten.split_with_sizes.default):
        named: dict[str, Any] = user.kwargs
        dim = args[2] if len(args) > 2 else named.get("dim", 0)
        sizes = [v.shape[dim] for v in user.meta["val"]]
        if not all(isinstance(s, int) for s in sizes) or any(u.target is not operator.getitem for u in user.users):
            return None
        firsts = [sum(sizes[:i]) for i in range(len(sizes))]
        numbers: dict[fx.Node, Any] = {u: u.args[1] for u in user.users}
        return dim, [(u, firsts[i], sizes[i]) for u, i in numbers.items()]
    return None


def _needed(node: fx.Node, order: dict[fx.Node, int]) -> int | None:
    """The place of the first node that computes with `node`, seen through views; None if nothing does."""
    found, todo = [], [node]
    while todo:
        for user in todo.pop().users:
            if user.target in VIEWS or user.target is aten.clone.default:
                todo.append(user)
            else:
                found.append(order[user])
    return min(found, default=None)


def apply(graph: fx.Graph, cut: Cut) -> None:
    """Put one launch and one wait per part in place of the whole."""
    old, wait = cut.exchange.launch, cut.exchange.wait
    assert wait is not None
    x, recv, send, group = old.args
    make = _Maker(graph, old)
    with graph.inserting_before(old):
        whole = x if cut.ranks is None else make(aten.view.default, x, [cut.ranks, -1, *old.meta["val"].shape[1:]])
        launches = []
        for p in cut.parts:
            piece = make(aten.slice.Tensor, whole, cut.dim, p.first, p.first + p.size)
            # a copy in the plain layout: what is sent lies in one piece
            piece = make(aten.clone.default, piece, memory_format=torch.contiguous_format)
            counts = (recv, send)
            if cut.ranks is not None:
                piece = make(aten.view.default, piece, [cut.ranks * p.size, *old.meta["val"].shape[1:]])
                counts = ([p.size] * cut.ranks, [p.size] * cut.ranks)
            launches.append(make(LAUNCH, piece, *counts, group))
    with graph.inserting_before(wait):
        for p, launch in zip(cut.parts, launches, strict=True):
            arrived = make(WAIT, launch)
            whole_part = arrived
            if cut.ranks is not None:
                shape = [cut.ranks, p.size, *old.meta["val"].shape[1:]]
                whole_part = make(aten.view.default, arrived, shape)
            p.node.replace_all_uses_with(whole_part)
            size = size_in_bytes(launch.meta["val"])
            launch.meta[KEY] = Exchange(
                "plain", cut.exchange.way, "urgent", size, launch, arrived, first_user(arrived)
            )
    _erase_unused(graph, wait)
    graph.erase_node(wait)
    graph.erase_node(old)


def _erase_unused(graph: fx.Graph, of: fx.Node) -> None:
    """All that is made of a node: nothing needs it any more."""
    unused, todo = {of}, [of]
    while todo:
        new = [u for u in todo.pop().users if u not in unused]
        unused.update(new)
        todo += new
    unused.remove(of)
    for node in reversed(graph.nodes):
        if node in unused:
            graph.erase_node(node)


def bytes_of_row(x: Exchange) -> int:
    """What is known of a row's size: a fact of the graph, the same on every rank, unlike the number of rows."""
    value = x.launch.meta["val"]
    known = [s for s in value.shape[1:] if isinstance(s, int)]
    return int(value.element_size() * math.prod(known))


class _Maker:
    """Calls that know where they came from and what they compute."""

    def __init__(self, graph: fx.Graph, origin: fx.Node) -> None:
        self.graph = graph
        self.origin = {k: origin.meta[k] for k in ORIGIN if k in origin.meta}

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta.update(self.origin)
        node.meta["val"] = fx_values.fake_value(node)
        return node
