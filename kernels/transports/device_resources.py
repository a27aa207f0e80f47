"""Streams, pinned memory and other resources of one transport, freed when it is closed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from freescale.kernels.transports.slot_rings import PRIORITY_LEVELS

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
