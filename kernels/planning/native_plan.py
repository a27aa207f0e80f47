"""ctypes signatures and arguments of the C planner (native/batch_plan.c, planning.c, mesh.c), and its results.

Its functions release the GIL, so planning runs concurrently with the training thread. The arrays of all exchanges share
one int64 buffer, so that one copy moves them to a device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from freescale.kernels.native import c_library

# Arrays of one exchange: first those for the rows of a batch,
ROWS_ARRAYS = ("ids", "inverse", "order", "ends", "early_rows", "urgent_rows")
# then those for the gradients of the previous batch: which keys, then the owner's distinct rows, their order and ends.
GRADIENT_ARRAYS = tuple(
    f"{kind}_{name}" for kind in ("urgent", "late") for name in ("keys", "rows", "order", "ends")
)
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
    """Offset and size of an array in the buffer, in elements."""

    offset: int
    size: int


class Extents:
    """Extents of several arrays, as the C code writes and reads them: `numbers` is a ctypes array of int64 with the
    offset and size of each; these are the ones from `begin` to `end`."""

    __slots__ = ("numbers", "begin", "end")

    def __init__(self, numbers: Any, begin: int, end: int) -> None:
        self.numbers, self.begin, self.end = numbers, begin, end

    @classmethod
    def of(cls, extents: Sequence[Extent]) -> Extents:
        numbers = [number for extent in extents for number in extent]
        return cls((ctypes.c_int64 * len(numbers))(*numbers), 0, len(extents))

    def __getitem__(self, i: int) -> Extent:
        place = 2 * range(self.begin, self.end)[i]
        return Extent(self.numbers[place], self.numbers[place + 1])

    def __iter__(self) -> Iterator[Extent]:
        return map(self.__getitem__, range(self.end - self.begin))

    def first(self, n: int) -> Extents:
        return Extents(self.numbers, self.begin, self.begin + n)


class Copy(NamedTuple):
    """Source and destination addresses, and bytes."""

    to: int
    from_: int
    size: int


class Room(NamedTuple):
    """Memory for plans, and other copies to make when they are planned."""

    address: int
    elements: int
    copies: Sequence[Copy] = ()


class PlannedExchange(NamedTuple):
    """The plan of one exchange of a batch."""

    rows: Extents
    row_counts: ExchangeCounts
    urgent_entries: int  # positions with urgent rows
    gradients: Extents  # of the previous batch (empty for the first); in self-contained plans, of this batch
    gradient_counts: ExchangeCounts


# Elements written, and a function that reads the plans, called when and where they are needed.
Planned = tuple[int, Callable[[], list[PlannedExchange]]]
NO_MEMORY = -1
_KNOWN = (torch.int32, torch.int64)  # id dtypes
_SIGNATURES = {  # P: pointer, n: integer, d: double, v: void; the result comes first
    "fs_new_mesh": "PnnPP",
    "fs_free_mesh": "vP",
    "fs_all_same": "nPPndP",
    "fs_give_up": "vP",
    "fs_new_batch_plan": "PPnnPn",
    "fs_free_batch_plan": "vP",
    "fs_plan_batch": "nPPdPPPPPn",
    "fs_request_and_plan": "nPnPPdPPPPnPPPn",
    "fs_room_of_last": "nP",
    "fs_plan_last": "nPPPP",
}
RANK_LEFT = -3  # returned if a rank disconnected


@cache
def library() -> Any:
    """Load the C library and declare its functions."""
    functions = c_library.require()
    types = {"P": ctypes.c_void_p, "n": ctypes.c_int64, "d": ctypes.c_double, "v": None}
    for name, kinds in _SIGNATURES.items():
        function = getattr(functions, name)
        function.restype, *function.argtypes = (types[kind] for kind in kinds)
    return functions


def require_memory(address: int | None) -> int:
    if not address:
        raise MemoryError("freescale: out of memory while planning a batch")
    return address


def checked(result: int) -> int:
    require_memory(result != NO_MEMORY)
    return result


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
        ids = [i if i.dtype in _KNOWN and i.is_contiguous() else i.long().contiguous() for i in ids]
        self.tensors = ids
        numbers = ctypes.c_int64 * len(ids)
        self._arrays = (
            numbers(*(i.data_ptr() for i in ids)),
            numbers(*(i.shape[0] for i in ids)),
            numbers(*(i.dtype == torch.int64 for i in ids)),
        )
        super().__init__(*map(ctypes.addressof, self._arrays))


_OWNER_FIELDS = ("first_rows", "table_sizes", "bounds", "shifts", "shard_order", "starts")


class RowOwners(ctypes.Structure):
    """Where the rows of an exchange are: owners.OwnerMap, and the tables of its features."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("features", "shards", "world", "bound")),
        *((name, ctypes.c_void_p) for name in _OWNER_FIELDS),
    ]

    def __init__(
        self,
        first_rows: Sequence[int],
        table_sizes: Sequence[int],
        bounds: torch.Tensor,
        shifts: torch.Tensor,
        starts: torch.Tensor,
    ) -> None:
        bound = max((first + size for first, size in zip(first_rows, table_sizes, strict=True)), default=0)
        of_shards = [bounds.numpy(), shifts.numpy(), np.argsort(bounds.numpy() + shifts.numpy()), starts.numpy()]
        self._arrays = [np.array(x, dtype=np.int64) for x in (first_rows, table_sizes, *of_shards)]
        sizes = len(first_rows), bounds.shape[0], starts.shape[0] - 1, bound
        super().__init__(*sizes, *map(address_of, self._arrays))
