"""The C library of this package, built when freescale is installed (setup.py) and called through ctypes, which releases
the GIL during a call."""

from __future__ import annotations

import ctypes
import hashlib
from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parent
_SIGNATURES = {  # P: pointer, n: integer, d: double, s: string, v: void; the result comes first
    "fs_sources": "s",
    "fs_new_mesh": "PnnPP",
    "fs_free_mesh": "vP",
    "fs_all_same": "nPPndP",
    "fs_give_up": "vP",
    "fs_new_batch_plan": "PPnnPn",
    "fs_free_batch_plan": "vP",
    "fs_plan_batch": "nPPdPPPPPn",
    "fs_request_and_plan": "nPnPPdPPPPnPPPn",
    "fs_room_of_last": "nP",
    "fs_plan_last": "nPPPP",
    "freescale_launch": "nPPPPPPPnnn",
}
_TYPES = {"P": ctypes.c_void_p, "n": ctypes.c_int64, "d": ctypes.c_double, "v": None, "s": ctypes.c_char_p}


@cache
def library() -> ctypes.CDLL:
    try:
        return _load()
    except OSError as error:
        raise RuntimeError(f"freescale: this rank cannot plan batches: {error}") from None


def problem() -> str | None:
    try:
        _load()
        return None
    except OSError as error:
        return str(error)


def _load() -> ctypes.CDLL:
    build_it = "install freescale with pip, in a checkout with `pip install -e .`"
    found = next(_FOLDER.glob("_native*.so"), None)
    if found is None:
        raise OSError(f"its C library is not in {_FOLDER}: {build_it}")
    try:
        library = ctypes.CDLL(str(found))
        for name, kinds in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, *function.argtypes = (_TYPES[kind] for kind in kinds)
        built_of = library.fs_sources().decode()
    except (OSError, AttributeError) as error:
        raise OSError(f"its C library does not load ({error}): {build_it}") from error
    # A checkout has the sources. A library built from other sources may read past the end of its arguments.
    if any(_FOLDER.glob("*.[ch]")) and built_of != sources_digest(_FOLDER):
        raise OSError(f"its C code has changed since its library was built: {build_it}")
    return library


def sources_digest(folder: Path) -> str:
    """setup.py compiles it into the library. (File times do not survive every copy of a checkout.)"""
    files = sorted(folder.glob("*.[ch]"))
    return hashlib.sha256(b"".join(f.name.encode() + b"\0" + f.read_bytes() for f in files)).hexdigest()[:16]
