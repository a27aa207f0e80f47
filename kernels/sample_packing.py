"""Pack samples for other ranks and rebuild batches from received ones, for batches already on the device.

`dispatch` packs the samples of many jagged features for all peers. `combine` builds a batch from what arrived. The
caller does the communication: both fields of `PackedSamples` are ready for an all-to-all.

Layout. Samples are ordered by `perm`; each peer takes the next ones. For each element size (1, 2, 4 or 8 bytes) there
is one buffer without gaps: by peer, then by feature of that size (in the order of `features`), then by sample. The
lengths of all features are one tensor in the same order.

Output sizes come from shapes and from CPU numbers of the caller, so nothing waits for the device. CPU tensors use the
definitions at the end of this file.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

# Elements are copied as integers of their size.
ELEMENT_DTYPE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Jagged(NamedTuple):
    """One feature of a batch. Sample i is values[offsets[i] : offsets[i + 1]]; dense ones have offsets 0, 1, 2, ..."""

    values: torch.Tensor  # [entries, ...]
    offsets: torch.Tensor  # [samples + 1] int64, from 0 to the number of entries


class PackedSamples(NamedTuple):
    """Samples for all peers, or from all peers."""

    data: dict[int, torch.Tensor]  # bytes per element -> [elements] integers of that size
    lengths: torch.Tensor  # [samples * features] int64, in entries


class FeatureSpec(NamedTuple):
    """Properties shared by all samples of a feature."""

    dtype: torch.dtype
    shape: tuple[int, ...]  # of one entry

    @property
    def width(self) -> int:
        return torch.Size(self.shape).numel()


def spec_of(feature: Jagged) -> FeatureSpec:
    return FeatureSpec(feature.values.dtype, tuple(feature.values.shape[1:]))


def dispatch(features: Sequence[Jagged], perm: torch.Tensor, peer_ends: torch.Tensor) -> PackedSamples:
    """Pack. Position i takes sample perm[i] (a permutation); peer p gets positions peer_ends[p - 1] to peer_ends[p]."""
    _check(features, perm, peer_ends)
    if not perm.is_cuda:
        return dispatch_reference(features, perm, peer_ends)
    return dispatch_on_device(features, perm, peer_ends)


def combine(
    packed: PackedSamples,
    perm: torch.Tensor,
    peer_ends: torch.Tensor,
    specs: Sequence[FeatureSpec],
    entries: Sequence[int],
) -> list[Jagged]:
    """Unpack. `packed` holds the samples of every peer in order, peer_ends[p] of them up to peer p; position i of the
    batch takes sample perm[i] of them. `entries` is the total number of entries of each feature. If it contradicts the
    lengths, values are misplaced, but nothing past `packed` is read."""
    if not perm.is_cuda:
        return combine_reference(packed, perm, peer_ends, specs)
    return combine_on_device(packed, perm, peer_ends, specs, entries)


def _check(features: Sequence[Jagged], perm: torch.Tensor, peer_ends: torch.Tensor) -> None:
    for number, (values, offsets) in enumerate(features):
        if offsets.shape[0] != perm.shape[0] + 1:
            raise ValueError(
                f"freescale: feature {number} has offsets of {offsets.shape[0] - 1} samples, "
                f"expected {perm.shape[0]} as `perm` has"
            )
        if values.element_size() not in ELEMENT_DTYPE or 0 in values.shape[1:]:
            found = f"{values.dtype}[entries, {', '.join(map(str, values.shape[1:]))}]"
            raise ValueError(
                f"freescale: feature {number} must have entries of 1, 2, 4 or 8-byte elements, found {found}"
            )
        _check_index(f"the offsets of feature {number}", offsets)
    _check_index("perm", perm)
    _check_index("peer_ends", peer_ends)


def _check_index(name: str, x: torch.Tensor) -> None:
    if x.dtype != torch.int64 or not x.is_contiguous():
        raise ValueError(f"freescale: expected {name} as contiguous int64, found {x.dtype} with strides {x.stride()}")


# ---- on the device ----------------------------------------------------------------------------------------------


class _Layout(NamedTuple):
    """What a set of features has in common for all batches. Rows are the features, ordered by element size."""

    sizes: list[int]  # of elements, largest first
    features: list[int]  # per row
    features_of_size: list[list[int]]  # for each size
    table: np.ndarray  # see sample_packing_triton.py; addresses omitted
    first_rows: list[int]  # of 4-, 2- and 1-byte elements


@functools.lru_cache(maxsize=256)
def _layout(specs: tuple[FeatureSpec, ...]) -> _Layout:
    sizes = _element_sizes(specs)
    features_of_size = [[f for f, s in enumerate(specs) if s.dtype.itemsize == size] for size in sizes]
    rows: list[list[int]] = []
    for size, features in zip(sizes, features_of_size, strict=True):
        first = len(rows)
        rows += [[0, 0, specs[f].width * size, first, len(features), f] for f in features]
    first_rows = [sum(s.dtype.itemsize > size for s in specs) for size in (4, 2, 1)]
    table = np.array(rows, dtype=np.int64).reshape(-1, 6)
    return _Layout(sizes, table[:, 5].tolist(), features_of_size, table, first_rows)


def _feature_table(
    layout: _Layout, values: list[int], offsets: list[int] | int, device: torch.device
) -> torch.Tensor:
    """The layout's table with the addresses of values and offsets, given by row."""
    table = layout.table.copy()
    table[:, 0], table[:, 1] = values, offsets
    on_host = torch.from_numpy(table)
    # pinned: a copy from pageable memory would wait for the device
    return on_host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else on_host


