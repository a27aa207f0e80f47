"""Reference implementations of every op, in plain, exact torch: they decide what is correct. The two composite exchange
ops use only the small ops below them: the pass that expands a composite runs these functions on graph nodes."""

from __future__ import annotations

import torch

from freescale.compat import distributed
from freescale.kernels import background
from freescale.kernels.ops import table_registry
from freescale.kernels.ops.schemas import LATE, implement, lib
from freescale.kernels.planning import native_plan, row_requests
from freescale.kernels.planning.owners import ExchangeTables, OwnerMap, first_invalid_id
from freescale.kernels.transports import launch_record

RUN_LENGTH = 512  # entries of a segment that are summed sequentially

_ops = torch.ops.freescale
_wait = torch.ops._c10d_functional.wait_tensor.default


def exchange_forward(token, rows, send_counts, recv_counts, n_recv, priority, table, group_name, packing=""):
    launched = _ops.all_to_all_rows_launch.default(
        token, rows, send_counts, recv_counts, n_recv, priority, table, group_name, **_packed(packing)
    )
    return _wait(launched)


def exchange_backward(
    token, grad, rows, order, ends, send_counts, recv_counts, n_recv, priority, table, group_name, packing=""
):
    launched = _ops.all_to_all_launch.default(
        grad, send_counts, recv_counts, n_recv, priority, table, group_name, **_packed(packing)
    )
    return _ops.update_.default(token, _wait(launched), rows, order, ends, priority, table)


def _packed(packing):
    return {"packing": packing} if packing else {}


class _AveragedParameter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parameter, name, place, group_name):  # type: ignore[override]
        ctx.arguments = name, place, group_name
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[override]
        return _ops.average_gradient.default(gradient, *ctx.arguments), None, None, None


def averaged_parameter(parameter, name, place, group_name):
    """`place`: index among the graph's parameters; 0 is the one whose gradient is complete first."""
    return _AveragedParameter.apply(parameter, name, place, group_name)


def average_gradient(gradient, name, place, group_name):
    return _wait(_ops.all_reduce_launch.default([gradient], name, group_name)).view(gradient.shape)


def sum_rows(x, order, ends):
    """out[i] = x[order[ends[i-1]]] + ... + x[order[ends[i]-1]], in at least float32: left to right in runs of
    RUN_LENGTH entries, then the sums of the runs left to right. So a row that is requested a million times does not
    need a million sequential additions on a GPU."""
    return sum_wide(x if x.dtype in (torch.float32, torch.float64) else x.float(), order, ends).to(x.dtype)


def sum_wide(x, order, ends):
    """sum_rows in the dtype of x."""
    x, sizes = x.index_select(0, order), ends.diff(prepend=ends.new_zeros(1))
    if order.shape[0] > RUN_LENGTH and int(sizes.max()) > RUN_LENGTH:
        runs = (sizes + RUN_LENGTH - 1) // RUN_LENGTH
        segment = torch.repeat_interleave(runs)
        nth = torch.arange(segment.shape[0], device=x.device) - (runs.cumsum(0) - runs)[segment]
        x, sizes = _sum_segments(x, (sizes[segment] - nth * RUN_LENGTH).clamp(max=RUN_LENGTH)), runs
    return _sum_segments(x, sizes)


def _sum_segments(x, sizes):
    # segment_reduce sums each segment left to right on every device
    return torch.segment_reduce(x, "sum", lengths=sizes, unsafe=True)


def update_(token, grad, rows, order, ends, priority, table):
    background.wait_for(table)
    if priority == LATE and rows.shape[0] == 0:
        table_registry.update_counts[table] += 1
        return torch.empty_like(token)
    with table_registry.table_for_update(table, late=priority == LATE) as updated:
        if grad.is_cuda and hasattr(updated, "sum_and_update"):  # one pass over memory instead of three
            updated.sum_and_update(grad.contiguous(), rows, order, ends)
        else:
            updated.apply_update(rows, _ops.sum_rows.default(grad, order, ends))
    return torch.empty_like(token)


def plan_now(ids, firsts, sizes, bounds, shifts, starts, table, group_name, fault=None):
    table_registry.count_lookup(table)
    device = ids[0].device
    tables = ExchangeTables(firsts, sizes, OwnerMap(bounds, shifts, starts))
    group = distributed.group_by_name(group_name)
    with launch_record.record_host_wait("planning in the step"):
        made = native_plan.plan_alone([i.cpu() for i in ids], tables, table, group, _fault(fault))
    inverse, order, ends, recv_counts, rows, send_counts, *own = made
    as_requester = [t.to(device) for t in (inverse, order, ends)]
    return (*as_requester, recv_counts, rows.to(device), send_counts, *(t.to(device) for t in own))


