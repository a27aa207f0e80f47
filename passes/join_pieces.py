"""Replace a concatenation of all pieces of a tensor, in order, by the tensor.

Needs:    nothing.
Promises: bit-identical; the copies, one kernel per piece, are removed.
Before:   a, b, c = split_with_sizes(x, sizes) ; y = cat([a, b, c])
After:    y = x

Models with many features often join their embeddings with `torch.cat([found[f].values() for f in features])`. In the
backward graph these are slices of the gradient, joined where the lookup was split.
"""

from __future__ import annotations

import operator
import sys
from typing import Any

import torch
from torch import fx

from freescale.compat import fx_values
from freescale.config import Config

aten = torch.ops.aten


def join_pieces(gm: fx.GraphModule, cfg: Config) -> int:
    """Return the number of concatenations removed."""
    returned = set(gm.graph.output_node().all_input_nodes)
    sites = 0
    for node in [n for n in gm.graph.nodes if n.target is aten.cat.default]:
        whole = _whole(node)
        if whole is None or not _is_laid_out_like(whole, node):
            continue
        # It must be a separate tensor: the caller may write to a returned result.
        if node in returned and (whole in returned or whole.op == "placeholder"):
            continue
        node.replace_all_uses_with(whole)
        _erase(gm.graph, node)
        sites += 1
    return sites


def _whole(cat: fx.Node) -> fx.Node | None:
    """The tensor of which these are all the pieces, in order, or None."""
    pieces: Any = cat.args[0]
    dim = _dimension(cat, cat.args[1] if len(cat.args) > 1 else 0)
    if all(piece.target is operator.getitem for piece in pieces):
        return _split_whole(pieces, dim)
    if all(piece.target is aten.slice.Tensor for piece in pieces):
        return _sliced_whole(pieces, dim)
    return None


def _split_whole(pieces: list[fx.Node], dim: int) -> fx.Node | None:
    split: Any = pieces[0].args[0]
    if split.target not in (aten.split_with_sizes.default, aten.split.Tensor):
        return None
    in_order = [(piece.args[0], piece.args[1]) for piece in pieces] == [
        (split, i) for i in range(len(split.meta["val"]))
    ]
    whole = split.args[0]
    return whole if in_order and dim == _dimension(whole, split.args[2] if len(split.args) > 2 else 0) else None


def _sliced_whole(pieces: list[fx.Node], dim: int) -> fx.Node | None:
    whole: Any = pieces[0].args[0]
    size = fx_values.expression(whole.meta["val"].shape[dim])
    end: Any = 0
    for piece in pieces:
        given: Any = piece.args
        of, along, first, last, step = given + (0, None, None, 1)[len(given) - 1 :]
        if of is not whole or _dimension(whole, along) != dim or step != 1 or _bound(first, size, 0) != end:
            return None
        end = _bound(last, size, size)
    return whole if end == size else None


def _bound(bound: Any, size: Any, default: Any) -> Any:
    """A bound of a slice as an expression."""
    if bound is None:
        return default
    if isinstance(bound, int) and bound == sys.maxsize:
        return size
    return fx_values.expression(bound.meta["val"] if isinstance(bound, fx.Node) else bound)


def _dimension(x: fx.Node, dim: Any) -> int:
    return dim % x.meta["val"].dim()


def _is_laid_out_like(x: fx.Node, y: fx.Node) -> bool:
    """Same size and strides in torch's metadata. Sizes of slices whose bounds may be out of order differ."""
    a, b = x.meta["val"], y.meta["val"]

    def layout(t: torch.Tensor) -> tuple[Any, ...]:
        return t.dtype, *(fx_values.expression(n) for n in (*t.shape, *t.stride()))

    return layout(a) == layout(b)


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a node and the nodes that only it used."""
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for other in dict.fromkeys(inputs):
        if not other.users and other.op == "call_function" and not other.is_impure():
            _erase(graph, other)
