"""The plans of a batch in one piece of memory, with the tensors of the batch: one copy brings them to the device.

The planning thread fills a block, without Python's lock. The training thread brings it to the device, on its own
stream: that takes it less time than to wait for the lock while another thread does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from freescale.compat import dlpack
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
            self._memory = self._host[: self._first + self._used].to(self._device, non_blocking=True)

    def arrays(self, extents: Sequence[Extent]) -> list[torch.Tensor]:
        """Arrays of the plans, as tensors on the device."""
        first = self._first
        if self._memory is None:
            return [native_plan.tensor(self._array[first + begin : first + begin + size]) for begin, size in extents]
        return self._own_storages([(first + begin, size) for begin, size in extents])

    def unpack(self, batch: Any) -> Any:
        """The batch with its tensors on the device."""
        return _replace_packable(batch, self._tensors_on_device()) if self._tensors else batch

    def _tensors_on_device(self) -> Iterator[torch.Tensor]:
        extents = [(place, -(-t.nbytes // _ELEMENT)) for place, t in zip(self._places, self._tensors, strict=True)]
        for t, on_device in zip(self._tensors, self._own_storages(extents), strict=True):
            if t.dtype != torch.int64:
                if t.nbytes % _ELEMENT:
                    on_device = on_device.view(torch.uint8)[: t.nbytes]
                on_device = on_device.view(t.dtype)
            yield on_device if t.dim() == 1 else on_device.view(t.shape)

    def _own_storages(self, extents: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """Parts of the memory, as tensors that are no views: to a compiled graph, views of one storage are related."""
        memory, sizes, end = self._memory, [], 0
        assert memory is not None
        for begin, size in sorted(extents):
            sizes += [begin - end, size]
            end = begin + size
        parts = memory.split_with_sizes([*sizes, memory.shape[0] - end])[1::2]  # one op for all
        by_extent = dict(zip(sorted(extents), parts, strict=True))
        return [dlpack.detached(by_extent[e]) if e[1] else memory.new_empty(0) for e in extents]


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
