"""The plans of a batch in one piece of memory, with the tensors of the batch: one copy brings them to the device.

The planning thread fills a block, without Python's lock. The training thread brings it to the device, on its own
stream: that takes it less time than to wait for the lock while another thread does it. For the same reason it is the
training thread that finds out which pinned memory can be used again.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from freescale.kernels.native.memory_parts import Part, split_arrays, split_memory
from freescale.kernels.planning import native_plan
from freescale.kernels.planning.batch_plan import ALIGNMENT, Copy, Extents, Planned, PlannedExchange, Room
from freescale.kernels.transports import cuda_driver
from freescale.runtime import batch_structure
from freescale.runtime.batch_structure import BatchEvent

_ELEMENT = 8  # bytes of int64


class PinnedMemory:
    """Pinned memory of the host, used again when the device has read it. (torch's own cache of pinned memory looks for
    what can be used again when some is asked for: that is in the planning thread.)"""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._idle: deque[torch.Tensor] = deque()
        self._being_read: deque[tuple[torch.Tensor, Any]] = deque()

    def take(self, elements: int) -> torch.Tensor:
        """In the planning thread."""
        while self._idle:
            memory = self._idle.popleft()
            if memory.shape[0] >= elements:
                return memory
        return torch.empty(1 << (elements - 1).bit_length(), dtype=torch.int64, pin_memory=True)

    def copy_to(self, target: torch.Tensor, memory: torch.Tensor) -> None:
        """In the training thread: the current stream fills `target` with as much of the memory, which is given back."""
        driver = cuda_driver.driver_of(self._device)
        stream = driver.current_stream()
        if self._being_read and driver.is_done(self._being_read[0][1]):
            self._idle.append(self._being_read.popleft()[0])
        if target.nbytes:
            driver.upload(target.data_ptr(), memory.data_ptr(), target.nbytes, stream)
        self._being_read.append((memory, driver.record_event(stream)))


class PlanBlock:
    """`elements`: room for plans. `tensors`: of the batch, on the CPU, contiguous. `pinned`: where its memory comes
    from, with a GPU."""

    def __init__(
        self, elements: int, device: torch.device, tensors: Sequence[torch.Tensor] = (),
        pinned: PinnedMemory | None = None,
    ) -> None:  # fmt: skip
        self._device, self._tensors = device, tensors
        self._pinned = pinned if pinned is not None else PinnedMemory(device)
        sizes = [-(-t.nbytes // (_ELEMENT * ALIGNMENT)) * ALIGNMENT for t in tensors]
        self._first = sum(sizes)  # element of the plans; tensors come before
        self._places = [end - size for end, size in zip(itertools.accumulate(sizes), sizes, strict=True)]
        self._memory: torch.Tensor | None = None  # on the device, once it is there
        self._used = 0
        self._read_plans: Callable[[], list[PlannedExchange]] = list
        self.make_room(elements)

    # -- the planning thread -------------------------------------------------------------------------------------

    def make_room(self, elements: int) -> None:
        """Of plans. What is in the block is lost."""
        whole = self._first + elements
        self._host: torch.Tensor | None = None
        if self._device.type == "cpu":
            self._array = np.empty(whole, dtype=np.int64)
            address = native_plan.address_of(self._array)
        else:
            self._host = self._pinned.take(whole)
            elements, address = self._host.shape[0] - self._first, self._host.data_ptr()
        places = zip(self._places, self._tensors, strict=True)
        copies = [Copy(address + _ELEMENT * place, t.data_ptr(), t.nbytes) for place, t in places]
        self.room = Room(address + _ELEMENT * self._first, elements, copies)

    def fill(self, plan: Callable[[Room], Planned]) -> None:
        """`plan` writes into the room that it gets."""
        self._used, self._read_plans = plan(self.room)

    # -- the training thread -------------------------------------------------------------------------------------

    @cached_property
    def exchanges(self) -> list[PlannedExchange]:
        return self._read_plans()

    def upload(self) -> None:
        """On the current stream of the device, once."""
        if self._host is not None and self._memory is None:
            # Not by `Tensor.to`: to find out what it is to do takes it longer than to do it.
            self._memory = torch.empty(self._first + self._used, dtype=torch.int64, device=self._device)
            self._pinned.copy_to(self._memory, self._host)
            self._host = None

    def arrays(self, extents: Extents) -> list[torch.Tensor]:
        """Arrays of the plans, as tensors on the device."""
        if self._memory is None:  # it is on the CPU
            self._memory = torch.from_numpy(self._array)
        return split_arrays(self._memory, extents.numbers, extents.begin, extents.end, self._first)

    def unpack(self, batch: Any) -> Any:
        """The batch with its tensors on the device."""
        if not self._tensors:
            return batch
        assert self._memory is not None
        places = zip(self._places, self._tensors, strict=True)
        flat = split_memory(self._memory, [Part(_ELEMENT * place, t.numel(), t.dtype) for place, t in places])
        pairs = zip(flat, self._tensors, strict=True)
        return _replace_packable(batch, iter([x if t.dim() == 1 else x.view(t.shape) for x, t in pairs]))


def packable_tensors(leaves: Sequence[Any], device: torch.device) -> list[torch.Tensor]:
    """Of a batch's leaves, the tensors that go to the device in a block."""
    if device.type == "cpu":
        return []
    tensors = [t for t in leaves if _is_packable(t)]
    return [t if t.is_contiguous() else t.contiguous() for t in tensors]  # an op would give Python's lock away


def _is_packable(x: Any) -> bool:
    return type(x) is torch.Tensor and x.is_cpu and x.layout == torch.strided and not x.requires_grad


def _replace_packable(batch: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if batch_structure.is_kjt(batch) or isinstance(batch, torch.Tensor):
        return next(tensors) if _is_packable(batch) else batch
    return batch_structure.map_children(batch, lambda child: _replace_packable(child, tensors))


def move_others(batch: Any, device: torch.device) -> tuple[Any, BatchEvent | None]:
    """The batch with all that is not packable on the device, and what to wait for before it is used."""
    if device.type == "cpu":
        return batch, None
    batch = _move_others(batch, device)
    return batch, BatchEvent([x for x in batch_structure.leaves(batch) if not _is_packable(x)])


def _move_others(x: Any, device: torch.device) -> Any:
    if batch_structure.is_kjt(x) or isinstance(x, torch.Tensor):
        return x if _is_packable(x) else batch_structure.to_device(x, device)
    return batch_structure.map_children(x, lambda child: _move_others(child, device))
