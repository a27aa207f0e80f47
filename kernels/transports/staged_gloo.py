"""The `staged` transport across hosts: threads send the slots over gloo, in whatever way the build offers it.

The device copies pieces into slots of pinned memory and out of others, and signals as on one host. Between them, for
each priority, one thread sends and one receives; each has the next piece in flight before it waits for the last,
and each priority has connections of its own, so that nothing urgent stands behind a large early message.

A piece may hold fragments for several peers, so the number of copies does not grow with the number of ranks.
"""

from __future__ import annotations

import mmap
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from freescale.compat import distributed
from freescale.kernels.transports import slot_rings
from freescale.kernels.transports.base import CopyTransport, release_words
from freescale.kernels.transports.channel import Channel
from freescale.kernels.transports.relay_threads import stop_relaying
from freescale.kernels.transports.shared_segment import cpu_group
from freescale.kernels.transports.slot_rings import (
    PAGE_BYTES,
    PRIORITY_LEVELS,
    WORD_STRIDE,
    Fragment,
    Lane,
    LaneTransfer,
)

SLOTS = 4
_POLL_INTERVAL = 20e-6  # seconds between two looks at a word
_RINGS = ("out", "in", "self out", "self in")  # the last two share their slots
Posted = tuple[int, list[tuple[int, Any]]]  # number of a piece, and for each fragment the peer and its Work


class RelayThread(threading.Thread):
    """Sends or receives the pieces of one priority, in order."""

    def __init__(
        self,
        sends: bool,
        slots: torch.Tensor,
        wait_words: np.ndarray,
        signal_words: np.ndarray,
        group: dist.ProcessGroup,
        stop: threading.Event,
        on_failure: Callable[[int | None, str], None],
    ) -> None:
        super().__init__(name=f"freescale-{'send' if sends else 'receive'}", daemon=True)
        self.sends, self.slots, self.wait_words, self.signal_words = sends, slots, wait_words, signal_words
        self.group, self.stopped, self.on_failure = group, stop, on_failure
        self.pieces: queue.SimpleQueue[list[Fragment]] = queue.SimpleQueue()
        self.awaited_peers: set[int] = set()
        self.enqueued = self.completed = 0  # pieces
        self.broken = False

    def enqueue(self, piece: list[Fragment]) -> None:
        self.enqueued += 1
        self.pieces.put(piece)

    @property
    def busy(self) -> bool:
        return self.completed < self.enqueued and not self.broken

    def run(self) -> None:
        try:
            self._relay_pieces()
        except BaseException as error:  # noqa: BLE001  (without this thread, streams would wait for ever)
            self._give_up(None, error)

    def _relay_pieces(self) -> None:
        number = 0
        posted: Posted | None = None
        while not self.stopped.is_set():
            try:
                piece = self.pieces.get(block=posted is None, timeout=0.05)
            except queue.Empty:
                self._complete(posted)
                posted = None
                continue
            while not self._may_post(number):
                self._complete(posted)
                posted = None
                if self.stopped.is_set():
                    return
                time.sleep(_POLL_INTERVAL)
            following = number, self._post(number, piece)
            self._complete(posted)
            posted, number = following, number + 1

    def _may_post(self, number: int) -> bool:
        awaited_round = number // SLOTS + (1 if self.sends else 0)
        return slot_rings.at_least(int(self.wait_words[number % SLOTS]), awaited_round)

    def _post(self, number: int, piece: list[Fragment]) -> list[tuple[int, Any]]:
        slot, start = self.slots[number % SLOTS], min(f.offset for f in piece)
        works: list[tuple[int, Any]] = []
        for peer, offset, nbytes in piece:
            fragment = slot[offset - start : offset - start + nbytes]
            try:
                if self.sends:
                    works.append((peer, dist.isend(fragment, group=self.group, group_dst=peer)))
                else:
                    works.append((peer, dist.irecv(fragment, group=self.group, group_src=peer)))
            except RuntimeError as error:
                self._give_up(peer, error)
        self.awaited_peers |= {peer for peer, _ in works}
        return works

    def _complete(self, posted: Posted | None) -> None:
        """Wait until the piece has been sent or received, then signal the device."""
        if posted is None:
            return
        number, works = posted
        for peer, work in works:
            try:
                work.wait()
            except RuntimeError as error:
                self._give_up(peer, error)
                return
        self.awaited_peers = set()
        self.signal_words[number % SLOTS] = number // SLOTS + 1
        self.completed = number + 1

    def _give_up(self, peer: int | None, error: BaseException) -> None:
        """Because of a peer, or (None) of something that only this rank has to do with."""
        if self.stopped.is_set():
            self.broken = True
            return
        text = next(iter(str(error).splitlines()), "")
        try:
            self.on_failure(peer, text if peer is not None else f"{type(error).__name__}: {text}")
        finally:
            self.broken = True  # behind the error: who sees that nothing is sent any more is to find it
            self.stopped.set()
            if peer is None:
                distributed.hang_up(self.group)  # the peers' threads give up too


