"""The few calls of the CUDA driver that a transport is made of: pinning, streams, copies, words, events.

Taken straight from libcuda, because torch offers no stream wait on a memory word and no registration of shared
memory. Nothing here waits on the host. Calls need a current context: `record_event` comes first in every launch and
makes the device's own context current.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_P, _U64, _U32, _SIZE = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_size_t
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuMemHostRegister_v2": (_P, _SIZE, _U32),
    "cuMemHostGetDevicePointer_v2": (ctypes.POINTER(_U64), _P, _U32),
    "cuMemHostUnregister": (_P,),
    "cuStreamCreateWithPriority": (ctypes.POINTER(_P), _U32, ctypes.c_int),
    "cuStreamDestroy_v2": (_P,),
    "cuMemcpyDtoHAsync_v2": (_P, _U64, _SIZE, _P),
    "cuMemcpyHtoDAsync_v2": (_U64, _P, _SIZE, _P),
    "cuMemcpyDtoDAsync_v2": (_U64, _U64, _SIZE, _P),
    "cuMemsetD32Async": (_U64, _U32, _SIZE, _P),
    "cuStreamWriteValue32_v2": (_P, _U64, _U32, _U32),
    "cuStreamWaitValue32_v2": (_P, _U64, _U32, _U32),
}
_PORTABLE_AND_MAPPED, _NON_BLOCKING, _AT_LEAST = 3, 1, 0


def load() -> dict[str, Any]:
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


class CudaDriver:
    """The calls, for one device. Its own streams are plain integers, addresses too."""

    calls: dict[str, Any] | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if CudaDriver.calls is None:
            CudaDriver.calls = load()
        calls = CudaDriver.calls
        self._device_to_host, self._host_to_device = calls["cuMemcpyDtoHAsync_v2"], calls["cuMemcpyHtoDAsync_v2"]
        self._write_value, self._wait_value = calls["cuStreamWriteValue32_v2"], calls["cuStreamWaitValue32_v2"]
        self._device_to_device, self._memset = calls["cuMemcpyDtoDAsync_v2"], calls["cuMemsetD32Async"]
        self._external_streams: dict[int, torch.cuda.ExternalStream] = {}

    def _call(self, name: str, *arguments: Any) -> None:
        assert CudaDriver.calls is not None
        self._raise_on_error(name, CudaDriver.calls[name](*arguments))

    def _raise_on_error(self, name: str, code: int) -> None:
        if code == 0:
            return
        assert CudaDriver.calls is not None
        text = ctypes.c_char_p()
        CudaDriver.calls["cuGetErrorName"](code, ctypes.byref(text))
        error = text.value.decode() if text.value else str(code)
        raise RuntimeError(f"freescale: {name} failed on {self.device}: {error}")

    # ---- set-up ----------------------------------------------------------------------------------------

    def bind_thread(self) -> None:
        torch.cuda.set_device(self.device)

    def pin(self, address: int, nbytes: int) -> int:
        """Make host memory reachable for the copy engines; return its address on the device."""
        torch.cuda.current_stream(self.device).query()  # a context of this thread
        self._call("cuMemHostRegister_v2", address, nbytes, _PORTABLE_AND_MAPPED)
        mapped = _U64()
        self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(mapped), address, 0)
        return mapped.value

    def unpin(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)

    def new_stream(self, priority: int) -> int:
        handle = _P()
        self._call("cuStreamCreateWithPriority", ctypes.byref(handle), _NON_BLOCKING, priority)
        assert handle.value is not None
        self._external_streams[handle.value] = torch.cuda.ExternalStream(handle.value, self.device)
        return handle.value

    def destroy_stream(self, stream: int) -> None:
        self._external_streams.pop(stream, None)
        self._call("cuStreamDestroy_v2", stream)

    # ---- in stream order -------------------------------------------------------------------------------

    def copy_to_host(self, to: int, data: int, nbytes: int, stream: int) -> None:
        """Device to pinned host memory."""
        self._raise_on_error("cuMemcpyDtoHAsync", self._device_to_host(to, data, nbytes, stream))

    def copy_to_device(self, to: int, data: int, nbytes: int, stream: int) -> None:
        """Pinned host memory to the device."""
        self._raise_on_error("cuMemcpyHtoDAsync", self._host_to_device(to, data, nbytes, stream))

    def copy_device_to_device(self, to: int, data: int, nbytes: int, stream: int) -> None:
        """Device to device. On one and the same device this takes SMs."""
        self._raise_on_error("cuMemcpyDtoDAsync", self._device_to_device(to, data, nbytes, stream))

    def fill_words(self, address: int, value: int, words: int, stream: int) -> None:
        self._raise_on_error("cuMemsetD32Async", self._memset(address, value & 0xFFFFFFFF, words, stream))

    def write_word(self, address: int, value: int, stream: int) -> None:
        """Store a 32-bit word after everything before it in the stream."""
        self._raise_on_error("cuStreamWriteValue32", self._write_value(stream, address, value & 0xFFFFFFFF, 0))

    def wait_for_word(self, address: int, value: int, stream: int) -> None:
        """Hold the stream until the word, as a number that may have wrapped around, is at least `value`."""
        self._raise_on_error("cuStreamWaitValue32", self._wait_value(stream, address, value & 0xFFFFFFFF, _AT_LEAST))

    # ---- between streams -------------------------------------------------------------------------------

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def record_event(self, stream: int | torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._external_streams[stream] if isinstance(stream, int) else stream)
        return event

    def wait_for_event(self, stream: int | torch.cuda.Stream, event: torch.cuda.Event) -> None:
        event.wait(self._external_streams[stream] if isinstance(stream, int) else stream)

    def is_done(self, event: torch.cuda.Event) -> bool:
        return event.query()
