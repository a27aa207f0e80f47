"""One process of a host compiles a graph, the others wait and load it from torch's cache. A process that does not find
it there compiles it: waiting changes when, never what. The lock, on a file, ends with its process. No rank may wait for
another while holding it.

Which rank compiles must be deterministic: generated code sums in an order that depends on the batch sizes that it was
compiled for, and these differ between ranks. So the first rank of a host gets a head start of a few seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
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

log = logging.getLogger(__name__)

_PAUSE = 0.05  # seconds between polls of the file
_HEAD_START = 3.0  # seconds for the first rank of a host to start
_FIRST_RANK = "first_rank"  # written next to the locks: the first rank uses this folder, too


@contextlib.contextmanager
def compiling_once(gm: fx.GraphModule, settings: str, seconds: float) -> Iterator[None]:
    """Compile a graph inside: alone, or after the process that is compiling it (waiting at most `seconds`)."""
    file = _open(gm, settings) if inductor.waiting_for_caches_pays() else None
    if file is None:
        yield
        return
    try:
        if not _is_first_rank():
            _give_head_start(file)
        if _lock(file, fcntl.LOCK_EX):
            with contextlib.suppress(OSError):
                os.pwrite(file, b"begun", 0)  # the graph is or will be in the cache
        else:
            _wait(file, seconds)
        yield
    finally:
        # Unlock explicitly: a process forked meanwhile has the file open, too.
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
        log.info("every process compiles its own graphs: %s", error)
        return None


def _folder() -> Path:
    return Path(inductor.cache_dir()) / "freescale_locks"


def _lock(file: int, kind: int) -> bool:
    """Whether this process has the lock, or there is nothing to wait for: some file systems lack locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        log.info("every process compiles its own graphs: %s", error)
    return True


def _is_first_rank() -> bool:
    """First rank of this host, by LOCAL_RANK; if that is unset, of all."""
    return dist.get_node_local_rank(dist.get_rank() if dist.is_initialized() else 0) == 0


_without_first_rank: set[Path] = set()  # folders in which waiting for it timed out


def _give_head_start(file: int) -> None:
    """Wait until some process has started."""
    folder = _folder()
    if folder in _without_first_rank:
        return
    end = time.monotonic() + _HEAD_START
    while time.monotonic() < end and os.fstat(file).st_size == 0:  # trying the lock would interfere with the first rank
        time.sleep(_PAUSE)
    if time.monotonic() >= end and not (folder / _FIRST_RANK).exists():
        _without_first_rank.add(folder)


def _wait(file: int, seconds: float) -> None:
    start = time.monotonic()
    log.info("another process of this host is compiling the same graph; waiting for it")
    # Shared lock: all waiters proceed together.
    while not _lock(file, fcntl.LOCK_SH):
        if time.monotonic() - start > seconds:
            log.warning("another process is still compiling the same graph after %.0f s; no longer waiting", seconds)
            return
        time.sleep(_PAUSE)
    fcntl.flock(file, fcntl.LOCK_UN)


def graph_hash(gm: fx.GraphModule, settings: str) -> str:
    """Hash of code, inputs and settings. Coarser than torch's own keys, which decide cache hits."""
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