class GlooRelay(CopyTransport):
    """Ranks of any hosts."""

    name = "staged"

    def __init__(
        self,
        group: dist.ProcessGroup,
        driver: Any,
        timeout: float,
        gloo_group: dist.ProcessGroup,
        ring_bytes: int,
        piece_bytes: int,
    ) -> None:
        super().__init__(group, driver, timeout)
        slots = 3 * PRIORITY_LEVELS * SLOTS
        self.piece_bytes = min(piece_bytes, ring_bytes // slots) // PAGE_BYTES * PAGE_BYTES
        if self.piece_bytes < PAGE_BYTES:
            least = slots * PAGE_BYTES
            raise ValueError(f"freescale: staged: expected ring_bytes of at least {least}, found {ring_bytes}")
        self._words_begin = slots * self.piece_bytes
        self.pinned_bytes = self._words_begin + 2 * PRIORITY_LEVELS * len(_RINGS) * SLOTS * WORD_STRIDE
        self._memory = np.frombuffer(mmap.mmap(-1, self.pinned_bytes), np.uint8)
        self._mapped = self._resources.pin(self._memory)
        self.streams = self._resources.open_streams()
        levels = range(PRIORITY_LEVELS)
        self._gloo_groups = [gloo_group, *(cpu_group(group, timeout, level) for level in levels[1:])]
        self._lanes = [[self._lane(ring, level) for ring in range(len(_RINGS))] for level in levels]
        self._open_channels([Channel(self.rank, *ways, [], [], self.piece_bytes) for ways in self.streams])
        self._wait_words = [lane.wait_words for lanes in self._lanes for lane in lanes if lane.wait_words is not None]
        self._stop_threads = threading.Event()
        self._threads = [self._relay_thread(level, sends) for level in levels for sends in (True, False)]
        self._resources.on_close(stop_relaying, self._threads, gloo_group, self._wait_words, self._stop_threads)
        for thread in self._threads:
            thread.start()
        self._start_watching()

    def _words_offset(self, ring: int, level: int, full: bool) -> int:
        return self._words_begin + ((ring * PRIORITY_LEVELS + level) * 2 + full) * SLOTS * WORD_STRIDE

    def _words(self, offset: int) -> np.ndarray:
        return self._memory[offset : offset + SLOTS * WORD_STRIDE].view(np.uint32)[:: WORD_STRIDE // 4]

    def _data_offset(self, ring: int, level: int) -> int:
        return (min(ring, 2) * PRIORITY_LEVELS + level) * SLOTS * self.piece_bytes

    def _lane(self, ring: int, level: int) -> Lane:
        sends = ring in (0, 2)
        words = min(ring, 2)  # both ends of the lane to itself look at the same words
        waits, signals = self._words_offset(words, level, not sends), self._words_offset(words, level, sends)
        return Lane(
            peer=self.rank if ring >= 2 else -1,
            sends=sends,
            slots=SLOTS,
            piece_bytes=self.piece_bytes,
            data_address=self._memory.ctypes.data + self._data_offset(ring, level),
            wait_address=self._mapped + waits,
            signal_address=self._mapped + signals,
            wait_words=self._words(waits),
        )

    def _relay_thread(self, level: int, sends: bool) -> RelayThread:
        ring = 0 if sends else 1
        begin = self._data_offset(ring, level)
        slots = torch.from_numpy(self._memory[begin : begin + SLOTS * self.piece_bytes]).view(SLOTS, self.piece_bytes)
        wait_words = self._words(self._words_offset(ring, level, sends))
        signal_words = self._words(self._words_offset(ring, level, not sends))
        transport_ref = weakref.ref(self)

        def on_failure(peer: int | None, text: str) -> None:
            transport = transport_ref()
            if transport is None:
                return
            what = f"rank {transport.global_rank} cannot go on"
            if peer is None:
                transport.fail(f"{what}: {text}", {transport.rank})
            else:
                transport.fail(f"{what}: {transport.describe_peers([peer])} gone ({text})", {peer})

        group = self._gloo_groups[level]
        return RelayThread(sends, slots, wait_words, signal_words, group, self._stop_threads, on_failure)

    def _put_on_streams(
        self, level: int, stream: int, x: int, out: int, send_counts: torch.Tensor, recv_counts: torch.Tensor,
        row_bytes: int,
    ) -> Any:  # fmt: skip
        send, recv = ([n * row_bytes for n in counts.tolist()] for counts in (send_counts, recv_counts))
        return self._issuer.launch_pieces(level, stream, x, out, self._transfers(level, send, recv))

    def _transfers(self, level: int, send: Sequence[int], recv: Sequence[int]) -> Iterable[LaneTransfer]:
        """Every piece of one message, in the order in which it is issued; the threads are told what is to travel."""
        rank, world = self.rank, self.world
        lane_out, lane_in, self_out, self_in = self._lanes[level]
        first_out, first_in = sum(send[:rank]), sum(recv[:rank])
        for begin in range(0, send[rank], self.piece_bytes):
            nbytes = min(self.piece_bytes, send[rank] - begin)
            yield LaneTransfer(self_out, first_out + begin, nbytes)
            yield LaneTransfer(self_in, first_in + begin, nbytes)
        receivers = [(rank + distance) % world for distance in range(1, world)]
        senders = [(rank - distance) % world for distance in range(1, world)]
        pieces_out = slot_rings.pack_fragments(receivers, send, self.piece_bytes)
        pieces_in = slot_rings.pack_fragments(senders, recv, self.piece_bytes)
        for k in range(max(len(pieces_out), len(pieces_in))):
            for lane, pieces, sends in ((lane_out, pieces_out, True), (lane_in, pieces_in, False)):
                if k < len(pieces):
                    self._threads[2 * level + (not sends)].enqueue(pieces[k])
                    yield LaneTransfer(lane, min(f.offset for f in pieces[k]), sum(f.nbytes for f in pieces[k]))

    def missing_peers(self) -> set[int]:
        return set().union(*(thread.awaited_peers for thread in self._threads))

    def _host_is_sending(self) -> bool:
        return any(thread.busy for thread in self._threads)

    def release_waits(self) -> None:
        release_words(self._wait_words)
