"""The end of a transport whose slots threads of the host carry: over gloo (staged_gloo.py), over NIXL (nixl.py)."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist

from freescale.kernels.transports.base import release_words

_SECONDS = 5.0


def stop_relaying(
    threads: Sequence[Any], gloo_group: dist.ProcessGroup, wait_words: list[np.ndarray], stop: threading.Event,
    released: threading.Event | None = None,
) -> None:  # fmt: skip
    """Let threads that are `busy` finish, unless one of them has stopped them all, or what they carry was `released`
    because something failed; then stop them, and wait until every rank is here."""
    end = time.monotonic() + _SECONDS
    while any(t.busy for t in threads) and not stop.is_set() and time.monotonic() < end:
        if released is not None and released.is_set():
            break
        time.sleep(0.001)
    stop.set()
    release_words(wait_words)
    for thread in threads:
        if thread.ident is not None and thread is not threading.current_thread():
            thread.join(max(0.0, end - time.monotonic()))
    if not threads or any(t.is_alive() or t.broken or t.busy for t in threads) or not dist.is_initialized():
        return
    # What this rank sent may still be on its way to a peer: connections and agents stay until everyone is here.
    with contextlib.suppress(RuntimeError):
        work = dist.barrier(gloo_group, async_op=True)
        assert work is not None
        work.wait(timedelta(seconds=_SECONDS))
