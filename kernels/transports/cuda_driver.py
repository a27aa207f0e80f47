"""CUDA driver calls of the transports: pinning, streams, copies, words, events.

Called directly in libcuda, because torch has neither a stream wait on a memory word nor registration of shared memory.
Nothing here blocks the host. Calls need a current context: `record_event` comes first in every launch and establishes
it.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from freescale.compat import cuda

_P, _U64, _U32, _SIZE = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_size_t
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuCtxGetCurrent": (ctypes.POINTER(_P),),
    "cuCtxSetCurrent": (_P,),
    "cuCtxPushCurrent_v2": (_P,),
    "cuCtxPopCurrent_v2": (ctypes.POINTER(_P),),
    "cuMemHostRegister_v2": (_P, _SIZE, _U32),
    "cuMemHostGetDevicePointer_v2": (ctypes.POINTER(_U64), _P, _U32),
    "cuMemHostUnregister": (_P,),
    "cuStreamCreateWithPriority": (ctypes.POINTER(_P), _U32, ctypes.c_int),
    "cuStreamDestroy_v2": (_P,),
    "cuMemcpyDtoHAsync_v2": (_P, _U64, _SIZE, _P),
    "cuMemcpyHtoDAsync_v2": (_U64, _P, _SIZE, _P),
    "cuStreamWriteValue32_v2": (_P, _U64, _U32, _U32),
    "cuStreamWaitValue32_v2": (_P, _U64, _U32, _U32),
    "cuEventCreate": (ctypes.POINTER(_P), _U32),
    "cuEventRecord": (_P, _P),
    "cuStreamWaitEvent": (_P, _P, _U32),
    "cuEventQuery": (_P,),
    "cuEventElapsedTime": (ctypes.POINTER(ctypes.c_float), _P, _P),
}
INVALID_CONTEXT, NOT_READY = 201, 600  # codes


@cache
def load() -> dict[str, Any]:
    """Return the functions by name."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(f"freescale: the CUDA driver library libcuda.so.1 cannot be loaded ({error})") from error
    calls: dict[str, Any] = {"cuGetErrorName": library.cuGetErrorName}
    for name, arguments in _SIGNATURES.items():
        call = getattr(library, name)
        call.argtypes, call.restype = arguments, ctypes.c_int
        calls[name] = call
    return calls


_PORTABLE_AND_MAPPED, _NON_BLOCKING, _NO_TIMING = 3, 1, 2
_idle_events: dict[tuple[int, bool], list[int]] = {}  # per device and timing: free handles


class DriverEvent:
    """A driver event. Its handle is recycled when the object is collected. That is safe: a stream wait refers to the
    record at the time when the wait was issued."""

    __slots__ = ("handle", "_idle")

    def __init__(self, handle: int, idle: list[int]) -> None:
        self.handle, self._idle = handle, idle

    def __del__(self) -> None:
        self._idle.append(self.handle)


