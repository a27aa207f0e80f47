"""Batch planning with the other ranks, in C (batch_plan.c): one call per batch, without the GIL, concurrent with the
training thread. If the caller's guess of the plans' size was too small, it takes a second call.

The arrays of all exchanges share one int64 buffer, so that one copy moves them to a device.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from freescale.kernels.planning import row_requests
from freescale.kernels.planning.native_plan import (
    GRADIENT_ARRAYS,
    NOTHING,
    RANK_LEFT,
    ROWS_ARRAYS,
    Copy,
    ExchangeCounts,
    Extents,
    FeatureIds,
    Planned,
    PlannedExchange,
    Room,
    RowOwners,
    Told,
    address_of,
    checked,
    library,
    require_memory,
    tensor,
)
from freescale.kernels.planning.owners import ExchangeTables
from freescale.kernels.planning.rank_mesh import GroupMesh, RankMesh
from freescale.kernels.planning.row_requests import NO_FAULT, Fault

_ARRAYS = len(ROWS_ARRAYS) + len(GRADIENT_ARRAYS)
_COUNTS = 2 * len(ExchangeCounts._fields)  # of rows, of gradients
_NO_ROOM = Room(0, 0)
_GO_ON = 1  # fs_request_and_plan returns this if all ranks proceed, and more if the batch is also planned


class _Result(ctypes.Structure):
    """struct plan_result."""

    _fields_ = [
        ("layout", ctypes.c_int64 * (2 * _ARRAYS)),
        ("urgent_entries", ctypes.c_int64),
        ("counts", ctypes.c_void_p),
    ]


class BatchPlan:
    """Plans the batches of one loop for its exchanges, in order, together with the other ranks.

    With `whole`, plans are self-contained: they find no collisions, so all rows of a batch are urgent, and its
    gradients are planned together with them."""

    def __init__(
        self, mesh: RankMesh | GroupMesh, tables: Sequence[ExchangeTables], timeout: float, whole: bool = False
    ) -> None:
        functions = library()
        owners = [RowOwners(t.first_rows, t.table_sizes, *t.owners) for t in tables]
        self._mesh, self._timeout, self.whole = mesh, timeout, whole
        self._world, self._exchanges = mesh.world, len(owners)
        self._owners = (RowOwners * len(owners))(*owners)
        self._kept = owners  # a structure does not keep its pointers' targets alive
        of_owners = len(owners), ctypes.addressof(self._owners)
        address = functions.fs_new_batch_plan(mesh.address, mesh.world, *of_owners, whole)
        self._address = require_memory(address)
        # Not at exit: a thread may still be waiting in C.
        weakref.finalize(self, functions.fs_free_batch_plan, self._address).atexit = False
        self._results: Any = None  # of the batch being planned
        self._counts: np.ndarray = np.empty(0)  # they point into this array
        self._planned_in: Room | None = None  # set if `request` has already planned the batch
        self._headers = np.empty((mesh.world, row_requests.header_width(len(owners))), dtype=np.int64)
        self._ids: FeatureIds | None = None  # of the batch being planned
        self._headers_address = address_of(self._headers)
        self._needed, self._used, self._failed = answers = [ctypes.c_int64() for _ in range(3)]
        self._needed_address, self._used_address, self._failed_address = map(ctypes.addressof, answers)

    def request(
        self, status: int, ids: Sequence[torch.Tensor] | None, room: Room | None = None, tell: Told = NOTHING
    ) -> row_requests.Headers | None:
        """Tell the other ranks which rows this rank requests (ids of all features of all exchanges, status 0), or that
        it stops (no ids). Returns None if all ranks proceed with valid ids, else what they reported. Collective.

        If all ranks proceed and `room` is large enough, it may also do the work of `plan`."""
        self._ids = None if ids is None else FeatureIds(ids)
        address = None if self._ids is None else ctypes.addressof(self._ids)
        memory, elements, copies = room if room is not None else _NO_ROOM
        answer = library().fs_request_and_plan(
            self._address, status, (ctypes.c_int64 * 2)(*tell), address, self._timeout, self._headers_address,
            self._needed_address, self._failed_address, memory, elements, self._used_address, self._new_results(),
            _numbers(copies), len(copies)
        )  # fmt: skip
        self._planned_in = room if self._checked(answer) > _GO_ON else None
        return None if answer >= _GO_ON else row_requests.read_headers(self._headers, self._exchanges)

    @property
    def told(self) -> np.ndarray:
        """[ranks, 2]: the numbers that each rank sent with the current batch."""
        return row_requests.told(self._headers)

    @property
    def needed(self) -> int:
        """Upper bound on the elements that `plan` writes."""
        return self._needed.value

    def plan(self, room: Room) -> Planned:
        """Plan the rows of the batch and the gradients of the previous one (of the same batch in self-contained plans),
        after all ranks agreed to proceed. Collective."""
        assert self._ids is not None
        if self._planned_in is not room:
            answer = library().fs_plan_batch(
                self._address, ctypes.addressof(self._ids), self._timeout, room.address, self._used_address,
                self._new_results(), self._failed_address, _numbers(room.copies), len(room.copies)
            )  # fmt: skip
            self._checked(answer)
        return self._read_results()

    @property
    def needed_for_last(self) -> int:
        """Upper bound on the elements that `plan_last` writes."""
        return library().fs_room_of_last(self._address)

    def plan_last(self, room: Room) -> Planned:
        """Plan the gradients of the last batch: all are urgent."""
        results = self._new_results()
        self._checked(library().fs_plan_last(self._address, room.address, self._used_address, results))
        return self._read_results()

    def _new_results(self) -> int:
        """Allocate results and return their address. Results of earlier plans stay valid."""
        self._results = (_Result * self._exchanges)()
        self._counts = np.zeros((self._exchanges, _COUNTS, self._world), dtype=np.int64)
        address = address_of(self._counts)
        for i, result in enumerate(self._results):
            result.counts = address + i * self._counts.strides[0]
        return ctypes.addressof(self._results)

    def _read_results(self) -> Planned:
        results, counts, whole = self._results, self._counts, self.whole
        return self._used.value, lambda: [_read(*pair, whole) for pair in zip(results, counts, strict=True)]

    def _checked(self, result: int) -> int:
        if checked(result) < 0:
            if self._mesh.failure is not None:
                raise self._mesh.failure
            what = "disconnected" if result == RANK_LEFT else f"did not respond within {self._timeout:g} s"
            raise RuntimeError(f"rank {self._failed.value} {what}")
        return result


def _numbers(copies: Sequence[Copy]) -> Any:
    return (ctypes.c_int64 * (3 * len(copies)))(*(number for copy in copies for number in copy))


def _read(result: Any, counts: np.ndarray, whole: bool) -> PlannedExchange:
    layout, c = result.layout, _COUNTS // 2
    row_counts = ExchangeCounts(*map(torch.from_numpy, counts[:c]))
    # The gradients of a self-contained plan go back along the path of its rows.
    gradient_counts = row_counts if whole else ExchangeCounts(*map(torch.from_numpy, counts[c:]))
    rows, gradients = Extents(layout, 0, len(ROWS_ARRAYS)), Extents(layout, len(ROWS_ARRAYS), _ARRAYS)
    return PlannedExchange(rows, row_counts, result.urgent_entries, gradients, gradient_counts)


def plan_alone(
    ids: Sequence[torch.Tensor], tables: ExchangeTables, table: str, group: dist.ProcessGroup, fault: Fault = NO_FAULT
) -> tuple[torch.Tensor, ...]:
    """Plan one batch of one exchange self-contained, on the CPU; the result is that of the op plan_now. Collective.

    An invalid id or a malformed KeyedJaggedTensor on any rank raises on every rank."""
    try:
        mesh = GroupMesh(group)
    except RuntimeError:  # no C library
        row_requests.tell_missing_library(group)
        raise
    plan = BatchPlan(mesh, [tables], 0.0, whole=True)
    headers = plan.request(fault.kind, None if fault.kind else ids, tell=(fault.found, fault.wanted))
    if headers is not None:
        row_requests.require_fine(headers, table)
    memory = np.empty(plan.needed, dtype=np.int64)
    _, read = plan.plan(Room(address_of(memory), memory.size))
    (planned,) = read()

    def arrays(extents: Extents) -> list[torch.Tensor]:
        return [tensor(memory[e.offset : e.offset + e.size]) for e in extents]

    _, inverse, order, ends, _, rows = arrays(planned.rows)
    _, own_rows, own_order, own_ends, *_ = arrays(planned.gradients)
    recv_counts, send_counts, *_ = planned.row_counts
    return inverse, order, ends, recv_counts, rows, send_counts, own_rows, own_order, own_ends
