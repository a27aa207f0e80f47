"""Gather, sum and update rows in one pass over memory, in Triton. Definitions and checks: row_kernels.py. Rows are
contiguous [n, dim]; indices are contiguous int64. Nothing waits for the device.

Each column of each run (reference.RUN_LENGTH entries of a segment) is summed left to right, so that the bits do not
depend on the launch. Many short segments share a program, one entry of each at a time. A long segment has its own, with
many rows in flight; one of several runs has one per run, whose sums are then added as if they were its rows.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from freescale.compat.triton_launch import cdiv, launch, next_power_of_2
from freescale.kernels.reference import RUN_LENGTH

SUM, SGD, ROWWISE_ADAGRAD, ADAGRAD = 0, 1, 2, 3
LONG_SEGMENT = 16  # a longer segment is a long one
SCAN_PROGRAMS = 4096  # programs that search for long segments
LONG_UNROLL = 16  # entries of a long segment in flight at once


@triton.jit(do_not_specialize=["n"])
def _gather(source, index, out, n, DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    position = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = tl.load(index + position, mask=position < n, other=0)
    for first in tl.static_range(0, DIM, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = (position < n)[:, None] & (column < DIM)[None, :]
        x = tl.load(source + row[:, None] * DIM + column[None, :], mask=inside)
        tl.store(out + position[:, None] * DIM + column[None, :], x, mask=inside)


@triton.jit
def _load_weights(weight, row, column, DIM: tl.constexpr):
    inside = (row >= 0)[:, None] & (column < DIM)[None, :]
    return tl.load(weight + row[:, None].to(tl.int64) * DIM + column[None, :], mask=inside, other=0.0)


@triton.jit
def _load_momenta(momentum, row, MODE: tl.constexpr):
    # Keep it in the cache: neighbors share a cache line, and each is written back.
    return tl.load(momentum + row, mask=row >= 0, other=0.0, eviction_policy="evict_last") if MODE == 2 else row


@triton.jit
def _subtract_product(w, a, b, FUSED: tl.constexpr):
    """w - a * b, rounded once if FUSED, else twice."""
    return tl.fma(-a, b, w) if FUSED else w - a * b


@triton.jit
def _optimizer_step(
    weight, momentum, row, w, m, grad, column, lr, eps, DIM: tl.constexpr, MODE: tl.constexpr, FUSED: tl.constexpr
):
    """One optimizer step in float32, rounded once to the dtype of the rows."""
    w = w.to(tl.float32)
    inside = (row >= 0)[:, None] & (column < DIM)[None, :]
    place = row[:, None].to(tl.int64) * DIM + column[None, :]
    if MODE == 2:
        squares = tl.sum(grad * grad, axis=1)
        mean = squares * (1.0 / DIM) if (DIM & (DIM - 1)) == 0 else tl.math.div_rn(squares, DIM * 1.0)
        m = m.to(tl.float32) + mean
        tl.store(momentum + row, m.to(momentum.dtype.element_ty), mask=row >= 0)
        step = tl.math.div_rn(1.0, tl.math.sqrt_rn(m) + eps) * lr
        w = _subtract_product(w, step[:, None] + tl.zeros_like(grad), grad, FUSED)
    elif MODE == 3:
        old = tl.load(momentum + place, mask=inside, other=0.0).to(tl.float32)
        m = tl.fma(grad, grad, old) if FUSED else old + grad * grad
        tl.store(momentum + place, m.to(momentum.dtype.element_ty), mask=inside)
        w = _subtract_product(w, lr + tl.zeros_like(grad), tl.math.div_rn(grad, tl.math.sqrt_rn(m) + eps), FUSED)
    else:
        w = _subtract_product(w, lr + tl.zeros_like(grad), grad, FUSED)
    tl.store(weight + place, w.to(weight.dtype.element_ty), mask=inside)


@triton.jit
def _short_bounds(ends, segment, n_segments, LONG_SEGMENT: tl.constexpr):
    """The bounds of segments in `order`, and whether they exist and are short; others are empty."""
    end = tl.load(ends + segment, mask=segment < n_segments, other=0)
    begin = tl.load(ends + segment - 1, mask=(segment > 0) & (segment < n_segments), other=0)
    live = (segment < n_segments) & (end - begin <= LONG_SEGMENT)
    return begin, tl.where(live, (end - begin).to(tl.int32), 0), live


@triton.jit
def _load_rows(rows, segment, there, MODE: tl.constexpr, ROW: tl.constexpr):
    return tl.load(rows + segment, mask=there, other=-1).to(ROW) if MODE != 0 else tl.zeros_like(segment)


@triton.jit
def _load_entries(order, begin, length, entry, UNROLL: tl.constexpr):
    """The next entries of each segment; -1 past its end."""
    x_rows = ()
    for ahead in tl.static_range(UNROLL):
        here = tl.load(order + begin + (entry + ahead), mask=entry + ahead < length, other=-1)
        x_rows = x_rows + (here.to(tl.int32),)  # type: ignore[assignment]
    return x_rows


@triton.jit
def _add_rows(total, x, x_rows, column, DIM: tl.constexpr, UNROLL: tl.constexpr):
    for ahead in tl.static_range(UNROLL):
        inside = (x_rows[ahead] >= 0)[:, None] & (column < DIM)[None, :]
        pointers = x + x_rows[ahead][:, None].to(tl.int64) * DIM + column[None, :]
        total += tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["n_segments"])
def _short_segments(
    x, order, ends, out, rows, weight, momentum, n_segments, lr, eps,
    DIM: tl.constexpr, MODE: tl.constexpr, LONG_SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr, COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr, ROW: tl.constexpr, INDEX: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)
    stride = tl.num_programs(0).to(INDEX) * SEGMENTS
    first = tl.program_id(0).to(INDEX) * SEGMENTS
    segment = first + tl.arange(0, SEGMENTS)
    # Prefetch bounds and rows two rounds ahead, indices and momenta one, so that a round waits only for its rows.
    begin, length, live = _short_bounds(ends, segment, n_segments, LONG_SEGMENT)
    begin1, length1, live1 = _short_bounds(ends, segment + stride, n_segments, LONG_SEGMENT)
    x_rows = _load_entries(order, begin, length, 0, UNROLL)
    row = _load_rows(rows, segment, live, MODE, ROW)
    row1 = _load_rows(rows, segment + stride, live1, MODE, ROW)
    m = _load_momenta(momentum, row, MODE)
    for here in range(first, n_segments, stride):
        segment = here + tl.arange(0, SEGMENTS)
        begin2, length2, live2 = _short_bounds(ends, segment + 2 * stride, n_segments, LONG_SEGMENT)
        x_rows1 = _load_entries(order, begin1, length1, 0, UNROLL)
        row2 = _load_rows(rows, segment + 2 * stride, segment + 2 * stride < n_segments, MODE, ROW)
        m1 = _load_momenta(momentum, row1, MODE)
        if MODE != 0:
            w = _load_weights(weight, row, column, DIM)
        # Reload instead of using `length`: as the bound of an inner loop, Triton (3.6, 3.7) confuses a loop-carried
        # value with its initial value when it changes layouts.
        _, lengths, _ = _short_bounds(ends, segment, n_segments, LONG_SEGMENT)
        total = _add_rows(tl.zeros((SEGMENTS, COLUMNS), tl.float32), x, x_rows, column, DIM, UNROLL)
        for entry in range(UNROLL, tl.max(lengths, 0), UNROLL):
            total = _add_rows(total, x, _load_entries(order, begin, length, entry, UNROLL), column, DIM, UNROLL)
        if MODE == 0:
            to = out + segment[:, None].to(tl.int64) * DIM + column[None, :]
            tl.store(to, total.to(out.dtype.element_ty), mask=live[:, None] & (column < DIM)[None, :])
        else:
            _optimizer_step(weight, momentum, tl.where(live, row, -1), w, m, total, column, lr, eps, DIM, MODE, FUSED)
        begin, length, live, x_rows, row, m = begin1, length1, live1, x_rows1, row1, m1
        begin1, length1, live1, row1 = begin2, length2, live2, row2


@triton.jit
def _sum_between(x, order, entry, end, column, DIM: tl.constexpr, UNROLL: tl.constexpr):
    """Sum entries of `order`, UNROLL at a time; the next indices are prefetched with the current rows."""
    total = tl.zeros((column.shape[0],), tl.float32)
    x_rows = ()
    for ahead in tl.static_range(UNROLL):
        here = tl.load(order + tl.minimum(entry + ahead, end - 1)).to(tl.int32)
        x_rows = x_rows + (here,)  # type: ignore[assignment]
    while entry < end:
        upcoming = ()
        for ahead in tl.static_range(UNROLL):
            here = tl.load(order + tl.minimum(entry + UNROLL + ahead, end - 1)).to(tl.int32)
            upcoming = upcoming + (here,)  # type: ignore[assignment]
        for ahead in tl.static_range(UNROLL):
            inside = (column < DIM) & (entry + ahead < end)
            total += tl.load(x + x_rows[ahead].to(tl.int64) * DIM + column, mask=inside, other=0.0).to(tl.float32)
        x_rows = upcoming
        entry += UNROLL
    return total


@triton.jit
def _segment_at(ends, entry, low, high):
    """The segment that contains an entry of `order`, by binary search from `low` to `high`."""
    while low < high:
        middle = (low + high) // 2
        later = tl.load(ends + middle) > entry
        low = tl.where(later, low, middle + 1)
        high = tl.where(later, middle, high)
    return low


@triton.jit(do_not_specialize=["n_segments", "n"])
def _sum_runs(
    x, order, ends, sums, n_segments, n,
    DIM: tl.constexpr, RUN_LENGTH: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Sum the runs that begin in one window of RUN_LENGTH entries of `order`, of segments with several runs. At most
    two do: one of the segment that the window begins in, and the first run of the segment that it ends in."""
    window = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    segment, high = window * 0, window * 0 + n_segments - 1
    for which in range(2):
        entry = window * RUN_LENGTH if which == 0 else tl.minimum(window * RUN_LENGTH + RUN_LENGTH, n) - 1
        segment = _segment_at(ends, entry, segment, high)
        begin, end = tl.load(ends + segment - 1, mask=segment > 0, other=0), tl.load(ends + segment)
        high = tl.minimum(segment + RUN_LENGTH, n_segments - 1)
        begins_here = begin > window * RUN_LENGTH
        run = begin if begins_here else begin + tl.cdiv(window * RUN_LENGTH - begin, RUN_LENGTH) * RUN_LENGTH
        if (end - begin > RUN_LENGTH) & (run < end) & (begins_here == (which == 1)):
            total = _sum_between(x, order, run, tl.minimum(run + RUN_LENGTH, end), column, DIM, UNROLL)
            tl.store(sums + (2 * window + which) * DIM + column, total, mask=column < DIM)


