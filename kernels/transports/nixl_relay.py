"""Moves the slots of the `nixl` transport: one thread and one NIXL agent per priority. A thread sleeps while its rank
has nothing in flight; NIXL accepts writes from peers on its own meanwhile.

The sender's device fills a slot and writes a word. Its thread sees the word and has NIXL write the slot into the
receiver's, with a notification. The receiver's thread sees that and writes the word that its device waits for. After
the device has emptied the slot, its thread notifies the sender that the slot is free.
"""

from __future__ import annotations

import queue
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from freescale.compat import nixl
from freescale.kernels.transports.slot_rings import at_least

_POLL_SECONDS = 20e-6, 2e-4  # polling interval: at first, and after a while without progress
_PING_SECONDS = 0.2  # interval between checks of the peers that a thread waits for
_WRITTEN, _EMPTIED, _LOST, _PING, _LAUNCHED = range(5)
_NOTIFICATION = struct.Struct("<Bq")  # kind; number of a piece, a rank, or messages


class PeerSlots(NamedTuple):
    """Memory shared with one peer, at one priority. Words are [slots]: the round that each slot is in."""

    out_address: int  # of the first slot
    out_full: np.ndarray  # written by the device
    out_free: np.ndarray  # the device waits for it
    in_full: np.ndarray  # the device waits for it
    in_free: np.ndarray  # written by the device


class _Writing:
    """Pieces to one peer."""

    def __init__(self, slots: PeerSlots, remote_address: int) -> None:
        self.slots, self.remote_address = slots, remote_address
        self.sizes: deque[int] = deque()  # of pieces not posted yet
        self.next = 0
        self.posted: dict[int, Any] = {}  # piece number -> handle
        self.emptied = np.zeros_like(slots.out_full)  # rounds completed by the peer


class _Reading:
    """Pieces from one peer."""

    def __init__(self, slots: PeerSlots) -> None:
        self.slots = slots
        self.expected = self.written = 0  # pieces, so far
        self.full: set[int] = set()  # written by the peer, not yet read by the device


class PeerReports:
    """Lost ranks known to this rank: the PeerLiveness of shared_segment.py for ranks without shared memory."""

    def __init__(self, relays: list[NixlRelay]) -> None:
        self._relays = relays  # one of them notifies the others
        self.lost: dict[int, int] = {}  # peer -> the rank to name: itself, or the one it reported
        self.launched_by: dict[int, int] = {}  # peer -> messages launched when last asked
        self.launched = 0  # by this rank

    def lost_peers(self) -> dict[int, int]:
        return dict(self.lost)

    def report_failure(self, culprits: set[int]) -> None:
        for relay in self._relays[:1] if culprits else ():
            relay.tell_lost(min(culprits))

    def set_launched(self, messages: int) -> None:
        self.launched = messages

    def peers_behind(self, messages: int) -> set[int]:
        """Peers not known to have launched this many. A peer that is itself waiting reports it."""
        return {p for relay in self._relays[:1] for p in relay.peers if self.launched_by.get(p, 0) < messages}


