"""Batch planning with the other ranks, in C (native/batch_plan.c): one call per batch, without the GIL; two if the
caller's guess of the plans' size was too small. The arrays of all exchanges share one int64 buffer."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from freescale.kernels.native import c_library
from freescale.kernels.planning import row_requests
from freescale.kernels.planning.owners import ExchangeTables
from freescale.kernels.planning.rank_mesh import RANK_LEFT, GroupMesh, RankMesh, require_memory
from freescale.kernels.planning.row_requests import NO_FAULT, Fault

# Arrays of one exchange: first those for the rows of a batch,
ROWS_ARRAYS = ("ids", "inverse", "order", "ends", "early_rows", "urgent_rows")
# then those for the gradients of the previous batch: which keys, then the owner's distinct rows, their order and ends.
GRADIENT_ARRAYS = tuple(f"{kind}_{name}" for kind in ("urgent", "late") for name in ("keys", "rows", "order", "ends"))
ALIGNMENT = 16  # elements: 128 bytes; device allocations are at least 16-byte aligned


class ExchangeCounts(NamedTuple):
    """[world] each: rows from owners (recv) and to requesters (send). Gradients go the other way."""

    urgent_recv: torch.Tensor
    urgent_send: torch.Tensor
    other_recv: torch.Tensor
    other_send: torch.Tensor


Told = tuple[int, int]  # two numbers that ranks exchange with a batch; opaque to planning
NOTHING: Told = (-1, 0)


class Extent(NamedTuple):
    offset: int
    size: int


class Copy(NamedTuple):
    to: int
    from_: int
    size: int


class Room(NamedTuple):
    """Memory for plans, and other copies to make when they are planned."""

    address: int
    elements: int
    copies: Sequence[Copy] = ()


class PlannedExchange(NamedTuple):
    rows: list[Extent]
    row_counts: ExchangeCounts
    urgent_entries: int  # positions with urgent rows
    gradients: list[Extent]  # of the previous batch (empty for the first); in self-contained plans, of this batch
    gradient_counts: ExchangeCounts


Planned = tuple[int, list[PlannedExchange]]  # elements written, and the plans


def tensor(array: np.ndarray) -> torch.Tensor:
    # An empty array may have stride 0, and a compiled graph would specialize on that.
    return torch.from_numpy(array) if array.size else torch.empty(0, dtype=torch.int64)


def address_of(x: np.ndarray) -> int:
    return x.__array_interface__["data"][0]


class FeatureIds(ctypes.Structure):
    """The ids of some features. It does not keep them alive."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("ids", "lengths", "is_int64")]

    def __init__(self, ids: Sequence[torch.Tensor]) -> None:
        # Ids of another dtype or layout are copied.
        ids = [i if i.dtype in (torch.int32, torch.int64) and i.is_contiguous() else i.long().contiguous() for i in ids]
        self.tensors = ids
        numbers = ctypes.c_int64 * len(ids)
        self._arrays = (
            numbers(*(i.data_ptr() for i in ids)),
            numbers(*(i.shape[0] for i in ids)),
            numbers(*(i.dtype == torch.int64 for i in ids)),
        )
        super().__init__(*map(ctypes.addressof, self._arrays))


class RowOwners(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("features", "shards", "world", "bound")),
        *((x, ctypes.c_void_p) for x in ("first_rows", "table_sizes", "bounds", "shifts", "shard_order", "starts")),
    ]

    def __init__(self, tables: ExchangeTables) -> None:
        first_rows, table_sizes, (bounds, shifts, starts) = tables
        bound = max((first + size for first, size in zip(first_rows, table_sizes, strict=True)), default=0)
        shard_order = np.argsort(bounds.numpy() + shifts.numpy())
        arrays = first_rows, table_sizes, bounds.numpy(), shifts.numpy(), shard_order, starts.numpy()
        self._arrays = [np.array(x, dtype=np.int64) for x in arrays]
        sizes = len(first_rows), bounds.shape[0], starts.shape[0] - 1, bound
        super().__init__(*sizes, *map(address_of, self._arrays))


_ARRAYS = len(ROWS_ARRAYS) + len(GRADIENT_ARRAYS)
_COUNTS = 2 * len(ExchangeCounts._fields)  # of rows, of gradients
_GO_ON = 1  # fs_request_and_plan returns this if all ranks proceed, and more if the batch is also planned
_NO_MEMORY, _TOO_LARGE = -1, -5  # other error codes: rank_mesh.py


class _Result(ctypes.Structure):
    """struct plan_result."""

    _fields_ = [
        ("layout", ctypes.c_int64 * (2 * _ARRAYS)),
        ("urgent_entries", ctypes.c_int64),
        ("counts", ctypes.c_void_p),
    ]


