"""Triton kernels of jagged HSTU attention, forward and backward. `hstu_triton.py` launches them.

The loops in `hstu.py` are the reference. Tensors are [N, heads, dim] with a contiguous last dimension; sequences are
concatenated without padding. Products are accumulated in float32, and silu's argument is recomputed in backward.

A program handles a block of queries (or keys) of one sequence and one head, which it reads from the list of tiles on
the device. It keeps its block and iterates over the keys (or queries) on or below the diagonal, in two loops:

* far ones, at `distances - 1` or more from the whole block: they share the last bias, a scalar, and lie inside the
  sequence, so there is no mask;
* near ones, whose biases are loaded as a tile, which also masks future keys.

Sums have a fixed order without atomics, so results are deterministic. Positions inside a tile are 32-bit, tile
addresses 64-bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

import hstu

TILE = tl.constexpr(hstu.TILE)  # blocks divide it
# Half the bias of a future key: silu and its derivative are then 0, regardless of the product.
FUTURE = tl.constexpr(-1e30)
BIAS_ROOM = tl.constexpr(512)  # padding of the expanded bias before distance 0 and after the last one


@triton.jit
def _dot(a, b, total, ARITHMETIC: tl.constexpr):
    if ARITHMETIC == "upcast":  # Triton's interpreter has no bfloat16 products; float32 ones are exact
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _product(a, b, ARITHMETIC: tl.constexpr):
    """a b^T in float32."""
    return _dot(a, tl.trans(b), tl.zeros((a.shape[0], b.shape[0]), tl.float32), ARITHMETIC)


@triton.jit
def _tanh_approximate(x):
    """One instruction, with an error of about 2**-11, less than bfloat16's precision."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _sigmoid(half):
    """Sigmoid of 2 half. For float32, not via 1 + tanh, which cancels for very negative arguments."""
    return 1.0 / (1.0 + tl.exp(-2.0 * half))


@triton.jit
def _silu(half, ARITHMETIC: tl.constexpr):
    """silu of 2 half."""
    if ARITHMETIC == "approximate":
        return half + half * _tanh_approximate(half)
    else:
        return 2.0 * half * _sigmoid(half)


@triton.jit
def _silu_and_slope(half, ARITHMETIC: tl.constexpr):
    """silu and its derivative at 2 half."""
    if ARITHMETIC == "approximate":
        tanh = _tanh_approximate(half)
        sigmoid, score, rest = 0.5 + 0.5 * tanh, half + half * tanh, 0.5 - 0.5 * tanh
    else:
        sigmoid = _sigmoid(half)
        score, rest = 2.0 * half * sigmoid, 1.0 - sigmoid
    return score, sigmoid + score * rest


