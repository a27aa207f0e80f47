"""The `staged` transport across hosts: threads carry the slots over gloo, in whatever way the build offers it.

The device copies pieces into slots of pinned memory and out of others, and signals as on one host. Between them, for
each priority, one thread sends and one receives; each has the next piece under way before it waits for the last,
and each priority has connections of its own, so that nothing urgent stands behind a large early message.

A piece may hold fragments for several peers, so the number of copies does not grow with the number of ranks.
"""

from __future__ import annotations

import contextlib
import mmap
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from freescale.compat import distributed
from freescale.kernels.transports import slot_rings
from freescale.kernels.transports.base import Transport, set_far
from freescale.kernels.transports.shared_segment import cpu_group
from freescale.kernels.transports.slot_rings import LEVELS, WORD_STRIDE, Fragment, Lane, Step

SLOTS = 4
_FAREWELL = 5.0  # seconds
_NAP = 20e-6  # seconds between two looks at a word
_RINGS = ("out", "in", "self out", "self in")  # the last two share their slots
Posted = tuple[int, list[tuple[int, Any]]]  # number of a piece, and for each fragment the peer and its Work


class Courier(threading.Thread):
    """Carries the pieces of one priority in one direction, in order."""

    def __init__(
        self,
        sends: bool,
        slots: torch.Tensor,
        awaited: np.ndarray,
        told: np.ndarray,
        group: dist.ProcessGroup,
        stop: threading.Event,
        failed: Callable[[int | None, str], None],
    ) -> None:
        super().__init__(name=f"freescale-{'send' if sends else 'receive'}", daemon=True)
        self.sends, self.slots, self.awaited, self.told = sends, slots, awaited, told
        self.group, self.stopped, self.failed = group, stop, failed
        self.pieces: queue.SimpleQueue[list[Fragment]] = queue.SimpleQueue()
        self.waits_for: set[int] = set()
        self.given = self.through = 0  # pieces
        self.broken = False

    def give(self, piece: list[Fragment]) -> None:
        self.given += 1
        self.pieces.put(piece)

    @property
    def busy(self) -> bool:
        return self.through < self.given and not self.broken

    def run(self) -> None:
        try:
            self._carry()
        except BaseException as error:  # noqa: BLE001  (without this thread, streams would wait for ever)
            self._give_up(None, error)

    def _carry(self) -> None:
        number = 0
        posted: Posted | None = None
        while not self.stopped.is_set():
            try:
                piece = self.pieces.get(block=posted is None, timeout=0.05)
            except queue.Empty:
                self._settle(posted)
                posted = None
                continue
            while not self._may_post(number):
                self._settle(posted)
                posted = None
                if self.stopped.is_set():
                    return
                time.sleep(_NAP)
            following = number, self._post(number, piece)
            self._settle(posted)
            posted, number = following, number + 1

    def _may_post(self, number: int) -> bool:
        needed = number // SLOTS + (1 if self.sends else 0)
        return slot_rings.at_least(int(self.awaited[number % SLOTS]), needed)

    def _post(self, number: int, piece: list[Fragment]) -> list[tuple[int, Any]]:
        slot, start = self.slots[number % SLOTS], min(f.offset for f in piece)
        works: list[tuple[int, Any]] = []
        for peer, offset, nbytes in piece:
            part = slot[offset - start : offset - start + nbytes]
            try:
                if self.sends:
                    works.append((peer, dist.isend(part, group=self.group, group_dst=peer)))
                else:
                    works.append((peer, dist.irecv(part, group=self.group, group_src=peer)))
            except RuntimeError as error:
                self._give_up(peer, error)
        self.waits_for |= {peer for peer, _ in works}
        return works

    def _settle(self, posted: Posted | None) -> None:
        """Wait until the piece is through, then tell the device."""
        if posted is None:
            return
        number, works = posted
        for peer, work in works:
            try:
                work.wait()
            except RuntimeError as error:
                self._give_up(peer, error)
                return
        self.waits_for = set()
        self.told[number % SLOTS] = number // SLOTS + 1
        self.through = number + 1

    def _give_up(self, peer: int | None, error: BaseException) -> None:
        """For want of a peer, or (None) of something that only this rank has to do with."""
        self.broken = True
        if self.stopped.is_set():
            return
        text = next(iter(str(error).splitlines()), "")
        try:
            self.failed(peer, text if peer is not None else f"{type(error).__name__}: {text}")
        finally:
            self.stopped.set()
            if peer is None:
                distributed.hang_up(self.group)  # the peers' couriers give up too


