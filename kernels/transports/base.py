"""Base class of the copying transports: a launch enqueues every copy and signal of an all-to-all on streams (issue.py),
and the device executes them without a host thread. (A message of very many pieces can fill the driver's queue; then the
launch blocks until the device catches up.)

Failure: a watcher thread polls the messages in flight. If a peer is gone, or a message exceeds the timeout, it records
the error, then releases the waiting streams, so nothing hangs. What the device computes after that is garbage: the next
launch, wait or `check` raises. A step calls `check` before it starts; code that reads the tables calls `drain`.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist

from freescale.compat import distributed
from freescale.kernels.transports.in_flight import DeviceResources, InFlight, Liveness, Message
from freescale.kernels.transports.issue import Channel, Issuer
from freescale.kernels.transports.slot_rings import Lane, level_of

# Ahead of every round that a stream may wait for, as wrapping 32-bit numbers: releases the wait.
RELEASED = 0x40000000
_WATCH_SECONDS = 0.05  # between polls


class TransportWork(dist.Work):
    """The Work that `_c10d_functional.wait_tensor` waits for: the current stream waits, not the host."""

    def __init__(self, transport: CopyTransport, message: Message) -> None:
        super().__init__()
        self.transport, self.message = transport, message

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.transport.check()
        driver, message = self.transport.driver, self.message
        current = driver.current_stream()
        if not driver.is_done(message.done):
            driver.wait_for_event(current, message.done)
        if current == message.launch_stream:
            message.tensors = ()  # from here on only that stream can reuse the memory
        return True

    def is_completed(self) -> bool:
        return self.transport.driver.is_done(self.message.done)


class CopyTransport(ABC):
    """All-to-alls of one group. A subclass defines the lanes of the pieces: its constructor opens resources through
    `_resources`, sets `liveness`, calls `_open_channels` and, last, `_start_watching`."""

    name: ClassVar[str]
    liveness: Liveness

    def __init__(self, group: dist.ProcessGroup, driver: Any, timeout: float | None = None) -> None:
        self.group, self.driver = group, driver
        self.rank, self.world = group.rank(), group.size()
        self.ranks = dist.get_process_group_ranks(group)
        self.timeout = timeout if timeout is not None else distributed.timeout_of(group).total_seconds()
        self.error: str | None = None
        self.launched = 0
        self.in_flight = InFlight(driver.is_done)
        self._launch_lock = threading.Lock()
        self._stop_watching = threading.Event()
        self._resources = DeviceResources(driver)
        self._finalizer = weakref.finalize(self, _give_back, self._resources, self._stop_watching)

    def _open_channels(self, lane: Callable[[int, int, bool], Lane], piece_bytes: int) -> None:
        """Open the streams and lanes of all priority levels. `lane(peer, level, sends)` returns one lane."""
        self.streams = self._resources.open_streams()  # by level: outbound, inbound
        self.lanes: list[Lane] = []
        channels = []
        for level, streams in enumerate(self.streams):
            out, back = ([lane(peer, level, sends) for peer in range(self.world)] for sends in (True, False))
            self.lanes += [*out, *back]
            channels.append(Channel(self.rank, *streams, out, back, piece_bytes))
        self._wait_words = [lane.wait_words for lane in self.lanes]
        self._issuer = Issuer(self.driver, channels)

    def _start_watching(self) -> None:
        arguments = (weakref.ref(self), self._stop_watching)
        threading.Thread(target=_watch, args=arguments, name=f"freescale-{self.name}", daemon=True).start()

    # ---- defined by subclasses -------------------------------------------------------------------------

    @abstractmethod
    def missing_peers(self) -> set[int]:
        """Peers that the issued messages still depend on."""

    def release_waits(self) -> None:
        """Release every stream of this rank that waits for a peer. Called repeatedly until none waits."""
        release_words(self._wait_words)

    def _issued(self, level: int, send_counts: torch.Tensor, recv_counts: torch.Tensor, row_bytes: int) -> None:
        """A message is on its streams. Called under the launch lock."""
        return  # in most transports the host has no part in it

    def _host_is_sending(self) -> bool:
        """Whether the host still has to send data that has been copied off the device."""
        return False

    # ---- launch and wait -------------------------------------------------------------------------------

    def launch(
        self, x: torch.Tensor, send_counts: torch.Tensor, recv_counts: torch.Tensor, n_recv: int, priority: int
    ) -> torch.Tensor:
        """Start an all-to-all of rows; wait for the result with `_c10d_functional.wait_tensor`."""
        out, work = self.start(x, send_counts, recv_counts, n_recv, priority)
        distributed.register_work(out, work)
        return out

    def start(
        self, x: torch.Tensor, send_counts: torch.Tensor, recv_counts: torch.Tensor, n_recv: int, priority: int
    ) -> tuple[torch.Tensor, TransportWork]:
        """launch(), for a caller that registers a Work of its own."""
        # The C code reads contiguous int64 on the host; usually a no-op.
        send_counts, recv_counts = (c.to("cpu", torch.int64).contiguous() for c in (send_counts, recv_counts))
        lengths = send_counts.shape[0], recv_counts.shape[0]
        if lengths != (self.world, self.world):
            raise ValueError(
                f"freescale: {self.name}: expected counts for {self.world} ranks, found {lengths[0]} and {lengths[1]}"
            )
        self.check()
        x = x.contiguous()
        out = x.new_empty((n_recv, *x.shape[1:]))
        row_bytes = x.element_size() * math.prod(x.shape[1:])
        with self._launch_lock:
            current = self.driver.current_stream()
            done = self._issuer.launch(level_of(priority), current, x, out, send_counts, recv_counts, row_bytes)
            if done is None:
                raise ValueError(
                    f"freescale: {self.name}: expected {int(send_counts.sum())} rows to send and "
                    f"{int(recv_counts.sum())} to receive, found {x.shape[0]} and {n_recv}"
                )
            self._issued(level_of(priority), send_counts, recv_counts, row_bytes)
            message = Message(self.launched, priority, time.monotonic(), current, done, (x, out))
            self.launched += 1
            self.liveness.set_launched(self.launched)
            self.in_flight.add(message)
        return out, TransportWork(self, message)

    # ---- failure and shutdown --------------------------------------------------------------------------

    def check(self) -> None:
        if self.error is not None:
            raise RuntimeError(self.error)

    def drain(self) -> None:
        """Wait until nothing is in flight, here or to a peer, for at most the group's timeout; raise if a transfer
        failed."""
        began = time.monotonic()
        while self.error is None and ((oldest := self.in_flight.oldest()) is not None or self._host_is_sending()):
            waited = time.monotonic() - began
            if oldest is None or waited > self.timeout:
                self.look_for_failure(waited)  # is a peer missing?
                self.check()
            if waited > self.timeout:
                what = "its host to send data already copied off the device"
                if oldest is not None:
                    what = f"its own device to finish message {oldest.number} of priority {oldest.priority}"
                raise RuntimeError(
                    f"freescale: {self.name}: rank {self.global_rank} waited {self.timeout:g} s for {what}"
                )
            time.sleep(1e-3)
        self.check()

    def fail(self, reason: str, culprits: set[int]) -> None:
        """Keep the first error, then release everything that waits."""
        if self.error is None:
            self.error = f"freescale: {self.name}: {reason}"
            self.liveness.report_failure(culprits)
        self.release_waits()

    def look_for_failure(self, waited: float = 0.0) -> None:
        """One poll of the watcher thread; or of a thread that has `waited` for this many seconds until nothing is in
        flight, including data that the host sends after the device has finished."""
        oldest = self.in_flight.oldest()
        if oldest is None and not waited:
            return
        if self.error is not None:
            self.release_waits()
            return
        lost = self.liveness.lost_peers()
        age = time.monotonic() - oldest.launched_at if oldest is not None else waited
        if not lost and age < self.timeout:
            return
        missing = self.missing_peers()  # empty if the message waits for this rank's own computation
        what = f"rank {self.global_rank} cannot finish "
        what += f"message {oldest.number} of priority {oldest.priority}" if oldest is not None else "sending"
        if gone := {lost[p] for p in missing if p in lost}:
            self.fail(f"{what}: {self.describe_peers(gone)} gone", gone)
        elif missing and age >= self.timeout:
            # a peer that launched the message may itself wait for one that did not
            behind = self.liveness.peers_behind(oldest.number + 1) if oldest is not None else set()
            silent = behind & missing or missing
            self.fail(f"{what}: {self.describe_peers(silent)} not responding after {age:.1f} s", silent)

    def describe_peers(self, peers: Iterable[int]) -> str:
        """Global ranks and a verb, for error messages."""
        names = [f"rank {self.ranks[p]}" for p in sorted(peers)]
        return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'}"

    @property
    def global_rank(self) -> int:
        return self.ranks[self.rank]

    def close(self, grace_seconds: float = 5.0) -> None:
        """Free pinned memory and streams. Messages in flight get `grace_seconds` to finish."""
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


def _watch(transport_ref: weakref.ref[CopyTransport], stop: threading.Event) -> None:
    """Holds no reference to the transport between polls, so an unused transport can be collected."""
    bound = False
    while not stop.wait(_WATCH_SECONDS):
        transport = transport_ref()
        if transport is None:
            return
        try:
            if not bound:
                transport.driver.bind_thread()
                bound = True
            transport.look_for_failure()
        except Exception as error:  # noqa: BLE001  (without this thread, what waits would wait for ever)
            with contextlib.suppress(Exception):  # the error is recorded first
                transport.fail(
                    f"rank {transport.global_rank} cannot watch its messages: {type(error).__name__}: {error}",
                    {transport.rank},
                )
        del transport


def _give_back(resources: DeviceResources, stop_watching: threading.Event) -> None:
    stop_watching.set()
    resources.close()


def release_words(words: list[np.ndarray]) -> None:
    """Release words that only this rank waits for."""
    for w in words:
        w[:] = RELEASED
