"""What the transports that copy have in common: a launch puts a whole all-to-all on streams.

A launch issues every copy and every signal of its message at once, in stream order; the device goes through them
without a thread of ours. So the training thread never waits, and neither Python's lock nor a busy host holds a
transfer up. (A message of very many pieces can fill the driver's queue, some hundred pieces deep; then the
launch itself is held back until the device has caught up.)

Failure: a watching thread (peer_watch.py) notices it, and the streams that wait are released. What the device computes
from there on is garbage: the next launch, wait or `check` raises, and the transport stays unusable. A step calls
`check` before it begins; whoever reads the tables calls `drain`.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist

from freescale.compat import distributed
from freescale.kernels.transports import peer_watch
from freescale.kernels.transports.device_resources import DeviceResources
from freescale.kernels.transports.in_flight import InFlight, Message
from freescale.kernels.transports.shared_segment import PeerLiveness
from freescale.kernels.transports.slot_rings import LaneTransfer, level_of

# Ahead of every round that a stream may wait for, as 32-bit numbers that wrap around: whoever waits goes on.
RELEASED = 0x40000000


class TransportWork(dist.Work):
    """What `_c10d_functional.wait_tensor` waits for: it makes the current stream wait, not the host."""

    def __init__(self, transport: CopyTransport, message: Message) -> None:
        super().__init__()
        self.transport, self.message = transport, message

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.transport.wait(self.message)
        return True

    def is_completed(self) -> bool:
        return all(self.transport.driver.is_done(event) for event in self.message.events)


class CopyTransport(ABC):
    """One group's all-to-alls. A subclass says through which lanes the pieces go.

    Its constructor opens what it needs through `_resources`, sets `streams`, and calls `_start_watching` last.
    """

    name: ClassVar[str]

    def __init__(self, group: dist.ProcessGroup, driver: Any, timeout: float | None = None) -> None:
        self.group, self.driver = group, driver
        self._copy_out, self._copy_in = driver.copy_to_host, driver.copy_to_device
        self.rank, self.world = group.rank(), group.size()
        self.ranks = dist.get_process_group_ranks(group)
        self.timeout = timeout if timeout is not None else distributed.timeout_of(group).total_seconds()
        self.liveness: PeerLiveness | None = None  # where the ranks share memory
        self.error: str | None = None
        self.launched = 0
        self.in_flight = InFlight(driver)
        self._launch_lock = threading.Lock()
        self._stop_watching = threading.Event()
        self._resources = DeviceResources(driver)
        self._finalizer = weakref.finalize(self, _give_back, self._resources, self._stop_watching)
        self.streams: list[tuple[list[int], list[int]]] = []  # by priority level: outwards, inwards

    def _start_watching(self) -> None:
        peer_watch.start_watching(self, self._stop_watching)

    # ---- what a subclass gives -------------------------------------------------------------------------

    @abstractmethod
    def _transfers(self, level: int, send: Sequence[int], recv: Sequence[int]) -> Iterable[LaneTransfer]:
        """Every piece of one message, in the order in which it is to be issued; bytes to and from each peer."""

    @abstractmethod
    def missing_peers(self) -> set[int]:
        """Peers without whom what was issued cannot finish."""

    @abstractmethod
    def release_waits(self) -> None:
        """Make every stream of this rank that waits for a peer go on. Called again until nothing waits."""

    def _signal(self, address: int, value: int, stream: int) -> None:
        """Tell the other end of a lane how far this end is, after everything before it in the stream."""
        self.driver.write_word(address, value, stream)

    def _host_is_sending(self) -> bool:
        """Whether the host still has something to send that has left the device."""
        return False

    # ---- launch and wait -------------------------------------------------------------------------------

    def launch(
        self, x: torch.Tensor, send_counts: torch.Tensor, recv_counts: torch.Tensor, n_recv: int, priority: int
    ) -> torch.Tensor:
        """Start an all-to-all of rows; the result is there after `_c10d_functional.wait_tensor`."""
        out, work = self.start(x, send_counts, recv_counts, n_recv, priority)
        distributed.register_work(out, work)
        return out

    def start(
        self, x: torch.Tensor, send_counts: torch.Tensor, recv_counts: torch.Tensor, n_recv: int, priority: int
    ) -> tuple[torch.Tensor, TransportWork]:
        """The same, for a caller that registers the work itself."""
        send, recv = send_counts.tolist(), recv_counts.tolist()
        self._check_counts(x, send, recv, n_recv)
        self.check()
        x = x.contiguous()
        out = x.new_empty((n_recv, *x.shape[1:]))
        row_bytes = x.element_size() * math.prod(x.shape[1:])
        with self._launch_lock:
            message = self._issue(x, out, [n * row_bytes for n in send], [n * row_bytes for n in recv], priority)
        return out, TransportWork(self, message)

    def _check_counts(self, x: torch.Tensor, send: list[int], recv: list[int], n_recv: int) -> None:
        if len(send) != self.world or len(recv) != self.world:
            raise ValueError(
                f"freescale: {self.name}: expected counts for {self.world} ranks, found {len(send)} and {len(recv)}"
            )
        if sum(send) != x.shape[0] or sum(recv) != n_recv:
            raise ValueError(
                f"freescale: {self.name}: expected {sum(send)} rows to send and {sum(recv)} to receive, "
                f"found {x.shape[0]} and {n_recv}"
            )

    def _issue(
        self, x: torch.Tensor, out: torch.Tensor, send: list[int], recv: list[int], priority: int
    ) -> Message:
        level = level_of(priority)
        outwards, inwards = self.streams[level]
        next_outwards, next_inwards = itertools.cycle(outwards), itertools.cycle(inwards)
        driver, wait_for_word, signal = self.driver, self.driver.wait_for_word, self._signal
        copy_out, copy_in = self._copy_out, self._copy_in
        sent_data, received_data = x.data_ptr(), out.data_ptr()
        current = driver.current_stream()
        ready = driver.record_event(current)  # x can be read and out can be written
        for stream in (*outwards, *inwards):
            driver.wait_for_event(stream, ready)
        for lane, offset, nbytes in self._transfers(level, send, recv):
            piece = lane.next_piece
            slot = lane.slot(piece)
            stream = next(next_outwards if lane.sends else next_inwards)
            if lane.awaited_round(piece) and (lane.wait_words is None or not lane.may_move(piece, lane.wait_words)):
                wait_for_word(lane.wait_address + slot * lane.word_stride, lane.awaited_round(piece), stream)
            if lane.sends:
                copy_out(lane.data_address + slot * lane.piece_bytes, sent_data + offset, nbytes, stream)
            else:
                copy_in(received_data + offset, lane.data_address + slot * lane.piece_bytes, nbytes, stream)
            signal(lane.signal_address + slot * lane.word_stride, piece // lane.slots + 1, stream)
            lane.next_piece += 1
        events = [driver.record_event(stream) for stream in (*outwards, *inwards)]
        message = Message(self.launched, priority, time.monotonic(), current, events, (x, out))
        self.launched += 1
        if self.liveness is not None:
            self.liveness.set_launched(self.launched)
        self.in_flight.add(message)
        return message

    def wait(self, message: Message) -> None:
        """The current stream goes on when the message has come in and its input may be written over."""
        self.check()
        current = self.driver.current_stream()
        for event in message.events:
            self.driver.wait_for_event(current, event)
        if current == message.launch_stream:
            message.tensors = ()  # that stream reuses the memory, if at all, behind this point
        self.in_flight.oldest()  # forgets what has finished

    # ---- failure and end -------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise if a transfer has failed."""
        if self.error is not None:
            raise RuntimeError(self.error)

    def drain(self) -> None:
        """Wait until nothing is in flight, as long as the group would; raise if a transfer has failed."""
        end = time.monotonic() + self.timeout
        while self.error is None and (oldest := self.in_flight.oldest()) is not None:
            if time.monotonic() > end:
                peer_watch.look_for_failure(self)  # is a peer missing?
                self.check()
                raise RuntimeError(
                    f"freescale: {self.name}: rank {self.global_rank} has waited {self.timeout:g} s for its own device "
                    f"to finish message {oldest.number} of priority {oldest.priority}"
                )
            time.sleep(1e-3)
        self.check()

    def fail(self, reason: str, culprits: set[int]) -> None:
        """Keep the first error, then let everything that waits go on."""
        if self.error is None:
            self.error = f"freescale: {self.name}: {reason}"
            if self.liveness is not None:
                self.liveness.report_failure(culprits)
        self.release_waits()

    def describe_peers(self, peers: Iterable[int]) -> str:
        """Their global ranks and a verb, for error messages."""
        names = [f"rank {self.ranks[p]}" for p in sorted(peers)]
        return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'}"

    @property
    def global_rank(self) -> int:
        return self.ranks[self.rank]

    def close(self, grace_seconds: float = 5.0) -> None:
        """Give pinned memory and streams back. What is still in flight gets `grace_seconds` to finish."""
        if not self._finalizer.alive:
            return
        end = time.monotonic() + grace_seconds
        while self.error is None and (self.in_flight.oldest() or self._host_is_sending()) and time.monotonic() < end:
            time.sleep(0.001)
        self.fail("the transport was closed", set())
        end = time.monotonic() + grace_seconds
        while self.in_flight.oldest() and time.monotonic() < end:
            self.release_waits()
            time.sleep(0.001)
        self._finalizer()


def _give_back(resources: DeviceResources, stop_watching: threading.Event) -> None:
    stop_watching.set()
    resources.close()


def release_words(words: list[np.ndarray]) -> None:
    """Set words that nobody but this rank waits for ahead of every round."""
    for w in words:
        w[:] = RELEASED
