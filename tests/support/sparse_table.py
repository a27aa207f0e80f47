"""Tensors of billions of elements that take no memory: files without content, of which a page exists once it is used."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def sparse_zeros(*shape: int, dtype: torch.dtype, device: str = "cpu") -> Iterator[torch.Tensor]:
    """On a GPU, which has no such thing, the memory is taken."""
    if device != "cpu":
        yield torch.zeros(shape, dtype=dtype, device=device)
        return
    with tempfile.NamedTemporaryFile() as file:
        size = torch.Size(shape).numel()
        yield torch.from_file(file.name, shared=True, size=size, dtype=dtype).view(shape)
