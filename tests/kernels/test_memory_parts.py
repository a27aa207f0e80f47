"""One tensor's memory as several tensors."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref

import numpy as np
import pytest
import torch

from freescale.compat import dlpack
from freescale.kernels.native import memory_parts
from freescale.kernels.native.memory_parts import Part, split_arrays, split_memory

TYPES = [*dlpack.TYPES, torch.float8_e4m3fn]  # the last one has no code in DLPack


@pytest.fixture(params=["C", "Python"])
def language(request, monkeypatch):
    if request.param == "Python":
        monkeypatch.setattr(memory_parts, "_functions", lambda: None)
    else:
        assert memory_parts._functions() is not None


def extents(*pairs: tuple[int, int]) -> ctypes.Array:
    return (ctypes.c_int64 * (2 * len(pairs)))(*(n for pair in pairs for n in pair))


def test_every_type(language):
    memory, places, expected = torch.zeros(16 * len(TYPES), dtype=torch.int64), [], []
    for i, dtype in enumerate(TYPES):
        value = torch.arange(5).to(dtype)
        memory.view(torch.uint8)[128 * i :][: value.nbytes] = value.view(torch.uint8)
        places.append(Part(128 * i, 5, dtype))
        expected.append(value)
    for parts in ([p] for p in places), [places], [places[:-1]]:
        for some in parts:
            for found, part in zip(split_memory(memory, some), some, strict=True):
                value = expected[TYPES.index(part.dtype)]
                assert found.dtype == value.dtype and found.shape == (5,) and found.stride() == (1,)
                assert torch.equal(found.view(torch.uint8), value.view(torch.uint8))
                assert found.data_ptr() == memory.data_ptr() + part.first_byte


def test_arrays(language):
    memory, numbers = torch.arange(100), extents((0, 3), (16, 0), (32, 5), (48, 2))
    found = split_arrays(memory, numbers, 1, 4, first=10)
    assert [t.tolist() for t in found] == [[], [42, 43, 44, 45, 46], [58, 59]]
    assert all(t.dtype == torch.int64 and t.stride() == (1,) for t in found)
    assert split_arrays(memory, numbers, 2, 2) == [] == split_memory(memory, [])
    assert split_arrays(torch.empty(0, dtype=torch.int64), extents((0, 0)), 0, 1)[0].shape == (0,)
    found[1][0] = -1
    assert memory[42] == -1  # the same memory
    assert not found[1]._is_view() and found[1]._version == 1 and memory._version == 0  # but no relation


def test_of_a_part_of_a_tensor(language):
    """The memory need not begin where its storage does."""
    found = split_arrays(torch.arange(50)[7:], extents((1, 2)), 0, 1)
    assert found[0].tolist() == [8, 9]


def test_the_last_part_gives_the_memory_back(language):
    array = np.arange(64)
    memory, alive = torch.from_numpy(array), weakref.ref(array)
    parts = split_arrays(memory, extents((0, 8), (16, 8), (32, 0)), 0, 3)
    del array, memory
    while parts:
        gc.collect()
        assert alive() is not None
        thread = threading.Thread(target=parts.pop)  # in whatever thread
        thread.start()
        thread.join()
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("taken", (False, True))
def test_a_part_that_cannot_be_made(number, taken):
    """Nothing is lost, neither the error nor the memory; and none of it is given back while a tensor is left."""
    array, made = np.arange(64), []
    memory, alive = torch.from_numpy(array), weakref.ref(array)

    def from_capsule(capsule):
        fails = len(made) == number
        if taken or not fails:
            made.append(dlpack.from_capsule(capsule))
        if fails:
            raise ValueError("no more")
        return made[-1]

    functions, numbers = memory_parts._functions(), extents((0, 1), (1, 1), (2, 1), (3, 1))
    with pytest.raises(ValueError, match="no more"):
        functions[1](dlpack.to_capsule(memory), from_capsule, ctypes.addressof(numbers), 4, 0)
    with pytest.raises(ValueError, match="PyCapsule_GetPointer"):
        functions[1](object(), from_capsule, ctypes.addressof(numbers), 4, 0)
    del array, memory
    while made:
        gc.collect()
        assert alive() is not None and [t.tolist() for t in made] == [[i] for i in range(len(made))]
        made.pop()
    gc.collect()
    assert alive() is None
