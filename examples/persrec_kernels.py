"""Triton kernels for the contribution of earlier segments' tokens to PerSRec's attention. `persrec_triton.py` launches
them after those of `hstu_kernels.py`, which handle the segments themselves.

The loops in `persrec_attention.py` are the reference. `rows` [histories (SEGMENTS + 1) + 1]: the first row of each
segment; `number`: the segment of each row; `tiles`: of the segments. A history's tokens are columns, ordered by
segment. There are no atomics, and each sum has a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hstu_kernels import FUTURE, _block, _dot, _product, _rows, _silu, _silu_and_slope


@triton.jit
def _columns(rows, history, column, SEGMENTS: tl.constexpr, TOKENS: tl.constexpr):
    """Rows of these tokens of a history, and whether they exist."""
    segment = column // TOKENS
    at = rows + history * (SEGMENTS + 1) + segment
    begin = tl.load(at, mask=segment < SEGMENTS, other=0)
    end = tl.load(at + 1, mask=segment < SEGMENTS, other=0)
    return end - TOKENS + column % TOKENS, end > begin


@triton.jit
def _gather(x, place, there, stride, DIM: tl.constexpr, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)[None, :]
    return tl.load(x + place[:, None] * stride + column, mask=there[:, None] & (column < DIM), other=0.0)


@triton.jit
def _half_bias(bias, head, distance, distances):
    nearest = tl.minimum(tl.maximum(distance, 0), distances - 1)
    return 0.5 * tl.load(bias + head * distances + nearest).to(tl.float32)


@triton.jit
def _add(x, first, stride, length, value, ROWS: tl.constexpr, DIM: tl.constexpr):
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, value.shape[1])[None, :]
    at, here = x + tl.cast(first, tl.int64) * stride + (row * stride + column), (row < length - first) & (column < DIM)
    tl.store(at, (tl.load(at, mask=here, other=0.0).to(tl.float32) + value).to(x.dtype.element_ty), mask=here)


@triton.jit
def _queries(tiles, rows, number, place, SEGMENTS: tl.constexpr, QUERIES: tl.constexpr):
    """The block of queries: start and length of its segment, its first row in it, its history, and the number of
    earlier segments to attend to (0 without tokens)."""
    start, length, first = _block(tiles, place, QUERIES, False)
    mine = tl.load(number + start, mask=first < length, other=0)
    history = mine // (SEGMENTS + 1)
    at = rows + history * (SEGMENTS + 1)
    some = (first < length) & (tl.load(at + 1) > tl.load(at))
    return start, length, first, history, tl.where(some, mine % (SEGMENTS + 1), 0).to(tl.int32)


@triton.jit(do_not_specialize=["heads", "distances"])
def forward(
    q, k, v, bias, tiles, rows, number, out, q_row, q_head, k_row, k_head, v_row, v_head, heads, distances, alpha,
    DIM: tl.constexpr, WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    ARITHMETIC: tl.constexpr, SEGMENTS: tl.constexpr, TOKENS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    head = (tl.program_id(0) % heads).to(tl.int64)
    start, length, first, history, before = _queries(
        tiles, rows, number, tl.program_id(0) // heads, SEGMENTS, QUERIES
    )
    if before == 0:
        return
    q_tile = _rows(q + start * q_row + head * q_head, first, q_row, length, QUERIES, DIM, WIDTH, True)
    row = start + first + tl.arange(0, QUERIES)
    total = tl.zeros((QUERIES, VALUE_WIDTH), tl.float32)
    for at in range(0, before * TOKENS, KEYS):
        column = at + tl.arange(0, KEYS)
        place, there = _columns(rows, history, column, SEGMENTS, TOKENS)
        there = there & (column < before * TOKENS)
        half = _product(q_tile, _gather(k + head * k_head, place, there, k_row, DIM, WIDTH), ARITHMETIC) * (0.5 * alpha)
        half += _half_bias(bias, head, row[:, None] - place[None, :], distances)
        half = tl.where(there[None, :], half, FUTURE)
        v_tile = _gather(v + head * v_head, place, there, v_row, VALUE_DIM, VALUE_WIDTH)
        total = _dot(_silu(half, ARITHMETIC).to(v_tile.dtype), v_tile, total, ARITHMETIC)
    out += (start * heads + head) * VALUE_DIM
    _add(out, first, heads * VALUE_DIM, length, total / length, QUERIES, VALUE_DIM)


@triton.jit(do_not_specialize=["heads", "distances", "count"])
def backward_queries(
    q, k, v, grad, bias, tiles, rows, number, dq, slopes,
    q_row, q_head, k_row, k_head, v_row, v_head, grad_row, grad_head, heads, distances, alpha, count,
    DIM: tl.constexpr, WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    ARITHMETIC: tl.constexpr, SEGMENTS: tl.constexpr, TOKENS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Also writes slopes [heads, count rows, SEGMENTS TOKENS], the gradients of scores, for the bias."""
    head = (tl.program_id(0) % heads).to(tl.int64)
    start, length, first, history, before = _queries(
        tiles, rows, number, tl.program_id(0) // heads, SEGMENTS, QUERIES
    )
    if before == 0:
        return
    q_tile = _rows(q + start * q_row + head * q_head, first, q_row, length, QUERIES, DIM, WIDTH, True)
    grad += start * grad_row + head * grad_head
    g_tile = _rows(grad, first, grad_row, length, QUERIES, VALUE_DIM, VALUE_WIDTH, True)
    within = first + tl.arange(0, QUERIES)
    row = start + within
    total = tl.zeros((QUERIES, WIDTH), tl.float32)
    for at in range(0, before * TOKENS, KEYS):
        column = at + tl.arange(0, KEYS)
        place, there = _columns(rows, history, column, SEGMENTS, TOKENS)
        there = there & (column < before * TOKENS)
        k_tile = _gather(k + head * k_head, place, there, k_row, DIM, WIDTH)
        half = _product(q_tile, k_tile, ARITHMETIC) * (0.5 * alpha)
        half += _half_bias(bias, head, row[:, None] - place[None, :], distances)
        _, slope = _silu_and_slope(tl.where(there[None, :], half, FUTURE), ARITHMETIC)
        v_tile = _gather(v + head * v_head, place, there, v_row, VALUE_DIM, VALUE_WIDTH)
        slope *= _product(g_tile, v_tile, ARITHMETIC)
        total = _dot(slope.to(k_tile.dtype), k_tile, total, ARITHMETIC)
        to = slopes + (head * count + row[:, None]) * (SEGMENTS * TOKENS) + column[None, :]
        tl.store(to, slope / length, mask=(within < length)[:, None] & (column < before * TOKENS)[None, :])
    dq += (start * heads + head) * DIM
    _add(dq, first, heads * DIM, length, total * (alpha / length), QUERIES, DIM)


