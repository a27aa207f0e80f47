"""How an all-to-all is cut into pieces that pass through rings of slots. Plain numbers: no device, no memory.

A lane is one ring in one direction. Its slots are used in turn; piece number n takes slot n % slots in round
n // slots + 1. Two words per slot carry the round: `full` says that the data is in, `free` says that it has been taken.
The writer of a piece waits for `free` of the round before, the reader for `full` of the round; so memory is bounded
and a slow reader holds the writer back.

Why no set of ranks can block each other: every rank puts its steps in the order of (message, piece, distance), where
distance is (receiver - sender) % world; a send goes before the receive of the same key. A step waits for steps of
smaller keys alone, or, a receive, for a send of its own key. So the smallest unfinished step can always run. This
holds even if one hardware queue carries all streams of a rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

LEVELS = 3  # priorities 0, 1 and 2; each has slots and streams of its own
WORD_STRIDE = 64  # a cache line per word: the two sides of a lane do not share one
_ALIGN = 4096


def level_of(priority: int) -> int:
    return min(max(priority, 0), LEVELS - 1)


@dataclass
class Lane:
    """One ring in one direction, as one side sees it."""

    peer: int
    sends: bool
    slots: int
    piece: int  # bytes in a slot
    data: int  # address of the first slot
    waits_at: int  # address of the first word that this side waits for
    tells_at: int  # address of the first word that this side writes
    seen: np.ndarray | None = None  # the words that this side waits for, where the host can read them
    word_stride: int = WORD_STRIDE
    number: int = 0  # of the next piece

    def slot(self, number: int) -> int:
        return number % self.slots

    def needs(self, number: int) -> int:
        """What the awaited word must have reached before piece `number` may move."""
        return number // self.slots + (0 if self.sends else 1)

    def reached(self, number: int, seen: np.ndarray) -> bool:
        return at_least(int(seen[number % self.slots]), self.needs(number))

    def lacks(self, seen: np.ndarray) -> bool:
        """Whether a piece that was issued cannot move yet. (Those of two streams may pass each other.)"""
        return not all(self.reached(n, seen) for n in range(max(0, self.number - self.slots), self.number))


def at_least(word: int, value: int) -> bool:
    """The comparison of the stream waits: on 32-bit numbers that wrap around."""
    return (word - value) & 0xFFFFFFFF < 0x80000000


class Step(NamedTuple):
    """One piece through one lane: bytes [offset, offset + nbytes) of the tensor that is sent or received."""

    lane: Lane
    offset: int
    nbytes: int


class Move(NamedTuple):
    """A Step, before it is known which lane it takes."""

    sends: bool
    peer: int
    offset: int
    nbytes: int


def walk(rank: int, send: Sequence[int], recv: Sequence[int], piece: int) -> Iterator[Move]:
    """Every piece of a message, in the order that cannot block; bytes to and from each peer."""
    world = len(send)
    starts_out, starts_in = [0, *accumulate(send)], [0, *accumulate(recv)]
    for at in range(0, max((*send, *recv), default=0), piece):
        for distance in (*range(1, world), 0):  # others first; what a rank sends to itself comes last
            to, source = (rank + distance) % world, (rank - distance) % world
            if at < send[to]:
                yield Move(True, to, starts_out[to] + at, min(piece, send[to] - at))
            if at < recv[source]:
                yield Move(False, source, starts_in[source] + at, min(piece, recv[source] - at))


@dataclass(frozen=True)
class Sizes:
    """Slots of the lanes between every two ranks of a host, and where each lies in the memory that they share."""

    world: int
    slots: int
    piece: int

    @property
    def lanes(self) -> int:
        return self.world * self.world * LEVELS

    def lane(self, source: int, to: int, level: int) -> int:
        return (source * self.world + to) * LEVELS + level

    def full_at(self, lane: int) -> int:
        return _up(self.world * WORD_STRIDE) + lane * self.slots * WORD_STRIDE

    def free_at(self, lane: int) -> int:
        return self.full_at(self.lanes) + lane * self.slots * WORD_STRIDE

    def data_at(self, lane: int) -> int:
        return _up(self.free_at(self.lanes)) + lane * self.slots * self.piece

    @property
    def nbytes(self) -> int:
        return self.data_at(self.lanes)

    @property
    def nbytes_per_rank(self) -> int:
        return self.world * LEVELS * self.slots * self.piece


def fit(world: int, ring_bytes: int, piece_bytes: int) -> Sizes:
    """The largest pieces up to `piece_bytes` with which one rank's lanes need at most `ring_bytes`."""
    slots = max(2, 8 // world)
    piece = min(piece_bytes, ring_bytes // (world * LEVELS * slots)) // _ALIGN * _ALIGN
    if piece < _ALIGN:
        least = world * LEVELS * slots * _ALIGN
        raise ValueError(
            f"freescale: a ring for {world} ranks needs at least {least} bytes and pieces of {_ALIGN}, "
            f"found ring_bytes={ring_bytes}, piece_bytes={piece_bytes}"
        )
    return Sizes(world, slots, piece)


def _up(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


class Fragment(NamedTuple):
    """What goes to or comes from one peer in one message of the network; offset is that in the tensor."""

    peer: int
    offset: int
    nbytes: int


def pack(peers: Sequence[int], nbytes: Sequence[int], piece: int) -> list[list[Fragment]]:
    """Fragments in the order of `peers`, grouped into pieces: each a stretch of the tensor that fits into a slot.

    Both ends of a pair cut what they share alike, whatever else shares their slots.
    """
    starts = [0, *accumulate(nbytes)]
    pieces: list[list[Fragment]] = []
    low = high = 0  # the stretch of the last piece
    for peer in peers:
        for at in range(0, nbytes[peer], piece):
            part = Fragment(peer, starts[peer] + at, min(piece, nbytes[peer] - at))
            end = part.offset + part.nbytes
            touches = part.offset == high or end == low
            if pieces and touches and max(high, end) - min(low, part.offset) <= piece:
                pieces[-1].append(part)
                low, high = min(low, part.offset), max(high, end)
            else:
                pieces.append([part])
                low, high = part.offset, end
    return pieces