@triton.jit
def _rows(
    x, first, stride, length, ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Rows of one sequence, zero after its end; WIDTH columns, a power of two, zero from DIM on."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    at = x + tl.cast(first, tl.int64) * stride + (row * stride + column)
    if MASKED:
        return tl.load(at, mask=(row < length - first) & (column < DIM), other=0.0)
    elif WIDTH != DIM:
        return tl.load(at, mask=column < DIM, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _put(x, first, stride, length, value, ROWS: tl.constexpr, DIM: tl.constexpr):
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, value.shape[1])[None, :]
    at = x + tl.cast(first, tl.int64) * stride + (row * stride + column)
    tl.store(at, value.to(x.dtype.element_ty), mask=(row < length - first) & (column < DIM))


@triton.jit
def _tile_of_bias(bias, shift, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, COPIES: tl.constexpr):
    """Row i is the expanded bias from `shift - i` on.

    Copy number r of its COPIES is shifted by r places, so that i can be rounded down and loads are aligned.
    """
    row = tl.arange(0, ROWS)
    at = bias + (row % COPIES) * width + (shift - row // COPIES * COPIES)
    return tl.load(at[:, None] + tl.arange(0, COLUMNS)[None, :]).to(tl.float32)


@triton.jit
def _block(tiles, place, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Start of this block's sequence, its length, and the block's first row in it.

    The list has the last tiles of the sequences first: as queries, these attend to the most keys. The first keys are
    attended to by the most queries, so key blocks are counted from the other end.
    """
    BLOCKS: tl.constexpr = TILE // ROWS
    place = tl.cast(place, tl.int32)
    at = tiles + 3 * (place // BLOCKS + 1)
    start, length, tile = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    if KEYS:
        first = tl.maximum((length + TILE - 1) // TILE - 1 - tile, 0) * TILE + place % BLOCKS * ROWS
    else:
        first = tile * TILE + (BLOCKS - 1 - place % BLOCKS) * ROWS
    return start.to(tl.int64), length, first


@triton.jit
def _far_keys(first, distances, GRAIN: tl.constexpr):
    """Keys before this one are far from all queries from `first` on; a multiple of GRAIN, like `first`."""
    return tl.maximum(first - distances + 2, 0) // GRAIN * GRAIN


@triton.jit
def _last_bias(bias, head, distances):
    return 0.5 * tl.load(bias + head * distances + distances - 1).to(tl.float32)


@triton.jit(do_not_specialize=["sequences", "capacity"])
def list_tiles(offsets, tiles, sequences, capacity, CHUNK: tl.constexpr):
    """Row 0 of `tiles` [capacity + 1, 3] is their number, followed by (start, length, tile) of each, then zeros.

    Program t writes tile t of all sequences that have one, after all later tiles.
    """
    tile, chunk = tl.program_id(0), tl.arange(0, CHUNK)
    behind, total = tl.zeros((CHUNK,), tl.int32), tl.zeros((CHUNK,), tl.int32)
    for first in range(0, sequences, CHUNK):
        here = first + chunk < sequences
        begin = tl.load(offsets + first + chunk, mask=here, other=0)
        count = ((tl.load(offsets + first + chunk + 1, mask=here, other=0) - begin + TILE - 1) // TILE).to(tl.int32)
        behind += tl.maximum(count - tile - 1, 0)
        total += count
    place, total = tl.sum(behind), tl.sum(total)
    for first in range(0, sequences, CHUNK):
        here = first + chunk < sequences
        begin = tl.load(offsets + first + chunk, mask=here, other=0)
        length = tl.load(offsets + first + chunk + 1, mask=here, other=0) - begin
        has = length > tile * TILE
        at = tiles + 3 * (place + tl.cumsum(has.to(tl.int32)))  # row 0 is the count
        tl.store(at, begin.to(tl.int32), mask=has)
        tl.store(at + 1, length.to(tl.int32), mask=has)
        tl.store(at + 2, tl.zeros_like(chunk) + tile, mask=has)
        place += tl.sum(has.to(tl.int32))
    if tile == 0:
        tl.store(tiles + tl.arange(0, 4), tl.where(tl.arange(0, 4) == 0, total, 0), mask=tl.arange(0, 4) < 3)
    for first in range(total + tile * CHUNK, capacity, tl.num_programs(0) * CHUNK):
        for word in tl.static_range(3):
            tl.store(tiles + 3 * (first + chunk + 1) + word, tl.zeros_like(chunk), mask=first + chunk < capacity)


@triton.jit(do_not_specialize=["distances"])
def expand_bias(bias, out, distances, width, COPIES: tl.constexpr, CHUNK: tl.constexpr):
    """Half the bias, for tiles [queries, keys] and for tiles [keys, queries]: [2, heads, COPIES, width].

    At y, copy r is for distance width - BIAS_ROOM - y + r and for distance y - BIAS_ROOM - r, respectively.
    """
    head, copy = tl.program_id(0) // COPIES, tl.program_id(0) % COPIES
    y = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    rising = tl.program_id(2) == 1
    distance = tl.where(rising, y - BIAS_ROOM - copy, width - BIAS_ROOM - y + copy)
    nearest = tl.minimum(tl.maximum(distance, 0), distances - 1)
    value = tl.where(distance < 0, FUTURE, 0.5 * tl.load(bias + head * distances + nearest).to(tl.float32))
    row = (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    tl.store(out + row * width + y, value.to(out.dtype.element_ty), mask=y < width)


@triton.jit(do_not_specialize=["heads", "distances"])
def forward(
    q, k, v, bias, expanded, tiles, out, q_row, q_head, k_row, k_head, v_row, v_head, heads, distances, width, alpha,
    DIM: tl.constexpr, WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    COPIES: tl.constexpr, ARITHMETIC: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, NEAR_STAGES: tl.constexpr,
):  # fmt: skip
    head = (tl.program_id(0) % heads).to(tl.int64)
    start, length, first = _block(tiles, tl.program_id(0) // heads, QUERIES, False)
    if first >= length:
        return
    q_tile = _rows(q + start * q_row + head * q_head, first, q_row, length, QUERIES, DIM, WIDTH, True)
    k += start * k_row + head * k_head
    v += start * v_row + head * v_head
    expanded += head * (COPIES * width) + (width - BIAS_ROOM)
    total = tl.zeros((QUERIES, VALUE_WIDTH), tl.float32)
    far, last = _far_keys(first, distances, KEYS), _last_bias(bias, head, distances)
    for at in range(0, far, KEYS):
        half = _product(q_tile, _rows(k, at, k_row, length, KEYS, DIM, WIDTH, False), ARITHMETIC) * (0.5 * alpha) + last
        v_tile = _rows(v, at, v_row, length, KEYS, VALUE_DIM, VALUE_WIDTH, False)
        total = _dot(_silu(half, ARITHMETIC).to(v_tile.dtype), v_tile, total, ARITHMETIC)
    for at in tl.range(far, tl.minimum(first + QUERIES, length), KEYS, num_stages=NEAR_STAGES):
        half = _product(q_tile, _rows(k, at, k_row, length, KEYS, DIM, WIDTH, True), ARITHMETIC) * (0.5 * alpha)
        half += _tile_of_bias(expanded, at - first, width, QUERIES, KEYS, COPIES)
        v_tile = _rows(v, at, v_row, length, KEYS, VALUE_DIM, VALUE_WIDTH, True)
        total = _dot(_silu(half, ARITHMETIC).to(v_tile.dtype), v_tile, total, ARITHMETIC)
    out += (start * heads + head) * VALUE_DIM
    _put(out, first, heads * VALUE_DIM, length, total / length, QUERIES, VALUE_DIM)


@triton.jit
def _key_gradients(dk, dv, v_tile, q_tile, g_tile, half, ARITHMETIC: tl.constexpr):
    """Add the contribution of one tile's queries to dk and dv; half is [keys, queries]."""
    score, slope = _silu_and_slope(half, ARITHMETIC)
    dv = _dot(score.to(g_tile.dtype), g_tile, dv, ARITHMETIC)
    slope *= _product(v_tile, g_tile, ARITHMETIC)
    return _dot(slope.to(q_tile.dtype), q_tile, dk, ARITHMETIC), dv


@triton.jit(do_not_specialize=["heads", "distances"])
def backward_keys(
    q, k, v, grad, bias, expanded, tiles, dk, dv,
    q_row, q_head, k_row, k_head, v_row, v_head, grad_row, grad_head, heads, distances, width, alpha,
    DIM: tl.constexpr, WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    COPIES: tl.constexpr, ARITHMETIC: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, NEAR_STAGES: tl.constexpr,
):  # fmt: skip
    head = (tl.program_id(0) % heads).to(tl.int64)
    start, length, first = _block(tiles, tl.program_id(0) // heads, KEYS, True)
    if first >= length:
        return
    k_tile = _rows(k + start * k_row + head * k_head, first, k_row, length, KEYS, DIM, WIDTH, True)
    v += start * v_row + head * v_head
    v_tile = _rows(v, first, v_row, length, KEYS, VALUE_DIM, VALUE_WIDTH, True)
    q += start * q_row + head * q_head
    grad += start * grad_row + head * grad_head
    expanded += (heads + head) * (COPIES * width) + BIAS_ROOM
    dk_tile, dv_tile = tl.zeros(k_tile.shape, tl.float32), tl.zeros(v_tile.shape, tl.float32)
    last = _last_bias(bias, head, distances)
    # Near: the tiles of queries up to `far`, and the sequence's last tile.
    far = tl.minimum(first + (KEYS + distances - 2 + QUERIES - 1) // QUERIES * QUERIES, length)
    whole = far + (length - far) // QUERIES * QUERIES
    for at in range(far, whole, QUERIES):
        q_tile = _rows(q, at, q_row, length, QUERIES, DIM, WIDTH, False)
        g_tile = _rows(grad, at, grad_row, length, QUERIES, VALUE_DIM, VALUE_WIDTH, False)
        half = _product(k_tile, q_tile, ARITHMETIC) * (0.5 * alpha) + last
        dk_tile, dv_tile = _key_gradients(dk_tile, dv_tile, v_tile, q_tile, g_tile, half, ARITHMETIC)
    near = tl.cdiv(far - first, QUERIES)
    for n in tl.range(0, near + tl.where(whole < length, 1, 0), num_stages=NEAR_STAGES):
        at = tl.where(n < near, first + n * QUERIES, whole)
        q_tile = _rows(q, at, q_row, length, QUERIES, DIM, WIDTH, True)
        g_tile = _rows(grad, at, grad_row, length, QUERIES, VALUE_DIM, VALUE_WIDTH, True)
        shift = tl.where(n < near, n * QUERIES, width - 2 * BIAS_ROOM + TILE)  # these all use the last bias
        half = _product(k_tile, q_tile, ARITHMETIC) * (0.5 * alpha)
        half += _tile_of_bias(expanded, shift, width, KEYS, QUERIES, COPIES)
        dk_tile, dv_tile = _key_gradients(dk_tile, dv_tile, v_tile, q_tile, g_tile, half, ARITHMETIC)
    dk += (start * heads + head) * DIM
    dv += (start * heads + head) * VALUE_DIM
    _put(dk, first, heads * DIM, length, dk_tile * (alpha / length), KEYS, DIM)
    _put(dv, first, heads * VALUE_DIM, length, dv_tile / length, KEYS, VALUE_DIM)


@triton.jit(do_not_specialize=["heads", "distances"])
def backward_queries(
    q, k, v, grad, bias, expanded, tiles, dq, far_sums,
    q_row, q_head, k_row, k_head, v_row, v_head, grad_row, grad_head, heads, distances, width, alpha,
    DIM: tl.constexpr, WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    COPIES: tl.constexpr, ARITHMETIC: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, NEAR_STAGES: tl.constexpr, GRAIN: tl.constexpr,
):  # fmt: skip
    """Also writes far_sums, the gradient of the last bias from each program's far tiles."""
    head = (tl.program_id(0) % heads).to(tl.int64)
    start, length, first = _block(tiles, tl.program_id(0) // heads, QUERIES, False)
    if first >= length:
        tl.store(far_sums + tl.program_id(0), 0.0)
        return
    q_tile = _rows(q + start * q_row + head * q_head, first, q_row, length, QUERIES, DIM, WIDTH, True)
    grad += start * grad_row + head * grad_head
    g_tile = _rows(grad, first, grad_row, length, QUERIES, VALUE_DIM, VALUE_WIDTH, True)
    k += start * k_row + head * k_head
    v += start * v_row + head * v_head
    expanded += head * (COPIES * width) + (width - BIAS_ROOM)
    dq_tile, sums = tl.zeros(q_tile.shape, tl.float32), tl.zeros((QUERIES,), tl.float32)
    far, last = _far_keys(first // GRAIN * GRAIN, distances, GRAIN), _last_bias(bias, head, distances)
    for at in range(0, far, KEYS):
        k_tile = _rows(k, at, k_row, length, KEYS, DIM, WIDTH, False)
        _, slope = _silu_and_slope(_product(q_tile, k_tile, ARITHMETIC) * (0.5 * alpha) + last, ARITHMETIC)
        slope *= _product(g_tile, _rows(v, at, v_row, length, KEYS, VALUE_DIM, VALUE_WIDTH, False), ARITHMETIC)
        sums += tl.sum(slope, 1)
        dq_tile = _dot(slope.to(k_tile.dtype), k_tile, dq_tile, ARITHMETIC)
    for at in tl.range(far, tl.minimum(first + QUERIES, length), KEYS, num_stages=NEAR_STAGES):
        k_tile = _rows(k, at, k_row, length, KEYS, DIM, WIDTH, True)
        half = _product(q_tile, k_tile, ARITHMETIC) * (0.5 * alpha)
        half += _tile_of_bias(expanded, at - first, width, QUERIES, KEYS, COPIES)
        _, slope = _silu_and_slope(half, ARITHMETIC)
        slope *= _product(g_tile, _rows(v, at, v_row, length, KEYS, VALUE_DIM, VALUE_WIDTH, True), ARITHMETIC)
        dq_tile = _dot(slope.to(k_tile.dtype), k_tile, dq_tile, ARITHMETIC)
    dq += (start * heads + head) * DIM
    _put(dq, first, heads * DIM, length, dq_tile * (alpha / length), QUERIES, DIM)
    tl.store(far_sums + tl.program_id(0), tl.sum(sums) / length)


@triton.jit(do_not_specialize=["heads", "distances", "offsets"])
def backward_bias(
    q, k, v, grad, expanded, tiles, parts, last_sums,
    q_row, q_head, k_row, k_head, v_row, v_head, grad_row, grad_head, heads, distances, width, alpha, offsets,
    DIM: tl.constexpr, WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    COPIES: tl.constexpr, ARITHMETIC: tl.constexpr, GRAIN: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of scores over tiles that are `offset` tiles below the diagonal, elementwise.

    These have the same distances in every sequence, so `reduce_bias` sums over diagonals only once, at the end. Each
    program handles a share of the tiles: parts [programs, heads, offsets, GRAIN, GRAIN]. The gradient of the last bias
    goes to last_sums [programs, heads, offsets].
    """
    offset, head = tl.program_id(0) % offsets, (tl.program_id(0) // offsets % heads).to(tl.int64)
    expanded += head * (COPIES * width) + (width - BIAS_ROOM)
    half_bias = _tile_of_bias(expanded, -offset * GRAIN, width, GRAIN, GRAIN, COPIES)
    row, column = tl.arange(0, GRAIN)[:, None], tl.arange(0, GRAIN)[None, :]
    total = tl.zeros((GRAIN, GRAIN), tl.float32)
    q, grad = q + head * q_head, grad + head * grad_head
    k, v = k + head * k_head, v + head * v_head
    places = tl.load(tiles) * (TILE // GRAIN)
    for place in range(tl.program_id(0) // (offsets * heads), places, tl.num_programs(0) // (offsets * heads)):
        start, length, first = _block(tiles, place, GRAIN, False)
        at = tl.maximum(first - offset * GRAIN, 0)
        end = tl.where(first >= offset * GRAIN, length, 0)  # else there is no such tile
        q_tile = _rows(q + start * q_row, first, q_row, end, GRAIN, DIM, WIDTH, True)
        g_tile = _rows(grad + start * grad_row, first, grad_row, end, GRAIN, VALUE_DIM, VALUE_WIDTH, True)
        k_tile = _rows(k + start * k_row, at, k_row, end, GRAIN, DIM, WIDTH, True)
        v_tile = _rows(v + start * v_row, at, v_row, end, GRAIN, VALUE_DIM, VALUE_WIDTH, True)
        _, slope = _silu_and_slope(_product(q_tile, k_tile, ARITHMETIC) * (0.5 * alpha) + half_bias, ARITHMETIC)
        slope *= _product(g_tile, v_tile, ARITHMETIC)
        total += slope * (1.0 / length)
    tl.store(parts + tl.program_id(0).to(tl.int64) * (GRAIN * GRAIN) + row * GRAIN + column, total)
    is_last = offset * GRAIN + row - column >= distances - 1
    tl.store(last_sums + tl.program_id(0), tl.sum(tl.sum(tl.where(is_last, total, 0.0), 1), 0))


@triton.jit(do_not_specialize=["parts_count", "far_count", "heads", "offsets", "distances"])
def reduce_bias(
    parts, last_sums, far_sums, out, parts_count, far_count, heads, offsets, distances,
    GRAIN: tl.constexpr, AT_ONCE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """out [heads, distances]: each program has 16 distances of one head; a head's first one also the last distance."""
    head, distance = tl.program_id(0), tl.program_id(1) * 16 + tl.arange(0, 16)
    row, part = tl.arange(0, GRAIN)[None, :, None], tl.arange(0, AT_ONCE)[:, None, None]
    total, stride = tl.zeros((AT_ONCE, GRAIN, 16), tl.float32), heads * offsets * (GRAIN * GRAIN)
    for which in tl.static_range(2):  # tiles of two offsets contain them
        offset = tl.program_id(1) * 16 // GRAIN + which
        column = offset * GRAIN + row - distance[None, None, :]
        inside = (offset < offsets) & (column >= 0) & (column < GRAIN)
        at = parts + (head * offsets + offset) * (GRAIN * GRAIN) + (part * stride + row * GRAIN + column)
        for first in range(0, parts_count, AT_ONCE):
            here = inside & (part < parts_count - first)
            total += tl.load(at + tl.cast(first, tl.int64) * stride, mask=here, other=0.0)
    sums = tl.sum(tl.sum(total, 0), 0).to(out.dtype.element_ty)
    tl.store(out + head * distances + distance, sums, mask=distance < distances - 1)
    if tl.program_id(1) == 0:
        last, chunk = tl.zeros((CHUNK,), tl.float32), tl.arange(0, CHUNK)
        for first in range(0, far_count, CHUNK):
            mine = first + chunk
            last += tl.load(far_sums + mine * heads + head, mask=mine < far_count, other=0.0)
        for first in range(0, parts_count * offsets, CHUNK):
            mine = first + chunk
            place = (mine // offsets * heads + head) * offsets + mine % offsets
            last += tl.load(last_sums + place, mask=mine < parts_count * offsets, other=0.0)
        tl.store(out + head * distances + distances - 1, tl.sum(last).to(out.dtype.element_ty))
