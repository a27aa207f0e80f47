"""Select, pack and restore the largest values of each block of rows, in Triton, and convert rows to fp8 and back.
Definition: compression.py.

One program holds a block in registers and searches for the threshold that leaves the required number of values.
Magnitudes are compared as the bits of absolute values, which sort the same way. The first guess comes from the mean
magnitude, the next ones interpolate; most blocks need five or six, and bisection bounds the rest. The selection does
not depend on the guesses. Nothing waits for the device, since the host knows where the slabs are.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from freescale.compat.triton_launch import cdiv, launch, next_power_of_2
from freescale.kernels import compression
from freescale.kernels.compression import ENTRY_BYTES, FIRST_PRIME, SECOND_PRIME, Packing, Slabs, fp8_row_bytes


@triton.jit
def _place(slabs, n_slabs, NUM: tl.constexpr, DEN: tl.constexpr, HEIGHT: tl.constexpr, SLABS: tl.constexpr):
    """First row, rows, first entry and entries of this program's block. `slabs`: first block, first row, rows and first
    entry of each slab."""
    block = tl.program_id(0).to(tl.int64)
    slab = tl.arange(0, SLABS)
    first_blocks = tl.load(slabs + slab, mask=slab < n_slabs, other=0x7FFFFFFFFFFFFFFF)
    mine = tl.max(tl.where(first_blocks <= block, slab, 0), 0)
    begin = (block - tl.load(slabs + mine)) * HEIGHT
    rows = tl.load(slabs + 2 * n_slabs + mine)
    end = tl.minimum(begin + HEIGHT, rows)
    skipped = begin * NUM // DEN
    first_entry = tl.load(slabs + 3 * n_slabs + mine) + skipped
    return tl.load(slabs + n_slabs + mine) + begin, end - begin, first_entry, (end * NUM // DEN - skipped).to(tl.int32)


@triton.jit
def _limit(size, total, values, entries, LOG_SHARE: tl.constexpr):
    """The threshold on `size`, and how many values reach it: `entries`, or more if there are ties. `total`: sum of the
    magnitudes. `LOG_SHARE`: log of the share of values to keep."""
    # Invariant: at least `entries` values reach `low`, fewer reach `high`. `entries` values of size `high` would sum to
    # more than `total`, even with rounding.
    low, left, left_high = 0, values, 0
    high = tl.minimum((total * (1.01 / entries)).to(tl.int32, bitcast=True), 0x7F800000) + 2
    if total != total:  # NaN; those computed by a GPU have all bits set
        high = 0x7FFFFFFF
        left_high = tl.sum((size == high).to(tl.int32), 0)
        if left_high >= entries:
            low, left = high, left_high
    # In a Laplace distribution, a share p exceeds -log(p) times the mean; slightly less in a normal one.
    guess, turn = (total * (-0.95 * LOG_SHARE / values)).to(tl.int32, bitcast=True), 0
    while (left != entries) & (high - low > 1):
        guess = tl.minimum(tl.maximum(guess, low + 1), high - 1)
        here = tl.sum((size >= guess).to(tl.int32), 0)
        enough = here >= entries
        low, left = tl.where(enough, guess, low), tl.where(enough, here, left)
        high, left_high = tl.where(enough, high, guess), tl.where(enough, left_high, here)
        turn += 1
        width = (high - low).to(tl.float32)
        if turn == 1:  # overshoot, so the threshold is between two guesses
            off = (here - entries).to(tl.float32) / entries + tl.where(enough, 0.7, -0.7) / tl.sqrt(entries + 0.0)
            step = off * (1.2 * 8388608.0 / -LOG_SHARE)
            guess += tl.minimum(tl.maximum(step, -width), width).to(tl.int32)
        elif (turn >= 6) & (turn % 4 == 2):
            guess = tl.where(low == 0, 1, low + (high - low) // 2)  # 1: are there enough nonzero values?
        else:
            share = ((left - entries).to(tl.float32) + 0.5) / (left - left_high)
            guess = low + (width * share).to(tl.int32)
    return low, left


@triton.jit(do_not_specialize=["n_slabs"])
def _compress(
    x, slabs, out, n_slabs, DIM: tl.constexpr, NUM: tl.constexpr, DEN: tl.constexpr, HEIGHT: tl.constexpr,
    SLABS: tl.constexpr, VALUES: tl.constexpr, CLEAR: tl.constexpr, LOG_SHARE: tl.constexpr,
):  # fmt: skip
    row, rows, first_entry, entries = _place(slabs, n_slabs, NUM, DEN, HEIGHT, SLABS)
    place = tl.arange(0, VALUES)
    inside = place < rows * DIM
    bits = tl.load(x + row * DIM + place, mask=inside, other=0)
    magnitudes = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    size = tl.where(inside, bits & 0x7FFFFFFF, -1)
    values = (rows * DIM).to(tl.int32)
    limit, left = _limit(size, tl.sum(magnitudes, 0), values, entries, LOG_SHARE)
    kept = size >= limit
    if left != entries:  # ties at the threshold: keep the first ones
        above, equal = size > limit, size == limit
        spare = entries - tl.sum(above.to(tl.int32), 0)
        kept = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= spare))
    kept = kept & (entries > 0)
    entry = out + (first_entry - 1) * 3 + tl.cumsum(kept.to(tl.int32), 0) * 3
    tl.store(entry, bits.to(tl.int16), mask=kept)
    tl.store(entry + 1, (bits >> 16).to(tl.int16), mask=kept)
    tl.store(entry + 2, place.to(tl.int16), mask=kept)
    if CLEAR:
        tl.store(x + row * DIM + place, tl.zeros_like(bits), mask=kept)


@triton.jit(do_not_specialize=["n_slabs"])
def _expand(
    packed, slabs, out, n_slabs, DIM: tl.constexpr, NUM: tl.constexpr, DEN: tl.constexpr, HEIGHT: tl.constexpr,
    SLABS: tl.constexpr, VALUES: tl.constexpr, ENTRIES: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    row, rows, first_entry, entries = _place(slabs, n_slabs, NUM, DEN, HEIGHT, SLABS)
    if not ADD:
        everything = tl.arange(0, VALUES)
        tl.store(out + row * DIM + everything, tl.zeros([VALUES], tl.float32), mask=everything < rows * DIM)
        tl.debug_barrier()  # other threads of the block overwrite these zeros
    for first in range(0, entries, ENTRIES):
        nth = first + tl.arange(0, ENTRIES)
        there = nth < entries
        entry = packed + (first_entry + nth) * 3
        low = tl.load(entry, mask=there, other=0).to(tl.int32) & 0xFFFF
        high = tl.load(entry + 1, mask=there, other=0).to(tl.int32) << 16
        place = tl.load(entry + 2, mask=there, other=0).to(tl.int32) & 0xFFFF
        value = (high | low).to(tl.float32, bitcast=True)
        target = out + row * DIM + place
        if ADD:
            value += tl.load(target, mask=there, other=0.0)
        tl.store(target, value, mask=there)


def _table(slabs: Slabs, packing: Packing, device: torch.device) -> tuple[torch.Tensor, int]:
    """The table for `_place`, and the number of blocks. The copy to the device is asynchronous."""
    blocks = (slabs.rows + packing.block_rows - 1) // packing.block_rows
    entries = compression.packed_counts(slabs.rows, packing)
    table = torch.cat([blocks.cumsum(0) - blocks, slabs.first_row, slabs.rows, entries.cumsum(0) - entries])
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    return table, int(blocks.sum())


def compress(x: torch.Tensor, slabs: Slabs, packing: Packing, clear: bool = False) -> torch.Tensor:
    """compression.compress on a GPU. `clear`: zero the selected values in `x`."""
    dim, n = x.shape[1], int(compression.packed_counts(slabs.rows, packing).sum())
    out = x.new_empty((n, ENTRY_BYTES), dtype=torch.uint8)
    if n:
        table, blocks = _table(slabs, packing, x.device)
        values = next_power_of_2(packing.block_rows * dim)
        # the search needs a share below 1
        log_share = math.log(min(0.99, packing.num / (packing.den * dim)))
        constants = dim, packing.num, packing.den, packing.block_rows, _power(slabs), values, clear, log_share
        warps = min(32, max(1, values // 1024))  # one warp sums without synchronization
        # A warp has 32 values per thread. Recomputing what does not fit in registers allows more concurrent programs.
        few_registers = {"maxnreg": 96} if warps <= 16 else {}
        launch(
            _compress, (blocks,), x.view(torch.int32), table, out.view(torch.int16), slabs.rows.shape[0], *constants,
            num_warps=warps, **few_registers,
        )  # fmt: skip
    return out


def expand(packed: torch.Tensor, out: torch.Tensor, slabs: Slabs, packing: Packing, add: bool = False) -> None:
    """compression.expand on a GPU. `add`: add to `out` instead of overwriting it."""
    if packed.shape[0] == 0 and not add:
        compression.fill_with_zeros(out, slabs)
    if packed.shape[0]:
        table, blocks = _table(slabs, packing, out.device)
        dim = out.shape[1]
        values = next_power_of_2(packing.block_rows * dim)
        most = min(1024, max(16, next_power_of_2(packing.block_rows * packing.num // packing.den + 1)))
        constants = dim, packing.num, packing.den, packing.block_rows, _power(slabs), values, most, add
        launch(
            _expand, (blocks,), packed.view(torch.int16), table, out, slabs.rows.shape[0], *constants,
            num_warps=min(8, max(1, values // 512)),
        )  # fmt: skip


def _power(slabs: Slabs) -> int:
    return max(2, next_power_of_2(slabs.rows.shape[0]))


@triton.jit
def _uniform(place, salt, PRIME: tl.constexpr):
    """compression._uniform; `salt` is derived from the launch number."""
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
    (n, dim), row_bytes = x.shape, fp8_row_bytes(x.shape[1])
    out = x.new_empty((n, row_bytes), dtype=torch.uint8)
    if n and dim:
        grid, rows, values, warps = _shape(n, row_bytes)
        # as a signed 32-bit number, so that all launches share one kernel
        salt = ((launch_number or 0) * SECOND_PRIME + 2**31) % 2**32 - 2**31
        constants = dim, row_bytes, FIRST_PRIME, launch_number is not None, rows, values
        launch(_to_fp8, grid, x.view(torch.int32), out, out.view(torch.int32), n, salt, *constants, num_warps=warps)
    return out


def from_fp8(packed: torch.Tensor, out: torch.Tensor) -> None:
    """compression.from_fp8 on a GPU; NaNs may have other bits."""
    if out.numel():
        n, dim = out.shape
        grid, rows, values, warps = _shape(n, packed.shape[1])
        constants = dim, packed.shape[1], rows, values
        launch(_from_fp8, grid, packed, packed.view(torch.int32), out, n, *constants, num_warps=warps)
