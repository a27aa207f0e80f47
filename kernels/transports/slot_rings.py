"""Rings of slots, through which the pieces of an all-to-all pass. Pure arithmetic: no device, no memory.

A lane is one ring in one direction. Piece n takes slot n % slots in round n // slots + 1. Two words per slot hold a
round: `full` means the data is in, `free` means it has been taken. The writer of a piece waits for `free` of the
previous round, the reader for `full` of this round. So memory is bounded, and a slow reader holds the writer back.

Why ranks cannot deadlock: every rank orders its transfers by (message, piece, distance), where distance is (receiver -
sender) % world, and a send comes before the receive of the same key. A transfer waits only for transfers of smaller
keys or, if it is a receive, for the send of its own key. So the smallest unfinished transfer can always run, even if
one hardware queue carries all streams of a rank. (Since the streams of a message join at its end, receives of later
messages wait for transfers of this one, which have smaller keys.)
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

PRIORITY_LEVELS = 3  # priorities 0, 1 and 2, each with its own slots and streams
WORD_STRIDE = 64  # one cache line per word: the two sides of a lane share none
PAGE_BYTES = 4096


def level_of(priority: int) -> int:
    return min(max(priority, 0), PRIORITY_LEVELS - 1)


class Lane(ctypes.Structure):
    """One ring in one direction, as seen by one side. Plain numbers, also read and updated by native/transfers.c."""

    peer: int
    sends: int  # 0 or 1
    slots: int
    piece_bytes: int  # of a slot
    data_address: int  # of the first slot
    wait_address: int  # of the first word that this side waits for
    signal_address: int  # of the first word that this side writes
    host_words: int  # host address of the words that this side waits for
    next_piece: int

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("peer", "sends", "slots", "piece_bytes")),
        *((name, ctypes.c_uint64) for name in ("data_address", "wait_address", "signal_address", "host_words")),
        ("next_piece", ctypes.c_int64),
    ]

    def __init__(self, wait_words: np.ndarray, **numbers: int) -> None:
        assert wait_words.strides == (WORD_STRIDE,)
        super().__init__(**numbers, host_words=wait_words.ctypes.data)
        self.wait_words = wait_words

    def awaited_round(self, piece: int) -> int:
        """The round that the word must reach before piece number `piece` may move."""
        return piece // self.slots + (0 if self.sends else 1)

    def may_move(self, piece: int) -> bool:
        return at_least(int(self.wait_words[piece % self.slots]), self.awaited_round(piece))

    def is_blocked(self) -> bool:
        """Whether an issued piece cannot move yet. (Pieces of two streams may overtake each other.)"""
        issued = range(max(0, self.next_piece - self.slots), self.next_piece)
        return not all(map(self.may_move, issued))


def at_least(word: int, value: int) -> bool:
    """The comparison of stream waits, on wrapping 32-bit numbers."""
    return (word - value) & 0xFFFFFFFF < 0x80000000


@dataclass(frozen=True)
class SharedLayout:
    """Layout of the lanes between all ranks of a host in shared memory: one line per rank (PeerLiveness), then the
    words of all lanes, then their slots."""

    world: int
    slots: int
    piece_bytes: int

    @classmethod
    def fitting(cls, world: int, ring_bytes: int, piece_bytes: int) -> SharedLayout:
        return cls(world, *fit_slots("staged", world, PRIORITY_LEVELS, ring_bytes, piece_bytes))

    @property
    def lanes(self) -> int:
        return self.world * self.world * PRIORITY_LEVELS

    def lane(self, source: int, to: int, level: int) -> int:
        return (source * self.world + to) * PRIORITY_LEVELS + level

    def full_offset(self, lane: int) -> int:
        return _round_up(self.world * WORD_STRIDE) + lane * self.slots * WORD_STRIDE

    def free_offset(self, lane: int) -> int:
        return self.full_offset(self.lanes) + lane * self.slots * WORD_STRIDE

    def data_offset(self, lane: int) -> int:
        return _round_up(self.free_offset(self.lanes)) + lane * self.slots * self.piece_bytes

    @property
    def nbytes(self) -> int:
        return self.data_offset(self.lanes)


def fit_slots(name: str, world: int, rings_per_peer: int, ring_bytes: int, piece_bytes: int) -> tuple[int, int]:
    """Slots of a ring, and the largest piece size up to `piece_bytes` for which a rank's rings fit in `ring_bytes`."""
    slots = max(2, 8 // world)
    in_all = world * rings_per_peer * slots
    fitting = min(piece_bytes, ring_bytes // in_all) // PAGE_BYTES * PAGE_BYTES
    if fitting < PAGE_BYTES:
        raise ValueError(
            f"freescale: {name}: the slots of {world} ranks need at least {in_all * PAGE_BYTES} bytes and pieces of "
            f"{PAGE_BYTES}, found ring_bytes={ring_bytes}, piece_bytes={piece_bytes}"
        )
    return slots, fitting


def _round_up(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
