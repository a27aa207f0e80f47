"""Reports that graphs are being compiled: a line when one begins, every 30 s while it lasts, and when it is done.

The lines go to the log where that is on, and otherwise to standard error of rank 0, a terminal or not: a batch job and
a notebook show nothing else in that time. FREESCALE_PROGRESS=0 turns the lines on standard error off.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator

import torch.distributed as dist

log = logging.getLogger(__name__)
_CLEAR = "\r\x1b[K"  # the line of a progress bar, which will be drawn again
_REPEAT_EVERY = 30.0  # seconds


def say(words: str, printed: bool = True) -> None:
    log.info(words)
    if printed and not log.isEnabledFor(logging.INFO) and _is_rank_0():
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a closed pipe, or none, stops no compilation
            print(f"{_CLEAR if sys.stderr.isatty() else ''}freescale: {words}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def repeating(words: str, printed: bool = True) -> Iterator[None]:
    """Report again and again that something is still at work."""
    done, began = threading.Event(), time.monotonic()

    def repeat() -> None:
        while not done.wait(_REPEAT_EVERY):
            say(f"still {words} after {time.monotonic() - began:.0f} s", printed)

    threading.Thread(target=repeat, name="freescale-progress", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _is_rank_0() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
