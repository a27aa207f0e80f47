"""Records of what the passes did to each graph, kept beside the cache; and progress messages during compilation."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from freescale.compat import inductor

log = logging.getLogger(__name__)


@dataclass
class GraphRecord:
    direction: str  # "forward" or "backward"
    exchanges: int = 0
    sites: dict[str, int] = field(default_factory=dict)  # per pass
    texts: dict[str, str] = field(default_factory=dict)  # graph text after each pass, and "before"
    refused: list[str] = field(default_factory=list)  # passes that did not apply, and why
    pass_seconds: dict[str, float] = field(default_factory=dict)
    timeline: list[dict[str, Any]] = field(default_factory=list)  # see passes/timeline.py


def keep(key: str, record: GraphRecord) -> None:
    """Atomic: ranks that share a cache may write the same record concurrently."""
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(gzip.compress(json.dumps(asdict(record)).encode()))
        os.replace(unfinished, path)
    except OSError as error:
        log.info("cannot store the record of the passes for the %s graph: %s", record.direction, error)


def recall(key: str) -> GraphRecord | None:
    try:
        return GraphRecord(**json.loads(gzip.decompress(_path(key).read_bytes())))
    except (OSError, EOFError, ValueError, TypeError) as error:
        log.debug("no record of %s: %s", key, error)
        return None


def _path(key: str) -> Path:
    return Path(inductor.cache_dir()) / "freescale" / f"{key}.json.gz"


_CLEAR = "\r\x1b[K"  # clears the line of a progress bar, which will be redrawn
_REPEAT_EVERY = 30.0  # seconds


def say(words: str, printed: bool = True) -> None:
    log.info(words)
    is_rank_0 = not dist.is_initialized() or dist.get_rank() == 0
    if printed and is_rank_0 and not log.isEnabledFor(logging.INFO):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a closed or missing pipe must not stop it
            print(f"{_CLEAR if sys.stderr.isatty() else ''}freescale: {words}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def repeating(words: str, printed: bool = True) -> Iterator[None]:
    done, began = threading.Event(), time.monotonic()

    def repeat() -> None:
        while not done.wait(_REPEAT_EVERY):
            say(f"still {words} after {time.monotonic() - began:.0f} s", printed)

    threading.Thread(target=repeat, name="freescale-progress", daemon=True).start()
    try:
        yield
    finally:
        done.set()
