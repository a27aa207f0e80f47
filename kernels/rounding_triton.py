"""Convert rows to fp8 and back in one pass over memory, in Triton. Definition: rounding.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freescale.compat.triton_launch import cdiv, launch, next_power_of_2
from freescale.kernels.rounding import FIRST_PRIME, SECOND_PRIME, fp8_row_bytes


@triton.jit
def _uniform(place, salt, PRIME: tl.constexpr):
    """rounding._uniform; `salt` is derived from the launch number."""
    h = place.to(tl.uint32) * PRIME + salt.to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return ((h ^ (h >> 16)) >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit(do_not_specialize=["n_rows", "salt"])
def _to_fp8(
    x, out, scales, n_rows, salt, DIM: tl.constexpr, ROW_BYTES: tl.constexpr, PRIME: tl.constexpr,
    STOCHASTIC: tl.constexpr, ROWS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """`scales`: `out` viewed as 32-bit words, of which the last of each row is its scale."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, VALUES)
    place, there = row[:, None] * DIM + column[None, :], row[:, None] < n_rows
    bits = tl.load(x + place, mask=there & (column[None, :] < DIM), other=0)
    largest = tl.max(bits & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
    scale = tl.maximum((largest * (1 / 448)).to(tl.int32, bitcast=True), 0x00800000)
    y = tl.div_rn(bits.to(tl.float32, bitcast=True), scale.to(tl.float32, bitcast=True)[:, None] + tl.zeros_like(bits))
    bits = y.to(tl.int32, bitcast=True)
    exponent = tl.maximum((bits >> 23) & 0xFF, 121)
    steps = tl.abs(y) * ((257 - exponent) << 23).to(tl.float32, bitcast=True)
    if STOCHASTIC:
        steps = tl.floor(steps + _uniform(place, salt, PRIME))
    else:
        steps = (steps + 12582912.0) - 12582912.0  # at most 16, so the sum has no fractional bits
    rounded = tl.minimum(steps * ((exponent - 3) << 23).to(tl.float32, bitcast=True), 448.0)
    normal = (rounded.to(tl.int32, bitcast=True) >> 20) - 960
    code = tl.where(rounded < 0.015625, (rounded * 512.0).to(tl.int32), normal)
    code = tl.where(y != y, 0x7F, code) | ((bits >> 24) & 0x80)
    padded = there & (column[None, :] < ROW_BYTES - 4)
    tl.store(out + row[:, None] * ROW_BYTES + column[None, :], code.to(tl.uint8), mask=padded)
    tl.store(scales + (row + 1) * (ROW_BYTES // 4) - 1, scale, mask=row < n_rows)


@triton.jit(do_not_specialize=["n_rows"])
def _from_fp8(
    packed, scales, out, n_rows, DIM: tl.constexpr, ROW_BYTES: tl.constexpr, ROWS: tl.constexpr, VALUES: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, VALUES)
    there = (row[:, None] < n_rows) & (column[None, :] < DIM)
    code = tl.load(packed + row[:, None] * ROW_BYTES + column[None, :], mask=there, other=0).to(tl.int32)
    scale = tl.load(scales + (row + 1) * (ROW_BYTES // 4) - 1, mask=row < n_rows, other=0)
    size = code & 0x7F
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    value = tl.where(size == 0x7F, float("nan"), value)
    # not -value: a GPU computes that as 0 - value, which loses -0.0
    value = (value.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
    value *= scale.to(tl.float32, bitcast=True)[:, None]
    tl.store(out + row[:, None] * DIM + column[None, :], value, mask=there)


def _shape(n_rows: int, row_bytes: int) -> tuple[tuple[int], int, int, int]:
    """Grid, rows and values per program, and warps."""
    values = next_power_of_2(row_bytes - 4)
    rows = max(1, 1024 // values)
    return (cdiv(n_rows, rows),), rows, values, min(32, max(4, values // 512))


def to_fp8(x: torch.Tensor, launch_number: int | None) -> torch.Tensor:
    """rounding.to_fp8 on a GPU."""
    (n, dim), row_bytes = x.shape, fp8_row_bytes(x.shape[1])
    out = x.new_empty((n, row_bytes), dtype=torch.uint8)
    if n and dim:
        grid, rows, values, warps = _shape(n, row_bytes)
        salt = salt_of(launch_number or 0)
        constants = dim, row_bytes, FIRST_PRIME, launch_number is not None, rows, values
        launch(_to_fp8, grid, x.view(torch.int32), out, out.view(torch.int32), n, salt, *constants, num_warps=warps)
    return out


def from_fp8(packed: torch.Tensor, out: torch.Tensor) -> None:
    """rounding.from_fp8 on a GPU; NaNs may have other bits."""
    if out.numel():
        n, dim = out.shape
        grid, rows, values, warps = _shape(n, packed.shape[1])
        constants = dim, packed.shape[1], rows, values
        launch(_from_fp8, grid, packed, packed.view(torch.int32), out, n, *constants, num_warps=warps)


def salt_of(launch_number: int) -> int:
    """The launch's salt as a signed 32-bit number, so that all launches share one kernel."""
    return (launch_number * SECOND_PRIME + 2**31) % 2**32 - 2**31
