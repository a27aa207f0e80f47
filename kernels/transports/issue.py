"""Enqueue a message on streams with one C call (native/transfers.c).

    x readable, out writable    event `ready` on the compute stream; each stream waits for it when first used
    for each piece, in order    wait for the word, copy, signal
    streams join                in the stream of the last receive (else the last send), which records event `done`

So a wait, or a check for completion, needs only one event. No send waits for a receive, and other priorities are not
affected. tests/support/issue_python.py defines the order of the calls.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from freescale.kernels.native import c_library
from freescale.kernels.transports.slot_rings import Lane

# The driver's names, in the order of `struct driver_calls`.
DRIVER_CALLS = (
    "cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuEventRecord", "cuStreamWaitEvent",
    "cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2", "cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2",
)  # fmt: skip
MAX_STREAMS = 8
_P, _I64 = ctypes.c_void_p, ctypes.c_int64
_COUNTS_DIFFER = -1  # returned by C if the counts do not add up to the rows


@dataclass
class Channel:
    """One priority of a transport: the streams and lanes of its messages."""

    rank: int
    outwards: list[int]  # used in turn
    inwards: list[int]
    lanes_out: list[Lane]  # by peer
    lanes_in: list[Lane]
    piece_bytes: int

    @property
    def streams(self) -> list[int]:
        return [*self.outwards, *self.inwards]


class _Channel(ctypes.Structure):
    """`struct channel`"""

    _fields_ = [
        ("calls", _P),
        ("context", _P),
        *((name, _I64) for name in ("rank", "world", "piece_bytes")),
        *((name, _P) for name in ("lanes_out", "lanes_in", "starts")),
        ("ways", _I64),
        ("streams", _P * MAX_STREAMS),
        ("ready", _P),
        ("finished", _P * MAX_STREAMS),
    ]


class Issuer:
    def __init__(self, driver: Any, channels: Sequence[Channel]) -> None:
        self._driver, self._launch = driver, c_library.library().freescale_launch
        addresses = [ctypes.cast(driver.calls[name], _P).value for name in DRIVER_CALLS]
        table = (_P * len(addresses))(*addresses)
        self._calls = ctypes.addressof(table)
        self._kept: list[Any] = [table, channels]  # targets of pointers in C structures
        self._channels = [self._native_channel(channel) for channel in channels]
        self._channel_addresses = [ctypes.addressof(channel) for channel in self._channels]

    def _native_channel(self, channel: Channel) -> _Channel:
        streams = channel.streams
        assert len(channel.outwards) == len(channel.inwards) and len(streams) <= MAX_STREAMS
        events = [self._driver.new_event() for _ in range(1 + len(streams))]
        world = len(channel.lanes_out)
        lanes = [(_P * world)(*map(ctypes.addressof, way)) for way in (channel.lanes_out, channel.lanes_in)]
        starts = (_I64 * (2 * world))()
        self._kept += [events, lanes, starts]
        return _Channel(
            calls=self._calls,
            context=self._driver.context,
            rank=channel.rank,
            world=world,
            piece_bytes=channel.piece_bytes,
            lanes_out=ctypes.addressof(lanes[0]),
            lanes_in=ctypes.addressof(lanes[1]),
            starts=ctypes.addressof(starts),
            ways=len(channel.outwards),
            streams=(_P * MAX_STREAMS)(*streams),
            ready=events[0].handle,
            finished=(_P * MAX_STREAMS)(*(event.handle for event in events[1:])),
        )

    def launch(
        self, level: int, stream: int, x: torch.Tensor, out: torch.Tensor, send_counts: torch.Tensor,
        recv_counts: torch.Tensor, row_bytes: int,
    ) -> Any:  # fmt: skip
        """Send the rows of `x` and receive into `out`, after the work already on `stream`. Returns the event after the
        last copy, or None, issuing nothing, if the counts do not add up to the rows."""
        done = self._driver.new_event()
        status = self._launch(
            self._channel_addresses[level], stream, done.handle, x.data_ptr(), out.data_ptr(), send_counts.data_ptr(),
            recv_counts.data_ptr(), row_bytes, x.shape[0], out.shape[0],
        )  # fmt: skip
        if status == _COUNTS_DIFFER:
            return None
        if status:
            self._driver.raise_on_error(DRIVER_CALLS[(status >> 32) - 1], status & 0xFFFFFFFF)
        return done
