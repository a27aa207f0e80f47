"""The launches behind dispatch.py: tables of pieces, and one copy of many pieces at once, in Triton.

A piece is one sample of one feature: consecutive bytes with one place to go. Pieces stand in slots, in the order in
which they fill the output; features with elements of the same size stand together, behind an empty slot. The output is
cut into equal tiles, each tile looks up its slots, so time follows the bytes and neither the number of peers nor the
length of one piece. Nothing here waits for the device.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The table of features (int64), a row each, ordered by size of element. Columns: 0 address of the values or of the
# slab, 1 address of the offsets, 2 bytes of an entry; of the features with elements of this size: 3 the slot before
# their first one, 4 how many they are, 5 which of them this is; 6 number of the feature.
TILE = 4096  # bytes


@triton.jit
def _peer_of(place, peer_ends, n_peers):
    """Of the peer that a place belongs to: where its places begin, and how many it has."""
    low = tl.zeros_like(place)
    high = low + (n_peers - 1)
    steps = n_peers
    while steps > 1:
        middle = (low + high) // 2
        beyond = tl.load(peer_ends + middle) <= place
        low = tl.where(beyond, middle + 1, low)
        high = tl.where(beyond, high, middle)
        steps = (steps + 1) // 2
    low = tl.minimum(low, n_peers - 1)
    first = tl.load(peer_ends + low - 1, mask=low > 0, other=0)
    return first, tl.load(peer_ends + low) - first


@triton.jit
def _slot(features, row, place, peer_ends, n_features, n_peers):
    """Where a place's piece stands among those of its size, and its length among all: by peer, then by feature."""
    first, count = _peer_of(place, peer_ends, n_peers)
    of = features + row * 7
    slot = tl.load(of + 3) + 1 + tl.load(of + 4) * first + tl.load(of + 5) * count + place - first
    return slot, n_features * first + tl.load(of + 6) * count + place - first


