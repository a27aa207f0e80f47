"""A stream beside the compute stream, for work on table rows that the current step neither reads nor writes.

Late gradients of the previous step, their update, and early rows of the next batch touch no row of this step. If a
graph has no compute to hide them under, because the embedding collections are compiled alone, they run here while the
dense part computes. Before anything else reads or updates the table, its stream waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache

import torch

from freescale.kernels.ops.schemas import LATE
from freescale.kernels.transports import launch_record

# By table: the last work on this stream. It holds its inputs, whose memory belongs to the compute stream.
_pending: dict[str, tuple[torch.cuda.Event, Sequence[torch.Tensor]]] = {}
_stream = cache(lambda device: torch.cuda.Stream(device))


def run(table: str, inputs: Sequence[torch.Tensor], work: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Run `work`, which reads `inputs`, after everything that is on the current stream now. On the CPU, run it now."""
    device = inputs[0].device
    if device.type != "cuda":
        return work()
    wait_for(table)
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream), launch_record.beside_compute():
        result = work()
        _pending[table] = stream.record_event(), inputs
    return result


def wait_for(table: str) -> None:
    """The current stream waits for the work on this table, if it has not ended."""
    pending = _pending.pop(table, None) if _pending else None
    if pending is None or pending[0].query():
        return
    event, inputs = pending
    device = inputs[0].device
    end = launch_record.begin_wait(launch_record.launch_label("gradients", LATE, table), device)
    torch.cuda.current_stream(device).wait_event(event)
    end()


def is_pending(tables: Iterable[str]) -> bool:
    """Whether nothing has waited for work on one of these tables."""
    return any(table in _pending for table in tables)


def wait_for_all() -> None:
    for table in list(_pending):
        wait_for(table)
