"""What torchrun and torch's own settings say in the environment. freescale's settings are config.py's."""

from __future__ import annotations

import os


def ranks_per_host() -> int:
    """As torchrun says; 0 where nobody does."""
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(value) if value.isdecimal() else 0


def cuda_caching_disabled() -> bool:
    """Whether torch frees GPU memory at once, which waits for the device."""
    return bool(os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"))
