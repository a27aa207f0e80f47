"""Planning of whole batches in C, with the other ranks (batch_plan.c): two calls for a batch, without Python's lock.

What they compute is defined by exchange_plan.py and row_requests.py.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from freescale.kernels.planning import native_plan, row_requests
from freescale.kernels.planning.batch_plan import (
    GRADIENT_ARRAYS,
    ROWS_ARRAYS,
    Copy,
    ExchangeCounts,
    Extent,
    PlannedExchange,
)
from freescale.kernels.planning.exchange_plan import ExchangeTables
from freescale.kernels.planning.rank_mesh import RankMesh

_ARRAYS = len(ROWS_ARRAYS) + len(GRADIENT_ARRAYS)
_COUNTS = 2 * len(ExchangeCounts._fields)  # of rows, of gradients


class _Result(ctypes.Structure):
    """plan_result."""

    _fields_ = [
        ("layout", ctypes.c_int64 * (2 * _ARRAYS)),
        ("urgent_entries", ctypes.c_int64),
        ("counts", ctypes.c_void_p),
    ]


class NativeBatchPlan:
    """batch_plan.BatchPlan of some exchanges."""

    def __init__(self, mesh: RankMesh, tables: Sequence[ExchangeTables], timeout: float) -> None:
        functions = native_plan.library()
        owners = [native_plan.RowOwners(t.first_rows, t.table_sizes, *t.owners) for t in tables]
        self._mesh, self._timeout = mesh, timeout
        self._world, self._exchanges = mesh.world, len(owners)
        self._owners = (native_plan.RowOwners * len(owners))(*owners)
        self._kept = owners  # a copy of a structure does not keep what it points to
        address = functions.fs_new_batch_plan(mesh.address, mesh.world, len(owners), ctypes.addressof(self._owners))
        self._address = native_plan.require_memory(address)
        # Not at exit: a thread may still be waiting in C.
        weakref.finalize(self, functions.fs_free_batch_plan, self._address).atexit = False
        self._results = (_Result * len(owners))()
        self._headers = np.empty((mesh.world, 1 + 3 * len(owners)), dtype=np.int64)
        self._ids: native_plan.FeatureIds | None = None  # of the batch that is planned
        self._needed, self._used, self._failed = (ctypes.c_int64() for _ in range(3))

    def request(self, status: int, ids: Sequence[torch.Tensor] | None) -> row_requests.Headers | None:
        self._ids = None if ids is None else native_plan.FeatureIds(ids)
        address = None if self._ids is None else ctypes.addressof(self._ids)
        headers = native_plan.address_of(self._headers)
        needed, failed = map(ctypes.addressof, (self._needed, self._failed))
        request = native_plan.library().fs_request_batch
        if self._checked(request(self._address, status, address, self._timeout, headers, needed, failed)):
            return None
        return row_requests.read_headers(self._headers, self._exchanges)

    @property
    def needed(self) -> int:
        return self._needed.value

    def plan(self, address: int, copies: Sequence[Copy] = ()) -> tuple[int, list[PlannedExchange]]:
        assert self._ids is not None
        numbers = (ctypes.c_int64 * (3 * len(copies)))(*(number for copy in copies for number in copy))
        ids, used, failed = map(ctypes.addressof, (self._ids, self._used, self._failed))
        plan = native_plan.library().fs_plan_batch
        rest = failed, numbers, len(copies)
        return self._planned(lambda results: plan(self._address, ids, self._timeout, address, used, results, *rest))

    @property
    def needed_for_last(self) -> int:
        return native_plan.library().fs_room_of_last(self._address)

    def plan_last(self, address: int) -> tuple[int, list[PlannedExchange]]:
        plan, used = native_plan.library().fs_plan_last, ctypes.addressof(self._used)
        return self._planned(lambda results: plan(self._address, address, used, results))

    def _planned(self, plan: Callable[[int], int]) -> tuple[int, list[PlannedExchange]]:
        counts = np.zeros((self._exchanges, _COUNTS, self._world), dtype=np.int64)
        for result, of_exchange in zip(self._results, counts, strict=True):
            result.counts = native_plan.address_of(of_exchange)
        self._checked(plan(ctypes.addressof(self._results)))
        return self._used.value, [_read(*pair) for pair in zip(self._results, counts, strict=True)]

    def _checked(self, result: int) -> int:
        if native_plan.checked(result) < 0:
            what = "has left" if result == native_plan.RANK_LEFT else f"has not answered within {self._timeout:g} s"
            raise RuntimeError(f"rank {self._failed.value} {what}")
        return result


def _read(result: Any, counts: np.ndarray) -> PlannedExchange:
    numbers, tensors = iter(result.layout), [torch.from_numpy(c) for c in counts]
    extents = [Extent(offset, size) for offset, size in zip(numbers, numbers, strict=True)]
    n, c = len(ROWS_ARRAYS), _COUNTS // 2
    row_counts, gradient_counts = ExchangeCounts(*tensors[:c]), ExchangeCounts(*tensors[c:])
    return PlannedExchange(extents[:n], row_counts, result.urgent_entries, extents[n:], gradient_counts)
