"""C code of this package, compiled on first use by the C compiler that Inductor and Triton need anyway.

What is in C is what would hold Python's lock while the training thread needs it. Called through ctypes, which gives the
lock away for as long as a call lasts. Each such function has a definition in Python that gives the same bits and takes
over where there is no compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from freescale.compat import inductor

log = logging.getLogger(__name__)

_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-Wall")  # no -march: hosts of a cluster may share the folder
_SECONDS = 120


class CannotBuild(RuntimeError):
    """There is no library; the text says why."""


@cache
def load(name: str) -> ctypes.CDLL | None:
    """The library of `<name>.c`, or None, with a warning, where it cannot be built."""
    try:
        return ctypes.CDLL(str(_built(Path(__file__).parent / f"{name}.c")))
    except (CannotBuild, OSError) as error:
        log.warning(
            "freescale: %s.c cannot be built (%s); Python does the same more slowly, and holds its lock", name, error
        )
        return None


def _built(source: Path) -> Path:
    """The shared library, from the cache of compiled code or newly made."""
    text = source.read_bytes()
    key = hashlib.sha256(text + " ".join(_FLAGS).encode() + os.uname().machine.encode()).hexdigest()[:16]
    folder = Path(inductor.cache_dir()) / "freescale"
    library = folder / f"{source.stem}-{key}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _compile(source, library)
    return library


def _compile(source: Path, library: Path) -> None:
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise CannotBuild(f"none of {', '.join(_COMPILERS)} is on the PATH")
    handle, unfinished = tempfile.mkstemp(dir=library.parent, suffix=".so")
    os.close(handle)
    try:
        command = [compiler, *_FLAGS, "-o", unfinished, str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
        if done.returncode:
            raise CannotBuild(f"{compiler} says: {done.stderr.strip()[-500:]}")
        os.replace(unfinished, library)  # whole or not at all, whoever else builds it now
    except subprocess.TimeoutExpired as error:
        raise CannotBuild(f"{compiler} was not done after {_SECONDS} s") from error
    finally:
        if os.path.exists(unfinished):
            os.unlink(unfinished)