@triton.jit(do_not_specialize=["heads", "distances"])
def backward_keys(
    q, k, v, grad, bias, rows, number, dk, dv,
    q_row, q_head, k_row, k_head, v_row, v_head, grad_row, grad_head, heads, distances, alpha,
    DIM: tl.constexpr, WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    ARITHMETIC: tl.constexpr, SEGMENTS: tl.constexpr, TOKENS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """A program handles up to KEYS tokens of one segment, and iterates over all later rows of the history."""
    BLOCKS: tl.constexpr = (TOKENS + KEYS - 1) // KEYS
    head = (tl.program_id(0) % heads).to(tl.int64)
    which = tl.program_id(0) // heads
    history, part = (which // BLOCKS // SEGMENTS).to(tl.int64), which // BLOCKS % SEGMENTS
    at = rows + history * (SEGMENTS + 1) + part
    begin, end = tl.load(at), tl.load(at + 1)
    stop = tl.load(rows + (history + 1) * (SEGMENTS + 1))
    if end <= begin:
        return
    first = end - TOKENS + which % BLOCKS * KEYS
    place = first + tl.arange(0, KEYS)
    k_tile = _rows(k + head * k_head, first, k_row, end, KEYS, DIM, WIDTH, True)
    v_tile = _rows(v + head * v_head, first, v_row, end, KEYS, VALUE_DIM, VALUE_WIDTH, True)
    dk_tile, dv_tile = tl.zeros(k_tile.shape, tl.float32), tl.zeros(v_tile.shape, tl.float32)
    for at_row in range(end, stop, QUERIES):
        row = at_row + tl.arange(0, QUERIES)
        q_tile = _rows(q + head * q_head, at_row, q_row, stop, QUERIES, DIM, WIDTH, True)
        g_tile = _rows(grad + head * grad_head, at_row, grad_row, stop, QUERIES, VALUE_DIM, VALUE_WIDTH, True)
        segment = tl.load(number + row, mask=row < stop, other=0)
        size = tl.load(rows + segment + 1, mask=row < stop, other=1) - tl.load(rows + segment, mask=row < stop, other=0)
        share = tl.where(row < stop, 1.0 / size, 0.0)[None, :]
        half = _product(k_tile, q_tile, ARITHMETIC) * (0.5 * alpha)
        half += _half_bias(bias, head, row[None, :] - place[:, None], distances)
        score, slope = _silu_and_slope(half, ARITHMETIC)
        dv_tile = _dot((score * share).to(g_tile.dtype), g_tile, dv_tile, ARITHMETIC)
        slope *= _product(v_tile, g_tile, ARITHMETIC) * share
        dk_tile = _dot(slope.to(q_tile.dtype), q_tile, dk_tile, ARITHMETIC)
    _add(dk + head * DIM, first, heads * DIM, end, dk_tile * alpha, KEYS, DIM)
    _add(dv + head * VALUE_DIM, first, heads * VALUE_DIM, end, dv_tile, KEYS, VALUE_DIM)


@triton.jit(do_not_specialize=["distances", "count", "columns", "parts"])
def backward_bias(
    slopes, rows, out, distances, count, columns, parts, SEGMENTS: tl.constexpr, TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """out [parts, heads, distances]: sums by distance of every `parts`-th token of all histories, `columns` in all."""
    EACH: tl.constexpr = SEGMENTS * TOKENS
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    chunk = tl.arange(0, CHUNK)
    distance = tl.program_id(2) * CHUNK + chunk
    near, last = tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32)
    for number in range(part, columns, parts):
        history, column = tl.cast(number // EACH, tl.int64), number % EACH
        place, there = _columns(rows, history, column, SEGMENTS, TOKENS)
        end = place - column % TOKENS + TOKENS
        stop = tl.where(there, tl.load(rows + (history + 1) * (SEGMENTS + 1)), 0)
        row = place + distance
        here = (row >= end) & (row < stop) & (distance < distances - 1)
        near += tl.load(slopes + (head * count + row) * EACH + column, mask=here, other=0.0)
        if tl.program_id(2) == 0:
            for first in range(tl.maximum(place + distances - 1, end), stop, CHUNK):
                far = first + chunk
                last += tl.load(slopes + (head * count + far) * EACH + column, mask=far < stop, other=0.0)
    out += (part * tl.num_programs(1) + head) * distances
    tl.store(out + distance, near, mask=distance < distances - 1)
    if tl.program_id(2) == 0:
        tl.store(out + distances - 1, tl.sum(last))
