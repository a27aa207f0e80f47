"""Rows in a narrower type: fp16, bf16 and fp8 of compression.py. These definitions decide what is correct.

*Stochastic* is up or down to one of the two neighbours in that type, with the probability that makes the mean right.
Which way follows from the place of the value and the number of the launch alone, so a run repeats bit for bit, and no
generator of random numbers is touched.
"""

from __future__ import annotations

import torch

WIDE_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
FP8_MAX = 448.0
FIRST_PRIME, SECOND_PRIME = 0x9E3779B1, 0x85EBCA77  # for the place, for the number of the launch
_MASK = 0xFFFFFFFF
_SMALLEST_SCALE = 0x00800000  # the smallest normal float32, as bits


def fp8_row_bytes(dim: int) -> int:
    return (dim + 3) // 4 * 4 + 4


def to_wide(x: torch.Tensor, dtype: torch.dtype, launch_number: int | None) -> torch.Tensor:
    """float16 or bfloat16; to nearest without a number.

    What has no neighbour above it, because it is larger than every number of the type, is rounded to nearest: a little
    more than the largest number becomes that one, and everything else infinite. NaN stays.
    """
    if launch_number is None:
        return x.to(dtype)
    magnitude, uniform = x.view(torch.int32) & 0x7FFFFFFF, _uniform(x, launch_number)
    if dtype == torch.bfloat16:  # the upper half of the bits
        up = uniform < (magnitude & 0xFFFF) * 2.0**-16
        rounded = ((magnitude & ~0xFFFF) + (up.int() << 16)).view(torch.float32)
    else:
        exponent = (magnitude >> 23).clamp(min=113)  # 2**-14 is the smallest that is normal
        steps = x.abs() * ((264 - exponent) << 23).view(torch.float32)  # of the distance of neighbours
        whole = steps.floor()
        up = uniform < steps - whole
        rounded = (whole + up) * ((exponent - 10) << 23).view(torch.float32)
    return torch.where(x.abs() <= torch.finfo(dtype).max, rounded.copysign(x), x).to(dtype)


def to_fp8(x: torch.Tensor, launch_number: int | None) -> torch.Tensor:
    """uint8 [n, dim, to a multiple of 4, and 4]: e4m3 and a scale that makes the row's largest magnitude 448.

    A row with an infinity or NaN arrives as NaN.
    """
    n, dim = x.shape
    if n == 0 or dim == 0:
        return x.new_empty((n, fp8_row_bytes(dim)), dtype=torch.uint8)
    largest = (x.view(torch.int32) & 0x7FFFFFFF).amax(1, keepdim=True).view(torch.float32)
    # not divided: by a number, torch divides on a GPU by multiplying, and the bits are to be the same
    scale = (largest * (1 / FP8_MAX)).view(torch.int32).clamp(min=_SMALLEST_SCALE).view(torch.float32)
    codes = _round_to_e4m3(x / scale, launch_number)
    padding = codes.new_zeros((n, -dim % 4))
    return torch.cat([codes, padding, scale.view(torch.uint8)], dim=1)


def _round_to_e4m3(y: torch.Tensor, launch_number: int | None) -> torch.Tensor:
    """Codes of values of at most 448. To nearest, of two as near to the even one; or up with the probability that
    makes the mean right."""
    bits = y.view(torch.int32)
    exponent = ((bits >> 23) & 0xFF).clamp(min=121)  # 2**-6 is the smallest that is normal
    unit = ((exponent - 3) << 23).view(torch.float32)  # the distance of neighbours
    steps = y.abs() / unit
    if launch_number is None:
        steps = steps.round()
    else:
        steps = (steps + _uniform(y, launch_number)).floor()
    rounded = (steps * unit).clamp(max=FP8_MAX)
    wide = rounded.view(torch.int32)
    normal = (wide >> 20) - (120 << 3)
    code = torch.where(rounded < 2.0**-6, (rounded * 512.0).to(torch.int32), normal)
    code = torch.where(torch.isnan(y), 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(torch.uint8)


def _uniform(y: torch.Tensor, launch_number: int) -> torch.Tensor:
    """In [0, 1), from a value's place and the number of the launch alone."""
    h = torch.arange(y.numel(), device=y.device) * FIRST_PRIME + launch_number * SECOND_PRIME & _MASK
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _MASK
    h = ((h ^ (h >> 15)) * 0x846CA68B) & _MASK
    return ((h ^ (h >> 16)) >> 8).float().mul_(2.0**-24).view(y.shape)


def from_fp8(packed: torch.Tensor, out: torch.Tensor) -> None:
    if out.numel() == 0:
        return
    codes = packed[:, : out.shape[1]].contiguous().view(torch.float8_e4m3fn)
    scale = packed[:, -4:].contiguous().view(torch.float32)
    torch.mul(codes.to(torch.float32), scale, out=out)
