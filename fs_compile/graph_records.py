"""Records of what the passes did to a graph, stored next to torch's cached code.

On a hit in torch's cache the passes do not run. What they did at compile time (number of exchanges, sites per pass,
graph text after each pass) is read from here. A record uses the key of the cache entry, which covers the graph, the
settings and our sources, so it always matches. Records only affect reports; a missing one, as after a hit in a remote
cache, is reported as missing.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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
    """Ranks that share a cache may write the same record concurrently, so each write is atomic."""
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
