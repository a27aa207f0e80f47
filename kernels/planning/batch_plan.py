"""Results of planning a batch (native_batch.py).

The arrays of all exchanges share one int64 buffer, so that one copy moves them to a device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

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
