"""The plans of a batch in one piece of memory, with the tensors of the batch: one copy brings them to the device.

The planning thread fills a block, without Python's lock. The training thread brings it to the device, on its own
stream: that takes it less time than to wait for the lock while another thread does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import dlpack

from freescale.kernels.planning import native_plan
from freescale.kernels.planning.batch_plan import ALIGNMENT, Copy, Extent, PlannedExchange
from freescale.runtime import batch_structure
from freescale.runtime.batch_structure import BatchEvent

_ELEMENT = 8  # bytes of int64


class PlanBlock:
    """`elements`: room for plans. `tensors`: of the batch, on the CPU, contiguous."""

    def __init__(self, elements: int, device: torch.device, tensors: Sequence[torch.Tensor] = ()) -> None:
        self._device, self._tensors = device, tensors
        sizes = [-(-t.nbytes // (_ELEMENT * ALIGNMENT)) * ALIGNMENT for t in tensors]
        self._first = sum(sizes)  # element of the plans; tensors come before
        self._places = [sum(sizes[:i]) for i in range(len(sizes))]
        if device.type == "cpu":
            self._array = np.empty(self._first + elements, dtype=np.int64)
            self._address = native_plan.address_of(self._array)
        else:
            self._host = torch.empty(self._first + elements, dtype=torch.int64, pin_memory=True)
            self._address = self._host.data_ptr()
        self._memory: torch.Tensor | None = None  # on the device, once it is there
        self._used = 0
        self.exchanges: list[PlannedExchange] = []

    # -- the planning thread -------------------------------------------------------------------------------------

    @property
    def copies(self) -> list[Copy]:
        """What brings the tensors of the batch into the block."""
        places = zip(self._places, self._tensors, strict=True)
        return [Copy(self._address + _ELEMENT * place, t.data_ptr(), t.nbytes) for place, t in places]

    def fill(self, plan: Callable[[int], tuple[int, list[PlannedExchange]]]) -> None:
        """`plan` writes to the address that it gets, and returns how many elements."""
        self._used, self.exchanges = plan(self._address + _ELEMENT * self._first)

    # -- the training thread -------------------------------------------------------------------------------------

    def upload(self) -> None:
        """On the current stream of the device, once."""
        if self._device.type != "cpu" and self._memory is None:
            used = self._first + self._used
            self._memory = torch.empty(used, dtype=torch.int64, device=self._device)
            self._memory.copy_(self._host[:used], non_blocking=True)

    def arrays(self, extents: Iterable[Extent]) -> list[torch.Tensor]:
        """Arrays of the plans, as tensors on the device."""
        first = self._first
        if self._memory is None:
            return [native_plan.tensor(self._array[first + begin : first + begin + size]) for begin, size in extents]
        return [self._own_storage(first + begin, size) for begin, size in extents]

    def unpack(self, batch: Any) -> Any:
        """The batch with its tensors on the device."""
        return _replace_packable(batch, self._tensors_on_device()) if self._tensors else batch

    def _tensors_on_device(self) -> Iterator[torch.Tensor]:
        for place, t in zip(self._places, self._tensors, strict=True):
            if t.nbytes == 0:
                yield torch.empty_like(t, device=self._device)
            else:
                elements = -(-t.nbytes // _ELEMENT)
                yield self._own_storage(place, elements).view(torch.uint8)[: t.nbytes].view(t.dtype).view(t.shape)

    def _own_storage(self, begin: int, size: int) -> torch.Tensor:
        """A part of the memory, as a tensor that is no view: to a compiled graph, views of one storage are related."""
        assert self._memory is not None
        if size == 0:
            return self._memory.new_empty(0)
        return dlpack.from_dlpack(dlpack.to_dlpack(self._memory[begin : begin + size]))


def packable_tensors(batch: Any, device: torch.device) -> list[torch.Tensor]:
    """Tensors of the batch that go to the device in a block."""
    if device.type == "cpu":
        return []
    return [t.contiguous() for t in batch_structure.leaves(batch) if _is_packable(t)]


def _is_packable(x: Any) -> bool:
    return type(x) is torch.Tensor and x.device.type == "cpu" and x.layout == torch.strided and not x.requires_grad


def _replace_packable(batch: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if batch_structure.is_kjt(batch) or isinstance(batch, torch.Tensor):
        return next(tensors) if _is_packable(batch) else batch
    return batch_structure.map_children(batch, lambda child: _replace_packable(child, tensors))


def move_to_device(batch: Any, device: torch.device) -> tuple[Any, BatchEvent | None]:
    """The batch with all that is not packable on the device, and what to wait for before it is used."""
    if device.type == "cpu":
        return batch, None
    batch = _move_others(batch, device)
    return batch, BatchEvent([x for x in batch_structure.leaves(batch) if not _is_packable(x)])


def _move_others(x: Any, device: torch.device) -> Any:
    if batch_structure.is_kjt(x) or isinstance(x, torch.Tensor):
        return x if _is_packable(x) else batch_structure.to_device(x, device)
    return batch_structure.map_children(x, lambda child: _move_others(child, device))
