"""The C library of this package, built when freescale is installed (setup.py) and called through ctypes.

ctypes releases the GIL during a call. The same work in Python would hold the GIL while the training thread needs it.
"""

from __future__ import annotations

import ctypes
import hashlib
from pathlib import Path

_FOLDER = Path(__file__).parent


def require() -> ctypes.CDLL:
    try:
        return _load()
    except OSError as error:
        raise RuntimeError(f"freescale: this rank cannot plan batches: {error}") from None


def problem() -> str | None:
    """Why the library is unavailable and what to do, or None if it is available."""
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
        library.fs_sources.restype = ctypes.c_char_p
        built_of = library.fs_sources().decode()
    except (OSError, AttributeError) as error:
        raise OSError(f"its C library does not load ({error}): {build_it}") from error
    # A checkout has the sources. A library built from other sources may read past the end of its arguments.
    if any(_FOLDER.glob("*.[ch]")) and built_of != sources_digest(_FOLDER):
        raise OSError(f"its C code has changed since its library was built: {build_it}")
    return library


def sources_digest(folder: Path) -> str:
    """Digest of the C code; setup.py compiles it into the library. File times do not survive every copy of a
    checkout."""
    files = sorted(folder.glob("*.[ch]"))
    return hashlib.sha256(b"".join(f.name.encode() + b"\0" + f.read_bytes() for f in files)).hexdigest()[:16]