class BatchPlan:
    """Plans the batches of one loop for its exchanges, in order, together with the other ranks. With `whole`, plans are
    self-contained: all rows of a batch are urgent, and its gradients are planned together with them."""

    def __init__(
        self, mesh: RankMesh | GroupMesh, tables: Sequence[ExchangeTables], timeout: float, whole: bool = False
    ) -> None:
        self._c = c_library.library()
        self._mesh, self._timeout, self.whole = mesh, timeout, whole
        self._world, self._exchanges = mesh.world, len(tables)
        self._kept = [RowOwners(t) for t in tables]  # an array of structures does not keep their pointers' targets
        self._owners = (RowOwners * len(tables))(*self._kept)
        self._address = require_memory(
            self._c.fs_new_batch_plan(mesh.address, mesh.world, len(tables), ctypes.byref(self._owners), whole)
        )
        # Not at exit: a thread may still be waiting in C.
        weakref.finalize(self, self._c.fs_free_batch_plan, self._address).atexit = False
        self._results: Any = None  # of the batch being planned
        self._counts: np.ndarray = np.empty(0)  # they point into this array
        self._planned_in: Room | None = None  # set if `request` has already planned the batch
        self._headers = np.empty((mesh.world, row_requests.header_width(len(tables))), dtype=np.int64)
        self._ids: FeatureIds | None = None  # of the batch being planned
        self._needed, self._used, self._failed = (ctypes.c_int64() for _ in range(3))

    def request(
        self, status: int, ids: Sequence[torch.Tensor] | None, room: Room | None = None, tell: Told = NOTHING
    ) -> row_requests.Headers | None:
        """Tell the other ranks which rows this rank requests (ids of all features of all exchanges, status 0), or that
        it stops (no ids). Returns None if all ranks proceed with valid ids, else what they reported. Then, if `room` is
        large enough, it may also do the work of `plan`. Collective."""
        self._ids = None if ids is None else FeatureIds(ids)
        ids_pointer = None if self._ids is None else ctypes.byref(self._ids)
        memory, elements, copies = room if room is not None else Room(0, 0)
        answer = self._c.fs_request_and_plan(
            self._address, status, (ctypes.c_int64 * 2)(*tell), ids_pointer, self._timeout, address_of(self._headers),
            ctypes.byref(self._needed), ctypes.byref(self._failed), memory, elements, ctypes.byref(self._used),
            self._new_results(), _numbers(copies), len(copies)
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
            answer = self._c.fs_plan_batch(
                self._address, ctypes.byref(self._ids), self._timeout, room.address, ctypes.byref(self._used),
                self._new_results(), ctypes.byref(self._failed), _numbers(room.copies), len(room.copies)
            )  # fmt: skip
            self._checked(answer)
        return self._read_results()

    @property
    def needed_for_last(self) -> int:
        """Upper bound on the elements that `plan_last` writes."""
        return self._c.fs_room_of_last(self._address)  # type: ignore[no-any-return]

    def plan_last(self, room: Room) -> Planned:
        """Plan the gradients of the last batch: all are urgent."""
        results = self._new_results()
        self._checked(self._c.fs_plan_last(self._address, room.address, ctypes.byref(self._used), results))
        return self._read_results()

    def _new_results(self) -> Any:
        """Allocate results; a pointer to them. Counts of earlier plans stay valid."""
        self._results = (_Result * self._exchanges)()
        self._counts = np.zeros((self._exchanges, _COUNTS, self._world), dtype=np.int64)
        for result, counts in zip(self._results, self._counts, strict=True):
            result.counts = address_of(counts)
        return ctypes.byref(self._results)

    def _read_results(self) -> Planned:
        results = zip(self._results, self._counts, strict=True)
        return self._used.value, [_read(*of_exchange, self.whole) for of_exchange in results]

    def _checked(self, result: int) -> int:
        require_memory(result != _NO_MEMORY)
        if result == _TOO_LARGE:
            raise ValueError(
                "freescale: a batch has too many ids for tables of this size: a row number and a position must fit in "
                "64 bits together"
            )
        if result < 0:
            if self._mesh.failure is not None:
                raise self._mesh.failure
            what = "disconnected" if result == RANK_LEFT else f"did not respond within {self._timeout:g} s"
            raise RuntimeError(f"rank {self._failed.value} {what}")
        return result


def _numbers(copies: Sequence[Copy]) -> Any:
    return (ctypes.c_int64 * (3 * len(copies)))(*(number for copy in copies for number in copy))


def _read(result: Any, counts: np.ndarray, whole: bool) -> PlannedExchange:
    extents = list(map(Extent, result.layout[::2], result.layout[1::2]))
    row_counts = ExchangeCounts(*map(torch.from_numpy, counts[: _COUNTS // 2]))
    # The gradients of a self-contained plan go back along the path of its rows.
    gradient_counts = row_counts if whole else ExchangeCounts(*map(torch.from_numpy, counts[_COUNTS // 2 :]))
    rows, gradients = extents[: len(ROWS_ARRAYS)], extents[len(ROWS_ARRAYS) :]
    return PlannedExchange(rows, row_counts, result.urgent_entries, gradients, gradient_counts)


def plan_alone(
    ids: Sequence[torch.Tensor], tables: ExchangeTables, table: str, group: dist.ProcessGroup, fault: Fault = NO_FAULT
) -> tuple[torch.Tensor, ...]:
    """Plan one batch of one exchange self-contained, on the CPU; the result is that of the op plan_now. An invalid id
    or a malformed KeyedJaggedTensor on any rank raises on every rank. Collective."""
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
    _, (planned,) = plan.plan(Room(address_of(memory), memory.size))

    def arrays(extents: Sequence[Extent]) -> list[torch.Tensor]:
        return [tensor(memory[e.offset : e.offset + e.size]) for e in extents]

    _, inverse, order, ends, _, rows = arrays(planned.rows)
    _, own_rows, own_order, own_ends, *_ = arrays(planned.gradients)
    recv_counts, send_counts, *_ = planned.row_counts
    return inverse, order, ends, recv_counts, rows, send_counts, own_rows, own_order, own_ends
