"""Rows as they travel, and back: compression.py defines it, and on a GPU kernels do what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from freescale.kernels.compression import (
    WIDE_TYPES,
    Packing,
    compress,
    entries_of,
    expand,
    from_fp8,
    packed_counts,
    parse,
    to_fp8,
)


@dataclass(frozen=True)
class Packed:
    """What is sent in place of rows, and what to do with what is received."""

    x: torch.Tensor  # uint8 [sent, bytes]
    send_counts: torch.Tensor
    recv_counts: torch.Tensor
    unpack: Callable[[torch.Tensor, torch.Tensor], None]  # (what was received, rows to be written)

    @property
    def n_recv(self) -> int:
        return int(self.recv_counts.sum())  # counts are on the CPU


def pack(
    text: str, x: torch.Tensor, send_counts: torch.Tensor, recv_counts: torch.Tensor, launch_number: int
) -> Packed:
    """Rows of float32 [n, dim], those of all peers one after another. `launch_number`: of it and of the value's place
    follows which way fp8:stochastic rounds a value."""
    packing = parse(text)
    unpack: Callable[[torch.Tensor, torch.Tensor], None]
    if packing.kind == "largest":
        packed, unpack = take_largest(x, send_counts, packing), partial(put_back, counts=recv_counts, packing=packing)
    elif packing.kind == "fp8":
        packed, unpack = to_fp8(x, launch_number if packing.stochastic else None), from_fp8
    else:
        dtype = WIDE_TYPES[packing.kind]
        packed, unpack = x.to(dtype).view(torch.uint8), partial(_widen, dtype=dtype)
    return Packed(packed, packed_counts(send_counts, packing), packed_counts(recv_counts, packing), unpack)


def _widen(packed: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> None:
    out.copy_(packed.view(dtype))


def take_largest(x: torch.Tensor, counts: torch.Tensor, packing: Packing, clear: bool = False) -> torch.Tensor:
    """compress(), on a GPU with one pass over memory. `clear`: what was taken becomes zero in `x`."""
    if x.is_cuda:
        from freescale.kernels import compression_triton

        return compression_triton.compress(x, counts, packing, clear)
    packed = compress(x, counts, packing)
    if clear:
        x.view(-1)[entries_of(packed, counts, packing, x.shape[1])[0]] = 0.0
    return packed


def put_back(
    packed: torch.Tensor, out: torch.Tensor, counts: torch.Tensor, packing: Packing, add: bool = False
) -> None:
    """expand(), or with `add` to what stands in `out`."""
    if out.is_cuda:
        from freescale.kernels import compression_triton

        compression_triton.expand(packed, out, counts, packing, add)
    elif add:
        places, values = entries_of(packed, counts, packing, out.shape[1])
        out.view(-1)[places] += values  # no place twice
    else:
        expand(packed, out, counts, packing)
