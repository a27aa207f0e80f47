"""swaps.improve in C (swaps.c): the same partition, without Python's lock."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from freescale.kernels.native import c_library
from freescale.runtime.balance.partition import Partition

_ARRAYS = ("counts", "home", "sizes", "keys", "loads")


class _Partition(ctypes.Structure):
    """partition, with arrays of the caller's."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("ranks", "width", "index_bits")),
        *((name, ctypes.c_void_p) for name in _ARRAYS),
    ]


@cache
def library() -> Any:
    """None without the C library."""
    functions = c_library.load()
    if functions is not None:
        functions.fs_improve.restype = ctypes.c_int64
        functions.fs_improve.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    return functions


def improve(partition: Partition, target: int, slack: int, operations: int) -> tuple[bool, int]:
    """Of a partition without a memory cap. Returns what swaps.improve does, and how many of the operations are left."""
    problem, left = partition.problem, ctypes.c_int64(operations)
    arrays = partition.counts, problem.home, problem.sizes, partition.keys, partition.loads
    assert partition.memory is None and all(a.dtype == "int64" and a.flags.c_contiguous for a in arrays)
    described = _Partition(*partition.keys.shape, problem.index_bits, *(a.ctypes.data for a in arrays))
    done = library().fs_improve(ctypes.addressof(described), target, slack, ctypes.addressof(left))
    if done < 0:
        raise MemoryError("freescale: no memory left to balance a batch")
    return bool(done), left.value
