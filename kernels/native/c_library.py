"""The C code of this package: one library, built when freescale is installed (setup.py) and called through ctypes.

What is in C would otherwise hold the GIL while the training thread needs it; ctypes releases the GIL for as long as a
call lasts. Each such function has a definition in Python that gives the same bits and takes over without the library.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent


@cache
def load() -> ctypes.CDLL | None:
    """None, with a warning, without the library."""
    try:
        return _load()
    except OSError as error:
        log.warning("freescale: %s. Python does the same more slowly, and holds the GIL", error)
        return None


def problem() -> str | None:
    """Why there is no library and what to do; None where there is one."""
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
    # In a checkout the sources are there, too. The library of others may read past the end of what it is passed.
    if any(source.stat().st_mtime > found.stat().st_mtime for source in _FOLDER.glob("*.[ch]")):
        raise OSError(f"its C code has changed since its library was built: {build_it}")
    try:
        return ctypes.CDLL(str(found))
    except OSError as error:
        raise OSError(f"its C library does not load ({error}): {build_it}") from error
