"""Rows in a narrower type, rounded stochastically in one pass over memory, in Triton. Definition: rounding.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freescale.compat.triton_launch import launch
from freescale.kernels.rounding import FIRST_PRIME, SECOND_PRIME

_BLOCK = 1024


@triton.jit
def _uniform(place, salt, PRIME: tl.constexpr):
    """rounding._uniform; `salt`: what the launch adds."""
    h = place.to(tl.uint32) * PRIME + salt.to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return ((h ^ (h >> 16)) >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit(do_not_specialize=["n", "salt"])
def _to_wide(x, out, n, salt, PRIME: tl.constexpr, BFLOAT: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(x + place, mask=place < n, other=0)
    uniform, magnitude = _uniform(place, salt, PRIME), bits & 0x7FFFFFFF
    if BFLOAT:
        up = uniform < (magnitude & 0xFFFF).to(tl.float32) * 1.52587890625e-05
        rounded = (magnitude >> 16) + up.to(tl.int32)
        nearest = (magnitude + 0x8000) >> 16
        nearest = tl.where(magnitude > 0x7F800000, 0x7FC0, nearest)
        code = tl.where(magnitude <= 0x7F7F0000, rounded, nearest)
    else:
        size = magnitude.to(tl.float32, bitcast=True)
        exponent = tl.maximum(magnitude >> 23, 113)
        steps = size * ((264 - exponent) << 23).to(tl.float32, bitcast=True)
        whole = tl.floor(steps)
        up = (uniform < steps - whole).to(tl.float32)
        rounded = (whole + up) * ((exponent - 10) << 23).to(tl.float32, bitcast=True)
        size = tl.where(size <= 65504.0, rounded, size)
        code = size.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    tl.store(out + place, (code | ((bits >> 16) & 0x8000)).to(tl.int16), mask=place < n)


def to_wide(x: torch.Tensor, dtype: torch.dtype, launch_number: int) -> torch.Tensor:
    """As rounding.to_wide; a NaN may have other bits."""
    out = torch.empty_like(x, dtype=dtype)
    if n := x.numel():
        constants = FIRST_PRIME, dtype == torch.bfloat16, _BLOCK
        launch(
            _to_wide, (triton.cdiv(n, _BLOCK),), x.view(torch.int32), out.view(torch.int16), n, salt_of(launch_number),
            *constants, num_warps=4,
        )  # fmt: skip
    return out


def salt_of(launch_number: int) -> int:
    """As a signed 32-bit number, so that all launches have one kernel."""
    return (launch_number * SECOND_PRIME + 2**31) % 2**32 - 2**31
