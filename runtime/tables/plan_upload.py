"""Plans on their way to the device: all tensors of a batch in one pinned buffer, one copy, on a stream of its own.

The planning thread does this, so that the training thread only has to make its stream wait for the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import dlpack

from freescale.kernels.planning import native_plan
from freescale.runtime import batch_structure
from freescale.runtime.batch_structure import BatchEvent
from freescale.runtime.tables import step_plan
from freescale.runtime.tables.step_plan import StepPlan

_ALIGNMENT = 16  # elements: 128 bytes, as the device's own allocations have at least 16


class Uploader:
    """To one device. On the CPU everything stays where it is."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def batch(self, batch: Any) -> tuple[Any, BatchEvent | None]:
        """The batch on the device, and what to wait for before it is used."""
        if self._stream is None:
            return batch_structure.to_device(batch, self.device), None
        with torch.cuda.stream(self._stream):
            batch = batch_structure.to_device(batch, self.device)
            return batch, BatchEvent(batch)

    def plans(self, rows: Sequence[StepPlan], gradients: Sequence[StepPlan]) -> BatchEvent | None:
        """Bring what the device reads to it: the forward half of some plans, the backward half of others.

        Returns what to wait for before they are used.
        """
        if self._stream is None:
            return None
        halves = [step_plan.tensors_of_rows(p) for p in rows] + [step_plan.tensors_of_gradients(p) for p in gradients]
        with torch.cuda.stream(self._stream):
            memory, copies = _copy_together([t for half in halves for t in half], self.device)
            copied = BatchEvent(memory)
        on_device = iter(copies)
        moved = [[next(on_device) for _ in half] for half in halves]
        for p, tensors in zip(rows, moved, strict=False):
            step_plan.set_tensors_of_rows(p, tensors)
        for p, tensors in zip(gradients, moved[len(rows) :], strict=True):
            step_plan.set_tensors_of_gradients(p, tensors)
        return copied


def _copy_together(tensors: list[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The memory on the device, and a tensor in it for each of the 1-D int64 tensors, on the current stream."""
    sizes = [t.shape[0] for t in tensors]
    gaps = [-n % _ALIGNMENT for n in sizes]
    total = sum(sizes) + sum(gaps)
    host = torch.empty(total, dtype=torch.int64, pin_memory=True)
    native_plan.pack(tensors, [n + gap for n, gap in zip(sizes, gaps, strict=True)], host)
    memory = torch.empty(total, dtype=torch.int64, device=device)
    memory.copy_(host, non_blocking=True)
    parts = memory.split_with_sizes([n for pair in zip(sizes, gaps, strict=True) for n in pair])
    return memory, [_own_storage(part) for part in parts[::2]]


def _own_storage(view: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that is no view: to a compiled graph, views of one storage are related inputs."""
    return dlpack.from_dlpack(dlpack.to_dlpack(view)) if view.shape[0] else view.new_empty(0)
