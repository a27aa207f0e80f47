"""Messages that a transport launched and that have not finished on the device."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from freescale.kernels.transports.slot_rings import PRIORITY_LEVELS, level_of

_MANY = 8  # messages per priority before the device is polled


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
        self._is_done, self._lock = is_done, threading.RLock()
        self._by_level: tuple[deque[Message], ...] = tuple(deque() for _ in range(PRIORITY_LEVELS))

    @property
    def messages(self) -> list[Message]:
        """Messages in launch order."""
        with self._lock:
            return sorted((m for messages in self._by_level for m in messages), key=lambda m: m.number)

    def add(self, message: Message) -> None:
        """Add a message. If its priority has many, drop finished ones: lists stay short, few launches poll the device,
        and the cost of a launch does not depend on the messages in flight."""
        with self._lock:
            messages = self._by_level[level_of(message.priority)]
            if len(messages) > _MANY:
                while messages and self._is_done(messages[0].done):
                    messages.popleft()
            messages.append(message)

    def oldest(self) -> Message | None:
        """Drop finished messages of all priorities and their memory; return the oldest unfinished one."""
        with self._lock:
            unfinished = [m for m in self.messages if not self._is_done(m.done)]
            for level, of_level in enumerate(self._by_level):
                of_level.clear()
                of_level.extend(m for m in unfinished if level_of(m.priority) == level)
            return unfinished[0] if unfinished else None