class CudaDriver:
    """Driver calls for one device. Streams and addresses are plain integers."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        self.calls = load()
        self.context = self._device_context()

    def _device_context(self) -> int:
        with torch.cuda.device(self._index):
            torch.cuda.current_stream().query()  # makes torch's context current in this thread
            context = ctypes.c_void_p()
            self.call("cuCtxGetCurrent", ctypes.byref(context))
        assert context.value is not None
        return context.value

    def call(self, name: str, *arguments: Any) -> None:
        self.raise_on_error(name, self.calls[name](*arguments))

    def raise_on_error(self, name: str, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            self.calls["cuGetErrorName"](code, ctypes.byref(text))
            error = text.value.decode() if text.value else code
            raise RuntimeError(f"freescale: {name.removesuffix('_v2')} failed on {self.device}: {error}")

    def _enter_context(self) -> bool:
        """Make the device's context current. Returns whether another device's was, for `_leave_context` to restore."""
        context = ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(context))
        if context.value is None:
            self.call("cuCtxSetCurrent", self.context)
        elif context.value != self.context:
            self.call("cuCtxPushCurrent_v2", self.context)
            return True
        return False

    def _is_current(self) -> bool:
        """Whether this is torch's current device; then its context is the thread's, if the thread has one."""
        assert cuda.current_device is not None
        return cuda.current_device() == self._index

    def _call_in_context(self, name: str, *arguments: Any) -> None:
        if self._is_current():  # the common case; asking the driver takes as long as the call itself
            code = self.calls[name](*arguments)
            if code != INVALID_CONTEXT:
                self.raise_on_error(name, code)
                return
        pushed = self._enter_context()
        try:
            self.call(name, *arguments)
        finally:
            if pushed:
                self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    # ---- set-up ----------------------------------------------------------------------------------------

    def bind_thread(self) -> None:
        torch.cuda.set_device(self.device)

    def pin(self, address: int, nbytes: int) -> int:
        """Register host memory with the driver; return its device address."""
        torch.cuda.current_stream(self.device).query()  # creates a context for this thread
        self.call("cuMemHostRegister_v2", address, nbytes, _PORTABLE_AND_MAPPED)
        mapped = ctypes.c_uint64()
        self.call("cuMemHostGetDevicePointer_v2", ctypes.byref(mapped), address, 0)
        return mapped.value

    def unpin(self, address: int) -> None:
        self.call("cuMemHostUnregister", address)

    def new_stream(self, priority: int) -> int:
        handle = ctypes.c_void_p()
        self.call("cuStreamCreateWithPriority", ctypes.byref(handle), _NON_BLOCKING, priority)
        assert handle.value is not None
        return handle.value

    def destroy_stream(self, stream: int) -> None:
        self.call("cuStreamDestroy_v2", stream)

    def new_event(self, timing: bool = False) -> DriverEvent:
        """Return a free event if there is one, else create one."""
        idle = _idle_events.setdefault((self._index, timing), [])
        try:
            return DriverEvent(idle.pop(), idle)
        except IndexError:
            handle = ctypes.c_void_p()
            self._call_in_context("cuEventCreate", ctypes.byref(handle), 0 if timing else _NO_TIMING)
            return DriverEvent(handle.value or 0, idle)

    # ---- in stream order -------------------------------------------------------------------------------

    def current_stream(self) -> int:
        """torch's current stream in this thread."""
        assert cuda.current_stream_handle is not None
        return cuda.current_stream_handle(self._index)

    def upload(self, to: int, data: int, nbytes: int, stream: int) -> None:
        """Copy pinned host memory to the device."""
        self._call_in_context("cuMemcpyHtoDAsync_v2", to, data, nbytes, stream)

    def record(self, event: DriverEvent, stream: int) -> None:
        self._call_in_context("cuEventRecord", event.handle, stream)

    def record_event(self, stream: int, timing: bool = False) -> DriverEvent:
        event = self.new_event(timing)
        self.record(event, stream)
        return event

    def wait_for_event(self, stream: int, event: DriverEvent) -> None:
        self._call_in_context("cuStreamWaitEvent", stream, event.handle, 0)

    def is_done(self, event: DriverEvent) -> bool:
        code = self.calls["cuEventQuery"](event.handle)
        if code == INVALID_CONTEXT:
            self._enter_context()  # the thread had no context
            code = self.calls["cuEventQuery"](event.handle)
        if code == NOT_READY:
            return False
        self.raise_on_error("cuEventQuery", code)
        return True

    def seconds_between(self, began: DriverEvent, ended: DriverEvent) -> float:
        """Seconds between two timing events that the device has reached."""
        milliseconds = ctypes.c_float()
        self.call("cuEventElapsedTime", ctypes.byref(milliseconds), began.handle, ended.handle)
        return milliseconds.value / 1e3


@cache
def driver_of(device: torch.device) -> CudaDriver:
    """The driver of a device, for events on streams that no transport opened."""
    return CudaDriver(device)
