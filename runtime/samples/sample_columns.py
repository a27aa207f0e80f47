"""The data of a batch as columns that are split by sample: select samples, or send them to other ranks, all columns in
two collectives, one of lengths, then one of bytes. Data that stays on its rank is not sent. Messages are on the CPU;
tensors on a device are packed there, see device_packing.py. split_batch.py converts batches to columns."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist

from freescale.runtime import batch_structure
from freescale.runtime.samples.device_packing import DevicePacker, row_bytes


@dataclass(frozen=True)
class Column:
    """Rows that belong to samples.

    name      path in the batch
    keys      its features, in the order of their rows
    lengths   rows per feature and sample, [keys, samples], on the CPU; None: one feature, one row per sample
    rows      tensors (values, and weights if any), each ordered by feature, then by sample
    samples   number of samples
    is_jagged the batch contains its lengths, so the number of samples is certain
    """

    name: str
    keys: tuple[str, ...]
    lengths: np.ndarray | None
    rows: tuple[torch.Tensor, ...]
    samples: int
    is_jagged: bool = False

    def counts(self) -> np.ndarray:
        return np.ones((1, self.samples), np.int64) if self.lengths is None else self.lengths

    def schema(self) -> str:
        """What must be the same on all ranks."""
        kinds = (f"{str(r.dtype).removeprefix('torch.')}{list(r.shape[1:])}" for r in self.rows)
        jagged = "" if self.lengths is None else "jagged "
        return f"{self.name}({', '.join(self.keys)}): {jagged}{' and '.join(kinds)}"


def digest(text: str) -> int:
    """A hash of a text such as a schema, for comparison across ranks."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def sizes(columns: Sequence[Column], samples: int) -> np.ndarray:
    """Bytes per sample, including its lengths."""
    total = np.zeros(samples, np.int64)
    for c in columns:
        total += c.counts().sum(0) * sum(row_bytes(r) for r in c.rows)
        total += 0 if c.lengths is None else 8 * len(c.keys)
    return total


def select(c: Column, chosen: np.ndarray) -> Column:
    index, lengths = chosen, None
    if c.lengths is not None:
        lengths = c.lengths[:, chosen]
        index = spans(_starts(c.lengths)[:, chosen].ravel(), lengths.ravel())
    rows = tuple(r.index_select(0, batch_structure.to_device(torch.from_numpy(index), r.device)) for r in c.rows)
    return replace(c, lengths=lengths, rows=rows, samples=len(chosen))


def exchange(
    columns: Sequence[Column], destination: np.ndarray, arriving: np.ndarray, group: dist.ProcessGroup
) -> list[Column]:
    """Send each sample to the rank `destination[sample]`; `arriving[rank]` samples arrive from each rank, in its order.
    Columns must have the same schema on all ranks. Collective."""
    order, leaving = np.argsort(destination, kind="stable"), np.bincount(destination, minlength=group.size())
    samples, lengths = int(arriving.sum()), _exchange_lengths(columns, order, leaving, arriving, group)
    tensors = [r for c in columns for r in c.rows]
    before = [c.lengths for c in columns for _ in c.rows]
    after = [n for c, n in zip(columns, lengths, strict=True) for _ in c.rows]
    outgoing = [_host_pieces(r, n, order, leaving) for r, n in zip(tensors, before, strict=True)]
    packers = _device_packers(tensors, group)
    for packer, mine in packers:
        counts = _counts([before[i] for i in mine], len(destination))
        for i, pieces in zip(mine, packer.pack(counts, destination), strict=True):
            outgoing[i] = pieces
    expected = [(_rows_by_rank(n, arriving) * row_bytes(r)).tolist() for r, n in zip(tensors, after, strict=True)]
    arrived = _exchange_bytes(outgoing, expected, group)
    rows = [_from_host_pieces(*x, samples, arriving) for x in zip(tensors, after, arrived, strict=True)]
    for packer, mine in packers:
        counts = _counts([after[i] for i in mine], samples)
        for i, r in zip(mine, packer.unpack(counts, arriving, [arrived[i] for i in mine]), strict=True):
            rows[i] = r
    new = iter(rows)
    return [
        replace(c, lengths=n, rows=tuple(islice(new, len(c.rows))), samples=samples)
        for c, n in zip(columns, lengths, strict=True)
    ]


def _on_device(rows: torch.Tensor) -> bool:
    return rows.device.type != "cpu"


