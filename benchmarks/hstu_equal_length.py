"""HSTU attention, fused, forward and backward, in Triton: a workload of the benchmarks, no part of the package.

    out = (silu(q k^T * scale) * causal / length) v        scale = dim ** -0.5, no softmax

q, k and v are contiguous [batch, heads, length, dim] of one type, all sequences of the same length, dim a power of two
from 16. Products are accumulated in float32; silu's argument is computed again in the backward. Tiles above the
diagonal are never touched. One kernel sums the gradients of a tile of keys over the queries, another those of a tile
of queries over the keys, so nothing is added atomically and the bits are the same every time. No jagged sequences.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

# QUERIES and KEYS are the sides of a tile; that of the tile which a program keeps is a multiple of the other one.
FORWARD = {"QUERIES": 128, "KEYS": 64, "num_warps": 4, "num_stages": 3}
BACKWARD_KEYS = {"QUERIES": 32, "KEYS": 64, "num_warps": 4, "num_stages": 3}
BACKWARD_QUERIES = {"QUERIES": 64, "KEYS": 64, "num_warps": 4, "num_stages": 2}


@triton.jit
def _tanh_approximate(x):
    """One instruction, good to about 2**-11, which bfloat16 does not see."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _sigmoid(half, APPROXIMATE: tl.constexpr):
    """Of 2 half. Not by 1 + tanh where float32 counts: for very negative arguments that has no digits left."""
    if APPROXIMATE:
        return 0.5 + 0.5 * _tanh_approximate(half)
    return 1.0 / (1.0 + tl.exp(-2.0 * half))


@triton.jit
def _silu(half, APPROXIMATE: tl.constexpr):
    """Of 2 half."""
    if APPROXIMATE:
        return half + half * _tanh_approximate(half)
    return 2.0 * half * _sigmoid(half, False)


@triton.jit
def _rows(x, row, length, DIM: tl.constexpr, WHOLE: tl.constexpr):
    """Rows of one sequence, zero behind its end."""
    at = x + row[:, None] * DIM + tl.arange(0, DIM)[None, :]
    return tl.load(at) if WHOLE else tl.load(at, mask=row[:, None] < length, other=0.0)


@triton.jit
def _put(x, row, value, length, DIM: tl.constexpr, WHOLE: tl.constexpr):
    at = x + row[:, None] * DIM + tl.arange(0, DIM)[None, :]
    value = value.to(x.dtype.element_ty)
    if WHOLE:
        tl.store(at, value)
    else:
        tl.store(at, value, mask=row[:, None] < length)


