"""The messages that a transport has launched and that have not finished on the device."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Message:
    number: int
    priority: int
    launched_at: float
    launch_stream: Any
    events: list[Any]  # after the last copy of each stream
    tensors: tuple[torch.Tensor, ...]  # what the copies read and write


class InFlight:
    """Keeps the memory of unfinished messages alive. Used by the launching and by the watching thread.

    (Not record_stream: the allocator would go on using the streams after they are given back.)
    """

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self.messages: list[Message] = []

    def add(self, message: Message) -> None:
        with self._lock:
            self.messages.append(message)

    def oldest(self) -> Message | None:
        """Of the unfinished ones; forgets what has finished, of any priority, and the memory that it held."""
        is_done = self._driver.is_done
        with self._lock:
            self.messages = [m for m in self.messages if not all(is_done(event) for event in m.events)]
            return self.messages[0] if self.messages else None
