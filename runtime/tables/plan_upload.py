"""Memory that plans are written to, and their way to the device: one copy for a batch, on a stream of its own.

The planning thread does this, so that the training thread only has to make its stream wait for the copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils import dlpack

from freescale.kernels.planning import native_plan
from freescale.kernels.planning.planned_batch import Extent
from freescale.runtime import batch_structure
from freescale.runtime.batch_structure import BatchEvent


class PlanMemory:
    """Memory of the CPU for one batch's plans, which stay there."""

    def __init__(self, elements: int) -> None:
        self._memory = np.empty(elements, dtype=np.int64)
        self.address = native_plan.address_of(self._memory)

    def upload(self, used: int) -> BatchEvent | None:
        """The first `used` elements are written. Returns what to wait for before tensors are used."""
        return None

    def tensors(self, extents: Iterable[Extent]) -> list[torch.Tensor]:
        # Separate storages: to a compiled graph, views of one storage are related inputs.
        return [native_plan.tensor(self._memory[begin : begin + size]) for begin, size in extents]


class PinnedPlanMemory(PlanMemory):
    """Memory of the CPU, and of a GPU to which it is copied."""

    def __init__(self, elements: int, stream: torch.cuda.Stream) -> None:
        self._host = torch.empty(elements, dtype=torch.int64, pin_memory=True)
        self._stream = stream
        self.address = self._host.data_ptr()

    def upload(self, used: int) -> BatchEvent | None:
        with torch.cuda.stream(self._stream):
            self._device_memory = torch.empty(used, dtype=torch.int64, device=self._stream.device)
            self._device_memory.copy_(self._host[:used], non_blocking=True)
            return BatchEvent(self._device_memory)

    def tensors(self, extents: Iterable[Extent]) -> list[torch.Tensor]:
        memory, empty = self._device_memory, self._device_memory.new_empty
        views = ((memory[begin : begin + size], size) for begin, size in extents)
        return [dlpack.from_dlpack(dlpack.to_dlpack(view)) if size else empty(0) for view, size in views]


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

    def plan_memory(self, elements: int) -> PlanMemory:
        return PlanMemory(elements) if self._stream is None else PinnedPlanMemory(elements, self._stream)
