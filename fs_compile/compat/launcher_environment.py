"""What torch's own settings say in the environment. freescale's settings are config.py's."""

from __future__ import annotations

import os


def cuda_caching_disabled() -> bool:
    """Whether torch frees GPU memory at once, which waits for the device."""
    return bool(os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"))


def launched_ranks() -> int:
    """How many ranks torchrun, or what does as it does, has started; 1 where there was none."""
    return int(os.environ.get("WORLD_SIZE", "1"))
