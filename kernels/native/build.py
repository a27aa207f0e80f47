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

# What each is for, and the names of its files.
LIBRARIES = {
    "planning": ("planning", "batch_plan", "mesh", "mailboxes"),
    "meetings of ranks": ("status_board",),
    "launches of staged and peer": ("transfers",),
    "tensors of plans": ("memory_parts",),
    "balancing of samples": ("swaps",),
}
_COMPILERS = ("cc", "gcc", "clang")
# No -march: hosts of a cluster may share the folder. Every product is rounded, as it is in NumPy.
_FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-Wall", "-ffp-contract=off")
_SECONDS = 120


class CannotBuild(RuntimeError):
    """There is no library; the text says why."""


@cache
def load(*names: str) -> ctypes.CDLL | None:
    """The library of `<name>.c` for each name, or None, with a warning, where it cannot be built."""
    try:
        return ctypes.CDLL(str(_built([Path(__file__).parent / f"{name}.c" for name in names])))
    except (CannotBuild, OSError) as error:
        log.warning(
            "freescale: %s.c cannot be built (%s); Python does the same more slowly, and holds its lock",
            names[0],
            error,
        )
        return None


def problem(*names: str) -> str | None:
    """Why there is no such library, in words; None where there is one."""
    try:
        _built([Path(__file__).parent / f"{name}.c" for name in names])
        return None
    except (CannotBuild, OSError) as error:
        return str(error)


def _built(sources: list[Path]) -> Path:
    """The shared library, from the cache of compiled code or newly made."""
    texts = [f.read_bytes() for f in (*sources, *sorted(sources[0].parent.glob("*.h")))]
    key = hashlib.sha256(b"".join(texts) + " ".join(_FLAGS).encode() + os.uname().machine.encode()).hexdigest()[:16]
    folder = Path(inductor.cache_dir()) / "freescale"
    library = folder / f"{sources[0].stem}-{key}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _compile(sources, library)
    return library


def _compile(sources: list[Path], library: Path) -> None:
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise CannotBuild(f"none of {', '.join(_COMPILERS)} is on the PATH")
    handle, unfinished = tempfile.mkstemp(dir=library.parent, suffix=".so")
    os.close(handle)
    try:
        command = [compiler, *_FLAGS, "-o", unfinished, *map(str, sources)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
        if done.returncode:
            raise CannotBuild(f"{compiler} says: {done.stderr.strip()[-500:]}")
        os.replace(unfinished, library)  # whole or not at all, whoever else builds it now
    except subprocess.TimeoutExpired as error:
        raise CannotBuild(f"{compiler} was not done after {_SECONDS} s") from error
    finally:
        if os.path.exists(unfinished):
            os.unlink(unfinished)
