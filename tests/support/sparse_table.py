"""Tensors with billions of elements that use no memory: sparse files, whose pages are allocated on use."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def sparse_zeros(*shape: int, dtype: torch.dtype, device: str = "cpu") -> Iterator[torch.Tensor]:
    """On a GPU, which has no sparse memory, it is allocated."""
    if device != "cpu":
        yield torch.zeros(shape, dtype=dtype, device=device)
        return
    with tempfile.NamedTemporaryFile() as file:
        size = torch.Size(shape).numel()
        yield torch.from_file(file.name, shared=True, size=size, dtype=dtype).view(shape)
