"""A message put on streams in one call, and a wait for it in one: native/transfers.c, which issue_python.py defines.

So a launch costs Python the same whatever the number of peers and pieces, and Python's lock is given away once. Without
the C library, or where the driver is none whose functions have addresses, Python does the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch

from freescale.kernels.native import c_library
from freescale.kernels.transports.channel import Channel
from freescale.kernels.transports.issue_python import PythonIssuer
from freescale.kernels.transports.slot_rings import LaneTransfer

# In the order of `struct driver_calls`: what the driver calls each.
DRIVER_CALLS = (
    "cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuEventRecord", "cuStreamWaitEvent",
    "cuEventQuery", "cuEventElapsedTime", "cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoDAsync_v2",
    "cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2",
)  # fmt: skip
MAX_STREAMS = 8
_P, _I64 = ctypes.c_void_p, ctypes.c_int64


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
        ("scratch", ctypes.c_uint64 * MAX_STREAMS),
        ("between_devices", _I64),
    ]


class _Piece(ctypes.Structure):
    """`struct piece`"""

    _fields_ = [("lane", _P), ("offset", _I64), ("nbytes", _I64)]


@cache
def _functions() -> dict[str, Any] | None:
    """Of transfers.c. Those that call the driver give Python's lock away; adding a few numbers up does not."""
    library = c_library.load()
    if library is None:
        return None
    holding_the_lock = ctypes.PyDLL(library._name)
    functions = {
        "launch": (library.freescale_launch, (_P, _P, _P, _P, _P, _P, _P, _I64, _P, _I64)),
        "wait": (library.freescale_wait, (_P, _P, _P, _P, _P, _P, _P, _P, ctypes.POINTER(ctypes.c_float))),
        "query": (library.freescale_query, (_P, _P, _P, _I64, _P)),
        "largest_count": (holding_the_lock.freescale_largest_count, (_P, _P, _I64, _I64, _I64)),
    }
    for function, arguments in functions.values():
        function.argtypes, function.restype = arguments, _I64
    return {name: function for name, (function, _) in functions.items()}


def issuer_for(driver: Any, channels: Sequence[Channel]) -> PythonIssuer | NativeIssuer:
    """The one place that decides whether C or Python issues a transport's messages."""
    if getattr(driver, "calls", None) is None or _functions() is None:
        return PythonIssuer(driver, channels)
    return NativeIssuer(driver, channels)


class NativeIssuer:
    """Takes and returns what PythonIssuer does."""

    def __init__(self, driver: Any, channels: Sequence[Channel]) -> None:
        functions = _functions()
        assert functions is not None
        self._driver = driver
        self._launch, self._wait, self._query = functions["launch"], functions["wait"], functions["query"]
        self._largest_count = functions["largest_count"]
        addresses = [ctypes.cast(driver.calls[name], _P).value for name in DRIVER_CALLS]
        table = (_P * len(addresses))(*addresses)
        self._calls = ctypes.addressof(table)
        self._context = driver.context
        self._kept: list[Any] = [table, channels]  # what the C structures point to
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
            context=self._context,
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
            scratch=(ctypes.c_uint64 * MAX_STREAMS)(*(channel.scratch_of_stream.get(s, 0) for s in streams)),
            between_devices=channel.between_devices,
        )

    def _raise_on_error(self, status: int) -> None:
        if status > 0:
            self._driver.raise_on_error(DRIVER_CALLS[(status >> 32) - 1], status & 0xFFFFFFFF)

    def largest_count(self, send_counts: torch.Tensor, recv_counts: torch.Tensor, n_send: int, n_recv: int) -> int:
        return self._largest_count(
            send_counts.data_ptr(), recv_counts.data_ptr(), send_counts.shape[0], n_send, n_recv
        )

    def launch(
        self, level: int, stream: int, x: int, out: int, send_counts: torch.Tensor, recv_counts: torch.Tensor,
        row_bytes: int,
    ) -> Any:  # fmt: skip
        done = self._driver.new_event()
        counts = send_counts.data_ptr(), recv_counts.data_ptr()
        status = self._launch(self._channel_addresses[level], stream, done.handle, x, out, *counts, row_bytes, None, 0)
        self._raise_on_error(status)
        return done

    def launch_pieces(self, level: int, stream: int, x: int, out: int, transfers: Iterable[LaneTransfer]) -> Any:
        done = self._driver.new_event()
        pieces = [_Piece(ctypes.addressof(lane), offset, nbytes) for lane, offset, nbytes in transfers]
        array = (_Piece * max(len(pieces), 1))(*pieces)
        channel = self._channel_addresses[level]
        status = self._launch(
            channel, stream, done.handle, x, out, None, None, 0, ctypes.addressof(array), len(pieces)
        )
        self._raise_on_error(status)
        return done

    def wait(
        self, stream: int, done: Any, times: tuple[Any, Any] | None = None, earlier: tuple[Any, Any] | None = None
    ) -> tuple[bool, float | None]:
        milliseconds = ctypes.c_float(-1.0)
        status = self._wait(
            self._calls, self._context, stream, done.handle,
            *((times[0].handle, times[1].handle) if times is not None else (None, None)),
            *((earlier[0].handle, earlier[1].handle) if earlier is not None else (None, None)),
            ctypes.byref(milliseconds),
        )  # fmt: skip
        self._raise_on_error(status)
        return status < 0, milliseconds.value / 1e3 if milliseconds.value >= 0 else None

    def are_done(self, events: Sequence[Any]) -> list[bool]:
        n = len(events)
        handles, answers = (_P * n)(*(event.handle for event in events)), (ctypes.c_uint64 * (n // 64 + 1))()
        self._raise_on_error(self._query(self._calls, self._context, handles, n, answers))
        return [bool(answers[i // 64] >> i % 64 & 1) for i in range(n)]