class NixlRelay(threading.Thread):
    def __init__(
        self,
        rank: int,
        agent: nixl.Agent,
        names: Sequence[str],
        slots: dict[int, PeerSlots],
        remote_addresses: dict[int, int],
        piece_bytes: int,
        reports: PeerReports,
        stop: threading.Event,
        on_failure: Callable[[str], None],
    ) -> None:
        """`names`: agents of all ranks. By peer: `slots`, and the address of this rank's slots in each peer's
        memory."""
        super().__init__(name="freescale-nixl", daemon=True)
        self.rank, self.agent, self.names, self.piece_bytes = rank, agent, names, piece_bytes
        self._rank_of = {name: r for r, name in enumerate(names)}
        self.peers = tuple(slots)
        self._writing = {p: _Writing(s, remote_addresses[p]) for p, s in slots.items()}
        self._reading = {p: _Reading(s) for p, s in slots.items()}
        self._n_slots = next((len(s.out_full) for s in slots.values()), 1)
        self._messages: queue.SimpleQueue[tuple[list[int], list[int]]] = queue.SimpleQueue()
        self._reports, self._stopped, self._on_failure = reports, stop, on_failure
        self._enqueued = self._begun = 0  # messages
        self._pinged = 0.0
        self.broken = False

    # ---- called by other threads ------------------------------------------------------------------------

    def enqueue(self, send: list[int], recv: list[int]) -> None:
        """A message with these bytes to and from each rank was enqueued on streams."""
        self._enqueued += 1
        self._messages.put((send, recv))

    @property
    def busy(self) -> bool:
        return not self.broken and (self._begun < self._enqueued or self._has_work())

    def awaited_peers(self) -> set[int]:
        """Peers that this priority depends on: they have not written, not emptied, or not received what was posted."""
        return {p for p in self._writing if self._waits_to_write(p) or self._waits_to_read(p)}

    def tell_lost(self, culprit: int) -> None:
        """Report the failed rank, so that other ranks name it and not this rank, which stops too."""
        for peer in self._writing:
            if peer != culprit and peer not in self._reports.lost:
                self._notify(peer, _LOST, culprit)

    # ---- the thread --------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self._relay()
        except BaseException as error:  # noqa: BLE001  (without this thread, streams would wait for ever)
            try:
                if not self._stopped.is_set():
                    text = next(iter(str(error).splitlines()), "")
                    self._on_failure(f"{type(error).__name__}: {text}")
            finally:
                self.broken = True  # set after the error: a thread that sees it will find the error

    def _relay(self) -> None:
        pause = shortest = _POLL_SECONDS[0]
        while not self._stopped.is_set():
            self._take_messages(wait=not self._has_work())
            moved = self._read_notifications()
            for peer in self.peers:
                moved |= self._move(peer)
            if moved:
                pause = shortest
            elif self._has_work():
                self._ping()
                time.sleep(pause)
                pause = min(1.5 * pause, _POLL_SECONDS[1])

    def _move(self, peer: int) -> bool:
        """Do everything that is possible now, without waiting. Most peers are idle at any time."""
        writing, reading, moved = self._writing[peer], self._reading[peer], False
        if (writing.sizes or writing.posted or reading.full) and peer not in self._reports.lost:
            moved = bool(writing.sizes) and self._post(peer)
            moved |= bool(writing.posted) and self._finish_posted(peer)
            moved |= bool(reading.full) and self._give_slots_back(peer)
        return moved

    def _take_messages(self, wait: bool) -> None:
        try:
            while True:
                send, recv = self._messages.get(block=wait, timeout=0.1 if wait else None)
                wait = False
                for peer, writing in self._writing.items():
                    n = send[peer]
                    writing.sizes.extend(min(self.piece_bytes, n - begin) for begin in range(0, n, self.piece_bytes))
                    self._reading[peer].expected += -(-recv[peer] // self.piece_bytes)
                self._begun += 1
        except queue.Empty:
            pass

    def _has_work(self) -> bool:
        return any(w.sizes or w.posted for w in self._writing.values()) or any(
            r.full or r.written < r.expected for r in self._reading.values()
        )

    def _slot_and_round(self, number: int) -> tuple[int, int]:
        return number % self._n_slots, number // self._n_slots + 1

    def _read_notifications(self) -> bool:
        moved = False
        for name, notification in self.agent.notifications():
            peer, (kind, number) = self._rank_of.get(name, -1), _NOTIFICATION.unpack(notification)
            if peer < 0:
                continue
            if kind == _PING:
                self._notify(peer, _LAUNCHED, self._reports.launched)
                continue
            if kind == _LAUNCHED:
                self._reports.launched_by[peer] = number
                continue
            moved = True
            slot, round_ = self._slot_and_round(number)
            if kind == _WRITTEN:
                reading = self._reading[peer]
                reading.full.add(number)
                reading.written += 1
                reading.slots.in_full[slot] = round_
            elif kind == _EMPTIED:
                self._writing[peer].emptied[slot] = round_
            else:
                self._reports.lost.setdefault(peer, number)
        return moved

    def _may_post(self, writing: _Writing) -> tuple[bool, bool]:
        """Whether the device has filled the next slot, and whether the peer has emptied its target."""
        slot, round_ = self._slot_and_round(writing.next)
        filled = at_least(int(writing.slots.out_full[slot]), round_)
        return filled, at_least(int(writing.emptied[slot]), round_ - 1)

    def _post(self, peer: int) -> bool:
        writing, moved = self._writing[peer], False
        while writing.sizes and all(self._may_post(writing)):
            number = writing.next
            offset = number % self._n_slots * self.piece_bytes
            notification = _NOTIFICATION.pack(_WRITTEN, number)
            addresses = writing.slots.out_address + offset, writing.remote_address + offset
            try:
                handle = self.agent.write(self.names[peer], *addresses, writing.sizes[0], notification)
            except nixl.PeerLost:
                self._reports.lost.setdefault(peer, peer)
                return moved
            writing.posted[number] = handle
            writing.sizes.popleft()
            writing.next, moved = number + 1, True
        return moved

    def _finish_posted(self, peer: int) -> bool:
        """Return written slots to the device."""
        writing, moved = self._writing[peer], False
        for number, handle in list(writing.posted.items()):
            try:
                if not self.agent.is_written(handle):
                    continue
            except nixl.PeerLost:
                self._reports.lost.setdefault(peer, peer)
                return moved
            slot, round_ = self._slot_and_round(number)
            writing.slots.out_free[slot] = round_
            del writing.posted[number]
            moved = True
        return moved

    def _give_slots_back(self, peer: int) -> bool:
        """Notify the peer of its slots here that the device has emptied."""
        reading, moved = self._reading[peer], False
        for number in sorted(reading.full):
            slot, round_ = self._slot_and_round(number)
            if at_least(int(reading.slots.in_free[slot]), round_):
                reading.full.discard(number)
                self._notify(peer, _EMPTIED, number)
                moved = True
        return moved

    def _notify(self, peer: int, kind: int, number: int) -> None:
        try:
            self.agent.notify(self.names[peer], _NOTIFICATION.pack(kind, number))
        except nixl.PeerLost:
            self._reports.lost.setdefault(peer, peer)

    def _ping(self) -> None:
        """Ask the peers that this rank waits for about their progress. NIXL reports a dead peer."""
        now = time.monotonic()
        if now - self._pinged > _PING_SECONDS:
            self._pinged = now
            for peer in self.awaited_peers():
                if peer not in self._reports.lost:
                    self._notify(peer, _PING, 0)

    def _waits_to_write(self, peer: int) -> bool:
        writing = self._writing[peer]
        return bool(writing.posted) or (bool(writing.sizes) and self._may_post(writing) == (True, False))

    def _waits_to_read(self, peer: int) -> bool:
        """Whether the peer is expected to write. Not if all slots are full, because this rank's device has not emptied
        one."""
        reading = self._reading[peer]
        return reading.written < reading.expected and len(reading.full) < self._n_slots
