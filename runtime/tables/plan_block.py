"""The plans of a batch and the batch's tensors in one block of memory: two copies upload them to the device. The
planning thread fills a block without the GIL. The training thread uploads it on its own stream and checks which pinned
memory is free again, which is faster than waiting for the GIL while another thread does it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from freescale.kernels.planning import native_plan
from freescale.kernels.planning.native_plan import ALIGNMENT, Copy, Extent, Planned, PlannedExchange, Room
from freescale.kernels.transports import cuda_driver
from freescale.runtime import batch_structure
from freescale.runtime.batch_structure import BatchEvent

_ELEMENT = 8  # bytes of int64
SMALL_BYTES = 16384  # a loop may keep batch tensors up to this size: see PlanBlock


class PinnedMemory:
    """Pinned host memory, reused once the device has read it. (torch's own cache checks for reusable blocks on
    allocation, which would be in the planning thread.)"""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._idle: deque[torch.Tensor] = deque()
        self._being_read: deque[tuple[torch.Tensor, Any]] = deque()

    def take(self, elements: int) -> torch.Tensor:
        while self._idle:
            memory = self._idle.popleft()
            if memory.shape[0] >= elements:
                return memory
        return torch.empty(1 << (elements - 1).bit_length(), dtype=torch.int64, pin_memory=True)

    def upload(self, memory: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Upload the first sum(sizes) elements as device tensors of these sizes, on the current stream. The memory is
        reused after the copy. Called by the training thread."""
        driver = cuda_driver.driver_of(self._device)
        stream, address = driver.current_stream(), memory.data_ptr()
        if self._being_read and driver.is_done(self._being_read[0][1]):
            self._idle.append(self._being_read.popleft()[0])
        # Not `Tensor.to`: its dispatch takes longer than the copy.
        uploaded = [torch.empty(size, dtype=torch.int64, device=self._device) for size in sizes]
        for target in filter(torch.Tensor.numel, uploaded):
            driver.upload(target.data_ptr(), address, target.nbytes, stream)
            address += target.nbytes
        self._being_read.append((memory, driver.record_event(stream)))
        return uploaded


class PlanBlock:
    """Memory for the plans of one batch, and on a GPU for its `tensors`, contiguous on the CPU. `elements`: plans.

    Small tensors of the batch get their own device memory. A loop may keep labels for a whole epoch, and a tensor keeps
    alive all memory that it shares.
    """

    def __init__(
        self, elements: int, pinned: PinnedMemory | None = None, tensors: Sequence[torch.Tensor] = ()
    ) -> None:
        self._pinned = pinned
        # Layout: small tensors, large tensors, plans. Offsets are in elements.
        nbytes = [t.nbytes for t in tensors]
        self._order = sorted(range(len(tensors)), key=lambda i: nbytes[i] > SMALL_BYTES)
        self._tensors = [tensors[i] for i in self._order]
        self._n_small = sum(n <= SMALL_BYTES for n in nbytes)
        sizes = (-(-nbytes[i] // (_ELEMENT * ALIGNMENT)) * ALIGNMENT for i in self._order)
        *self._places, self._first = itertools.accumulate(sizes, initial=0)
        self._small_end = (*self._places, self._first)[self._n_small]
        self._small: torch.Tensor | None = None  # on the device after upload: the small tensors,
        self._memory: torch.Tensor | None = None  # and everything else
        self._used = 0
        self.exchanges: list[PlannedExchange] = []
        self.make_room(elements)

    # -- the planning thread -------------------------------------------------------------------------------------

    def make_room(self, elements: int) -> None:
        """Allocate room for plans. Discards the block's contents."""
        whole = self._first + elements
        self._host: torch.Tensor | None = None
        if self._pinned is None:
            self._array = np.empty(whole, dtype=np.int64)
            address = native_plan.address_of(self._array)
        else:
            self._host = self._pinned.take(whole)
            elements, address = self._host.shape[0] - self._first, self._host.data_ptr()
        places = zip(self._places, self._tensors, strict=True)
        copies = [Copy(address + _ELEMENT * place, t.data_ptr(), t.nbytes) for place, t in places]
        self.room = Room(address + _ELEMENT * self._first, elements, copies)

    def fill(self, plan: Callable[[Room], Planned]) -> None:
        self._used, self.exchanges = plan(self.room)

    # -- the training thread -------------------------------------------------------------------------------------

    def upload(self) -> None:
        """Copy to the device once, on its current stream."""
        if self._host is not None:
            assert self._pinned is not None
            sizes = self._small_end, self._first - self._small_end + self._used
            self._small, self._memory = self._pinned.upload(self._host, sizes)
            self._host = None

    def arrays(self, extents: Sequence[Extent]) -> list[torch.Tensor]:
        if self._memory is None:  # on the CPU there are no tensors of the batch
            self._memory = torch.from_numpy(self._array)
        first = self._first - self._small_end
        return [detached(self._memory, first + extent.offset, extent.size) for extent in extents]

    def unpack(self, batch: Any) -> Any:
        if not self._tensors:
            return batch
        assert self._small is not None and self._memory is not None
        small, large = self._small.view(torch.uint8), self._memory.view(torch.uint8)
        by_leaf = {}
        for i, (leaf, place, t) in enumerate(zip(self._order, self._places, self._tensors, strict=True)):
            memory, place = (small, place) if i < self._n_small else (large, place - self._small_end)
            by_leaf[leaf] = detached(memory, _ELEMENT * place, t.nbytes).view(t.dtype).view(t.shape)
        tensors = map(by_leaf.__getitem__, range(len(by_leaf)))
        return batch_structure.map_leaves(batch, lambda x: next(tensors) if _is_packable(x) else x)


def detached(memory: torch.Tensor, first: int, size: int) -> torch.Tensor:
    """A slice that keeps the memory alive but is no view for autograd: a write elsewhere does not bump its version."""
    return from_dlpack(to_dlpack(memory[first : first + size]))


def packable_tensors(leaves: Sequence[Any], device: torch.device) -> list[torch.Tensor]:
    """The tensors among a batch's leaves that are uploaded in a block."""
    if device.type == "cpu":
        return []
    tensors = [t for t in leaves if _is_packable(t)]
    return [t if t.is_contiguous() else t.contiguous() for t in tensors]  # calling .contiguous() would release the GIL


def _is_packable(x: Any) -> bool:
    return type(x) is torch.Tensor and x.is_cpu and x.layout == torch.strided and not x.requires_grad


def move_others(batch: Any, device: torch.device) -> tuple[Any, BatchEvent | None]:
    """Move everything that is not packable to the device. Also return the event to wait for before using the batch."""
    if device.type == "cpu":
        return batch, None
    batch = batch_structure.map_leaves(batch, lambda x: x if _is_packable(x) else batch_structure.to_device(x, device))
    return batch, BatchEvent([x for x in batch_structure.leaves(batch) if not _is_packable(x)])
