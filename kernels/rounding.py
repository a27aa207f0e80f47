"""Definition of fp8 rows (compression.py); fp16 and bf16 use torch's own casts.

*Stochastic* rounding goes up or down to a neighbor in the narrow type, with the probability that makes the expected
value exact. The direction depends only on the value's position and the launch number, so runs are reproducible, and no
random generator is used.
"""

from __future__ import annotations

import torch

WIDE_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
FP8_MAX = 448.0
FIRST_PRIME, SECOND_PRIME = 0x9E3779B1, 0x85EBCA77  # for the position and for the launch number
_MASK = 0xFFFFFFFF
_SMALLEST_SCALE = 0x00800000  # the smallest normal float32, as bits


def fp8_row_bytes(dim: int) -> int:
    return (dim + 3) // 4 * 4 + 4


def to_fp8(x: torch.Tensor, launch_number: int | None) -> torch.Tensor:
    """Return uint8 [n, dim padded to a multiple of 4, plus 4]: e4m3 values and a scale that maps the row's largest
    magnitude to 448.

    A row with an infinity or NaN arrives as NaN.
    """
    n, dim = x.shape
    if n == 0 or dim == 0:
        return x.new_empty((n, fp8_row_bytes(dim)), dtype=torch.uint8)
    largest = (x.view(torch.int32) & 0x7FFFFFFF).amax(1, keepdim=True).view(torch.float32)
    # multiply, not divide: on a GPU torch divides by a scalar as a multiplication, and the bits must match
    scale = (largest * (1 / FP8_MAX)).view(torch.int32).clamp(min=_SMALLEST_SCALE).view(torch.float32)
    codes = _round_to_e4m3(x / scale, launch_number)
    padding = codes.new_zeros((n, -dim % 4))
    return torch.cat([codes, padding, scale.view(torch.uint8)], dim=1)


def _round_to_e4m3(y: torch.Tensor, launch_number: int | None) -> torch.Tensor:
    """e4m3 codes of values of at most 448: round to nearest even, or stochastically if there is a launch number."""
    bits = y.view(torch.int32)
    exponent = ((bits >> 23) & 0xFF).clamp(min=121)  # 2**-6 is the smallest normal number
    unit = ((exponent - 3) << 23).view(torch.float32)  # spacing of neighbors
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
    """Numbers in [0, 1) that depend only on the position and the launch number."""
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
