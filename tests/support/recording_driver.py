"""A driver that only logs calls, in Python and behind function pointers alike."""

from __future__ import annotations

import ctypes
import itertools

from freescale.kernels.transports.cuda_driver import NOT_READY, DriverEvent

_P, _U64, _U32, _SIZE = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_size_t


class RecordingDriver:
    """`log` has a line per call. An event is logged as the number of the line that recorded it, so the log does not
    depend on which handles are reused."""

    def __init__(self, context=0, current_context=0, fails_at=None, code=700):
        self.context, self.current_context = context, current_context
        self.fails_at, self.code = fails_at, code
        self.log: list[tuple] = []
        self.recorded: dict[int, int] = {}  # handle: line
        self.reached: set[int] = set()  # lines
        self.idle, self.handles = [], itertools.count(1000)
        self.milliseconds = 0.0
        self.calls = {
            "cuCtxGetCurrent": self._behind_pointer(self._get_context, _P),
            "cuCtxPushCurrent_v2": self._behind_pointer(lambda c: self._say("push", c), _P),
            "cuCtxPopCurrent_v2": self._behind_pointer(lambda _: self._say("pop"), _P),
            "cuEventRecord": self._behind_pointer(self._record, _P, _P),
            "cuStreamWaitEvent": self._behind_pointer(lambda s, e, _: self._say("wait", s, self.recorded[e]), _P, _P, _U32),
            "cuMemcpyDtoHAsync_v2": self._behind_pointer(lambda *a: self._say("to host", *a), _P, _U64, _SIZE, _P),
            "cuMemcpyHtoDAsync_v2": self._behind_pointer(lambda *a: self._say("to device", *a), _U64, _P, _SIZE, _P),
            "cuStreamWriteValue32_v2": self._behind_pointer(lambda s, a, v, _: self._say("write", a, v, s), _P, _U64, _U32, _U32),
            "cuStreamWaitValue32_v2": self._behind_pointer(lambda s, a, v, _: self._say("word", a, v, s), _P, _U64, _U32, _U32),
        }  # fmt: skip

    @staticmethod
    def _behind_pointer(fn, *arguments):
        return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(lambda *values: fn(*(v or 0 for v in values)))

    def _say(self, *line) -> int:
        self.log.append(line)
        return self.code if self.fails_at == len(self.log) - 1 else 0

    def _get_context(self, to) -> int:
        ctypes.c_void_p.from_address(to).value = self.current_context
        return 0

    def _record(self, handle, stream) -> int:
        self.recorded[handle] = len(self.log)
        return self._say("record", stream)

    def _query(self, handle) -> int:
        return self._say("query", self.recorded[handle]) or (0 if self.recorded[handle] in self.reached else NOT_READY)

    def _elapsed(self, to, began, ended) -> int:
        ctypes.c_float.from_address(to).value = self.milliseconds
        return self._say("elapsed", self.recorded[began], self.recorded[ended])

    # ---- the same for Python ---------------------------------------------------------------------------

    def raise_on_error(self, name, code):
        if code:
            raise RuntimeError(f"freescale: {name.removesuffix('_v2')} failed: {code}")

    def new_event(self, timing=False):
        return DriverEvent(self.idle.pop() if self.idle else next(self.handles), self.idle)

    def record(self, event, stream):
        self.raise_on_error("cuEventRecord", self._record(event.handle, stream))

    def record_event(self, stream):
        event = self.new_event()
        self.record(event, stream)
        return event

    def wait_for_event(self, stream, event):
        self.raise_on_error("cuStreamWaitEvent", self._say("wait", stream, self.recorded[event.handle]))

    def is_done(self, event):
        code = self._query(event.handle)
        if code != NOT_READY:
            self.raise_on_error("cuEventQuery", code)
        return code == 0

    def seconds_between(self, began, ended):
        milliseconds = ctypes.c_float()
        self.raise_on_error("cuEventElapsedTime", self._elapsed(ctypes.addressof(milliseconds), began.handle, ended.handle))
        return milliseconds.value / 1e3

    def copy_to_host(self, *line):
        self.raise_on_error("cuMemcpyDtoHAsync", self._say("to host", *line))

    def copy_to_device(self, *line):
        self.raise_on_error("cuMemcpyHtoDAsync", self._say("to device", *line))

    def write_word(self, address, value, stream):
        self.raise_on_error("cuStreamWriteValue32", self._say("write", address, value & 0xFFFFFFFF, stream))

    def wait_for_word(self, address, value, stream):
        self.raise_on_error("cuStreamWaitValue32", self._say("word", address, value & 0xFFFFFFFF, stream))
