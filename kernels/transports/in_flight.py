"""Messages in flight of a transport, what it knows about its peers, and the resources freed when it is closed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from freescale.kernels.transports.slot_rings import PRIORITY_LEVELS

_MANY = 16  # messages before the device is polled for finished ones


@dataclass(slots=True)
class Message:
    number: int
    priority: int
    launched_at: float
    launch_stream: int
    done: Any  # event after the last copy
    tensors: tuple[torch.Tensor, ...]  # what the copies read and write


class InFlight:
    """Keeps the memory of unfinished messages alive. Shared by the launching and the watcher thread. (Instead of
    record_stream: the allocator would use the streams even after they are destroyed.)"""

    def __init__(self, is_done: Callable[[Any], bool]) -> None:
        """`is_done`: whether the device has reached an event."""
        self._is_done, self._lock = is_done, threading.Lock()
        self.messages: list[Message] = []  # in launch order
        self._full = _MANY

    def add(self, message: Message) -> None:
        """Finished messages are dropped when there are twice as many as were unfinished the last time: bulk messages
        keep no memory of later ones, and a launch polls the device twice at most, on average."""
        with self._lock:
            if len(self.messages) >= self._full:
                self._drop_finished()
                self._full = max(_MANY, 2 * len(self.messages))
            self.messages.append(message)

    def _drop_finished(self) -> None:
        self.messages = [m for m in self.messages if not self._is_done(m.done)]

    def oldest(self) -> Message | None:
        """Drop finished messages and their memory; return the oldest unfinished one."""
        with self._lock:
            self._drop_finished()
            return self.messages[0] if self.messages else None


class Liveness(Protocol):
    """What a rank knows about its peers."""

    def lost_peers(self) -> dict[int, int]:
        """Peers that will send nothing more, and for each the rank to name: itself, or the one it reported."""

    def report_failure(self, culprits: set[int]) -> None: ...

    def set_launched(self, messages: int) -> None: ...

    def peers_behind(self, messages: int) -> set[int]:
        """Peers that have launched fewer messages."""


# Used in turn in each direction: while one signals, the other copies. With three, the levels need more streams than
# there are hardware queues, and urgent messages queued after bulk ones (measured on an H200).
STREAMS_PER_DIRECTION = 2


class DeviceResources:
    """Frees resources in reverse order. Holds no reference to the transport, whose finalizer owns it."""

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
        driver = self._driver
        address: int = driver.pin(array.ctypes.data, array.nbytes)
        self.on_close(lambda: driver.unpin(array.ctypes.data))  # keeps the memory mapped until then
        return address

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # at exit the context may already be gone
            self._stack.close()
