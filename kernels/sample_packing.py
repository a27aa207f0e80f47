"""Samples to other ranks and back into a batch, for batches that are on the device already.

`dispatch` packs the samples of many jagged features for all peers, `combine` makes a batch of what arrived. What
travels in between is up to the caller: `Slabs.data` and `Slabs.lengths` are ready for an all-to-all.

Layout. Samples are brought into the order of `perm`; each peer takes the next few of them. For every size of element
(1, 2, 4 or 8 bytes) there is one buffer without gaps: by peer, then by feature (in the order of `features`, those of
that size), then by sample. The lengths are one tensor in the same order, of all features.

Sizes of outputs come from shapes and from numbers that the caller has on the CPU, so on a GPU nothing waits for the
device. On a CPU tensor the same is done by the definitions at the end of this file.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

ELEMENT = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Jagged(NamedTuple):
    """One feature of a batch. Sample i has values[offsets[i] : offsets[i + 1]]; a dense one has offsets 0, 1, 2, ..."""

    values: torch.Tensor  # [entries, ...]
    offsets: torch.Tensor  # [samples + 1] int64, from 0 to the number of entries


class Slabs(NamedTuple):
    """Samples for all peers, or from all peers."""

    data: dict[int, torch.Tensor]  # bytes per element -> [elements] integers of that size
    lengths: torch.Tensor  # [samples * features] int64, in entries


class Kind(NamedTuple):
    """What is known of a feature without its samples."""

    dtype: torch.dtype
    shape: tuple[int, ...]  # of one entry

    @property
    def width(self) -> int:
        return torch.Size(self.shape).numel()


def kind_of(feature: Jagged) -> Kind:
    return Kind(feature.values.dtype, tuple(feature.values.shape[1:]))


def dispatch(features: Sequence[Jagged], perm: torch.Tensor, peer_ends: torch.Tensor) -> Slabs:
    """Pack. Place i takes sample perm[i] (a permutation); peer p has the places before peer_ends[p] that are left."""
    _check(features, perm, peer_ends)
    if not perm.is_cuda:
        return dispatch_reference(features, perm, peer_ends)
    return dispatch_on_device(features, perm, peer_ends)


def combine(
    slabs: Slabs, perm: torch.Tensor, peer_ends: torch.Tensor, kinds: Sequence[Kind], entries: Sequence[int]
) -> list[Jagged]:
    """Unpack. The slabs hold the samples of every peer one after another, peer_ends[p] of them up to peer p; place i
    of the batch takes the perm[i]-th of them. `entries` says how many entries each feature has in all; where it
    says other than the lengths, values are at the wrong places, but nothing beyond the slabs is read."""
    if not perm.is_cuda:
        return combine_reference(slabs, perm, peer_ends, kinds)
    return combine_on_device(slabs, perm, peer_ends, kinds, entries)


def slab_sizes(lengths: torch.Tensor, peer_samples: Sequence[int], kinds: Sequence[Kind]) -> dict[int, list[int]]:
    """Elements per peer of every buffer, from lengths on the CPU: what an all-to-all has to know."""
    sizes: dict[int, list[int]] = {size: [] for size in _sizes(kinds)}
    for part in lengths.split([n * len(kinds) for n in peer_samples]):
        per_feature = part.view(len(kinds), -1).sum(1).tolist()
        for size, of_peer in sizes.items():
            mine = zip(per_feature, kinds, strict=True)
            of_peer.append(sum(n * k.width for n, k in mine if k.dtype.itemsize == size))
    return sizes


def _check(features: Sequence[Jagged], perm: torch.Tensor, peer_ends: torch.Tensor) -> None:
    for number, (values, offsets) in enumerate(features):
        if offsets.shape[0] != perm.shape[0] + 1:
            raise ValueError(
                f"freescale: feature {number} has offsets of {offsets.shape[0] - 1} samples, "
                f"expected {perm.shape[0]} as `perm` has"
            )
        if values.element_size() not in ELEMENT or 0 in values.shape[1:]:
            what = f"{values.dtype}[entries, {', '.join(map(str, values.shape[1:]))}]"
            raise ValueError(
                f"freescale: feature {number} must have entries of 1, 2, 4 or 8-byte elements, found {what}"
            )
        _check_index(f"the offsets of feature {number}", offsets)
    _check_index("perm", perm)
    _check_index("peer_ends", peer_ends)


def _check_index(name: str, x: torch.Tensor) -> None:
    if x.dtype != torch.int64 or not x.is_contiguous():
        raise ValueError(f"freescale: expected {name} as contiguous int64, found {x.dtype} with strides {x.stride()}")


# ---- on the device ----------------------------------------------------------------------------------------------


class _Layout(NamedTuple):
    """What a set of features has in common for all batches. Rows are the features, ordered by size of element."""

    sizes: list[int]  # of elements, largest first
    features: list[int]  # of each row
    of_size: list[list[int]]  # the features with each size
    table: np.ndarray  # see sample_packing_triton.py; without addresses
    first_rows: list[int]  # of elements of 4, 2 and 1 bytes


@functools.lru_cache(maxsize=256)
def _layout(kinds: tuple[Kind, ...]) -> _Layout:
    sizes = _sizes(kinds)
    of_size = [[f for f, k in enumerate(kinds) if k.dtype.itemsize == size] for size in sizes]
    rows: list[list[int]] = []
    for size, mine in zip(sizes, of_size, strict=True):
        first = len(rows)
        rows += [[0, 0, kinds[f].width * size, first, len(mine), f] for f in mine]
    first_rows = [sum(k.dtype.itemsize > size for k in kinds) for size in (4, 2, 1)]
    table = np.array(rows, dtype=np.int64).reshape(-1, 6)
    return _Layout(sizes, table[:, 5].tolist(), of_size, table, first_rows)


def _table(layout: _Layout, values: list[int], offsets: list[int] | int, like: torch.Tensor) -> torch.Tensor:
    """Addresses are by row."""
    table = layout.table.copy()
    table[:, 0], table[:, 1] = values, offsets
    made = torch.from_numpy(table)
    # pinned: from pageable memory the copy would wait for the device
    return made.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else made


def _buffers(layout: _Layout, counts: list[int], like: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor, int]:
    """Room for so many elements of each size in one buffer: each size's part, the whole, and bytes. Larger elements
    come first, so every part is aligned to its own."""
    n_bytes = sum(n * size for n, size in zip(counts, layout.sizes, strict=True))
    whole = like.new_empty(-(-n_bytes // 8))
    parts, begin = [], 0
    for n, size in zip(counts, layout.sizes, strict=True):
        seen = whole if size == 8 else whole.view(ELEMENT[size])
        parts.append(seen[begin // size : begin // size + n])
        begin += n * size
    return parts, whole, n_bytes


def dispatch_on_device(features: Sequence[Jagged], perm: torch.Tensor, peer_ends: torch.Tensor) -> Slabs:
    from freescale.kernels import sample_packing_triton as launches

    values, n = [f.values.contiguous() for f in features], perm.shape[0]
    layout = _layout(tuple(map(kind_of, features)))
    counts = [sum(values[f].numel() for f in mine) for mine in layout.of_size]
    parts, whole, n_bytes = _buffers(layout, counts, perm)
    data = dict(zip(layout.sizes, parts, strict=True))
    if not values or not n:
        return Slabs(data, perm.new_empty(0))
    at = [values[f].data_ptr() for f in layout.features]
    table = _table(layout, at, [features[f].offsets.data_ptr() for f in layout.features], perm)
    lengths, bounds, sources = launches.dispatch_pieces(table, perm, peer_ends)
    launches.copy_pieces(table, bounds, sources, whole, n_bytes, [row * n for row in layout.first_rows])
    return Slabs(data, lengths)


def combine_on_device(
    slabs: Slabs, perm: torch.Tensor, peer_ends: torch.Tensor, kinds: Sequence[Kind], entries: Sequence[int]
) -> list[Jagged]:
    from freescale.kernels import sample_packing_triton as launches

    n, layout = perm.shape[0], _layout(tuple(kinds))
    if not kinds or not n:
        nothing = perm.new_zeros(n + 1)
        return [Jagged(perm.new_empty((0, *k.shape), dtype=k.dtype), nothing) for k in kinds]
    table = _table(layout, [slabs.data[kinds[f].dtype.itemsize].data_ptr() for f in layout.features], 0, perm)
    bounds, sources = launches.combine_pieces(table, perm, peer_ends, slabs.lengths)
    many = [[entries[f] * kinds[f].width for f in mine] for mine in layout.of_size]
    parts, whole, n_bytes = _buffers(layout, [sum(m) for m in many], perm)
    offsets = perm.new_empty(len(kinds), n + 1)
    launches.copy_pieces(table, bounds, sources, whole, n_bytes, [row * n for row in layout.first_rows], offsets)
    flat = [x for part, m in zip(parts, many, strict=True) for x in part.split(m)]
    made: dict[int, Jagged] = {}
    for f, x, at in zip(layout.features, flat, offsets.unbind(), strict=True):
        x = x if x.dtype == kinds[f].dtype else x.view(kinds[f].dtype)
        made[f] = Jagged(x.view(entries[f], *kinds[f].shape) if kinds[f].shape else x, at)
    return [made[f] for f in range(len(kinds))]


def _sizes(kinds: Sequence[Kind]) -> list[int]:
    return sorted({k.dtype.itemsize for k in kinds}, reverse=True)


# ---- definitions ------------------------------------------------------------------------------------------------


def dispatch_reference(features: Sequence[Jagged], perm: torch.Tensor, peer_ends: torch.Tensor) -> Slabs:
    parts: dict[int, list[torch.Tensor]] = {size: [] for size in _sizes([kind_of(f) for f in features])}
    lengths: list[torch.Tensor] = [perm.new_empty(0)]
    first = 0
    for end in peer_ends.tolist():
        samples, first = perm[first:end], end
        for f in features:
            begin, length = f.offsets[samples], f.offsets[samples + 1] - f.offsets[samples]
            lengths.append(length)
            element = ELEMENT[f.values.element_size()]
            for at, n in zip(begin.tolist(), length.tolist(), strict=True):
                parts[element.itemsize].append(f.values[at : at + n].contiguous().view(-1).view(element))
    empty = {size: perm.new_empty(0, dtype=ELEMENT[size]) for size in parts}
    return Slabs({size: torch.cat([empty[size], *p]) for size, p in parts.items()}, torch.cat(lengths))


def combine_reference(
    slabs: Slabs, perm: torch.Tensor, peer_ends: torch.Tensor, kinds: Sequence[Kind]
) -> list[Jagged]:
    found: list[list[torch.Tensor]] = [[] for _ in kinds]  # of every feature, the samples in the order of arrival
    at, done, first = dict.fromkeys(slabs.data, 0), 0, 0
    for end in peer_ends.tolist():
        for f, kind in enumerate(kinds):
            for length in slabs.lengths[done : done + end - first].tolist():
                size, n = kind.dtype.itemsize, length * kind.width
                flat = slabs.data[size][at[size] : at[size] + n]
                found[f].append(flat.view(kind.dtype).view(length, *kind.shape))
                at[size] += n
            done += end - first
        first = end
    made = []
    for kind, samples in zip(kinds, found, strict=True):
        chosen = [samples[i] for i in perm.tolist()]
        offsets = torch.tensor([0, *(len(s) for s in chosen)], device=perm.device).cumsum(0)
        empty = perm.new_empty((0, *kind.shape), dtype=kind.dtype)
        made.append(Jagged(torch.cat([empty, *chosen]), offsets))
    return made