@triton.jit
def _out_of_tiles(
    total, q, k, v, query, first, end, length, half_scale,
    DIM: tl.constexpr, KEYS: tl.constexpr, WHOLE: tl.constexpr, APPROXIMATE: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    for start in range(first, end, KEYS):
        key = start + tl.arange(0, KEYS)
        half = tl.dot(q, tl.trans(_rows(k, key, length, DIM, WHOLE))) * half_scale
        score = _silu(half, APPROXIMATE)
        if DIAGONAL:
            score = tl.where(query[:, None] >= key[None, :], score, 0.0)
        total = tl.dot(score.to(v.dtype.element_ty), _rows(v, key, length, DIM, WHOLE), total)
    return total


@triton.jit
def _forward(
    q, k, v, out, length, scale,
    DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WHOLE: tl.constexpr, APPROXIMATE: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64) * length * DIM
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * QUERIES  # the longest start first
    query = first + tl.arange(0, QUERIES)
    mine = _rows(q + sequence, query, length, DIM, WHOLE)
    total = tl.zeros((QUERIES, DIM), tl.float32)
    k, v, half = k + sequence, v + sequence, 0.5 * scale
    total = _out_of_tiles(total, mine, k, v, query, 0, first, length, half, DIM, KEYS, WHOLE, APPROXIMATE, False)
    end = tl.minimum(first + QUERIES, length)
    total = _out_of_tiles(total, mine, k, v, query, first, end, length, half, DIM, KEYS, WHOLE, APPROXIMATE, True)
    _put(out + sequence, query, total / length, length, DIM, WHOLE)


@triton.jit
def _silu_and_slope(half, APPROXIMATE: tl.constexpr):
    """silu and its derivative at 2 half."""
    sigmoid = _sigmoid(half, APPROXIMATE)
    score = 2.0 * half * sigmoid
    return score, sigmoid * (1.0 + 2.0 * half - score)


@triton.jit
def _key_gradients_of_tiles(
    dk, dv, q, k, v, grad, key, first, end, length, half_scale,
    DIM: tl.constexpr, QUERIES: tl.constexpr, WHOLE: tl.constexpr, APPROXIMATE: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    for start in range(first, end, QUERIES):
        query = start + tl.arange(0, QUERIES)
        q_tile, grad_tile = _rows(q, query, length, DIM, WHOLE), _rows(grad, query, length, DIM, WHOLE)
        score, slope = _silu_and_slope(tl.dot(k, tl.trans(q_tile)) * half_scale, APPROXIMATE)  # [keys, queries]
        if DIAGONAL:
            score = tl.where(key[:, None] <= query[None, :], score, 0.0)
            slope = tl.where(key[:, None] <= query[None, :], slope, 0.0)
        dv = tl.dot(score.to(grad_tile.dtype), grad_tile, dv)
        slope *= tl.dot(v, tl.trans(grad_tile))
        dk = tl.dot(slope.to(q_tile.dtype), q_tile, dk)
    return dk, dv


@triton.jit
def _backward_keys(
    q, k, v, grad, dk, dv, length, scale,
    DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WHOLE: tl.constexpr, APPROXIMATE: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64) * length * DIM
    first = tl.program_id(1) * KEYS
    key = first + tl.arange(0, KEYS)
    k_tile, v_tile = _rows(k + sequence, key, length, DIM, WHOLE), _rows(v + sequence, key, length, DIM, WHOLE)
    dk_tile, dv_tile = tl.zeros((KEYS, DIM), tl.float32), tl.zeros((KEYS, DIM), tl.float32)
    q, grad, half = q + sequence, grad + sequence, 0.5 * scale
    end = tl.minimum(first + KEYS, length)
    dk_tile, dv_tile = _key_gradients_of_tiles(
        dk_tile, dv_tile, q, k_tile, v_tile, grad, key, first, end, length, half,
        DIM, QUERIES, WHOLE, APPROXIMATE, True,
    )  # fmt: skip
    dk_tile, dv_tile = _key_gradients_of_tiles(
        dk_tile, dv_tile, q, k_tile, v_tile, grad, key, first + KEYS, length, length, half,
        DIM, QUERIES, WHOLE, APPROXIMATE, False,
    )  # fmt: skip
    _put(dk + sequence, key, dk_tile * (scale / length), length, DIM, WHOLE)
    _put(dv + sequence, key, dv_tile / length, length, DIM, WHOLE)


@triton.jit
def _query_gradients_of_tiles(
    dq, q, k, v, grad, query, first, end, length, half_scale,
    DIM: tl.constexpr, KEYS: tl.constexpr, WHOLE: tl.constexpr, APPROXIMATE: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    for start in range(first, end, KEYS):
        key = start + tl.arange(0, KEYS)
        k_tile, v_tile = _rows(k, key, length, DIM, WHOLE), _rows(v, key, length, DIM, WHOLE)
        _, slope = _silu_and_slope(tl.dot(q, tl.trans(k_tile)) * half_scale, APPROXIMATE)
        slope *= tl.dot(grad, tl.trans(v_tile))
        if DIAGONAL:
            slope = tl.where(query[:, None] >= key[None, :], slope, 0.0)
        dq = tl.dot(slope.to(k_tile.dtype), k_tile, dq)
    return dq


@triton.jit
def _backward_queries(
    q, k, v, grad, dq, length, scale,
    DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WHOLE: tl.constexpr, APPROXIMATE: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64) * length * DIM
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * QUERIES
    query = first + tl.arange(0, QUERIES)
    q_tile, g_tile = _rows(q + sequence, query, length, DIM, WHOLE), _rows(grad + sequence, query, length, DIM, WHOLE)
    dq_tile = tl.zeros((QUERIES, DIM), tl.float32)
    k, v, half = k + sequence, v + sequence, 0.5 * scale
    dq_tile = _query_gradients_of_tiles(
        dq_tile, q_tile, k, v, g_tile, query, 0, first, length, half, DIM, KEYS, WHOLE, APPROXIMATE, False
    )
    end = tl.minimum(first + QUERIES, length)
    dq_tile = _query_gradients_of_tiles(
        dq_tile, q_tile, k, v, g_tile, query, first, end, length, half, DIM, KEYS, WHOLE, APPROXIMATE, True
    )
    _put(dq + sequence, query, dq_tile * (scale / length), length, DIM, WHOLE)


def launch(kernel: Any, tile: dict[str, int], kept: str, *tensors: torch.Tensor) -> None:
    """One program for each sequence and each tile of the side named `kept`."""
    batch, heads, length, dim = tensors[0].shape
    whole = length % max(tile["QUERIES"], tile["KEYS"]) == 0
    grid = (batch * heads, triton.cdiv(length, tile[kept]))
    # float32 is for checks: it keeps its precision in silu, though not in the products of a GPU
    approximate = tensors[0].is_cuda and tensors[0].dtype != torch.float32
    kernel[grid](*tensors, length, dim**-0.5, DIM=dim, WHOLE=whole, APPROXIMATE=approximate, **tile)


class _HstuAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        out = torch.empty_like(q)
        launch(_forward, FORWARD, "QUERIES", q, k, v, out)
        ctx.save_for_backward(q, k, v)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v = ctx.saved_tensors
        grad, dq, dk, dv = grad.contiguous(), torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        launch(_backward_keys, BACKWARD_KEYS, "KEYS", q, k, v, grad, dk, dv)
        launch(_backward_queries, BACKWARD_QUERIES, "QUERIES", q, k, v, grad, dq)
        return dq, dk, dv


def hstu_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    dim = q.shape[-1]
    same = q.shape == k.shape == v.shape and q.dtype == k.dtype == v.dtype
    if q.dim() != 4 or not same or not all(x.is_contiguous() for x in (q, k, v)) or dim < 16 or dim & (dim - 1):
        found = ", ".join(f"{x.dtype} {list(x.shape)} strides {x.stride()}" for x in (q, k, v))
        raise ValueError(
            "freescale: hstu_attention expected q, k, v contiguous, [batch, heads, length, dim] of one type, "
            f"dim a power of two from 16, found {found}"
        )
    return _HstuAttention.apply(q, k, v)


def hstu_attention_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """What hstu_attention computes, in the type of its inputs, with the whole matrix of scores."""
    length, dim = q.shape[-2:]
    causal = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    return (torch.nn.functional.silu(q @ k.transpose(-1, -2) * dim**-0.5) * causal / length) @ v