def checked_rows(ids, firsts, sizes, table, group_name, fault=None):
    group = distributed.group_by_name(group_name)
    invalid = first_invalid_id(ids, sizes)
    with launch_record.record_host_wait("planning in the step"):
        row_requests.compare_invalid_ids(invalid, table, group, _fault(fault))
    return torch.cat([i.long() + first for i, first in zip(ids, firsts, strict=True)])


def _fault(numbers):
    return row_requests.NO_FAULT if numbers is None else row_requests.Fault(*numbers.tolist())


def count_values(lengths, offsets, values, keys, unique_keys, reader, group_name=None):
    """Sum the lengths of each key, and check them; the second result is a row_requests.Fault as numbers. With a fault,
    the sums are such that nothing is read past the values until plan_now raises. The host waits for the device.

    `group_name`: given if no plan_now follows; then this raises on every rank. `reader` names the tables. It keeps
    AOTAutograd from merging the nodes of two readers, which would leave the second reader's sizes without a source.
    """
    lengths, offsets = lengths.cpu(), None if offsets is None else offsets.cpu()
    fault = row_requests.find_fault(keys, unique_keys, lengths, offsets, values.shape[0])
    if group_name is not None:
        with launch_record.record_host_wait("planning in the step"):
            row_requests.compare_invalid_ids(None, reader, distributed.group_by_name(group_name), fault)
    if fault.kind:
        counts = torch.tensor([values.shape[0]] + [0] * (keys - 1))
    else:
        counts = lengths.reshape(keys, lengths.shape[0] // keys).sum(1, dtype=torch.int64)
    return counts, torch.tensor(fault)


def checked_weights(weights, ids, features, group_name):
    group = distributed.group_by_name(group_name)
    with launch_record.record_host_wait("planning in the step"):
        row_requests.compare_weights(weights.shape[0], ids.shape[0], features, group)
    return weights.clone()


def expect_ids(token, ids, planned, step, table, lengths=None, counts=None, fault=None):
    """Check that the plan is for these ids and for this many per key: `counts` are planned, `lengths` [keys, samples].
    `fault`: result of count_values for unplanned lengths, which must run before any op that reads rows by them."""
    require_planned(ids, planned, step, table, _equal)
    if lengths is not None:
        require_counts(lengths, counts, step, table, has_counts)
    return torch.empty_like(token)


def require_planned(ids, planned, step, table, equal):
    table_registry.count_lookup(table)
    got = torch.cat([i.long() for i in ids]) if len(ids) != 1 else ids[0]
    if got.shape != planned.shape:
        found = f" (planned {planned.shape[0]} ids, found {got.shape[0]})"
        raise RuntimeError(_not_planned("ids", step, table) + found)
    _require(equal(got, planned), "ids", step, table)


def require_counts(lengths, counts, step, table, has_counts):
    _require(has_counts(lengths, counts), "lengths", step, table)


def has_counts(lengths, counts):
    """Whether no length is negative and the lengths of each key add up to its count; then all lengths are within the
    rows of their key. (The boundaries of samples within a key are not planned and may change.)"""
    return (lengths >= 0).all() & _equal(lengths.sum(1), counts)


def _equal(a, b):
    return (a == b).all()


MAX_MESSAGE = 254  # bytes of a device-side assert message


def _require(fine, what, step, table):
    """On a GPU this is a device-side assert: the host does not wait, and later work on the stream does not run."""
    if fine.is_cuda:
        torch._assert_async(fine, _not_planned(what, step, table)[:MAX_MESSAGE])
    elif not fine:
        raise RuntimeError(_not_planned(what, step, table))


def _not_planned(what, step, table):
    return (
        f"freescale: {table}: the {what} passed to the model do not match batch {step.tolist()}, the next batch that "
        "the LookaheadLoader yielded; pass each of its batches to the model once, in order"
    )


for _fn in (
    exchange_forward,
    exchange_backward,
    average_gradient,
    sum_rows,
    update_,
    plan_now,
    checked_rows,
    count_values,
    checked_weights,
    expect_ids,
):
    implement(_fn.__name__, _fn)
# CompositeImplicit: AOTAutograd traces into it, including its gradient.
lib.impl("averaged_parameter", averaged_parameter, "CompositeImplicitAutograd")
