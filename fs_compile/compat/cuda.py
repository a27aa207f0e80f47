"""CUDA handles, and environment variables of CUDA, NCCL and launchers."""

from __future__ import annotations

import os

import torch

# CPU builds lack these functions and never call them.
current_stream_handle = getattr(torch._C, "_cuda_getCurrentRawStream", None)
current_device = getattr(torch._C, "_cuda_getDevice", None)


def cuda_caching_disabled() -> bool:
    """Whether torch frees GPU memory immediately, which waits for the device."""
    return bool(os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"))


def nccl_shares_gpus() -> bool:
    """Whether NCCL is configured to allow several ranks per GPU, or to treat each rank as a separate host."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" or "NCCL_HOSTID" in os.environ


def launched_ranks() -> int:
    """Number of ranks started by torchrun or a compatible launcher; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))
