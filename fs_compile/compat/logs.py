"""torch's logs, its trace of artifacts, its profiler."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch


def profiling() -> bool:
    """Is a torch profiler on?"""
    return torch.autograd.profiler._is_profiler_enabled


def ops_are_watched() -> bool:
    """By a profiler, or by a mode: whoever calls an op or launches a kernel goes the way on which that is seen."""
    return torch.autograd.profiler._is_profiler_enabled or torch._C._len_torch_dispatch_stack() > 0


def log_once(name: str) -> None:
    """Lines of a log to which TORCH_LOGS gave a handler do not go to the root's handlers too, as with torch's own."""
    from torch._logging._internal import _is_torch_handler

    log = logging.getLogger(name)
    if any(map(_is_torch_handler, log.handlers)):
        log.propagate = False


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """A file in tlparse's report (TORCH_TRACE)."""
    torch._logging.trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text
    )
