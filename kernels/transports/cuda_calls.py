"""The libcuda functions that transports use, and the names of their error codes."""

from __future__ import annotations

import ctypes
from typing import Any

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


def error_name(calls: dict[str, Any], code: int) -> str:
    text = ctypes.c_char_p()
    calls["cuGetErrorName"](code, ctypes.byref(text))
    return text.value.decode() if text.value else str(code)
