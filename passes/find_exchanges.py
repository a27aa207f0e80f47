"""Mark every embedding all-to-all of a graph.

Needs:    a post-grad graph, forward or backward.
Promises: the graph is unchanged except for `meta["freescale"]` on nodes that start an exchange.
Marks:    the dialect's `exchange_forward`, `exchange_backward` and launches of rows, and a plain
          `_c10d_functional.all_to_all_single` whose input was looked up in a table (rows) or whose result
          goes into a table's gradient or update (gradients).
Leaves:   integer all-to-alls (ids, lengths), and those between compute and compute: expert parallelism, sequence
          parallelism (Ulysses). If such data is a graph input, its symbolic height distinguishes it from a table;
          with static sizes, a gather from it looks like a lookup.
"""

from __future__ import annotations

import logging
import operator

import sympy
import torch
from torch import fx

from freescale.config import Config
from freescale.kernels import compression
from freescale.kernels.ops.schemas import PRIORITY_NAMES
from freescale.passes.graph import EXCHANGE_KEY, GraphExchange, argument, first_user, last_wait, size_in_bytes

log = logging.getLogger(__name__)

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
fs = torch.ops.freescale

# Ops that pass values through: views, copies, casts, concatenation.
PASS_THROUGH = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.clone.default,
    aten.detach.default,
    aten.alias.default,
    aten.cat.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.expand.default,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten._to_copy.default,
    torch.ops.prims.convert_element_type.default,
    operator.getitem,
}
# Scaling and masking, such as the division of a gradient by the world size, or zeros for padding.
SCALING = {aten.div.Tensor, aten.div.Scalar, aten.mul.Tensor, aten.mul.Scalar, aten.where.self}
GATHERS = {aten.index.Tensor, aten.index_select.default}
SCATTERS = {
    aten.index_put.default,
    aten.index_put_.default,
    aten._unsafe_masked_index_put_accumulate.default,  # from embedding_dense_backward, since torch 2.13
    aten.index_add.default,
    aten.scatter_add.default,
}


def find_exchanges(gm: fx.GraphModule, cfg: Config) -> int:
    """Return the number of exchanges marked."""
    marked = [x for n in gm.graph.nodes if (x := _exchange(n)) is not None]
    for x in marked:
        x.launch.meta[EXCHANGE_KEY] = x
    return len(marked)


def count_exchanges(graph: fx.Graph) -> int:
    return sum(_exchange(n) is not None for n in graph.nodes)


def _exchange(node: fx.Node) -> GraphExchange | None:
    if node.target is fs.exchange_forward.default:
        return _dialect_exchange("composite", "rows", node, node)
    if node.target is fs.exchange_backward.default:
        return _dialect_exchange("composite", "gradients", node, node)
    if node.target is fs.all_to_all_rows_launch.default:
        return _dialect_exchange("chunk", "rows", node, last_wait(node))
    if node.target is c10d.all_to_all_single.default:
        return _plain_exchange(node)
    return None


def _dialect_exchange(kind: str, payload: str, node: fx.Node, wait: fx.Node | None) -> GraphExchange:
    sent = argument(node, "grad" if payload == "gradients" else "token").meta["val"]
    n_recv = argument(node, "n_recv")
    received = size_in_bytes(sent, n_recv.meta["val"] if isinstance(n_recv, fx.Node) else n_recv)
    if packing := node.kwargs.get("packing"):
        received *= sympy.Rational(compression.row_bytes(compression.parse(str(packing)), 1), sent.element_size())
    priority = PRIORITY_NAMES[argument(node, "priority")]
    consumer = first_user(wait) if wait is not None else None
    return GraphExchange(kind, payload, priority, received, node, wait, consumer, argument(node, "table"))


def _plain_exchange(node: fx.Node) -> GraphExchange | None:
    value = node.meta["val"]
    if not value.dtype.is_floating_point:
        return None
    wait = last_wait(node) or node
    if _comes_from_lookup(node.args[0]):
        payload = "rows"
    elif _goes_to_update(wait):
        payload = "gradients"
    else:
        reason = "its data is neither looked up in a table nor written to one"
        log.debug("%s is not an embedding exchange: %s", node.name, reason)
        return None
    return GraphExchange("plain", payload, "urgent", size_in_bytes(value), node, wait, first_user(wait))


def _called_op(node: fx.Node) -> str:
    """The name of the called op, seen through functionalization of in-place ops."""
    target = str(node.target)
    return str(node.args[0]) if target.startswith("auto_functionalized") else target


def _is_lookup(node: fx.Node) -> bool:
    if node.target is aten.embedding.default:
        return True
    op = _called_op(node)
    if op.startswith("fbgemm.") and "embedding" in op and "forward" in op:
        return True
    return node.target in GATHERS and _is_table(node.args[0])


def _is_table(node: object) -> bool:
    """A graph input from outside the step: neither a gradient nor computed."""
    while isinstance(node, fx.Node) and node.target in PASS_THROUGH:
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.op != "placeholder" or node.name.startswith("tangents"):
        return False
    return _has_fixed_rows(node)


def _has_fixed_rows(node: fx.Node) -> bool:
    """A table has a static height; activations that are graph inputs have the batch's symbolic one."""
    return not any(isinstance(s, torch.SymInt) for s in node.meta["val"].shape[:1])


def _comes_from_lookup(start: object) -> bool:
    todo, seen = [start], set()
    while todo:
        node = todo.pop()
        if not isinstance(node, fx.Node) or node in seen:
            continue
        seen.add(node)
        if _is_lookup(node):
            return True
        if node.target in PASS_THROUGH:
            todo += node.all_input_nodes
    return False


def _goes_to_update(start: fx.Node) -> bool:
    todo, seen = [start], set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        for user in node.users:
            if _is_update(user, node):
                return True
            if user.target in PASS_THROUGH or user.target in SCALING:
                todo.append(user)
    return False


def _is_update(user: fx.Node, value: fx.Node) -> bool:
    """Whether `user` turns `value` into a table's gradient or applies it to a table."""
    if user.target in (aten.embedding_dense_backward.default, fs.update_.default):
        return True
    op = _called_op(user)
    if op.startswith("fbgemm.") and "backward" in op:
        return True
    if user.target not in SCATTERS or user.args[0] is value:
        return False
    return _has_fixed_rows(user) and _ends_outside(user)


def _ends_outside(start: fx.Node) -> bool:
    """Whether the scattered sum leaves the graph as a gradient, with those of other lookups of the table, or goes back
    into a table, without further compute."""
    todo, seen = [start], {start}
    while todo:
        node = todo.pop()
        if not node.users:
            return False
        for user in node.users:
            if user.op == "output" or user.target is aten.copy_.default or user in seen:
                continue
            if user.target not in PASS_THROUGH | SCALING | {aten.add.Tensor}:
                return False
            seen.add(user)
            todo.append(user)
    return True