@triton.jit
def _add_run_sums(sums, begin, end, column, DIM: tl.constexpr, RUN_LENGTH: tl.constexpr, UNROLL: tl.constexpr):
    """The sum of a segment's runs, as stored by _sum_runs."""
    window, runs = begin // RUN_LENGTH, tl.cdiv(end - begin, RUN_LENGTH)
    first = 2 * window + (begin % RUN_LENGTH != 0).to(tl.int64)
    total = tl.load(sums + first * DIM + column, mask=column < DIM, other=0.0)
    for run in range(1, runs, UNROLL):
        for ahead in tl.static_range(UNROLL):
            inside = (column < DIM) & (run + ahead < runs)
            total += tl.load(sums + 2 * (window + run + ahead) * DIM + column, mask=inside, other=0.0)
    return total


@triton.jit(do_not_specialize=["n_segments"])
def _long_segments(
    x, order, ends, out, rows, weight, momentum, n_segments, lr, eps, sums,
    DIM: tl.constexpr, MODE: tl.constexpr, LONG_SEGMENT: tl.constexpr, RUN_LENGTH: tl.constexpr, SCAN: tl.constexpr,
    COLUMNS: tl.constexpr, UNROLL: tl.constexpr, ROW: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    programs = tl.num_programs(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    for first in range(tl.program_id(0).to(tl.int64), n_segments, SCAN * programs):
        segment = first + tl.arange(0, SCAN) * programs  # strided: long segments are often adjacent
        end = tl.load(ends + segment, mask=segment < n_segments, other=0)
        begin = tl.load(ends + segment - 1, mask=(segment > 0) & (segment < n_segments), other=0)
        long = end - begin > LONG_SEGMENT
        one = first - 1
        for _ in range(tl.sum(long.to(tl.int32), 0)):
            one = tl.min(tl.where(long & (segment > one), segment, n_segments), 0)
            if MODE != 0:
                row = tl.load(rows + one + tl.zeros((1,), tl.int32)).to(ROW)
                w, m = _load_weights(weight, row, column, DIM), _load_momenta(momentum, row, MODE)
            from_entry, to_entry = tl.load(ends + one - 1, mask=one > 0, other=0), tl.load(ends + one)
            if sums is None:
                total = _sum_between(x, order, from_entry, to_entry, column, DIM, UNROLL)
            elif to_entry - from_entry > RUN_LENGTH:
                total = _add_run_sums(sums, from_entry, to_entry, column, DIM, RUN_LENGTH, UNROLL)
            else:
                total = _sum_between(x, order, from_entry, to_entry, column, DIM, UNROLL)
            if MODE == 0:
                tl.store(out + one * DIM + column, total.to(out.dtype.element_ty), mask=column < DIM)
            else:
                _optimizer_step(weight, momentum, row, w, m, total[None, :], column, lr, eps, DIM, MODE, FUSED)


def gather(source: torch.Tensor, index: torch.Tensor, tile: int = 4096, warps: int = 4) -> torch.Tensor:
    """source[index]; each program copies `tile` bytes."""
    n, dim = index.shape[0], source.shape[1]
    out = source.new_empty((n, dim))
    if n and dim:
        whole = next_power_of_2(dim)
        columns = min(whole, tile // source.element_size())
        rows = max(1, tile // source.element_size() // columns)
        launch(_gather, (cdiv(n, rows),), source, index, out, n, dim, rows, columns, num_warps=warps)
    return out


@triton.jit(do_not_specialize=["n"])
def _equal(a, b, out, n, BLOCK: tl.constexpr):
    """A single program, so `out` needs no initialization."""
    differ = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, n, BLOCK):
        position = first + tl.arange(0, BLOCK).to(tl.int64)
        inside = position < n
        differ |= (tl.load(a + position, mask=inside) != tl.load(b + position, mask=inside)).to(tl.int32) & inside
    tl.store(out, tl.max(differ, 0) == 0)


def equal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Whether two contiguous integer tensors of one length are equal, as a bool on the device."""
    out = torch.empty((), dtype=torch.bool, device=a.device)
    launch(_equal, (1,), a, b, out, a.shape[0], 8192, num_warps=16)
    return out


@triton.jit(do_not_specialize=["samples"])
def _has_counts(lengths, counts, out, samples, BLOCK: tl.constexpr):
    """One program per key."""
    key = tl.program_id(0).to(tl.int64)
    total, negative = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int32)
    for first in range(0, samples, BLOCK):
        position = first + tl.arange(0, BLOCK).to(tl.int64)
        length = tl.load(lengths + key * samples + position, mask=position < samples, other=0).to(tl.int64)
        total += length
        negative |= (length < 0).to(tl.int32)
    tl.store(out + key, (tl.max(negative, 0) == 0) & (tl.sum(total, 0) == tl.load(counts + key)))


def has_counts(lengths: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    out = torch.empty(lengths.shape[0], dtype=torch.bool, device=lengths.device)
    if lengths.shape[0]:
        launch(_has_counts, (lengths.shape[0],), lengths, counts, out, lengths.shape[1], 1024, num_warps=4)
    return out.view(()) if lengths.shape[0] == 1 else out.all()  # of one key, `all` would be a copy


def sum_segments(x: torch.Tensor, order: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    out = x.new_empty((ends.shape[0], x.shape[1]))
    _launch(x, order, ends, out, None, None, None, 0.0, 0.0, SUM)
    return out


def update_segments(
    weight: torch.Tensor, momentum: torch.Tensor | None, grad: torch.Tensor, rows: torch.Tensor,
    order: torch.Tensor, ends: torch.Tensor, lr: float, eps: float, longest: int | None = None, fused: bool = False,
) -> None:  # fmt: skip
    """SGD without `momentum`, row-wise Adagrad with one number per row, Adagrad with one per element."""
    mode = SGD if momentum is None else ROWWISE_ADAGRAD if momentum.dim() == 1 else ADAGRAD
    _launch(grad, order, ends, None, rows, weight, momentum, lr, eps, mode, longest, fused=fused)


def _launch(x, order, ends, out, rows, weight, momentum, lr, eps, mode, longest=None, programs=256, fused=False):
    """Launch up to `programs` programs per multiprocessor."""
    n, dim = ends.shape[0], x.shape[1]
    if n == 0 or dim == 0:
        return
    args = (x, order, ends, out, rows, weight, momentum, n, float(lr), float(eps))
    columns = next_power_of_2(dim)
    # Small rows: 16 bytes per thread and four entries at once, since the longest segment of a tile delays the others.
    # Measured on an H200.
    small = columns * x.element_size() <= 512
    tile, unroll = (512, 4) if small else (1024, 2)
    segments = max(1, tile // (columns * x.element_size()))
    warps = min(16, max(1, columns // 512))
    grid = (min(cdiv(n, segments), _processors(x.device) * programs),)
    row = tl.int32 if weight is None or weight.shape[0] < 2**31 else tl.int64  # half the registers if 32 bits suffice
    index = tl.int32 if n + 3 * grid[0] * segments < 2**31 else tl.int64
    # No FMA contraction: the reference rounds the product and the sum separately.
    options = {"num_warps": warps, "enable_fp_fusion": False}
    sizes = LONG_SEGMENT, segments, columns, unroll, row, index
    launch(_short_segments, grid, *args, dim, mode, *sizes, fused, **options)
    entries = order.shape[0]
    most = entries if longest is None else min(longest, entries)
    if most <= LONG_SEGMENT:
        return
    options["num_warps"] = min(16, max(1, columns // 32))
    sums = None
    if most > RUN_LENGTH:
        windows = cdiv(entries, RUN_LENGTH)
        sums = x.new_empty((2 * windows, dim), dtype=torch.float32)
        of_runs = dim, RUN_LENGTH, columns, LONG_UNROLL
        launch(_sum_runs, (windows,), x, order, ends, sums, n, entries, *of_runs, **options)
    constants = dim, mode, LONG_SEGMENT, RUN_LENGTH, 256, columns, LONG_UNROLL, row, fused
    launch(_long_segments, (min(SCAN_PROGRAMS, n),), *args, sums, *constants, **options)


@functools.lru_cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
