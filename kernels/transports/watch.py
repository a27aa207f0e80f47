"""Messages in flight of a transport, the thread that watches them, and the resources freed when a transport is closed.

The watcher polls the messages a few times per second. If a peer is gone, or a message exceeds the timeout, the
transport fails: it records the error, then releases the waiting streams, so nothing hangs. The thread holds no
reference to the transport between polls, so an unused transport can be collected.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from freescale.kernels.transports.slot_rings import PRIORITY_LEVELS

if TYPE_CHECKING:
    from freescale.kernels.transports.base import CopyTransport

_MANY = 16  # messages before the device is polled


@dataclass(slots=True)
class Message:
    number: int
    priority: int
    launched_at: float
    launch_stream: int
    done: Any  # event after the last copy
    tensors: tuple[torch.Tensor, ...]  # what the copies read and write


class InFlight:
    """Keeps the memory of unfinished messages alive. Shared by the launching and the watcher thread.

    (Instead of record_stream: the allocator would use the streams even after they are destroyed.)
    """

    def __init__(self, is_done: Callable[[Any], bool]) -> None:
        """`is_done`: whether the device has reached an event."""
        self._is_done, self._lock = is_done, threading.Lock()
        self.messages: deque[Message] = deque()  # in launch order

    def add(self, message: Message) -> None:
        """Add a message. If there are many, drop the first ones that have finished: the list stays short, few launches
        poll the device, and the cost of a launch does not depend on the messages in flight."""
        with self._lock:
            while len(self.messages) > _MANY and self._is_done(self.messages[0].done):
                self.messages.popleft()
            self.messages.append(message)

    def oldest(self) -> Message | None:
        """Drop finished messages and their memory; return the oldest unfinished one."""
        with self._lock:
            self.messages = deque(m for m in self.messages if not self._is_done(m.done))
            return self.messages[0] if self.messages else None


_INTERVAL = 0.05  # seconds


class Liveness(Protocol):
    """What a rank knows about its peers."""

    def lost_peers(self) -> dict[int, int]:
        """Peers that will send nothing more, and for each the rank to name: itself, or the one it reported."""

    def report_failure(self, culprits: set[int]) -> None: ...

    def set_launched(self, messages: int) -> None: ...

    def peers_behind(self, messages: int) -> set[int]:
        """Peers that have launched fewer messages."""


def start_watching(transport: CopyTransport) -> None:
    arguments = (weakref.ref(transport), transport.stop_watching)
    threading.Thread(target=_watch, args=arguments, name=f"freescale-{transport.name}", daemon=True).start()


def look_for_failure(transport: CopyTransport, waited: float = 0.0) -> None:
    """One poll of the watcher thread, or of a thread that has `waited` this many seconds until nothing is in flight,
    including data that the host sends after the device has finished."""
    oldest = transport.in_flight.oldest()
    if oldest is None and not waited:
        return
    if transport.error is not None:
        transport.release_waits()
        return
    lost = transport.liveness.lost_peers()
    age = time.monotonic() - oldest.launched_at if oldest is not None else waited
    if not lost and age < transport.timeout:
        return
    missing = transport.missing_peers()  # empty if the message waits for this rank's own computation
    what = f"rank {transport.global_rank} cannot finish "
    what += f"message {oldest.number} of priority {oldest.priority}" if oldest is not None else "sending"
    if gone := {lost[p] for p in missing if p in lost}:
        transport.fail(f"{what}: {transport.describe_peers(gone)} gone", gone)
    elif missing and age >= transport.timeout:
        # a peer that launched the message may itself wait for one that did not
        behind = transport.liveness.peers_behind(oldest.number + 1) if oldest is not None else set()
        silent = behind & missing or missing
        transport.fail(f"{what}: {transport.describe_peers(silent)} not responding after {age:.1f} s", silent)


def _watch(transport_ref: weakref.ref[CopyTransport], stop: threading.Event) -> None:
    bound = False
    while not stop.wait(_INTERVAL):
        transport = transport_ref()
        if transport is None:
            return
        try:
            if not bound:
                transport.driver.bind_thread()
                bound = True
            look_for_failure(transport)
        except Exception as error:  # noqa: BLE001  (without this thread, what waits would wait for ever)
            with contextlib.suppress(Exception):  # the error is recorded first
                transport.fail(
                    f"rank {transport.global_rank} cannot watch its messages: {type(error).__name__}: {error}",
                    {transport.rank},
                )
        del transport


# Used in turn in each direction: while one signals, the other copies. With three, the levels need more streams than
# there are hardware queues, and urgent messages queued after bulk ones (measured on an H200).
STREAMS_PER_DIRECTION = 2


class DeviceResources:
    """Frees resources in reverse order. Holds no reference to the transport, so the transport's finalizer can own
    it."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._stack = contextlib.ExitStack()

    def on_close(self, callback: Callable[..., Any], *arguments: Any) -> None:
        self._stack.callback(callback, *arguments)

    def open_streams(self) -> list[tuple[list[int], list[int]]]:
        """For each priority level, the outbound and the inbound streams."""
        streams = []
        for level in range(PRIORITY_LEVELS):
            opened = [self._driver.new_stream(level - PRIORITY_LEVELS + 1) for _ in range(2 * STREAMS_PER_DIRECTION)]
            for stream in opened:
                self.on_close(self._driver.destroy_stream, stream)
            streams.append((opened[:STREAMS_PER_DIRECTION], opened[STREAMS_PER_DIRECTION:]))
        return streams

    def pin(self, array: np.ndarray) -> int:
        """Pin host memory until the transport is closed; return its device address."""
        address = self._driver.pin(array.ctypes.data, array.nbytes)
        self.on_close(_unpin, self._driver, array)
        return address

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # at exit the context may already be gone
            self._stack.close()


def _unpin(driver: Any, array: np.ndarray) -> None:
    driver.unpin(array.ctypes.data)  # the reference to `array` keeps its memory mapped until here
