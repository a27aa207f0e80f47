"""What settings of torch and NCCL say in the environment. freescale's settings are config.py's."""

from __future__ import annotations

import os


def cuda_caching_disabled() -> bool:
    """Whether torch frees GPU memory at once, which waits for the device."""
    return bool(os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"))


def nccl_shares_gpus() -> bool:
    """Whether NCCL is told to serve several ranks on a GPU, or to take each rank for a host of its own."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" or "NCCL_HOSTID" in os.environ


def launched_ranks() -> int:
    """How many ranks torchrun, or what does as it does, has started; 1 where there was none."""
    return int(os.environ.get("WORLD_SIZE", "1"))
