"""Processes of one host that need the same graph at the same time: one compiles it, the others take it from the cache.

The others wait until the first is done, and then all go on at once. Whoever then does not find the graph in torch's
cache compiles it: waiting changes when, never what. The lock is the operating system's, on a file beside torch's cache:
it ends with the process that holds it. Inside, no rank may wait for another; should one do so all the same, the wait
ends after `seconds`.

Which rank compiles is not to be chance: generated code sums in an order that depends on the sizes of the batch that it
was compiled for, and ranks have batches of different size. So the first rank of a host has a head start: the others
give it some seconds to begin. Where it has nothing to compile, that is all they lose; where it has a cache folder of
its own, they lose it once.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from freescale.compat import inductor

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

_LONGEST_PAUSE = 0.1  # seconds between two looks at the file
_HEAD_START = 3.0  # seconds that the first rank of a host has to begin
_FIRST_RANK = "first_rank"  # beside the locks: it uses this folder, too


@contextlib.contextmanager
def compiling_once(gm: fx.GraphModule, settings: str, seconds: float) -> Iterator[None]:
    """Around the compilation of a graph: alone, or after whoever was at it (for so many seconds at most)."""
    file = _open(gm, settings) if fcntl is not None and inductor.waiting_for_caches_pays() else None
    if file is None:
        yield
        return
    try:
        if not _is_first_rank():
            _give_head_start(file)
        if _lock(file, fcntl.LOCK_EX):
            _note_beginning(file)
        else:
            _wait(file, seconds)
        yield
    finally:
        # Not only by closing it: a process that was forked meanwhile has the file open too.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


def _open(gm: fx.GraphModule, settings: str) -> int | None:
    folder = _folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if _is_first_rank():
            (folder / _FIRST_RANK).touch()
        return os.open(folder / graph_hash(gm, settings), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        log.info("graphs are compiled by every process: %s", error)
        return None


def _folder() -> Path:
    return Path(inductor.cache_dir()) / "freescale_locks"


def _lock(file: int, kind: int) -> bool:
    """Whether this process has it now, or there is nothing to wait for: not every file system knows locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        log.info("graphs are compiled by every process: %s", error)
    return True


def _is_first_rank() -> bool:
    """Of this host, as the launcher counts them (LOCAL_RANK); of all, where it does not."""
    return dist.get_node_local_rank(dist.get_rank() if dist.is_initialized() else 0) == 0


def _note_beginning(file: int) -> None:
    """That some process has begun, now or earlier: the graph is in the cache, or will be."""
    with contextlib.suppress(OSError):
        os.pwrite(file, b"begun", 0)


_without_first_rank: set[Path] = set()  # folders in which it was waited for in vain


def _give_head_start(file: int) -> None:
    """Until some process has begun."""
    folder = _folder()
    if folder in _without_first_rank:
        return
    end, pauses = time.monotonic() + _HEAD_START, _pauses()
    while time.monotonic() < end and os.fstat(file).st_size == 0:  # (to try the lock would be in the first one's way)
        time.sleep(next(pauses))
    if time.monotonic() >= end and not (folder / _FIRST_RANK).exists():
        _without_first_rank.add(folder)


def _wait(file: int, seconds: float) -> None:
    start, pauses = time.monotonic(), _pauses()
    log.info("another process of this host is compiling the same graph; waiting for it")
    # Shared: all who wait go on together.
    while not _lock(file, fcntl.LOCK_SH):
        if time.monotonic() - start > seconds:
            log.warning("another process still compiles the same graph after %.0f s; no longer waiting", seconds)
            return
        time.sleep(next(pauses))
    fcntl.flock(file, fcntl.LOCK_UN)


def _pauses() -> Iterator[float]:
    pause = 0.005
    while True:
        yield pause
        pause = min(1.5 * pause, _LONGEST_PAUSE)


def graph_hash(gm: fx.GraphModule, settings: str) -> str:
    """Of what is compiled: code, inputs and settings. Coarser than torch's own keys, which decide what is a hit."""
    parts = [settings, torch.__version__, str(torch.is_grad_enabled())]
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            inputs = module.graph.find_nodes(op="placeholder")
            parts += [module.code, *(_text(n.meta.get("example_value", n.meta.get("val"))) for n in inputs)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype} {value.device} {value.requires_grad}"
    return type(value).__name__
