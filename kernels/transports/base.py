"""What the transports have in common: a launch that puts a whole all-to-all on streams, and what happens on failure.

A launch issues every copy and every signal of its message at once, in stream order; the device goes through them
without a thread of ours. So the training thread never waits, and neither Python's lock nor a busy host holds a
transfer up. (A message of very many pieces can fill the driver's queue, some hundred pieces deep; then the
launch itself is held back until the device has caught up.)

Failure: a watching thread looks at messages in flight a few times a second. If a peer is gone, or a message is older
than the time-out, it keeps the error first and then releases the streams that wait, so that nothing hangs. What the
device computes from there on is garbage: the next launch, wait or `check` raises, and the transport stays unusable.
A step calls `check` before it begins; who reads the tables, `settle`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from freescale.compat import distributed
from freescale.kernels.transports.shared_segment import Presence
from freescale.kernels.transports.slot_rings import LEVELS, Step, level_of

_LOOK_EVERY = 0.05  # seconds
# In each direction, taken in turn: while one signals, the other copies. With three, the levels need more streams than
# there are hardware queues, and urgent messages stood behind bulk ones (measured on an H200).
STREAMS = 2
FAR = 0x40000000  # ahead of every round that a stream may wait for, as 32-bit numbers that wrap around


@dataclass
class Message:
    number: int
    priority: int
    since: float
    stream: Any  # that launched it
    events: list[Any]  # after the last copy of each stream
    holds: tuple[torch.Tensor, ...]  # what the copies read and write


class TransportWork(dist.Work):
    """What `_c10d_functional.wait_tensor` waits for: it makes the current stream wait, not the host."""

    def __init__(self, transport: Transport, message: Message) -> None:
        super().__init__()
        self.transport, self.message = transport, message

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.transport.wait(self.message)
        return True

    def is_completed(self) -> bool:
        return all(self.transport.driver.done(event) for event in self.message.events)


class Transport:
    """One group's all-to-alls. A subclass says through which lanes the pieces go."""

    name = "?"

    def __init__(self, group: dist.ProcessGroup, driver: Any, timeout: float | None = None) -> None:
        self.group, self.driver = group, driver
        self._copy_out, self._copy_in = driver.copy_out, driver.copy_in
        self.rank, self.world = group.rank(), group.size()
        self.ranks = dist.get_process_group_ranks(group)
        self.timeout = timeout if timeout is not None else distributed.timeout_of(group).total_seconds()
        self.presence: Presence | None = None  # where the ranks share memory
        self.error: str | None = None
        self.launched = 0
        self.in_flight: list[Message] = []
        self._launching, self._listing = threading.Lock(), threading.Lock()
        self._stop = threading.Event()
        self._resources = contextlib.ExitStack()  # what close() gives back, last in first out
        self._finalizer = weakref.finalize(self, _give_back, self._resources, self._stop)
        self.streams: list[tuple[list[int], list[int]]] = []  # by level: outwards, inwards

    def _open_streams(self) -> None:
        for level in range(LEVELS):
            made = [self.driver.new_stream(level - LEVELS + 1) for _ in range(2 * STREAMS)]
            for stream in made:
                self._resources.callback(self.driver.drop_stream, stream)
            self.streams.append((made[:STREAMS], made[STREAMS:]))

    def _pin(self, array: np.ndarray) -> int:
        """The device's address of host memory that is pinned until the transport is closed."""
        device = self.driver.pin(array.ctypes.data, array.nbytes)
        self._resources.callback(_unpin, self.driver, array)
        return device

    def _start_watching(self) -> None:
        arguments = (weakref.ref(self), self._stop)
        threading.Thread(target=_watch, args=arguments, name=f"freescale-{self.name}", daemon=True).start()

    # ---- of a subclass ---------------------------------------------------------------------------------

    def _steps(self, level: int, send: Sequence[int], recv: Sequence[int]) -> Iterable[Step]:
        """Every piece of one message, in the order in which it is to be issued; bytes to and from each peer."""
        raise NotImplementedError

    def _tell(self, address: int, value: int, level: int, stream: int) -> None:
        self.driver.write(address, value, stream)

    def _lacking(self) -> set[int]:
        """Peers without whom what was issued cannot finish."""
        raise NotImplementedError

    def _sending(self) -> bool:
        """Whether the host still has something to send that has left the device."""
        return False

    def _release(self) -> None:
        """Make every stream of this rank that waits for a peer go on. Called again until nothing waits."""
        raise NotImplementedError

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
        """The same, for who registers the work himself."""
        send, recv = send_counts.tolist(), recv_counts.tolist()
        self._check_counts(x, send, recv, n_recv)
        self.check()
        x = x.contiguous()
        out = x.new_empty((n_recv, *x.shape[1:]))
        row = x.element_size() * math.prod(x.shape[1:])
        with self._launching:
            message = self._issue(x, out, [n * row for n in send], [n * row for n in recv], priority)
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
        turns_out, turns_in = itertools.cycle(outwards), itertools.cycle(inwards)
        driver, wait, tell = self.driver, self.driver.wait, self._tell
        copy_out, copy_in = self._copy_out, self._copy_in
        data_out, data_in = x.data_ptr(), out.data_ptr()
        current = driver.current()
        ready = driver.mark(current)  # x can be read and out can be written
        for stream in (*outwards, *inwards):
            driver.after(stream, ready)
        for step in self._steps(level, send, recv):
            lane, number = step.lane, step.lane.number
            slot = lane.slot(number)
            stream = next(turns_out if lane.sends else turns_in)
            if lane.needs(number) and (lane.seen is None or not lane.reached(number, lane.seen)):
                wait(lane.waits_at + slot * lane.word_stride, lane.needs(number), stream)
            if lane.sends:
                copy_out(lane.data + slot * lane.piece, data_out + step.offset, step.nbytes, stream)
            else:
                copy_in(data_in + step.offset, lane.data + slot * lane.piece, step.nbytes, stream)
            tell(lane.tells_at + slot * lane.word_stride, number // lane.slots + 1, level, stream)
            lane.number += 1
        events = [driver.mark(stream) for stream in (*outwards, *inwards)]
        message = Message(self.launched, priority, time.monotonic(), current, events, (x, out))
        self.launched += 1
        if self.presence is not None:
            self.presence.has_launched(self.launched)
        with self._listing:
            self.in_flight.append(message)
        return message

    def wait(self, message: Message) -> None:
        """The current stream goes on when the message has come in and its input may be written over."""
        self.check()
        current = self.driver.current()
        for event in message.events:
            self.driver.after(current, event)
        if current == message.stream:
            message.holds = ()  # that stream reuses the memory, if at all, behind this point
        self._unfinished()

    # ---- failure and end -------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise if a transfer has failed."""
        if self.error is not None:
            raise RuntimeError(self.error)

    def settle(self) -> None:
        """Wait until nothing is in flight, as long as the group would; raise if a transfer has failed."""
        end = time.monotonic() + self.timeout
        while self.error is None and (oldest := self._unfinished()) is not None:
            if time.monotonic() > end:
                self.look()  # is it for want of a peer?
                self.check()
                raise RuntimeError(
                    f"freescale: {self.name}: rank {self._me()} has waited {self.timeout:g} s for its own device to "
                    f"finish message {oldest.number} of priority {oldest.priority}"
                )
            time.sleep(1e-3)
        self.check()

    def fail(self, reason: str, culprits: set[int]) -> None:
        """Keep the first error, then let everything that waits go on."""
        if self.error is None:
            self.error = f"freescale: {self.name}: {reason}"
            if self.presence is not None:
                self.presence.report(culprits)
        self._release()

    def look(self) -> None:
        """One look of the watching thread."""
        oldest = self._unfinished()
        if oldest is None:
            return
        if self.error is not None:
            self._release()
            return
        gone = self.presence.gone() if self.presence is not None else {}
        age = time.monotonic() - oldest.since
        if not gone and age < self.timeout:
            return
        lacking = self._lacking()  # empty where the message waits for this rank's own computation
        what = f"rank {self._me()} cannot finish message {oldest.number} of priority {oldest.priority}"
        if left := {gone[p] for p in lacking if p in gone}:
            self.fail(f"{what}: {self._names(left)} gone", left)
        elif lacking and age >= self.timeout:
            # who has launched the message may itself wait for one who has not
            late = self.presence.behind(oldest.number + 1) & lacking if self.presence is not None else set()
            self.fail(f"{what}: {self._names(late or lacking)} silent for {age:.1f} s", late or lacking)

    def _unfinished(self) -> Message | None:
        """The oldest message in flight; forgets what has finished, of any priority, and the memory that it held.

        (Not record_stream: the allocator would go on using the streams after they are given back.)
        """
        done = self.driver.done
        with self._listing:
            self.in_flight = [m for m in self.in_flight if not all(done(event) for event in m.events)]
            return self.in_flight[0] if self.in_flight else None

    def _names(self, peers: Iterable[int]) -> str:
        names = [f"rank {self.ranks[p]}" for p in sorted(peers)]
        return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'}"

    def _me(self) -> int:
        return self.ranks[self.rank]

    def close(self, patience: float = 5.0) -> None:
        """Give pinned memory and streams back. What is still in flight gets `patience` seconds to finish."""
        if not self._finalizer.alive:
            return
        end = time.monotonic() + patience
        while self.error is None and (self._unfinished() or self._sending()) and time.monotonic() < end:
            time.sleep(0.001)
        self.fail("the transport was closed", set())
        end = time.monotonic() + patience
        while self._unfinished() and time.monotonic() < end:
            self._release()
            time.sleep(0.001)
        self._finalizer()


def _watch(transport_ref: weakref.ref[Transport], stop: threading.Event) -> None:
    entered = False
    while not stop.wait(_LOOK_EVERY):
        transport = transport_ref()
        if transport is None:
            return
        try:
            if not entered:
                transport.driver.enter_thread()
                entered = True
            transport.look()
        except Exception as error:  # noqa: BLE001  (without this thread, what waits would wait for ever)
            with contextlib.suppress(Exception):  # the error is kept before anything else
                transport.fail(
                    f"rank {transport._me()} cannot watch its messages: {type(error).__name__}: {error}",
                    {transport.rank},
                )
        del transport


def _give_back(resources: contextlib.ExitStack, stop: threading.Event) -> None:
    stop.set()
    with contextlib.suppress(RuntimeError):  # at exit the context may be gone before us
        resources.close()


def _unpin(driver: Any, array: np.ndarray) -> None:
    driver.unpin(array.ctypes.data)  # the array keeps its memory mapped until here


def set_far(words: list[np.ndarray]) -> None:
    """Set words that nobody but this rank waits for ahead of every round."""
    for w in words:
        w[:] = FAR
