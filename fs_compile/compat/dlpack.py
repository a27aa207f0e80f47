"""Tensors over parts of another's memory with storages of their own, by DLPack's functions without their checks."""

from __future__ import annotations

import torch

to_capsule, from_capsule = torch._C._to_dlpack, torch._C._from_dlpack

# DLPack's code of each type, and its bits.
TYPES = {
    torch.int8: (0, 8), torch.int16: (0, 16), torch.int32: (0, 32), torch.int64: (0, 64),
    torch.uint8: (1, 8), torch.float16: (2, 16), torch.float32: (2, 32), torch.float64: (2, 64),
    torch.bfloat16: (4, 16), torch.complex64: (5, 64), torch.complex128: (5, 128), torch.bool: (6, 8),
}  # fmt: skip


def detached(view: torch.Tensor) -> torch.Tensor:
    """The same memory, which it keeps alive, as a tensor that is no view."""
    return from_capsule(to_capsule(view))
