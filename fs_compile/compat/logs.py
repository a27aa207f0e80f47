"""torch's logs, structured trace and profiler."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch


def profiling() -> bool:
    """Whether a torch profiler is on."""
    return torch.autograd.profiler._is_profiler_enabled


def ops_are_watched() -> bool:
    """Whether a profiler or a mode observes ops; then ops and kernels take the path that is observed."""
    return torch.autograd.profiler._is_profiler_enabled or torch._C._len_torch_dispatch_stack() > 0


def log_once(name: str) -> None:
    """Keep lines of a log that has a TORCH_LOGS handler out of the root's handlers, as torch's own logs do."""
    from torch._logging._internal import _is_torch_handler

    log = logging.getLogger(name)
    if any(map(_is_torch_handler, log.handlers)):
        log.propagate = False


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Add a file to tlparse's report (TORCH_TRACE)."""
    torch._logging.trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text
    )
