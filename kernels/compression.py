"""Row compression for exchanges. These definitions decide what is correct; row_packing.py uses them, or on a GPU the
kernels of compression_triton.py.

A *packing* is a string in the graph:

    largest:NUM/DEN:ROWS   of n rows to a peer, the n * NUM // DEN values of largest magnitude. Each is an *entry* of
                           6 bytes: a float32 and its position. The other values arrive as zeros
    fp16, bf16             every value, rounded to nearest
    fp8                    every value as e4m3, with one float32 scale per row; rounded to nearest
    fp8:stochastic         rounded to either neighbor, with the probability that makes the expected value exact. It
                           depends only on the value's position and the launch number, so runs are reproducible
    fp16:codec, bf16:codec:SCALE
                           as TorchRec's codecs: every value is multiplied by the scale, clamped and rounded, also a
                           rank's own rows, which are not sent

The data for one peer is its *slab*; both sides know its size from the plan's counts. `largest` cuts it into blocks of
ROWS rows. The block from row a to row b has b * NUM // DEN - a * NUM // DEN entries, in the order of their positions;
ties go to the first one. Infinities and NaN count as the largest, so a failure stays visible. An entry is three int16:
the two halves of the value, and its position in the block as an unsigned number.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

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
    magnitude to 448. A row with an infinity or NaN arrives as NaN."""
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


ENTRY_BYTES = 6
MAX_BLOCK = 65536  # values per block: positions are 16 bits
_PLACES = MAX_BLOCK - 1
NARROW_TYPES = ("fp16", "bf16", "fp8")


@dataclass(frozen=True)
class Packing:
    kind: str  # "largest", "fp16", "bf16" or "fp8"
    num: int = 1
    den: int = 1
    block_rows: int = 1
    stochastic: bool = False  # fp8
    codec: bool = False  # fp16 and bf16 as in TorchRec's quantized communication,
    scale: float | None = None  # with its loss scale

    def __str__(self) -> str:
        if self.kind == "largest":
            return f"largest:{self.num}/{self.den}:{self.block_rows}"
        if self.codec:
            return f"{self.kind}:codec" + ("" if self.scale is None else f":{self.scale!r}")
        return f"{self.kind}:stochastic" if self.stochastic else self.kind


@cache
def parse(text: str) -> Packing:
    kind, *rest = text.split(":")
    if kind == "largest" and len(rest) == 2:
        num, den = map(int, rest[0].split("/"))
        return Packing(kind, num, den, int(rest[1]))
    if kind in WIDE_TYPES and rest[:1] == ["codec"] and len(rest) <= 2:
        return Packing(kind, codec=True, scale=float(rest[1]) if rest[1:] else None)
    if kind in NARROW_TYPES and (not rest or text == "fp8:stochastic"):
        return Packing(kind, stochastic=bool(rest))
    raise ValueError(f"freescale: unknown packing {text!r}")


def encode(x: torch.Tensor, packing: Packing) -> torch.Tensor:
    """As FBGEMM's QuantizedCommCodec.encode, to the bit."""
    dtype = WIDE_TYPES[packing.kind]
    if packing.scale is not None:
        x = packing.scale * x
    return x.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)


def decode(x: torch.Tensor, packing: Packing) -> torch.Tensor:
    """As its `decode`."""
    return (x if packing.scale is None else x / packing.scale).float()


def row_bytes(packing: Packing, dim: int) -> int:
    """Bytes of a packed row; of one entry for `largest`."""
    if packing.kind == "largest":
        return ENTRY_BYTES
    return fp8_row_bytes(dim) if packing.kind == "fp8" else 2 * dim


def packed_counts(counts: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Packed rows per peer, from rows per peer."""
    return counts * packing.num // packing.den if packing.kind == "largest" else counts


@dataclass(frozen=True)
class Slabs:
    """The rows to or from each peer, as int64 CPU tensors."""

    first_row: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def of(cls, counts: torch.Tensor, own: int | None = None) -> Slabs:
        """Consecutive slabs. The slab of rank `own` is empty."""
        first_row = counts.cumsum(0) - counts
        if own is not None:
            counts = counts.clone()
            counts[own] = 0
        return cls(first_row, counts)


# ---- the largest values ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Blocks:
    first_row: torch.Tensor
    rows: torch.Tensor
    entries: torch.Tensor


def blocks_of(slabs: Slabs, packing: Packing) -> Blocks:
    counts, height = slabs.rows, packing.block_rows
    n_blocks = (counts + height - 1) // height
    slab = torch.repeat_interleave(n_blocks)
    begin = (torch.arange(slab.shape[0]) - (n_blocks.cumsum(0) - n_blocks)[slab]) * height  # in the slab
    end = torch.minimum(begin + height, counts[slab])
    entries = packed_counts(end, packing) - packed_counts(begin, packing)
    return Blocks(slabs.first_row[slab] + begin, end - begin, entries)


def compress(x: torch.Tensor, slabs: Slabs, packing: Packing) -> torch.Tensor:
    """Return the entries as uint8 [entries, 6]."""
    blocks, dim = blocks_of(slabs, packing), x.shape[1]
    total, most = int(blocks.entries.sum()), int(blocks.entries.max()) if blocks.entries.numel() else 0
    if total == 0:
        return x.new_empty((0, ENTRY_BYTES), dtype=torch.uint8)
    flat, place = x.reshape(-1), torch.arange(packing.block_rows * dim, device=x.device)
    first, sizes, entries = ((t * f).to(x.device)[:, None] for t, f in
                             ((blocks.first_row, dim), (blocks.rows, dim), (blocks.entries, 1)))  # fmt: skip
    inside = place < sizes
    bits = flat.view(torch.int32)[torch.where(inside, first + place, 0)] & 0x7FFFFFFF
    # Magnitude and position in one number, so all keys are distinct.
    key = torch.where(inside, (bits.long() << 16) | (_PLACES - place), -1)
    chosen = _PLACES - (key.topk(most, dim=1).values & _PLACES)
    kept = torch.arange(most, device=x.device) < entries
    places = torch.where(kept, chosen, MAX_BLOCK).sort(dim=1).values
    values = flat[(first + places)[kept]]
    low, high = values.view(torch.int16).view(-1, 2).unbind(1)
    return torch.stack([low, high, _as_int16(places[kept])], dim=1).view(torch.uint8)


def _as_int16(place: torch.Tensor) -> torch.Tensor:
    return torch.where(place < 32768, place, place - 65536).to(torch.int16)


def entries_of(packed: torch.Tensor, slabs: Slabs, packing: Packing, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the entries' positions among the values of all slabs, and their values."""
    blocks, halves = blocks_of(slabs, packing), packed.view(torch.int16)
    first = torch.repeat_interleave(blocks.first_row * dim, blocks.entries).to(packed.device)
    return first + (halves[:, 2].long() & 0xFFFF), halves[:, :2].reshape(-1).view(torch.float32)


def expand(packed: torch.Tensor, out: torch.Tensor, slabs: Slabs, packing: Packing) -> None:
    """Write the rows that compress() read, with zeros for the values that were not sent."""
    fill_with_zeros(out, slabs)
    places, values = entries_of(packed, slabs, packing, out.shape[1])
    out.view(-1)[places] = values


def fill_with_zeros(out: torch.Tensor, slabs: Slabs) -> None:
    for first, rows in zip(slabs.first_row.tolist(), slabs.rows.tolist(), strict=True):
        out[first : first + rows] = 0.0
