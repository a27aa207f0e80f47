"""Launch ops: an all-to-all or an average starts here, and `_c10d_functional.wait_tensor` waits for it.

The graph sees one op regardless of `transport` and `packing`: the result has the shape of the rows, and the wait
unpacks packed rows, on a GPU on the waiting stream. Rows that a rank sends to itself are copied at the launch,
unpacked. The launch's record counts the bytes received from other ranks.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from freescale.compat import distributed
from freescale.kernels import background, dense_average, row_packing
from freescale.kernels.ops import table_registry
from freescale.kernels.ops.schemas import EARLY, LATE, implement
from freescale.kernels.transports import c10d, launch_record, open_transports

_launches: Counter[str] = Counter()  # per label, in this process


def all_to_all_rows_launch(token, rows, send_counts, recv_counts, n_recv, priority, table, *how, **more):
    background.wait_for(table)
    # This op owns the send buffer: the Work holds it until it completes, even if the wait is in a later graph.
    packed = table_registry.gather_rows(table, rows)
    return launch("rows", packed, send_counts, recv_counts, n_recv, priority, table, *how, **more)


def all_to_all_launch(x, *how, **more):
    return launch("gradients", x.contiguous(), *how, **more)


def all_to_all_background_launch(
    grad, token, rows, order, ends, late_send_counts, late_recv_counts, n_late, early_rows, send_counts, recv_counts,
    n_recv, table, group_name, transport="c10d", gradient_packing="", packing=""
):  # fmt: skip
    """What the separate ops do, in this order, on a stream beside the current one."""

    def work():
        late = all_to_all_launch(
            grad, late_send_counts, late_recv_counts, n_late, LATE, table, group_name, transport, gradient_packing
        )
        arrived = torch.ops._c10d_functional.wait_tensor(late)
        torch.ops.freescale.update_.default(token, arrived, rows, order, ends, LATE, table)
        return all_to_all_rows_launch(
            token, early_rows, send_counts, recv_counts, n_recv, EARLY, table, group_name, transport, packing
        )

    return background.run(table, (grad, rows, order, ends, early_rows), work)


def launch(what, x, send_counts, recv_counts, n_recv, priority, table, group_name, transport="c10d", packing=""):
    group = distributed.group_by_name(group_name)
    label = launch_record.launch_label(what, priority, table)
    with launch_record.profiler_range("launch", label):
        if not packing:
            out, work = _start(transport, group, x, send_counts, recv_counts, n_recv, priority)
            return launch_record.register_launch(work, label, out, group)
        _launches[label] += 1
        packed = row_packing.pack(packing, x, send_counts, recv_counts, group.rank(), _launches[label])
        out = x.new_empty((n_recv, *x.shape[1:]))
        # before the start, so a stream that waits for the message also waits for this copy
        row_packing.copy_own(packing, x, out, send_counts, recv_counts, group.rank())
        counts = packed.send_counts, packed.recv_counts, packed.n_recv
        received, work = _start(transport, group, packed.x, *counts, priority)
    then = partial(_unpack, packed, received, out)
    return launch_record.register_launch(work, label, out, group, received.nbytes, then)


def _start(transport, group, x, send_counts, recv_counts, n_recv, priority) -> tuple[torch.Tensor, Any]:
    copies = None if transport == "c10d" else open_transports.transport_for(transport, group, x, n_recv)
    if copies is not None:
        return copies.start(x, send_counts, recv_counts, n_recv, priority)
    out = x.new_empty((n_recv, *x.shape[1:]))
    return out, c10d.start_all_to_all(out, x, recv_counts.tolist(), send_counts.tolist(), group)


def _unpack(packed: row_packing.Packed, received: torch.Tensor, out: torch.Tensor) -> None:
    if received.is_cuda:
        received.record_stream(torch.cuda.current_stream(received.device))  # may differ from the launch's stream
    with torch.no_grad():
        packed.unpack(received, out)


def all_reduce_launch(gradients, parameters, group_name, packing=""):
    """Each rank divides its gradients before the sum, as DistributedDataParallel does: bit-identical."""
    group = distributed.group_by_name(group_name)
    with launch_record.profiler_range("launch", launch_record.DENSE):
        if packing:
            out, work, size, then = dense_average.start(gradients, parameters, group, packing)
            return launch_record.register_launch(work, launch_record.DENSE, out, group, size, then)
        out = torch.cat([g.reshape(-1) for g in gradients]).mul_(1.0 / group.size())
        work = dist.all_reduce(out, group=group, async_op=True)
    return launch_record.register_launch(
        work, launch_record.DENSE, out, group, all_reduce_bytes(out.nbytes, group.size())
    )


def all_reduce_bytes(size: int, world: int) -> int:
    return 2 * size * (world - 1) // world


for _fn in (all_to_all_rows_launch, all_to_all_launch, all_to_all_background_launch, all_reduce_launch):
    implement(_fn.__name__, _fn)