@triton.jit(do_not_specialize=["n_samples", "n_features", "n_peers"])
def _dispatch_pieces(
    features, perm, peer_ends, lengths, sizes, sources, n_samples, n_features, n_peers, BLOCK: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = place < n_samples
    values, entry = tl.load(features + row * 7), tl.load(features + row * 7 + 2)
    offsets = tl.load(features + row * 7 + 1).to(tl.pointer_type(tl.int64))
    sample = tl.load(perm + place, mask=live, other=0)
    begin = tl.load(offsets + sample, mask=live, other=0)
    length = tl.load(offsets + sample + 1, mask=live, other=0) - begin
    slot, at = _slot(features, row, place, peer_ends, n_features, n_peers)
    tl.store(lengths + at, length, mask=live)
    tl.store(sizes + slot, length * entry, mask=live)
    tl.store(sources + slot, values + begin * entry, mask=live)


@triton.jit(do_not_specialize=["n_samples", "n_features", "n_peers"])
def _received_sizes(features, peer_ends, lengths, sizes, n_samples, n_features, n_peers, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot, at = _slot(features, row, place, peer_ends, n_features, n_peers)
    length = tl.load(lengths + at, mask=place < n_samples, other=0)
    tl.store(sizes + slot, length * tl.load(features + row * 7 + 2), mask=place < n_samples)


@triton.jit(do_not_specialize=["n_samples", "n_features", "n_peers"])
def _combine_pieces(
    features, perm, peer_ends, ends, sizes, sources, n_samples, n_features, n_peers, BLOCK: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = place < n_samples
    sample = tl.load(perm + place, mask=live, other=0)
    slot, _ = _slot(features, row, sample, peer_ends, n_features, n_peers)
    begin = tl.load(ends + slot - 1, mask=live, other=0)
    end = tl.load(ends + slot, mask=live, other=0)
    before = tl.load(ends + tl.load(features + row * 7 + 3))  # bytes of larger elements
    to = row * (n_samples + 1) + 1 + place
    tl.store(sizes + to, end - begin, mask=live)
    tl.store(sources + to, tl.load(features + row * 7) + begin - before, mask=live)


@triton.jit(do_not_specialize=["n_slots", "n_tiles"])
def _look_up(ends, slots, n_slots, n_tiles, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """For every tile, the slot that its first byte is in: the first that ends after it."""
    tile = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros_like(tile)
    high = low + (n_slots - 1)
    steps = n_slots
    while steps > 1:
        middle = (low + high) // 2
        beyond = (tl.load(ends + middle) <= tile * TILE) & (low < high)
        low = tl.where(beyond, middle + 1, low)
        high = tl.where(beyond, high, middle)
        steps = (steps + 1) // 2
    tl.store(slots + tile, low, mask=tile < n_tiles)


@triton.jit
def _run(ends, sources, slot, high, start, first, stop, lane, T: tl.constexpr):
    """The part of a tile that comes from one slot, and where it is; nothing from slots after `high`."""
    size: tl.constexpr = T.primitive_bitwidth // 8
    at = tl.minimum(slot, high)
    begin, end = tl.load(ends + at - 1, mask=at > 0, other=0), tl.load(ends + at)
    low = (tl.maximum(begin, first) - start).to(tl.int32)
    inside = (lane * size >= low) & (lane * size < (tl.minimum(end, stop) - start).to(tl.int32)) & (slot <= high)
    source = (tl.load(sources + at) + (start - begin)).to(tl.pointer_type(T))
    return tl.load(source + lane, mask=inside), inside


@triton.jit(do_not_specialize=["begin", "stop"])
def _copy(ends, sources, slots, out, begin, stop, TILE: tl.constexpr, BLOCK: tl.constexpr, RUNS: tl.constexpr):
    """Fill bytes begin ... stop of `out` from the pieces. Slot k ends at ends[k], its source is address sources[k]."""
    T: tl.constexpr = out.dtype.element_ty
    size: tl.constexpr = T.primitive_bitwidth // 8
    tile = begin // TILE + tl.program_id(0).to(tl.int64)
    start = tile * TILE
    first, stop = tl.maximum(start, begin), tl.minimum(start + TILE, stop)
    low, high = tl.load(slots + tile), tl.load(slots + tile + 1)
    lane = tl.arange(0, BLOCK)
    to = out + tile * BLOCK + lane
    if high - low < RUNS:
        for slot in range(low, high + 1, 2):
            x0, inside0 = _run(ends, sources, slot, high, start, first, stop, lane, T)
            x1, inside1 = _run(ends, sources, slot + 1, high, start, first, stop, lane, T)
            tl.store(to, x0, mask=inside0)
            tl.store(to, x1, mask=inside1)
    else:
        mine = tl.zeros_like(lane)  # slot of each element, from `low` on
        until = mine + (high - low).to(tl.int32)
        span = high - low + 1
        while span > 1:
            middle = (mine + until) // 2
            # of slots before `until` alone, which end within the tile
            beyond = ((tl.load(ends + low + middle) - start).to(tl.int32) <= lane * size) & (mine < until)
            mine = tl.where(beyond, middle + 1, mine)
            until = tl.where(beyond, until, middle)
            span = (span + 1) // 2
        inside = (lane * size >= (first - start).to(tl.int32)) & (lane * size < (stop - start).to(tl.int32))
        at = low + mine
        source = tl.load(sources + at) + (start - tl.load(ends + at - 1, mask=at > 0, other=0))
        x = tl.load(source.to(tl.pointer_type(T)) + lane, mask=inside)
        tl.store(to, x, mask=inside)


def dispatch_pieces(features, perm, peer_ends, n_slots):
    """Of slabs: lengths, where each slot ends, where it comes from."""
    n, n_features, peers = perm.shape[0], features.shape[0], peer_ends.shape[0]
    lengths = perm.new_empty(n_features * n)
    sizes, sources = perm.new_zeros(n_slots), perm.new_empty(n_slots)
    grid = (triton.cdiv(n, 128), n_features)
    _dispatch_pieces[grid](features, perm, peer_ends, lengths, sizes, sources, n, n_features, peers, 128)
    return lengths, sizes.cumsum(0), sources


def combine_pieces(features, perm, peer_ends, lengths, n_slots):
    """Of a batch made of received slabs: where each slot ends, where it comes from. Every feature has an empty slot."""
    n, n_features, peers = perm.shape[0], features.shape[0], peer_ends.shape[0]
    grid = (triton.cdiv(n, 128), n_features)
    arrived = perm.new_zeros(n_slots)
    _received_sizes[grid](features, peer_ends, lengths, arrived, n, n_features, peers, 128)
    sizes, sources = perm.new_zeros(n_features * (n + 1)), perm.new_empty(n_features * (n + 1))
    ends = arrived.cumsum(0)
    _combine_pieces[grid](features, perm, peer_ends, ends, sizes, sources, n, n_features, peers, 128)
    return sizes.cumsum(0), sources


def copy_pieces(ends, sources, parts, n_bytes):
    """Fill a buffer of `n_bytes` from the pieces: `parts` are its elements of one size each, one after another."""
    n_tiles = triton.cdiv(n_bytes, TILE) + 1
    slots = ends.new_empty(n_tiles)
    _look_up[(triton.cdiv(n_tiles, 128),)](ends, slots, ends.shape[0], n_tiles, TILE, 128)
    begin = 0
    for part, whole in parts:
        stop = begin + part.nbytes
        if begin < stop:
            block = TILE // part.element_size()
            grid = (triton.cdiv(stop, TILE) - begin // TILE,)
            _copy[grid](ends, sources, slots, whole, begin, stop, TILE, block, 8, num_warps=min(8, block // 128))
        begin = stop
