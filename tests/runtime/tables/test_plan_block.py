"""A block brings plans and tensors of a batch to the device."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from freescale.kernels.planning.native_plan import ExchangeCounts, Extent, Planned, PlannedExchange, Room
from freescale.runtime import batch_structure
from freescale.runtime.tables.plan_block import SMALL_BYTES, PinnedMemory, PlanBlock, move_others, packable_tensors
from interpreted import needs_gpu

NO_COUNTS = ExchangeCounts(*[torch.zeros(0, dtype=torch.int64)] * 4)


@dataclass
class Batch:
    ids: torch.Tensor
    rest: dict[str, Any]


def batch() -> Batch:
    g = torch.Generator().manual_seed(0)
    rest = {
        "flags": torch.rand(7, generator=g) < 0.5,
        "half": torch.rand(3, 5, generator=g).half(),
        "none": torch.empty(0, 4),
        "number": torch.tensor(3.5),
        "every_other": torch.arange(10)[::2],
        "int32": torch.arange(5, dtype=torch.int32),
        "large": torch.rand(100, 50, generator=g),
        "names": ["a", "b"],
        "large_flags": torch.rand(SMALL_BYTES + 1, generator=g) < 0.5,
        "as_large_as_a_small_one": torch.arange(SMALL_BYTES // 2, dtype=torch.int16),
    }
    return Batch(torch.randint(0, 9, (13,), generator=g), rest)


def tensors(b: Batch) -> list[torch.Tensor]:
    return [b.ids, *(t for t in b.rest.values() if isinstance(t, torch.Tensor))]


def fill(block: PlanBlock, numbers: np.ndarray, extents: list[Extent]) -> None:
    def plan(room: Room) -> Planned:
        assert room.elements * 8 >= numbers.nbytes
        for copy in room.copies:
            ctypes.memmove(*copy)
        ctypes.memmove(room.address, numbers.ctypes.data, numbers.nbytes)
        return numbers.shape[0], [PlannedExchange(extents[::2], NO_COUNTS, 0, extents[1::2], NO_COUNTS)]

    block.fill(plan)


class HostPinned:
    """Stands for PinnedMemory; what is "on the device" is in memory of its own, as there."""

    def __init__(self) -> None:
        self.uploaded: list[weakref.ref] = []

    def take(self, elements: int) -> torch.Tensor:
        return torch.full((elements + 7,), -1)

    def upload(self, memory: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        arrays = [x.numpy().copy() for x in memory[: sum(sizes)].split(list(sizes))]
        self.uploaded = [weakref.ref(a) for a in arrays]
        return [torch.from_numpy(a) for a in arrays]


def packed(b: Batch, pinned: HostPinned) -> PlanBlock:
    tensors = [t.contiguous() for t in batch_structure.leaves(b)]
    return PlanBlock(120, pinned, tensors)  # type: ignore[arg-type]


@pytest.mark.parametrize("kept, kept_of", [("ids", 0), ("half", 0), ("as_large_as_a_small_one", 0), ("large", 1)])
def test_whoever_keeps_a_small_tensor_does_not_keep_the_plans(kept, kept_of):
    before, pinned = batch(), HostPinned()
    block = packed(before, pinned)
    fill(block, np.arange(100), [])
    block.upload()
    after, arrays = block.unpack(before), block.arrays([Extent(0, 100)])
    tensor = after.ids if kept == "ids" else after.rest[kept]
    del block, after, arrays
    gc.collect()
    assert [memory() is not None for memory in pinned.uploaded] == [kept_of == 0, kept_of == 1]
    assert torch.equal(tensor, before.ids if kept == "ids" else before.rest[kept])


@pytest.mark.parametrize("device", ["cpu", "stand-in", pytest.param("cuda", marks=needs_gpu)])
def test_block(device):
    stands_in = device == "stand-in"
    device = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    before, numbers = batch(), np.arange(100)
    if stands_in:
        block = packed(before, HostPinned())
    else:
        pinned = PinnedMemory(device) if device.type == "cuda" else None
        block = PlanBlock(120, pinned, packable_tensors(list(batch_structure.leaves(before)), device))
    given, moved = move_others(before, device)
    extents = [Extent(16, 3), Extent(0, 5), Extent(48, 0), Extent(64, 36)]
    fill(block, numbers, extents)
    block.upload()
    if moved is not None:
        moved.wait()
    after = block.unpack(given)
    for a, b in zip(tensors(after), tensors(before), strict=True):
        assert a.device == device and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.cpu(), b)
    assert after.rest["names"] == ["a", "b"]
    arrays = block.arrays(extents)
    assert [a.tolist() for a in arrays] == [[16, 17, 18], [0, 1, 2, 3, 4], [], list(range(64, 100))]
    storages = {t.untyped_storage()._cdata for t in (*arrays, *tensors(after))}
    assert len(storages) == len(arrays) + len(tensors(after))  # none is a view of another
    if device.type == "cuda":
        assert all(t.data_ptr() % 128 == 0 for t in (*arrays, *tensors(after)) if t.numel())


def test_more_room():
    """Where a guess was too small, before anything is filled in."""
    block = PlanBlock(4)
    block.make_room(40)
    fill(block, np.arange(40), [])
    assert [a.tolist() for a in block.arrays([Extent(32, 2)])] == [[32, 33]]


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_gpu)])
def test_a_small_tensor_takes_little_of_the_device(device):
    device, before = torch.device(device, 0), torch.arange(10)
    block = PlanBlock(2**20, PinnedMemory(device), [before])
    fill(block, np.arange(2**20), [])
    block.upload()
    used = torch.cuda.memory_allocated(device)
    tensor = block.unpack(before)
    del block
    gc.collect()
    assert torch.cuda.memory_allocated(device) <= used - 2**23 and torch.equal(tensor.cpu(), before)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_gpu)])
def test_pinned_memory_is_used_again(device):
    """When the device has read it, and only where it is large enough."""
    pinned, taken = PinnedMemory(torch.device(device, 0)), []
    for number, size in enumerate((100, 100, 100, 300, 300, 300, 300, 300)):
        block = PlanBlock(size, pinned)
        taken.append(block._host.data_ptr())
        fill(block, np.arange(size), [Extent(1, 2)])
        if number == 1:
            torch.cuda._sleep(int(2e9))  # its copy waits behind this
        block.upload()
        assert not (number == 2 and pinned._idle)
        if number != 1:
            assert block.arrays([Extent(1, 2)])[0].tolist() == [1, 2]  # the device has read it
    # When memory is given back, that before it may have been read: so the second behind it has it again.
    assert len(set(taken)) == 5 and taken[2] == taken[0] and taken[6:] == taken[3:5]
