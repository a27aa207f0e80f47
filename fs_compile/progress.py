"""A word to whoever waits for code to be generated: one line when it begins and one when it is there, per graph.

Through the log where that is on. Otherwise on standard error if it is a terminal, on rank 0 alone.
"""

from __future__ import annotations

import logging
import sys

import torch.distributed as dist

log = logging.getLogger(__name__)
_CLEAR = "\r\x1b[K"  # the line of a progress bar, which will be drawn again


def say(words: str) -> None:
    log.info(words)
    if not log.isEnabledFor(logging.INFO) and _first_rank() and sys.stderr.isatty():
        print(f"{_CLEAR}freescale: {words}", file=sys.stderr, flush=True)


def _first_rank() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
