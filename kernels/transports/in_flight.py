"""The messages that a transport has launched and that have not finished on the device."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from freescale.kernels.transports.slot_rings import PRIORITY_LEVELS, level_of

_MANY = 3  # messages; asking the device about them takes as long as launching one


@dataclass(slots=True)
class Message:
    number: int
    priority: int
    launched_at: float
    launch_stream: int
    done: Any  # event after the last copy
    tensors: tuple[torch.Tensor, ...]  # what the copies read and write


class InFlight:
    """Keeps the memory of unfinished messages alive. Used by the launching and by the watching thread.

    (Not record_stream: the allocator would go on using the streams after they are given back.)
    """

    def __init__(self) -> None:
        self.are_done: Callable[[Sequence[Any]], list[bool]] | None = None  # of events; there before the first message
        self._lock = threading.RLock()
        self._by_level: tuple[deque[Message], ...] = tuple(deque() for _ in range(PRIORITY_LEVELS))

    @property
    def messages(self) -> list[Message]:
        """In the order of their launches."""
        with self._lock:
            return sorted((m for messages in self._by_level for m in messages), key=lambda m: m.number)

    def add(self, message: Message) -> None:
        """Also forgets the oldest message of a priority that has many, if it has finished: the list stays short, and to
        launch costs the same however many are in flight."""
        with self._lock:
            oldest = [messages for messages in self._by_level if len(messages) > _MANY]
            if oldest:
                assert self.are_done is not None
                for messages, done in zip(oldest, self.are_done([m[0].done for m in oldest]), strict=True):
                    if done:
                        messages.popleft()
            self._by_level[level_of(message.priority)].append(message)

    def oldest(self) -> Message | None:
        """Of the unfinished ones; forgets what has finished, of any priority, and the memory that it held."""
        with self._lock:
            messages = self.messages
            if not messages:
                return None
            assert self.are_done is not None
            done = self.are_done([m.done for m in messages])
            unfinished = [m for m, is_done in zip(messages, done, strict=True) if not is_done]
            for level, of_level in enumerate(self._by_level):
                of_level.clear()
                of_level.extend(m for m in unfinished if level_of(m.priority) == level)
            return unfinished[0] if unfinished else None
