"""PerSRec's attention on a GPU: the kernels of `hstu_kernels.py` on segments, then those of `persrec_kernels.py`, which
add the tokens of earlier segments in place. The reference is in `persrec_attention.py`.

No host sync. Unused rows at the end are 0, in the result and in the gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

import hstu_triton
import persrec_kernels as kernels
from hstu import TILE

PARTS = 16  # partial sums of the bias gradient


def _block(q: Tensor, v: Tensor) -> dict[str, int]:
    wide = max(q.shape[2], v.shape[2]) > (32 if q.dtype == torch.float32 else 64)
    return {"QUERIES": 32 if wide else 64, "KEYS": 16, "num_warps": 4, "num_stages": 2}


class _Call:
    """Shared arguments of the kernels of one attention call."""

    def __init__(
        self, inputs: tuple[Tensor, ...], rows: Tensor, bias: Tensor, alpha: float, segments: int, tokens: int
    ) -> None:
        q, v = inputs[0], inputs[2]
        self.given = tuple(x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous() for x in inputs)
        self.bias, self.rows, self.heads = bias.contiguous(), rows.contiguous(), q.shape[1]
        strides = [s for x in self.given for s in x.stride()[:2]]
        self.numbers: list[Any] = [*strides, self.heads, bias.shape[1], alpha]
        if not q.is_cuda:
            arithmetic = "upcast"
        else:
            arithmetic = "approximate" if q.dtype == torch.bfloat16 else "exact"
        self.block = _block(q, v)
        self.segmented = {"SEGMENTS": segments, "TOKENS": tokens}
        self.common = {"ARITHMETIC": arithmetic, **self.segmented, **self.block}
        self.common |= {"DIM": q.shape[2], "WIDTH": max(triton.next_power_of_2(q.shape[2]), 16)}
        self.common |= {"VALUE_DIM": v.shape[2], "VALUE_WIDTH": max(triton.next_power_of_2(v.shape[2]), 16)}
        self.histories = (rows.shape[0] - 1) // (segments + 1)

    def programs(self, tiles: Tensor) -> tuple[int]:
        return ((tiles.shape[0] - 1) * (TILE // self.block["QUERIES"]) * self.heads,)

    def token_programs(self) -> tuple[int]:
        blocks = triton.cdiv(self.segmented["TOKENS"], self.block["KEYS"])
        return (self.histories * self.segmented["SEGMENTS"] * blocks * self.heads,)

    def bias_gradient(self, slopes: Tensor) -> Tensor:
        heads, count, each = slopes.shape
        columns, distances = self.histories * each, self.bias.shape[1]
        parts = min(PARTS, columns)
        sums = torch.empty((parts, heads, distances), device=slopes.device, dtype=torch.float32)
        grid = (parts, heads, triton.cdiv(distances, 128))
        numbers = (distances, count, columns, parts)
        kernels.backward_bias[grid](slopes, self.rows, sums, *numbers, **self.segmented, CHUNK=128)
        return sums.sum(0)


def attention(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, number: Tensor, bias: Tensor, alpha: float, segments: int,
    tokens: int, tiles: Tensor,
) -> Tensor:  # fmt: skip
    out = hstu_triton.attention(q, k, v, tiles, bias, alpha, padded=True)
    if out.numel():
        call = _Call((q, k, v), rows, bias, alpha, segments, tokens)
        tensors = (*call.given, call.bias, tiles, call.rows, number, out)
        kernels.forward[call.programs(tiles)](*tensors, *call.numbers, **call.common)
    return out


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, number: Tensor, bias: Tensor, alpha: float,
    segments: int, tokens: int, tiles: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and bias."""
    dq, dk, dv, d_bias = hstu_triton.attention_backward(grad, q, k, v, tiles, bias, alpha, padded=True)
    if q.numel():
        call = _Call((q, k, v, grad), rows, bias, alpha, segments, tokens)
        slopes = torch.empty((q.shape[1], q.shape[0], segments * tokens), device=q.device, dtype=torch.float32)
        tensors = (*call.given, call.bias, tiles, call.rows, number, dq, slopes)
        kernels.backward_queries[call.programs(tiles)](*tensors, *call.numbers, q.shape[0], **call.common)
        tensors = (*call.given, call.bias, call.rows, number, dk, dv)
        kernels.backward_keys[call.token_programs()](*tensors, *call.numbers, **call.common)
        d_bias = (d_bias + call.bias_gradient(slopes)).to(bias.dtype)
    return dq, dk, dv, d_bias
