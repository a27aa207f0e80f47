"""The dialect: schema and fake of every op. reference.py defines what an op computes (pack_rows: row_kernels.py).

Table rows are not graph values. An op names its table (`table`, an entry of table_registry.py) and reads or updates it
in place. A *token*, an empty tensor with the table's width, dtype and device, goes in and comes out of such ops and
orders them. So a table is never copied, saved or functionalized, and the order of reads and updates is ordinary data
flow.

Counts (rows per peer) are CPU int64 tensors of length world, so the graph does not grow with the world size.

    plan_now                ids of this batch -> plan of its exchange, everything urgent (collective); raises on every
                            rank if any rank has an invalid id or KeyedJaggedTensor (`fault`)
    checked_rows            ids of this batch -> rows of replicated tables (collective); raises likewise
    count_values            values per key of a KeyedJaggedTensor, and what is wrong with it; given a group, it raises
                            on every rank if any is malformed (collective)
    checked_weights         weights of ids, after every rank confirmed that it has one weight per id (collective)
    expect_ids              raises unless the ids, and their number per key, match the plan
    exchange_forward        rows from their owners to the ranks that requested them
    exchange_backward       their gradients back to the owner, which sums and applies them. `packing` as in a launch
    all_to_all_rows_launch  start of an all-to-all of table rows
    all_to_all_launch       start of an all-to-all; `_c10d_functional.wait_tensor` waits for either. `transport` carries
                            it (transports/selection.py); `packing` is the compression of rows (compression.py)
    all_to_all_background_launch  late gradients, their update, then the start of early rows, on a stream beside the
                            current one (background.py)
    averaged_parameter      identity on a dense parameter; average_gradient averages its gradient over the ranks
    average_gradient        average of one parameter's gradient, blocking (collective)
    all_reduce_launch       start of the average of several gradients, in one buffer; wait_tensor waits for it. With a
                            `packing`, only the largest values are sent (dense_average.py)
    pack_rows               rows of a table
    sum_rows                sums of rows in a fixed order
    agree                   raises unless every rank of the group is about to run a graph with these launches (once)
    update_                 the owner's optimizer step on unique rows; a late one uses the settings of the previous step
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from freescale.compat import dynamo, inductor
from freescale.compat.direct_calls import DirectOps

lib = torch.library.Library("freescale", "DEF")
direct_ops = DirectOps("freescale")


def implement(name: str, function: Callable[..., Any], on_gpu: bool = False) -> None:
    """Register the implementation of an op; with `on_gpu`, the one for CUDA."""
    # untraced: after a graph break in user code, Dynamo must not try to compile the inside of an op
    function = dynamo.untraced(function)
    lib.impl(name, function, "CUDA" if on_gpu else "CompositeExplicitAutograd")
    direct_ops.add(name, function, on_gpu)


lib.define(
    "plan_now(Tensor[] ids, int[] firsts, int[] sizes, Tensor bounds, Tensor shifts, Tensor starts, "
    "str table, str group_name, Tensor? fault=None) -> (Tensor inverse, Tensor order, Tensor ends, Tensor recv_counts, "
    "Tensor rows, Tensor send_counts, Tensor own_rows, Tensor own_order, Tensor own_ends)"
)
lib.define(
    "checked_rows(Tensor[] ids, int[] firsts, int[] sizes, str table, str group_name, Tensor? fault=None) -> Tensor"
)
lib.define(
    "count_values(Tensor lengths, Tensor? offsets, Tensor values, int keys, bool unique_keys, str reader, "
    "str? group_name=None) -> (Tensor counts, Tensor fault)"
)
lib.define("checked_weights(Tensor weights, Tensor ids, str features, str group_name) -> Tensor")
lib.define(
    "expect_ids(Tensor token, Tensor[] ids, Tensor planned, Tensor step, str table, Tensor? lengths=None, "
    "Tensor? counts=None, Tensor? fault=None) -> Tensor"
)
lib.define(
    "exchange_forward(Tensor token, Tensor rows, Tensor send_counts, Tensor recv_counts, SymInt n_recv, "
    'int priority, str table, str group_name, str packing="") -> Tensor'
)
lib.define(
    "exchange_backward(Tensor token, Tensor grad, Tensor rows, Tensor order, Tensor ends, Tensor send_counts, "
    'Tensor recv_counts, SymInt n_recv, int priority, str table, str group_name, str packing="") -> Tensor'
)
_HOW = (
    "Tensor send_counts, Tensor recv_counts, SymInt n_recv, int priority, str table, str group_name, "
    'str transport="c10d", str packing=""'
)
lib.define(f"all_to_all_rows_launch(Tensor token, Tensor rows, {_HOW}) -> Tensor")
lib.define(f"all_to_all_launch(Tensor x, {_HOW}) -> Tensor")
lib.define(
    "all_to_all_background_launch(Tensor grad, Tensor token, Tensor rows, Tensor order, Tensor ends, "
    "Tensor late_send_counts, Tensor late_recv_counts, SymInt n_late, Tensor early_rows, Tensor send_counts, "
    "Tensor recv_counts, SymInt n_recv, str table, str group_name, str transport=\"c10d\", "
    "str gradient_packing=\"\", str packing=\"\") -> Tensor"
)
lib.define("averaged_parameter(Tensor(a) parameter, str name, int place, str group_name) -> Tensor(a)")
lib.define("average_gradient(Tensor gradient, str name, int place, str group_name) -> Tensor")
lib.define('all_reduce_launch(Tensor[] gradients, str parameters, str group_name, str packing="") -> Tensor')
lib.define("pack_rows(Tensor weight, Tensor rows) -> Tensor")
lib.define("sum_rows(Tensor x, Tensor order, Tensor ends) -> Tensor")
lib.define("agree(Tensor(a!) first, str launches, str group_name, float timeout) -> Tensor")
lib.define(
    "update_(Tensor token, Tensor grad, Tensor rows, Tensor order, Tensor ends, int priority, str table) -> Tensor"
)

# Lower numbers get the network first.
URGENT, LATE, EARLY = 0, 1, 2
PRIORITY_NAMES = {URGENT: "urgent", LATE: "late", EARLY: "early"}


def _rows_like(x: torch.Tensor, n: int | torch.SymInt) -> torch.Tensor:
    return x.new_empty((n, *x.shape[1:]))


@torch.library.register_fake("freescale::plan_now", lib=lib)
def _plan_now(ids, firsts, sizes, bounds, shifts, starts, table, group_name, fault=None):
    ctx = torch.library.get_ctx()
    positions = sum(i.shape[0] for i in ids)
    unique, sent, own = ctx.new_dynamic_size(), ctx.new_dynamic_size(), ctx.new_dynamic_size()
    torch._check(own <= sent)
    index = torch.empty(0, dtype=torch.int64, device=ids[0].device)
    counts = starts.new_empty(starts.shape[0] - 1)
    return (
        index.new_empty(positions),
        index.new_empty(positions),
        index.new_empty(unique),
        counts,
        index.new_empty(sent),
        counts.new_empty(counts.shape),
        index.new_empty(own),
        index.new_empty(sent),
        index.new_empty(own),
    )


@torch.library.register_fake("freescale::checked_rows", lib=lib)
def _checked_rows(ids, firsts, sizes, table, group_name, fault=None):
    return ids[0].new_empty(sum(i.shape[0] for i in ids), dtype=torch.int64)


@torch.library.register_fake("freescale::count_values", lib=lib)
def _count_values(lengths, offsets, values, keys, unique_keys, reader, group_name=None):
    on_host = torch.empty(0, dtype=torch.int64, device="cpu")
    return on_host.new_empty(keys), on_host.new_empty(3)


@torch.library.register_fake("freescale::checked_weights", lib=lib)
def _checked_weights(weights, ids, features, group_name):
    return weights.new_empty(ids.shape[0])


@torch.library.register_fake("freescale::expect_ids", lib=lib)
@torch.library.register_fake("freescale::exchange_backward", lib=lib)
@torch.library.register_fake("freescale::update_", lib=lib)
def _new_token(token, *arguments, **more):
    return torch.empty_like(token)


@torch.library.register_fake("freescale::exchange_forward", lib=lib)
@torch.library.register_fake("freescale::all_to_all_rows_launch", lib=lib)
def _received_table_rows(token, rows, send_counts, recv_counts, n_recv, *how, **more):
    return _rows_like(token, n_recv)


@torch.library.register_fake("freescale::all_to_all_launch", lib=lib)
def _all_to_all_launch(x, send_counts, recv_counts, n_recv, *how, **more):
    return _rows_like(x, n_recv)


@torch.library.register_fake("freescale::all_to_all_background_launch", lib=lib)
def _all_to_all_background_launch(
    grad, token, rows, order, ends, late_send_counts, late_recv_counts, n_late, early_rows, send_counts, recv_counts,
    n_recv, *how, **more
):  # fmt: skip
    return _rows_like(token, n_recv)


@torch.library.register_fake("freescale::average_gradient", lib=lib)
def _average_gradient(gradient, name, place, group_name):
    return gradient.new_empty(gradient.shape)


@torch.library.register_fake("freescale::all_reduce_launch", lib=lib)
def _all_reduce_launch(gradients, parameters, group_name, packing=""):
    return gradients[0].new_empty(sum(g.numel() for g in gradients))


@torch.library.register_fake("freescale::pack_rows", lib=lib)
def _pack_rows(weight, rows):
    return weight.new_empty((rows.shape[0], weight.shape[1]))


@torch.library.register_fake("freescale::sum_rows", lib=lib)
def _sum_rows(x, order, ends):
    return _rows_like(x, ends.shape[0])


@torch.library.register_fake("freescale::agree", lib=lib)
def _agree(first, launches, group_name, timeout):
    # `first` is unchanged. Declaring it mutated keeps the op in the graph, before the next reader of `first`. The
    # result is for Inductor, which before 2.13 does not order ops that return nothing.
    return first.new_empty(0)


for _op in ("all_to_all_rows_launch", "all_to_all_launch", "all_to_all_background_launch", "all_reduce_launch"):
    inductor.register_launch_lowering(getattr(torch.ops.freescale, _op))

# A rank with no rows or gradients must still join collectives. Without this, Inductor would remove an op whose results
# are unused in that batch's graph, and the other ranks would hang.
for _defined in inductor.ops_of("freescale"):
    if any(a.name in ("group_name", "group") for a in _defined._schema.arguments):
        torch.fx.node.has_side_effect(_defined)
