"""What planning a batch results in (native_batch.py).

The arrays of all exchanges stand in one piece of int64 memory, from which one copy brings them to a device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

# The arrays of an exchange: first those for the rows of a batch,
ROWS_ARRAYS = ("ids", "inverse", "order", "ends", "early_rows", "urgent_rows")
# then those for the gradients of the batch before it: which keys, the owner's distinct rows, their order and ends.
GRADIENT_ARRAYS = tuple(
    f"{kind}_{name}" for kind in ("urgent", "late") for name in ("keys", "rows", "order", "ends")
)
ALIGNMENT = 16  # elements: 128 bytes, as the device's own allocations have at least 16


class ExchangeCounts(NamedTuple):
    """[world] each: rows that come from owners (recv) and go to requesters (send). Gradients go the other way."""

    urgent_recv: torch.Tensor
    urgent_send: torch.Tensor
    other_recv: torch.Tensor
    other_send: torch.Tensor


Told = tuple[int, int]  # two numbers that ranks tell each other with a batch; planning does not look at them
NOTHING: Told = (-1, 0)


class Extent(NamedTuple):
    """Of an array in the memory, in elements."""

    offset: int
    size: int


class Extents:
    """Of several arrays, as the C code writes and reads them: `numbers` is a ctypes array of int64 with the offset and
    the size of each; of those, the ones from `begin` to `end`."""

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
    """Addresses, and a number of bytes."""

    to: int
    from_: int
    size: int


class Room(NamedTuple):
    """Memory for plans, and what else is to be copied when they are made."""

    address: int
    elements: int
    copies: Sequence[Copy] = ()


class PlannedExchange(NamedTuple):
    """One exchange of a batch."""

    rows: Extents
    row_counts: ExchangeCounts
    urgent_entries: int  # positions with urgent rows
    gradients: Extents  # of the batch before, of no size after the first; in whole plans, of the batch itself
    gradient_counts: ExchangeCounts


# How many elements were written, and what reads the plans: called when and where they are needed.
Planned = tuple[int, Callable[[], list[PlannedExchange]]]
