"""Progress messages of compilation: a line at the start, every 30 s, and at the end.

The lines go to the log if it is on, otherwise to standard error of rank 0, including in batch jobs and notebooks, which
show nothing else meanwhile. FREESCALE_PROGRESS=0 turns the lines on standard error off.
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
_CLEAR = "\r\x1b[K"  # clears the line of a progress bar, which will be redrawn
_REPEAT_EVERY = 30.0  # seconds


def say(words: str, printed: bool = True) -> None:
    log.info(words)
    if printed and not log.isEnabledFor(logging.INFO) and _is_rank_0():
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a closed or missing pipe must not stop it
            print(f"{_CLEAR if sys.stderr.isatty() else ''}freescale: {words}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def repeating(words: str, printed: bool = True) -> Iterator[None]:
    """Report repeatedly that work is in progress."""
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
