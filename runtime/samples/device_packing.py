"""Pack samples of device tensors for all ranks, and unpack them, many tensors at a time.

One kernel launch packs them. Outgoing data is copied to the host once per element size, with a single synchronization.
Incoming data is copied to the device asynchronously. Data that stays on its rank stays on the device. The pieces have
the layout that sample_columns.py uses for host tensors, and share its messages. Runs on the current stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from freescale.kernels import sample_packing
from freescale.kernels.sample_packing import ELEMENT_DTYPE, FeatureSpec, Jagged, PackedSamples
from freescale.runtime import batch_structure

_ALIGNED = 16  # bytes; kernels expect this alignment of tensors that are not slices


class DevicePacker:
    """Packs the tensors of one device for other ranks: `pack`, exchange the pieces, `unpack`.

    `rows`: tensors [rows, ...], ordered by feature, then by sample. Counts: rows per feature and sample, [features,
    samples], for each tensor. Peers are the other ranks, then this one, so data that stays is at the end of every slab.
    """

    def __init__(self, rows: Sequence[torch.Tensor], me: int, ranks: int) -> None:
        self.rows, self.me, self.device = rows, me, rows[0].device
        self.others = [rank for rank in range(ranks) if rank != me]
        self.peers = [*self.others, me]
        # By index; the other tensors are empty.
        self._packable = {i: _as_plain_elements(r) for i, r in enumerate(rows) if 0 not in r.shape[1:]}
        self._by_element_size: dict[int, list[int]] = {}
        for i, x in self._packable.items():
            self._by_element_size.setdefault(x.element_size(), []).append(i)
        self._staying: dict[int, torch.Tensor] = {}

    def pack(self, counts: Sequence[np.ndarray], destination: np.ndarray) -> list[list[torch.Tensor]]:
        """For each tensor and rank, the bytes to send, on the host; empty for this rank. Sample i goes to rank
        destination[i]."""
        pieces = [[torch.empty(0, dtype=torch.uint8)] * len(self.peers) for _ in self.rows]
        if not self._packable:
            return pieces
        with _device_guard(self.device):
            slabs = self._dispatch(counts, destination)
            n_bytes = {
                i: np.bincount(destination, counts[i].sum(0), len(self.peers)).astype(np.int64) * row_bytes(x)
                for i, x in self._packable.items()
            }
            for size, mine in self._by_element_size.items():
                stays = sum(int(n_bytes[i][self.me]) for i in mine) // size
                leaves = slabs.data[size].shape[0] - stays
                slabs.data[size], self._staying[size] = slabs.data[size].split([leaves, stays])
            leaving = batch_structure.to_host([slabs.data[size] for size in self._by_element_size])
        for mine, slab in zip(self._by_element_size.values(), leaving, strict=True):
            places = [(i, rank) for rank in self.others for i in mine]
            parts = slab.view(torch.uint8).split([int(n_bytes[i][rank]) for i, rank in places])
            for (i, rank), part in zip(places, parts, strict=True):
                pieces[i][rank] = part
        return pieces

    def unpack(
        self, counts: Sequence[np.ndarray], arriving: np.ndarray, arrived: Sequence[Sequence[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Build the tensors from what arrived, samples ordered by rank. `arrived[tensor][rank]`: what `pack` made for
        this rank. `counts`: of the arrived samples. `arriving[rank]`: number of samples from each rank."""
        unpacked: Iterator[Jagged] = iter(())
        if self._packable:
            with _device_guard(self.device):
                unpacked = iter(self._combine(counts, arriving, arrived))
        rows = []
        for i, before in enumerate(self.rows):
            if i not in self._packable:
                rows.append(before.new_empty((int(counts[i].sum()), *before.shape[1:])))
                continue
            x = _concatenated([next(unpacked).values for _ in counts[i]])
            rows.append(torch.view_as_complex(x) if x.dim() > before.dim() else x)
        return rows

    def _dispatch(self, counts: Sequence[np.ndarray], destination: np.ndarray) -> PackedSamples:
        order = np.argsort(np.where(destination == self.me, len(self.peers), destination), kind="stable")
        peer_ends = np.bincount(destination, minlength=len(self.peers))[self.peers].cumsum()
        different = {id(counts[i]): _offsets(counts[i]) for i in self._packable}
        perm, ends, *uploaded = self._upload([order, peer_ends, *different.values()])
        offsets = dict(zip(different, uploaded, strict=True))
        features = [
            Jagged(values, starts)
            for i, x in self._packable.items()
            for values, starts in zip(x.split(counts[i].sum(1).tolist()), offsets[id(counts[i])], strict=True)
        ]
        return sample_packing.dispatch(features, perm, ends)

    def _combine(
        self, counts: Sequence[np.ndarray], arriving: np.ndarray, arrived: Sequence[Sequence[torch.Tensor]]
    ) -> list[Jagged]:
        of_peer = arriving[self.peers]
        rank_of = np.repeat(self.peers, of_peer)  # of the samples in slab order
        perm = np.argsort(rank_of, kind="stable")
        lengths = np.concatenate([counts[i] for i in self._packable])[:, np.argsort(perm)]
        peer_of = np.repeat(np.arange(len(self.peers)), of_peer)
        by_peer = np.argsort(np.tile(peer_of, len(lengths)), kind="stable")
        placed, ends, flat = self._upload([perm, of_peer.cumsum(), lengths.ravel()[by_peer]])
        data = {size: self._slab(size, [[arrived[i][r] for i in mine] for r in self.others])
                for size, mine in self._by_element_size.items()}  # fmt: skip
        kinds = [FeatureSpec(x.dtype, tuple(x.shape[1:])) for i, x in self._packable.items() for _ in counts[i]]
        return sample_packing.combine(PackedSamples(data, flat), placed, ends, kinds, lengths.sum(1).tolist())

    def _slab(self, size: int, by_rank: list[list[torch.Tensor]]) -> torch.Tensor:
        """What arrived from other ranks, then what stayed."""
        arrived = [piece for of_rank in by_rank for piece in of_rank]
        n, staying = sum(map(len, arrived)) // size, self._staying.pop(size)
        slab = torch.empty(n + len(staying), dtype=ELEMENT_DTYPE[size], device=self.device)
        if n:
            host = torch.empty(n * size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            torch.cat(arrived, out=host)
            slab[:n].copy_(host.view(slab.dtype), non_blocking=True)
        slab[n:].copy_(staying)
        return slab

    def _upload(self, numbers: list[np.ndarray]) -> list[torch.Tensor]:
        """Copy integer arrays to the device at once."""
        flat = batch_structure.to_device(torch.from_numpy(np.concatenate([x.ravel() for x in numbers])), self.device)
        parts = flat.split([x.size for x in numbers])
        return [part.view(x.shape) for part, x in zip(parts, numbers, strict=True)]


def _as_plain_elements(rows: torch.Tensor) -> torch.Tensor:
    """Contiguous elements of at most 8 bytes, without lazy conjugation or negation."""
    rows = rows.resolve_conj().resolve_neg().contiguous()
    return torch.view_as_real(rows) if rows.element_size() > max(ELEMENT_DTYPE) else rows


def _offsets(counts: np.ndarray) -> np.ndarray:
    """[features, samples + 1]: start of each sample in its feature's rows, and the end of the last."""
    offsets = np.zeros((counts.shape[0], counts.shape[1] + 1), np.int64)
    np.cumsum(counts, 1, out=offsets[:, 1:])
    return offsets


def row_bytes(rows: torch.Tensor) -> int:
    return rows.shape[1:].numel() * rows.element_size()


def _concatenated(parts: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate the features of a tensor; without a copy if they are adjacent, as the kernels leave them."""
    first, offset, adjacent = parts[0], parts[0].storage_offset(), True
    for part in parts:
        same_storage = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        adjacent = bool(adjacent and same_storage and part.storage_offset() == offset)
        offset += part.numel()
    if not adjacent:
        return torch.cat(parts)
    shape = (sum(map(len, parts)), *first.shape[1:])
    x = first.as_strided(shape, first.stride()) if len(parts) > 1 else first
    return x.clone() if x.data_ptr() % _ALIGNED else x


def _device_guard(device: torch.device) -> AbstractContextManager:
    """Kernels launch on the current device, which is 0 in a new thread."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
