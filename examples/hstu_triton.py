"""Launch the kernels of `hstu_kernels.py`: jagged HSTU attention on a GPU. The reference is in `hstu.py`.

`offsets` is never read on the host: sizes come from shapes, and only kernels depend on lengths. `list_tiles` depends on
`offsets` alone, so a model calls it once per step for all layers.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

import hstu_kernels as kernels
from hstu import TILE, tile_capacity

BIAS_ROOM = kernels.BIAS_ROOM.value
MAX_DIM = {torch.float32: 64, torch.bfloat16: 128, torch.float16: 128}


class Blocks(NamedTuple):
    """Tile sizes of each kernel, and compile options.

    GRAIN: near and far regions begin at its multiples, also in the kernel of the queries, whose tiles must divide it.
    Otherwise a key that is far for only some queries of a tile would be missing in the gradient of the bias.
    """

    forward: dict[str, int]
    keys: dict[str, int]
    queries: dict[str, int]
    bias: dict[str, int]


HALF = Blocks(
    {"QUERIES": 128, "KEYS": 64, "NEAR_STAGES": 2, "num_warps": 4, "num_stages": 3},
    {"QUERIES": 64, "KEYS": 64, "NEAR_STAGES": 2, "num_warps": 4, "num_stages": 3, "maxnreg": 168},
    {"QUERIES": 64, "KEYS": 64, "NEAR_STAGES": 2, "num_warps": 4, "num_stages": 3, "maxnreg": 168},
    {"GRAIN": 64, "num_warps": 4, "num_stages": 3},
)
# for heads wider than 64
HALF_WIDE = Blocks(
    {"QUERIES": 128, "KEYS": 64, "NEAR_STAGES": 2, "num_warps": 8, "num_stages": 2},
    {"QUERIES": 32, "KEYS": 64, "NEAR_STAGES": 2, "num_warps": 8, "num_stages": 2},
    {"QUERIES": 64, "KEYS": 32, "NEAR_STAGES": 2, "num_warps": 4, "num_stages": 2},
    {"GRAIN": 64, "num_warps": 4, "num_stages": 1},
)
# float32 products do not use tensor cores, to keep full precision.
FULL = Blocks(
    {"QUERIES": 32, "KEYS": 32, "NEAR_STAGES": 1, "num_warps": 4, "num_stages": 1},
    {"QUERIES": 32, "KEYS": 32, "NEAR_STAGES": 1, "num_warps": 4, "num_stages": 1},
    {"QUERIES": 32, "KEYS": 32, "NEAR_STAGES": 1, "num_warps": 4, "num_stages": 1},
    {"GRAIN": 32, "num_warps": 4, "num_stages": 1},
)
# for heads wider than 32
FULL_WIDE = Blocks(
    {"QUERIES": 16, "KEYS": 16, "NEAR_STAGES": 1, "num_warps": 4, "num_stages": 1},
    {"QUERIES": 16, "KEYS": 16, "NEAR_STAGES": 1, "num_warps": 4, "num_stages": 1},
    {"QUERIES": 16, "KEYS": 16, "NEAR_STAGES": 1, "num_warps": 4, "num_stages": 1},
    {"GRAIN": 16, "num_warps": 4, "num_stages": 1},
)


def supports(q: Tensor, k: Tensor, v: Tensor) -> bool:
    most = MAX_DIM.get(q.dtype, 0)
    return q.dtype == k.dtype == v.dtype and max(q.shape[2], v.shape[2]) <= most


def _blocks(q: Tensor, v: Tensor) -> Blocks:
    dim = max(q.shape[2], v.shape[2])
    if q.dtype == torch.float32:
        return FULL if dim <= 32 else FULL_WIDE
    return HALF if dim <= 64 else HALF_WIDE


def list_tiles(offsets: Tensor, rows: int) -> Tensor:
    """Implements `hstu::tiles` of `hstu.py`."""
    sequences = offsets.shape[0] - 1
    most = tile_capacity(sequences, rows)
    tiles = offsets.new_empty((most + 1, 3), dtype=torch.int32)
    kernels.list_tiles[(max(triton.cdiv(rows, TILE), 1),)](offsets.contiguous(), tiles, sequences, most, CHUNK=256)
    return tiles


class _Call:
    """Shared arguments of the kernels of one attention call."""

    def __init__(self, inputs: tuple[Tensor, ...], tiles: Tensor, bias: Tensor, alpha: float) -> None:
        q, v = inputs[0], inputs[2]
        self.rows = tuple(x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous() for x in inputs)
        self.bias, self.tiles, self.alpha, self.heads = bias.contiguous(), tiles, alpha, q.shape[1]
        self.distances = bias.shape[1]
        # float16 cannot represent FUTURE; copies: elements per load of a thread
        expanded_type = torch.float32 if bias.dtype == torch.float16 else bias.dtype
        copies = 16 // expanded_type.itemsize
        self.expanded = self._expand(copies, expanded_type)
        if not q.is_cuda:
            arithmetic = "upcast"
        else:
            arithmetic = "approximate" if q.dtype == torch.bfloat16 else "exact"
        self.common = {"COPIES": copies, "ARITHMETIC": arithmetic}
        self.common |= {"DIM": q.shape[2], "WIDTH": max(triton.next_power_of_2(q.shape[2]), 16)}
        self.common |= {"VALUE_DIM": v.shape[2], "VALUE_WIDTH": max(triton.next_power_of_2(v.shape[2]), 16)}

    def _expand(self, copies: int, dtype: torch.dtype) -> Tensor:
        width = triton.cdiv(self.distances, TILE) * TILE + 2 * BIAS_ROOM
        out = self.bias.new_empty((2, self.heads, copies, width), dtype=dtype)
        chunk = 1024
        grid = (self.heads * copies, triton.cdiv(width, chunk), 2)
        kernels.expand_bias[grid](self.bias, out, self.distances, width, COPIES=copies, CHUNK=chunk)
        return out

    def programs(self, block: int) -> int:
        return (self.tiles.shape[0] - 1) * (TILE // block) * self.heads

    def numbers(self) -> list[Any]:
        strides = [s for x in self.rows for s in x.stride()[:2]]
        return [*strides, self.heads, self.distances, self.expanded.shape[-1], self.alpha]

    def forward(self, out: Tensor, block: dict[str, int]) -> None:
        tensors = (*self.rows, self.bias, self.expanded, self.tiles, out)
        kernels.forward[(self.programs(block["QUERIES"]),)](*tensors, *self.numbers(), **self.common, **block)

    def backward_keys(self, dk: Tensor, dv: Tensor, block: dict[str, int]) -> None:
        tensors = (*self.rows, self.bias, self.expanded, self.tiles, dk, dv)
        kernels.backward_keys[(self.programs(block["KEYS"]),)](*tensors, *self.numbers(), **self.common, **block)

    def backward_queries(self, dq: Tensor, block: dict[str, int], grain: int) -> Tensor:
        """Also returns the contribution of far keys to the gradient of the last bias, per program."""
        assert grain % block["QUERIES"] == 0, (grain, block)
        programs = self.programs(block["QUERIES"])
        sums = torch.empty(programs, device=dq.device, dtype=torch.float32)
        tensors = (*self.rows, self.bias, self.expanded, self.tiles, dq, sums)
        kernels.backward_queries[(programs,)](*tensors, *self.numbers(), **self.common, **block, GRAIN=grain)
        return sums

    def backward_bias(self, far_sums: Tensor, out: Tensor, block: dict[str, int]) -> None:
        grain = block["GRAIN"]
        offsets = (self.distances + grain - 3) // grain + 1 if self.distances > 1 else 1
        parts = _programs_at_once(self.tiles.device) // (self.heads * offsets)
        parts = max(min(parts, self.programs(grain) // self.heads), 1)
        sums = torch.empty((parts, self.heads, offsets, grain * grain + 1), device=out.device, dtype=torch.float32)
        tiles, lasts = sums.view(-1)[: -sums[..., 0].numel()], sums.view(-1)[-sums[..., 0].numel() :]
        tensors = (*self.rows, self.expanded, self.tiles, tiles, lasts)
        kernels.backward_bias[(lasts.numel(),)](*tensors, *self.numbers(), offsets, **self.common, **block)
        sizes = (parts, far_sums.numel() // self.heads, self.heads, offsets, self.distances)
        grid = (self.heads, triton.cdiv(self.distances, 16))
        constants = {"GRAIN": grain, "AT_ONCE": 8, "CHUNK": 1024, "num_warps": 8}
        kernels.reduce_bias[grid](tiles, lasts, far_sums, out, *sizes, **constants)


@cache
def _programs_at_once(device: torch.device) -> int:
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 24


def attention(
    q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, bias: Tensor, alpha: float, blocks: Blocks | None = None,
    padded: bool = False,
) -> Tensor:  # fmt: skip
    """padded: there are rows outside all tiles; they are set to 0."""
    out = v.new_zeros(v.shape) if padded else v.new_empty(v.shape)
    if out.numel():
        blocks = blocks or _blocks(q, v)
        _Call((q, k, v), tiles, bias, alpha).forward(out, blocks.forward)
    return out


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tensor,
    bias: Tensor,
    alpha: float,
    blocks: Blocks | None = None,
    padded: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and bias; padded: see `attention`."""
    if not q.numel():
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), bias.new_zeros(bias.shape)
    dq, dk, dv = (x.new_zeros(x.shape) if padded else x.new_empty(x.shape) for x in (q, k, v))
    d_bias = bias.new_empty(bias.shape)
    blocks = blocks or _blocks(q, v)
    call = _Call((q, k, v, grad), tiles, bias, alpha)
    call.backward_keys(dk, dv, blocks.keys)
    far = call.backward_queries(dq, blocks.queries, blocks.bias["GRAIN"])
    call.backward_bias(far, d_bias, blocks.bias)
    return dq, dk, dv, d_bias