class Relay(Transport):
    """Ranks of any hosts."""

    name = "staged"

    def __init__(
        self,
        group: dist.ProcessGroup,
        driver: Any,
        timeout: float,
        side: dist.ProcessGroup,
        ring_bytes: int,
        piece_bytes: int,
    ) -> None:
        super().__init__(group, driver, timeout)
        self.piece = min(piece_bytes, ring_bytes // (3 * LEVELS * SLOTS)) // 4096 * 4096
        if self.piece < 4096:
            least = 3 * LEVELS * SLOTS * 4096
            raise ValueError(f"freescale: staged: expected ring_bytes of at least {least}, found {ring_bytes}")
        self._words_at = 3 * LEVELS * SLOTS * self.piece
        self.pinned_bytes = self._words_at + 2 * LEVELS * len(_RINGS) * SLOTS * WORD_STRIDE
        self._memory = np.frombuffer(mmap.mmap(-1, self.pinned_bytes), np.uint8)
        self._device = self._pin(self._memory)
        self._open_streams()
        self._groups = [side, *(cpu_group(group, timeout, level) for level in range(1, LEVELS))]
        self._lanes = [[self._lane(ring, level) for ring in range(len(_RINGS))] for level in range(LEVELS)]
        self._awaited = [lane.seen for lanes in self._lanes for lane in lanes if lane.seen is not None]
        self._halt = threading.Event()
        self._couriers = [self._courier(level, sends) for level in range(LEVELS) for sends in (True, False)]
        self._resources.callback(_let_go, self._couriers, side, self._awaited, self._halt)
        for courier in self._couriers:
            courier.start()
        self._start_watching()

    def _words(self, ring: int, level: int, full: bool) -> int:
        return self._words_at + ((ring * LEVELS + level) * 2 + full) * SLOTS * WORD_STRIDE

    def _view(self, at: int) -> np.ndarray:
        return self._memory[at : at + SLOTS * WORD_STRIDE].view(np.uint32)[:: WORD_STRIDE // 4]

    def _data(self, ring: int, level: int) -> int:
        return (min(ring, 2) * LEVELS + level) * SLOTS * self.piece

    def _lane(self, ring: int, level: int) -> Lane:
        sends = ring in (0, 2)
        words = min(ring, 2)  # both ends of the lane to itself look at the same words
        waits, tells = self._words(words, level, not sends), self._words(words, level, sends)
        return Lane(
            peer=self.rank if ring >= 2 else -1,
            sends=sends,
            slots=SLOTS,
            piece=self.piece,
            data=self._memory.ctypes.data + self._data(ring, level),
            waits_at=self._device + waits,
            tells_at=self._device + tells,
            seen=self._view(waits),
        )

    def _courier(self, level: int, sends: bool) -> Courier:
        ring = 0 if sends else 1
        at = self._data(ring, level)
        slots = torch.from_numpy(self._memory[at : at + SLOTS * self.piece]).view(SLOTS, self.piece)
        awaited, told = self._view(self._words(ring, level, sends)), self._view(self._words(ring, level, not sends))
        this = weakref.ref(self)

        def failed(peer: int | None, text: str) -> None:
            transport = this()
            if transport is None:
                return
            if peer is None:
                transport.fail(f"rank {transport._me()} cannot go on: {text}", {transport.rank})
            else:
                transport.fail(f"rank {transport._me()} cannot go on: {transport._names([peer])} gone ({text})", {peer})

        return Courier(sends, slots, awaited, told, self._groups[level], self._halt, failed)

    def _steps(self, level: int, send: Sequence[int], recv: Sequence[int]) -> Iterable[Step]:
        me, world = self.rank, self.world
        lane_out, lane_in, self_out, self_in = self._lanes[level]
        first_out, first_in = sum(send[:me]), sum(recv[:me])
        for at in range(0, send[me], self.piece):
            nbytes = min(self.piece, send[me] - at)
            yield Step(self_out, first_out + at, nbytes)
            yield Step(self_in, first_in + at, nbytes)
        pieces_out = slot_rings.pack([(me + d) % world for d in range(1, world)], send, self.piece)
        pieces_in = slot_rings.pack([(me - d) % world for d in range(1, world)], recv, self.piece)
        for k in range(max(len(pieces_out), len(pieces_in))):
            for lane, pieces, sends in ((lane_out, pieces_out, True), (lane_in, pieces_in, False)):
                if k < len(pieces):
                    self._couriers[2 * level + (not sends)].give(pieces[k])
                    yield Step(lane, min(f.offset for f in pieces[k]), sum(f.nbytes for f in pieces[k]))

    def _lacking(self) -> set[int]:
        return set().union(*(c.waits_for for c in self._couriers))

    def _sending(self) -> bool:
        return any(c.busy for c in self._couriers)

    def _release(self) -> None:
        set_far(self._awaited)


def _let_go(
    couriers: list[Courier], side: dist.ProcessGroup, awaited: list[np.ndarray], halt: threading.Event
) -> None:
    end = time.monotonic() + _FAREWELL
    while any(c.busy for c in couriers) and time.monotonic() < end:
        time.sleep(0.001)
    halt.set()
    set_far(awaited)
    for courier in couriers:
        if courier.ident is not None and courier is not threading.current_thread():
            courier.join(max(0.0, end - time.monotonic()))
    if any(c.is_alive() or c.broken or c.busy for c in couriers) or not dist.is_initialized():
        return
    # What we sent may still be on its way to a peer: a process does not end its connections before everyone is here.
    with contextlib.suppress(RuntimeError):
        work = dist.barrier(side, async_op=True)
        assert work is not None
        work.wait(timedelta(seconds=_FAREWELL))
