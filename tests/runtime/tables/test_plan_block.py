"""A block brings plans and tensors of a batch to the device."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from freescale.kernels.planning.batch_plan import Extent
from freescale.runtime.tables.plan_block import PlanBlock, move_to_device, packable_tensors
from interpreted import needs_gpu


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
        "names": ["a", "b"],
    }
    return Batch(torch.randint(0, 9, (13,), generator=g), rest)


def tensors(b: Batch) -> list[torch.Tensor]:
    return [b.ids, *(t for t in b.rest.values() if isinstance(t, torch.Tensor))]


def fill(block: PlanBlock, numbers: np.ndarray) -> None:
    def plan(address: int) -> tuple[int, list[Any]]:
        for copy in block.copies:
            ctypes.memmove(*copy)
        ctypes.memmove(address, numbers.ctypes.data, numbers.nbytes)
        return numbers.shape[0], []

    block.fill(plan)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_block(device):
    device = torch.device(device, 0) if device == "cuda" else torch.device(device)
    before, numbers = batch(), np.arange(100)
    given, moved = move_to_device(before, device)
    block = PlanBlock(120, device, packable_tensors(given, device))
    fill(block, numbers)
    block.upload()
    if moved is not None:
        moved.wait()
    after = block.unpack(given)
    for a, b in zip(tensors(after), tensors(before), strict=True):
        assert a.device == device and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.cpu(), b)
    assert after.rest["names"] == ["a", "b"]
    extents = [Extent(16, 3), Extent(0, 5), Extent(48, 0), Extent(64, 36)]
    arrays = block.arrays(extents)
    assert [a.tolist() for a in arrays] == [[16, 17, 18], [0, 1, 2, 3, 4], [], list(range(64, 100))]
    storages = {t.untyped_storage()._cdata for t in (*arrays, *tensors(after))}
    assert len(storages) == len(arrays) + len(tensors(after))  # none is a view of another
    if device.type == "cuda":
        assert all(t.data_ptr() % 128 == 0 for t in (*arrays, *tensors(after)) if t.numel())
