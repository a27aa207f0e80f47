"""Ranks that share memory tell each other a few numbers. Python's lock is free while a rank waits for the others.

Who is gone is seen by the lock that its process held on the memory (shared_segment.py).
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch.distributed as dist

from freescale.compat import distributed
from freescale.kernels.native import c_library
from freescale.kernels.transports.shared_segment import SharedSegment, share_segment

_LINE_BYTES = 128
_MAX_NUMBERS = _LINE_BYTES // 8 - 1
_LOOK_SECONDS = 0.05  # between two looks after a rank that does not come
_GONE = -1  # in place of a round: this rank will not come any more


@cache
def _library() -> Any:
    functions = c_library.load()
    if functions is not None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        functions.fs_post.argtypes = [pointer, *[number] * 3, pointer, number]
        functions.fs_post.restype = None
        functions.fs_read.argtypes = [pointer, number, number, number, pointer, number, ctypes.c_double]
        functions.fs_post_and_read.argtypes = [pointer, *[number] * 4, pointer, pointer, number, ctypes.c_double]
        functions.fs_read.restype = functions.fs_post_and_read.restype = number
    return functions


class StatusBoard:
    """One rank's view of the board."""

    def __init__(self, segment: SharedSegment, rank: int, world: int) -> None:
        self._segment, self._rank, self._world = segment, rank, world
        self._round = 0
        self._own: Any = None  # what this rank says in this round
        self._finalizer = weakref.finalize(self, segment.close)

    def gather(self, numbers: Sequence[int], timeout: float) -> list[list[int]]:
        """What every rank says, in rank order. Raises where one is gone, or has not come in time."""
        self._begin_round(numbers)
        return self._read(timeout, posted=False)

    def post(self, numbers: Sequence[int]) -> None:
        """The first half of `gather`, which waits for nobody. `read` is the second."""
        self._begin_round(numbers)
        _library().fs_post(self._segment.address, _LINE_BYTES, self._rank, self._round, self._own, len(numbers))

    def read(self, timeout: float) -> list[list[int]]:
        return self._read(timeout, posted=True)

    def _begin_round(self, numbers: Sequence[int]) -> None:
        assert len(numbers) <= _MAX_NUMBERS
        self._round += 1
        self._own = (ctypes.c_int64 * len(numbers))(*numbers)

    def _read(self, timeout: float, posted: bool) -> list[list[int]]:
        own, functions, address = self._own, _library(), self._segment.address
        count, end, seconds = len(own), time.monotonic() + timeout, min(_LOOK_SECONDS, timeout)
        all_numbers = (ctypes.c_int64 * (count * self._world))()
        while True:
            if posted:
                missing = functions.fs_read(address, _LINE_BYTES, self._world, self._round, all_numbers, count, seconds)
            else:
                missing = functions.fs_post_and_read(
                    address, _LINE_BYTES, self._rank, self._world, self._round, own, all_numbers, count, seconds
                )
                posted = True
            if missing == self._world:
                if bytes(all_numbers) == bytes(own) * self._world:
                    return [list(own)] * self._world
                return [list(all_numbers[r * count : (r + 1) * count]) for r in range(self._world)]
            gone = self._has_left(missing)
            if gone or time.monotonic() > end:
                self.leave()
                raise RuntimeError(f"rank {missing} {'is gone' if gone else 'has not come'}")

    def leave(self) -> None:
        """Tell the others not to wait for this rank any more."""
        for line in range(2):
            self._line(self._rank, line)[0] = _GONE

    def _line(self, rank: int, line: int) -> Any:
        begin = (2 * rank + line) * _LINE_BYTES
        return self._segment.bytes[begin : begin + _LINE_BYTES].view("int64")

    def _has_left(self, rank: int) -> bool:
        if any(self._line(rank, line)[0] == _GONE for line in range(2)):
            return True
        if self._segment.is_held_by(rank):
            return False
        # It may have come and gone since it was missing: what it said counts.
        return self._line(rank, self._round & 1)[0] != self._round


def open_board(group: dist.ProcessGroup) -> StatusBoard | None:
    """A board for the ranks of a CPU group; None where they cannot share one. Collective."""
    rank, world = group.rank(), group.size()
    if min(built for (built,) in distributed.gather_ints([_library() is not None], group)) == 0:
        return None
    segment, _ = share_segment(2 * world * _LINE_BYTES, rank, group)
    return None if segment is None else StatusBoard(segment, rank, world)