def _device_packers(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[tuple[DevicePacker, list[int]]]:
    """Per device, its packer and the indices of its tensors."""
    of_device: dict[torch.device, list[int]] = {}
    for i, r in enumerate(tensors):
        if _on_device(r):
            of_device.setdefault(r.device, []).append(i)
    return [(DevicePacker([tensors[i] for i in mine], group.rank(), group.size()), mine) for mine in of_device.values()]


def _counts(lengths: Sequence[np.ndarray | None], samples: int) -> list[np.ndarray]:
    """Rows per feature and sample; the same array for all dense tensors."""
    dense = np.ones((1, samples), np.int64)
    return [dense if n is None else n for n in lengths]


def _exchange_bytes(
    outgoing: list[list[torch.Tensor]], expected: list[list[int]], group: dist.ProcessGroup
) -> list[list[torch.Tensor]]:
    """Send `outgoing[tensor][rank]` to that rank; return `[tensor][rank]` received, `expected` bytes each."""
    me, ranks = group.rank(), range(group.size())
    others = [rank for rank in ranks if rank != me]
    sizes_in = [sum(e[rank] for e in expected) if rank != me else 0 for rank in ranks]
    sizes_out = [sum(len(o[rank]) for o in outgoing) if rank != me else 0 for rank in ranks]
    nothing = torch.empty(0, dtype=torch.uint8)
    message = torch.cat([nothing, *(o[rank] for rank in others for o in outgoing)])
    received = torch.empty(sum(sizes_in), dtype=torch.uint8)
    dist.all_to_all_single(received, message, sizes_in, sizes_out, group=group)
    pieces = iter(received.split([e[rank] for rank in others for e in expected]))
    from_rank = {rank: [next(pieces) for _ in expected] for rank in others}
    from_rank[me] = [o[me] for o in outgoing]
    return [[from_rank[rank][i] for rank in ranks] for i in range(len(outgoing))]


def _exchange_lengths(
    columns: Sequence[Column], order: np.ndarray, leaving: np.ndarray, arriving: np.ndarray, group: dist.ProcessGroup
) -> list[np.ndarray | None]:
    """Arriving rows per feature and sample, for each column; None if each sample has one row."""
    jagged = [c.lengths for c in columns if c.lengths is not None]
    if not jagged:
        return [None] * len(columns)
    message = torch.from_numpy(np.ascontiguousarray(np.concatenate(jagged).T[order]))
    received = message.new_empty((int(arriving.sum()), message.shape[1]))
    dist.all_to_all_single(received, message, arriving.tolist(), leaving.tolist(), group=group)
    ends = np.cumsum([len(lengths) for lengths in jagged])
    parts = iter(np.split(np.ascontiguousarray(received.numpy().T), ends[:-1]))
    return [None if c.lengths is None else next(parts) for c in columns]


def _host_pieces(
    rows: torch.Tensor, lengths: np.ndarray | None, order: np.ndarray, leaving: np.ndarray
) -> list[torch.Tensor]:
    """For each rank, the bytes to send, ordered by feature, then by sample. Empty for tensors packed on their
    device."""
    if _on_device(rows):
        return []
    index, per_rank = order, leaving
    if lengths is not None:
        counts, segments = lengths[:, order], _segments(len(lengths), leaving)
        starts = _starts(lengths)[:, order].ravel()[segments]
        index, per_rank = spans(starts, counts.ravel()[segments]), _rows_by_rank(counts, leaving)
    return list(as_bytes(rows.index_select(0, torch.from_numpy(index))).split((per_rank * row_bytes(rows)).tolist()))


def _from_host_pieces(
    before: torch.Tensor, lengths: np.ndarray | None, pieces: list[torch.Tensor], samples: int, arriving: np.ndarray
) -> torch.Tensor:
    """A tensor like `before` of received bytes, which are ordered by rank, feature, sample."""
    if _on_device(before):
        return before
    n = samples if lengths is None else int(lengths.sum())
    rows = torch.cat(pieces).view(before.dtype).view(n, *before.shape[1:])
    if lengths is None or len(lengths) == 1:
        return rows
    segments = _segments(len(lengths), arriving)
    arrived = lengths.ravel()[segments]
    starts = np.empty_like(arrived)
    starts[segments] = np.cumsum(arrived) - arrived
    return rows.index_select(0, torch.from_numpy(spans(starts, lengths.ravel())))


def _segments(keys: int, samples: np.ndarray) -> np.ndarray:
    """Indices into (feature, sample) that group the samples by rank."""
    if keys == 1:
        return np.arange(samples.sum())
    return np.argsort(np.tile(np.repeat(np.arange(len(samples)), samples), keys), kind="stable")


def _rows_by_rank(counts: np.ndarray | None, samples: np.ndarray) -> np.ndarray:
    """Rows per rank, if `counts` is ordered by rank; None: one row per sample."""
    if counts is None:
        return samples
    ends = np.zeros(counts.shape[1] + 1, np.int64)
    np.cumsum(counts.sum(0), out=ends[1:])
    last = samples.cumsum()
    return ends[last] - ends[last - samples]


def _starts(counts: np.ndarray) -> np.ndarray:
    flat = counts.ravel()
    return (np.cumsum(flat) - flat).reshape(counts.shape)


def spans(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Concatenated ranges start, start + 1, ..., of the given counts."""
    return np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    return rows.contiguous().view(-1).view(torch.uint8)
