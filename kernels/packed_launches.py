"""Launches whose rows travel packed (compression.py says how), over every transport.

To the graph they are launches like the others: what they return has the shape of the rows, and is there after
`_c10d_functional.wait_tensor`, in the same graph or in a later one. What was received is unpacked by that wait: on a
GPU on the stream that waits. What a rank sends to itself is copied when it is launched. The launch's record has the
bytes that come from other ranks.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch

from freescale.compat import distributed
from freescale.kernels import row_packing
from freescale.kernels.ops import table_registry
from freescale.kernels.ops.schemas import LAUNCH_SUFFIXES, implement
from freescale.kernels.planning.batch_plan import unless_nobody_sends
from freescale.kernels.transports import c10d, launch_record, open_transports

_launches: Counter[str] = Counter()  # of each label, in this process


def launch_packed(transport_name, what, x, send_counts, recv_counts, n_recv, priority, table, group_name, packing):
    """`transport_name`: "" for the group's own all-to-all."""
    group = distributed.group_by_name(group_name)
    label = launch_record.launch_label(what, priority, table)
    _launches[label] += 1
    with launch_record.profiler_range("launch", label):
        packed = row_packing.pack(packing, x, send_counts, recv_counts, group.rank(), _launches[label])
        out, n_packed = x.new_empty((n_recv, *x.shape[1:])), packed.n_recv
        # before the start: whatever stream waits for the message waits for this too
        row_packing.copy_own(x, out, send_counts, recv_counts, group.rank())
        transport = (
            open_transports.transport_for(transport_name, group, packed.x, n_packed) if transport_name else None
        )
        if transport is None:
            received = packed.x.new_empty((n_packed, packed.x.shape[1]))
            counts = packed.recv_counts.tolist(), packed.send_counts.tolist()
            message: Any = c10d.start_all_to_all(received, packed.x, *counts, group)
        else:
            received, message = transport.start(packed.x, packed.send_counts, packed.recv_counts, n_packed, priority)
    unpack = partial(_unpack, packed, received, out)
    if transport is None:
        work = launch_record.RecordedWork(message, label, out, group, received.nbytes, unpack)
    else:
        work = launch_record.RecordedMessage(transport, message, label, out, group, received.nbytes, unpack)
    distributed.register_work(out, work)
    return out


def _unpack(packed: row_packing.Packed, received: torch.Tensor, out: torch.Tensor) -> None:
    if received.is_cuda:
        received.record_stream(torch.cuda.current_stream(received.device))  # it may not be the one of the launch
    with torch.no_grad():
        packed.unpack(received, out)


def _implement(transport_name: str) -> None:
    @unless_nobody_sends
    def all_to_all_launch_packed(
        x, send_counts, recv_counts, n_recv, priority, table, group_name, packing
    ):
        where = send_counts, recv_counts, n_recv, priority, table, group_name
        return launch_packed(transport_name, "gradients", x.contiguous(), *where, packing)

    @unless_nobody_sends
    def all_to_all_rows_launch_packed(
        token, rows, send_counts, recv_counts, n_recv, priority, table, group_name, packing
    ):
        where = send_counts, recv_counts, n_recv, priority, table, group_name
        return launch_packed(transport_name, "rows", table_registry.gather_rows(table, rows), *where, packing)

    suffix = f"_{transport_name}" if transport_name else ""
    for fn in (all_to_all_launch_packed, all_to_all_rows_launch_packed):
        implement(f"{fn.__name__}{suffix}", fn)


for _name in ("", *LAUNCH_SUFFIXES):
    _implement(_name)
