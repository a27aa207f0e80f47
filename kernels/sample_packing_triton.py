"""GPU kernels of sample_packing.py: build tables of pieces, and copy all pieces in one launch, in Triton.

A piece is one sample of one feature: consecutive bytes with one destination. Pieces occupy slots in output order, with
larger elements first. Slot k takes bytes bounds[k] ... bounds[k + 1] from address sources[k]. The output is cut into
equal tiles, and each tile looks up its slots, so the time depends on the bytes, not on the number of peers or the
length of one piece. Nothing here waits for the device, and no program waits for another.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The feature table (int64) has one row per feature, ordered by element size. Columns: 0 address of the values (packed
# or not), 1 address of the offsets, 2 bytes per entry, 3 first row with this element size, 4 rows with this element
# size, 5 feature number.
TILE = 4096  # bytes
BLOCK = 128  # pieces or tiles per program


@triton.jit
def _first_above(ends, value, n, WAYS: tl.constexpr):
    """The first of n ascending numbers above the value, or the last if there is none. Each step makes WAYS - 1
    independent probes, since these have the latency of one."""
    low = tl.zeros_like(value)
    span = n
    while span > 1:
        step = (span + (WAYS - 1)) // WAYS
        base = low
        for k in tl.static_range(1, WAYS):
            probe = base + (step * k - 1)
            in_range = probe < n - 1
            low += tl.where(in_range & (tl.load(ends + probe, mask=in_range, other=0) <= value), step, 0)
        span = step
    return low


@triton.jit
def _slot(features, row, place, peer_ends, n_samples, n_features, n_peers):
    """The slot of a piece among those of its element size, and the index of its length: by peer, then by feature."""
    peer = _first_above(peer_ends, place, n_peers, 8)
    first = tl.load(peer_ends + peer - 1, mask=peer > 0, other=0)
    count = tl.load(peer_ends + peer) - first
    first_row, rows = tl.load(features + row * 6 + 3), tl.load(features + row * 6 + 4)
    slot = first_row * n_samples + rows * first + (row - first_row) * count + place - first
    return slot, n_features * first + tl.load(features + row * 6 + 5) * count + place - first


@triton.jit
def _store_sizes(sizes, row, place, slot, size, live):
    """Store after a leading zero, so that the running sum is the bounds."""
    tl.store(sizes + 1 + slot, size, mask=live)
    tl.store(sizes + place, tl.zeros_like(place), mask=(place + row) == 0)


@triton.jit(do_not_specialize=["n_samples", "n_features", "n_peers"])
def _dispatch_pieces(
    features, perm, peer_ends, lengths, sizes, sources, n_samples, n_features, n_peers, BLOCK: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = place < n_samples
    values, entry = tl.load(features + row * 6), tl.load(features + row * 6 + 2)
    offsets = tl.load(features + row * 6 + 1).to(tl.pointer_type(tl.int64))
    sample = tl.load(perm + place, mask=live, other=0)
    begin = tl.load(offsets + sample, mask=live, other=0)
    length = tl.load(offsets + sample + 1, mask=live, other=0) - begin
    slot, length_index = _slot(features, row, place, peer_ends, n_samples, n_features, n_peers)
    tl.store(lengths + length_index, length, mask=live)
    tl.store(sources + slot, values + begin * entry, mask=live)
    _store_sizes(sizes, row, place, slot, length * entry, live)


@triton.jit(do_not_specialize=["n_samples", "n_features", "n_peers"])
def _received_sizes(features, peer_ends, lengths, sizes, n_samples, n_features, n_peers, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = place < n_samples
    slot, length_index = _slot(features, row, place, peer_ends, n_samples, n_features, n_peers)
    length = tl.load(lengths + length_index, mask=live, other=0)
    _store_sizes(sizes, row, place, slot, length * tl.load(features + row * 6 + 2), live)


@triton.jit(do_not_specialize=["n_samples", "n_features", "n_peers"])
def _combine_pieces(
    features, perm, peer_ends, received, sizes, sources, n_samples, n_features, n_peers, BLOCK: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = place < n_samples
    sample = tl.load(perm + place, mask=live, other=0)
    slot, _ = _slot(features, row, sample, peer_ends, n_samples, n_features, n_peers)
    begin = tl.load(received + slot, mask=live, other=0)
    end = tl.load(received + slot + 1, mask=live, other=0)
    before = tl.load(received + tl.load(features + row * 6 + 3) * n_samples)  # bytes of larger elements
    new_slot = row * n_samples + place
    tl.store(sources + new_slot, tl.load(features + row * 6) + begin - before, mask=live)
    _store_sizes(sizes, row, place, new_slot, end - begin, live)


@triton.jit(do_not_specialize=["n_slots", "n_tiles", "n_samples"])
def _find_tiles(
    features, bounds, sources, tiles, offsets, n_slots, n_tiles, n_samples,
    TILE: tl.constexpr, BLOCK: tl.constexpr, OFFSETS: tl.constexpr,
):  # fmt: skip
    """Store a record for each tile and one past the end: the slot of its first byte, the slot's distance (source
    address minus output position), and the slot's end. The remaining programs write the offsets of a batch."""
    program, with_tiles = tl.program_id(0), n_tiles // BLOCK + 1
    if program < with_tiles:
        tile = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        slot = _first_above(bounds + 1, tile * TILE, n_slots, 8)
        tl.store(tiles + tile * 4, slot, mask=tile <= n_tiles)
        tl.store(tiles + tile * 4 + 1, tl.load(sources + slot) - tl.load(bounds + slot), mask=tile <= n_tiles)
        tl.store(tiles + tile * 4 + 2, tl.load(bounds + slot + 1), mask=tile <= n_tiles)
    elif OFFSETS:
        blocks = n_samples // BLOCK + 1
        row = ((program - with_tiles) // blocks).to(tl.int64)
        place = ((program - with_tiles) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        begin, entry = tl.load(bounds + row * n_samples), tl.load(features + row * 6 + 2)
        ahead = tl.load(bounds + row * n_samples + place, mask=place <= n_samples, other=0) - begin
        tl.store(offsets + row * (n_samples + 1) + place, ahead // entry, mask=place <= n_samples)


@triton.jit
def _copy_tile(
    low, distance, end, high, high_distance, bounds, sources, start, stop, out,
    T: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """Copy the tile at `start`, in the smallest element type it contains, up to `stop`. A tile within one piece is one
    straight copy. Otherwise each element finds the distance of its piece, by search if there are many."""
    SIZE: tl.constexpr = T.primitive_bitwidth // 8
    if (low == high) & (start + TILE <= stop):
        lane = tl.arange(0, TILE // SIZE)
        x = tl.load((distance + start).to(tl.pointer_type(T)) + lane)
        tl.store((out + start).to(tl.pointer_type(T)) + lane, x)
    else:
        LANES: tl.constexpr = TILE // SIZE // PARTS
        for part in range(PARTS):
            position = (part * LANES + tl.arange(0, LANES)) * SIZE
            if high - low <= RUNS:
                distances = tl.where(position < tl.minimum(end - start, TILE).to(tl.int32), distance, high_distance)
                between = low + 1
                while between < high:  # all of these are within the tile
                    first, next_first = tl.load(bounds + between), tl.load(bounds + between + 1)
                    in_piece = position >= (first - start).to(tl.int32)
                    in_piece = in_piece & (position < (next_first - start).to(tl.int32))
                    distances = tl.where(in_piece, tl.load(sources + between) - first, distances)
                    between += 1
            else:
                slot = low + _first_above(bounds + low + 1, start + position, high - low + 1, 2)
                distances = tl.load(sources + slot) - tl.load(bounds + slot)
            inside = position < tl.minimum(stop - start, TILE).to(tl.int32)
            x = tl.load((distances + start + position).to(tl.pointer_type(T)), mask=inside)
            tl.store((out + start + position).to(tl.pointer_type(T)), x, mask=inside)


@triton.jit(do_not_specialize=["out", "n_bytes", "n_slots", "first4", "first2", "first1"])
def _copy(
    tiles, bounds, sources, out, n_bytes, n_slots, first4, first2, first1,
    TILE: tl.constexpr, SMALL: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """Fill the output from the pieces; elements of 4, 2 and 1 bytes begin at the named slots. `out` is passed as a
    number: for a pointer the compiler infers alignment and gives each thread adjacent elements, which is slower."""
    tile = tl.program_id(0).to(tl.int64)
    start, record = tile * TILE, tiles + tile * 4
    low, distance, end = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    high, high_distance = tl.load(record + 4), tl.load(record + 5)  # next tile
    stop = tl.minimum(tl.load(bounds + n_slots), n_bytes)  # never read past the last piece
    if high < first4:
        _copy_tile(low, distance, end, high, high_distance, bounds, sources, start, stop, out, tl.int64, TILE, 1, RUNS)
    elif high < first2:
        _copy_tile(low, distance, end, high, high_distance, bounds, sources, start, stop, out, tl.int32, TILE, 1, RUNS)
    elif SMALL:
        if high < first1:
            _copy_tile(
                low, distance, end, high, high_distance, bounds, sources, start, stop, out, tl.int16, TILE, 4, RUNS
            )
        else:
            _copy_tile(
                low, distance, end, high, high_distance, bounds, sources, start, stop, out, tl.int8, TILE, 8, RUNS
            )


def dispatch_pieces(features, perm, peer_ends):
    """Lengths, slot bounds and slot sources for packing."""
    n, n_features = perm.shape[0], features.shape[0]
    lengths, sources, sizes = (perm.new_empty(n_features * n + more) for more in (0, 0, 1))
    grid = (triton.cdiv(n, BLOCK), n_features)
    _dispatch_pieces[grid](features, perm, peer_ends, lengths, sizes, sources, n, n_features, peer_ends.shape[0], BLOCK)
    return lengths, sizes.cumsum(0), sources


def combine_pieces(features, perm, peer_ends, lengths):
    """Slot bounds and slot sources for a batch of received samples, feature by feature."""
    n, n_features, peers = perm.shape[0], features.shape[0], peer_ends.shape[0]
    sources, sizes, received = (perm.new_empty(n_features * n + more) for more in (0, 1, 1))
    grid = (triton.cdiv(n, BLOCK), n_features)
    _received_sizes[grid](features, peer_ends, lengths, received, n, n_features, peers, BLOCK)
    received = received.cumsum(0)
    _combine_pieces[grid](features, perm, peer_ends, received, sizes, sources, n, n_features, peers, BLOCK)
    return sizes.cumsum(0), sources


def copy_pieces(features, bounds, sources, whole, n_bytes, first_slots, offsets=None):
    """Fill `n_bytes` of a buffer from the pieces, and offsets [features, samples + 1] if given. Elements of 4, 2 and 1
    bytes begin at `first_slots`."""
    n_slots, n_tiles = sources.shape[0], triton.cdiv(n_bytes, TILE)
    tiles = bounds.new_empty(4 * (n_tiles + 1))
    n_samples, grid = n_slots // features.shape[0], n_tiles // BLOCK + 1
    if offsets is not None:
        grid += features.shape[0] * (n_samples // BLOCK + 1)
    _find_tiles[(grid,)](
        features, bounds, sources, tiles, offsets, n_slots, n_tiles, n_samples, TILE, BLOCK, offsets is not None
    )
    if n_tiles:
        out, small = whole.data_ptr(), first_slots[1] < n_slots
        _copy[(n_tiles,)](
            tiles, bounds, sources, out, n_bytes, n_slots, *first_slots, TILE, small, 8, num_warps=2, maxnreg=64
        )
