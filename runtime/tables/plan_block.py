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

from freescale.compat import dlpack
from freescale.kernels.planning import native_plan
from freescale.kernels.planning.batch_plan import ALIGNMENT, Copy, Extent, Planned, PlannedExchange, Room
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

    def give_back(self, memory: torch.Tensor) -> None:
        """In the training thread, behind the copy to the device, which the current stream makes."""
        driver = cuda_driver.driver_of(self._device)
        if self._being_read and driver.is_done(self._being_read[0][1]):
            self._idle.append(self._being_read.popleft()[0])
        self._being_read.append((memory, driver.record_event(driver.current_stream())))


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
        self._parts: dict[tuple[int, int], torch.Tensor] = {}  # of that memory, by begin and size
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
            self._memory = self._host[: self._first + self._used].to(self._device, non_blocking=True)
            self._pinned.give_back(self._host)
            self._host = None

    def arrays(self, extents: Sequence[Extent]) -> list[torch.Tensor]:
        """Arrays of the plans, as tensors on the device."""
        first = self._first
        if self._memory is None:
            return [native_plan.tensor(self._array[first + begin : first + begin + size]) for begin, size in extents]
        return [self._part(first + begin, size) for begin, size in extents]

    def unpack(self, batch: Any) -> Any:
        """The batch with its tensors on the device."""
        return _replace_packable(batch, self._tensors_on_device()) if self._tensors else batch

    def _tensors_on_device(self) -> Iterator[torch.Tensor]:
        for place, t in zip(self._places, self._tensors, strict=True):
            on_device = self._part(place, _elements(t))
            if t.dtype != torch.int64:
                on_device = on_device.view(t.dtype)
                if on_device.shape[0] != t.numel():
                    on_device = on_device[: t.numel()]
            yield on_device if t.dim() == 1 else on_device.view(t.shape)

    def _part(self, begin: int, size: int) -> torch.Tensor:
        """Of the memory, as a tensor that is no view: to a compiled graph, views of one storage are related."""
        assert self._memory is not None
        if not size:
            return self._memory.new_empty(0)
        if (begin, size) not in self._parts:
            self._split_memory()
        return dlpack.detached(self._parts[begin, size])

    def _split_memory(self) -> None:
        """Into all that is in it: one op for all, which makes no views that autograd knows of."""
        assert self._memory is not None
        sizes, end = [], 0
        plans = (e for x in self.exchanges for e in (*x.rows, *x.gradients))
        tensors = zip(self._places, map(_elements, self._tensors), strict=True)
        extents = sorted({e for e in (*tensors, *((self._first + begin, size) for begin, size in plans)) if e[1]})
        for begin, size in extents:
            sizes += [begin - end, size]
            end = begin + size
        parts = self._memory.unsafe_split_with_sizes([*sizes, self._memory.shape[0] - end])[1::2]
        self._parts = dict(zip(extents, parts, strict=True))


def _elements(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ELEMENT)


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