def _allocate(
    layout: _Layout, counts: list[int], device: torch.device
) -> tuple[list[torch.Tensor], torch.Tensor, int]:
    """Allocate one buffer for the given counts of each element size. Returns each size's part, the whole, and its
    bytes. Larger elements come first, so every part is aligned."""
    n_bytes = sum(n * size for n, size in zip(counts, layout.sizes, strict=True))
    whole = torch.empty(-(-n_bytes // 8), dtype=torch.int64, device=device)
    parts, begin = [], 0
    for n, size in zip(counts, layout.sizes, strict=True):
        elements = whole if size == 8 else whole.view(ELEMENT_DTYPE[size])
        parts.append(elements[begin // size : begin // size + n])
        begin += n * size
    return parts, whole, n_bytes


def dispatch_on_device(features: Sequence[Jagged], perm: torch.Tensor, peer_ends: torch.Tensor) -> PackedSamples:
    from freescale.kernels import sample_packing_triton as triton_kernels

    values, n = [f.values.contiguous() for f in features], perm.shape[0]
    layout = _layout(tuple(map(spec_of, features)))
    counts = [sum(values[f].numel() for f in indices) for indices in layout.features_of_size]
    parts, whole, n_bytes = _allocate(layout, counts, perm.device)
    data = dict(zip(layout.sizes, parts, strict=True))
    if not values or not n:
        return PackedSamples(data, perm.new_empty(0))
    value_addresses = [values[f].data_ptr() for f in layout.features]
    offset_addresses = [features[f].offsets.data_ptr() for f in layout.features]
    table = _feature_table(layout, value_addresses, offset_addresses, perm.device)
    lengths, bounds, sources = triton_kernels.dispatch_pieces(table, perm, peer_ends)
    triton_kernels.copy_pieces(table, bounds, sources, whole, n_bytes, [row * n for row in layout.first_rows])
    return PackedSamples(data, lengths)


def combine_on_device(
    packed: PackedSamples,
    perm: torch.Tensor,
    peer_ends: torch.Tensor,
    specs: Sequence[FeatureSpec],
    entries: Sequence[int],
) -> list[Jagged]:
    from freescale.kernels import sample_packing_triton as triton_kernels

    n, layout = perm.shape[0], _layout(tuple(specs))
    if not specs or not n:
        no_offsets = perm.new_zeros(n + 1)
        return [Jagged(perm.new_empty((0, *s.shape), dtype=s.dtype), no_offsets) for s in specs]
    value_addresses = [packed.data[specs[f].dtype.itemsize].data_ptr() for f in layout.features]
    table = _feature_table(layout, value_addresses, 0, perm.device)
    bounds, sources = triton_kernels.combine_pieces(table, perm, peer_ends, packed.lengths)
    counts = [[entries[f] * specs[f].width for f in indices] for indices in layout.features_of_size]
    parts, whole, n_bytes = _allocate(layout, [sum(c) for c in counts], perm.device)
    offsets = perm.new_empty(len(specs), n + 1)
    triton_kernels.copy_pieces(table, bounds, sources, whole, n_bytes, [row * n for row in layout.first_rows], offsets)
    flat = [x for part, c in zip(parts, counts, strict=True) for x in part.split(c)]
    unpacked: dict[int, Jagged] = {}
    for f, x, feature_offsets in zip(layout.features, flat, offsets.unbind(), strict=True):
        x = x if x.dtype == specs[f].dtype else x.view(specs[f].dtype)
        unpacked[f] = Jagged(x.view(entries[f], *specs[f].shape) if specs[f].shape else x, feature_offsets)
    return [unpacked[f] for f in range(len(specs))]


def _element_sizes(specs: Sequence[FeatureSpec]) -> list[int]:
    return sorted({s.dtype.itemsize for s in specs}, reverse=True)


# ---- definitions ------------------------------------------------------------------------------------------------


def dispatch_reference(features: Sequence[Jagged], perm: torch.Tensor, peer_ends: torch.Tensor) -> PackedSamples:
    parts: dict[int, list[torch.Tensor]] = {size: [] for size in _element_sizes([spec_of(f) for f in features])}
    lengths: list[torch.Tensor] = [perm.new_empty(0)]
    first = 0
    for end in peer_ends.tolist():
        samples, first = perm[first:end], end
        for f in features:
            begin, length = f.offsets[samples], f.offsets[samples + 1] - f.offsets[samples]
            lengths.append(length)
            element = ELEMENT_DTYPE[f.values.element_size()]
            for i, n in zip(begin.tolist(), length.tolist(), strict=True):
                parts[element.itemsize].append(f.values[i : i + n].contiguous().view(-1).view(element))
    empty = {size: perm.new_empty(0, dtype=ELEMENT_DTYPE[size]) for size in parts}
    return PackedSamples({size: torch.cat([empty[size], *p]) for size, p in parts.items()}, torch.cat(lengths))


def combine_reference(
    packed: PackedSamples, perm: torch.Tensor, peer_ends: torch.Tensor, specs: Sequence[FeatureSpec]
) -> list[Jagged]:
    received: list[list[torch.Tensor]] = [[] for _ in specs]  # per feature, in order of arrival
    consumed, lengths_read, first = dict.fromkeys(packed.data, 0), 0, 0
    for end in peer_ends.tolist():
        for f, spec in enumerate(specs):
            for length in packed.lengths[lengths_read : lengths_read + end - first].tolist():
                size, n = spec.dtype.itemsize, length * spec.width
                flat = packed.data[size][consumed[size] : consumed[size] + n]
                received[f].append(flat.view(spec.dtype).view(length, *spec.shape))
                consumed[size] += n
            lengths_read += end - first
        first = end
    unpacked = []
    for spec, samples in zip(specs, received, strict=True):
        in_order = [samples[i] for i in perm.tolist()]
        offsets = torch.tensor([0, *(len(s) for s in in_order)], device=perm.device).cumsum(0)
        empty = perm.new_empty((0, *spec.shape), dtype=spec.dtype)
        unpacked.append(Jagged(torch.cat([empty, *in_order]), offsets))
    return unpacked
