"""A tensor's memory as several tensors, in one call (memory_parts.c)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from freescale.compat import dlpack
from freescale.kernels.native import c_library

_P, _I64, _OBJECT = ctypes.c_void_p, ctypes.c_int64, ctypes.py_object


class Part(NamedTuple):
    """`elements` of a type, from a byte on that is a multiple of the type's size."""

    first_byte: int
    elements: int
    dtype: torch.dtype


@cache
def _functions() -> tuple[Any, Any] | None:
    """None without the C library."""
    library = c_library.load()
    if library is None:
        return None
    with_lock = ctypes.PyDLL(library._name)  # they call Python
    memory, arrays = with_lock.fs_split_memory, with_lock.fs_split_arrays
    memory.restype, memory.argtypes = _OBJECT, [_OBJECT, _OBJECT, _P, _I64]
    arrays.restype, arrays.argtypes = _OBJECT, [_OBJECT, _OBJECT, _P, _I64, _I64]
    return memory, arrays


def split_memory(memory: torch.Tensor, parts: Sequence[Part]) -> list[torch.Tensor]:
    """One-dimensional tensors, none of which is a view of `memory` or of another; they keep it alive."""
    functions, types = _functions(), dlpack.TYPES
    if functions is None or not parts or not all(part.dtype in types for part in parts):
        return [_part(memory, *part) for part in parts]
    numbers = [x for first, elements, dtype in parts for x in (first, elements, *types[dtype])]
    described = (_I64 * len(numbers))(*numbers)
    return functions[0](dlpack.to_capsule(memory), dlpack.from_capsule, described, len(parts))


def split_arrays(memory: torch.Tensor, extents: Any, begin: int, end: int, first: int = 0) -> list[torch.Tensor]:
    """The same for arrays of int64. `extents`: a ctypes array of int64, of each array its offset, counted from element
    `first` of the memory, and its size; those of arrays `begin` to `end` are taken."""
    functions = _functions()
    if functions is None or begin == end:
        pairs = [(8 * (first + extents[2 * i]), extents[2 * i + 1]) for i in range(begin, end)]
        return [_part(memory, *pair, torch.int64) for pair in pairs]
    address = ctypes.addressof(extents) + 16 * begin
    return functions[1](dlpack.to_capsule(memory), dlpack.from_capsule, address, end - begin, first)


def _part(memory: torch.Tensor, first_byte: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """The definition."""
    of_bytes = memory.view(torch.uint8)[first_byte : first_byte + elements * dtype.itemsize]
    return dlpack.detached(of_bytes.view(dtype))
