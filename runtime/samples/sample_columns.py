"""The data of a batch as columns that are cut by sample: select samples, or send them to other ranks.

A column knows how many rows each sample has; a dense tensor has one. All columns of a batch travel together: one
all-to-all of lengths, then one of bytes. What stays on its rank is not sent. Tensors on a device stay there, the
messages are on the CPU: see device_packing.py. What a batch looks like is in split_batch.py.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from freescale.runtime import batch_structure
from freescale.runtime.samples.device_packing import DevicePacker


@dataclass(frozen=True)
class Column:
    """Rows that belong to samples.

    name      where it is in the batch
    keys      the features in it, in the order of their rows
    lengths   rows of each feature and sample, [keys, samples], on the CPU; None: one feature, one row per sample
    rows      tensors of so many rows each (values, and weights if there are any): by feature, then by sample
    samples   how many
    is_jagged its lengths were in the batch, which makes it certain how many samples there are
    """

    name: str
    keys: tuple[str, ...]
    lengths: np.ndarray | None
    rows: tuple[torch.Tensor, ...]
    samples: int
    is_jagged: bool = False

    def counts(self) -> np.ndarray:
        """Rows of each feature and sample."""
        return np.ones((1, self.samples), np.int64) if self.lengths is None else self.lengths

    def schema(self) -> str:
        """What must be the same on all ranks."""
        kinds = (f"{str(r.dtype).removeprefix('torch.')}{list(r.shape[1:])}" for r in self.rows)
        jagged = "" if self.lengths is None else "jagged "
        return f"{self.name}({', '.join(self.keys)}): {jagged}{' and '.join(kinds)}"


def digest(text: str) -> int:
    """A number that stands for a text, such as a schema, where ranks compare them."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def sizes(columns: Sequence[Column], samples: int) -> np.ndarray:
    """Bytes of each sample, with its lengths."""
    total = np.zeros(samples, np.int64)
    for c in columns:
        total += c.counts().sum(0) * sum(_row_bytes(r) for r in c.rows)
        total += 0 if c.lengths is None else 8 * len(c.keys)
    return total


def select(columns: Sequence[Column], chosen: np.ndarray) -> list[Column]:
    """The chosen samples, in the order given."""
    return [_selected(c, chosen) for c in columns]


def _selected(c: Column, chosen: np.ndarray) -> Column:
    index, lengths = chosen, None
    if c.lengths is not None:
        lengths = c.lengths[:, chosen]
        index = _spans(_starts(c.lengths)[:, chosen].ravel(), lengths.ravel())
    rows = tuple(r.index_select(0, batch_structure.to_device(torch.from_numpy(index), r.device)) for r in c.rows)
    return replace(c, lengths=lengths, rows=rows, samples=len(chosen))


def exchange(
    columns: Sequence[Column], destination: np.ndarray, arriving: np.ndarray, group: dist.ProcessGroup
) -> list[Column]:
    """Send every sample to the rank `destination[sample]`; `arriving[rank]` samples come from each rank.

    They are put together by the rank they come from, then in the order that they had there. All ranks of the group
    call this with columns of the same schema.
    """
    order, leaving = np.argsort(destination, kind="stable"), np.bincount(destination, minlength=group.size())
    lengths = _exchange_lengths(columns, order, leaving, arriving, group)
    counts_before = _counts_by_tensor(columns, [c.lengths for c in columns], len(destination))
    counts_after = _counts_by_tensor(columns, lengths, int(arriving.sum()))
    outgoing = [pieces for c in columns for pieces in _pieces_by_rank(c, order, leaving)]
    packers = _device_packers(columns, group)
    for packer, indices in packers:
        for i, pieces in zip(indices, packer.pack([counts_before[i] for i in indices], destination), strict=True):
            outgoing[i] = pieces
    expected = [
        (_rows_by_rank(counts, arriving) * _row_bytes(r)).tolist()
        for c, counts in zip(columns, lengths, strict=True)
        for r in c.rows
    ]
    arrived = _exchange_bytes(outgoing, expected, group)
    unpacked: dict[int, torch.Tensor] = {}
    for packer, indices in packers:
        rows = packer.unpack([counts_after[i] for i in indices], arriving, [arrived[i] for i in indices])
        unpacked.update(zip(indices, rows, strict=True))
    index = iter(range(len(arrived)))
    return [
        _assemble(c, counts, [unpacked.get(i, arrived[i]) for _, i in zip(c.rows, index, strict=False)], arriving)
        for c, counts in zip(columns, lengths, strict=True)
    ]


def _on_device(rows: torch.Tensor) -> bool:
    """Whether the tensor is packed on its device; a tensor on the CPU is packed here."""
    return rows.device.type != "cpu"


def _device_packers(columns: Sequence[Column], group: dist.ProcessGroup) -> list[tuple[DevicePacker, list[int]]]:
    """For each device its packer, and the indices of its tensors among those of all columns."""
    tensors = [r for c in columns for r in c.rows]
    of_device: dict[torch.device, list[int]] = {}
    for i, r in enumerate(tensors):
        if _on_device(r):
            of_device.setdefault(r.device, []).append(i)
    return [(DevicePacker([tensors[i] for i in mine], group.rank(), group.size()), mine) for mine in of_device.values()]


def _counts_by_tensor(
    columns: Sequence[Column], lengths: Sequence[np.ndarray | None], samples: int
) -> list[np.ndarray]:
    """Rows of each feature and sample, for each tensor of the columns."""
    dense = np.ones((1, samples), np.int64)
    return [dense if n is None else n for c, n in zip(columns, lengths, strict=True) for _ in c.rows]


def _exchange_bytes(
    outgoing: list[list[torch.Tensor]], expected: list[list[int]], group: dist.ProcessGroup
) -> list[list[torch.Tensor]]:
    """`outgoing[tensor][rank]` goes to that rank; returns what came, `[tensor][rank]`, of `expected` bytes each."""
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
    """Rows of each feature and sample that arrives, per column; None where each sample has one."""
    jagged = [c.lengths for c in columns if c.lengths is not None]
    if not jagged:
        return [None] * len(columns)
    message = torch.from_numpy(np.ascontiguousarray(np.concatenate(jagged).T[order]))
    received = message.new_empty((int(arriving.sum()), message.shape[1]))
    dist.all_to_all_single(received, message, arriving.tolist(), leaving.tolist(), group=group)
    ends = np.cumsum([len(lengths) for lengths in jagged])
    parts = iter(np.split(np.ascontiguousarray(received.numpy().T), ends[:-1]))
    return [None if c.lengths is None else next(parts) for c in columns]


def _pieces_by_rank(c: Column, order: np.ndarray, leaving: np.ndarray) -> list[list[torch.Tensor]]:
    """For each tensor of the column, for each rank, the bytes that go there: by feature, then by sample.

    Nothing for those that are packed on their device.
    """
    if all(map(_on_device, c.rows)):
        return [[] for _ in c.rows]
    if c.lengths is None:
        index, per_rank = torch.from_numpy(order), leaving
    else:
        counts = c.lengths[:, order]
        segments = _segments(len(c.keys), leaving)
        starts = _starts(c.lengths)[:, order].ravel()[segments]
        index, per_rank = torch.from_numpy(_spans(starts, counts.ravel()[segments])), _rows_by_rank(counts, leaving)
    return [
        [] if _on_device(r) else as_bytes(r.index_select(0, index)).split((per_rank * _row_bytes(r)).tolist())
        for r in c.rows
    ]


def _assemble(
    c: Column, counts: np.ndarray | None, arrived: Sequence[torch.Tensor | list[torch.Tensor]], arriving: np.ndarray
) -> Column:
    """The column from the bytes that arrived by rank, then by feature, then by sample; or from tensors made of them."""
    samples = int(arriving.sum())
    total = samples if counts is None else int(counts.sum())
    index = None
    if counts is not None and len(c.keys) > 1 and any(isinstance(t, list) for t in arrived):
        segments = _segments(len(c.keys), arriving)
        arrived_counts = counts.ravel()[segments]
        starts = np.empty_like(arrived_counts)
        starts[segments] = np.cumsum(arrived_counts) - arrived_counts
        index = torch.from_numpy(_spans(starts, counts.ravel()))
    rows = []
    for t, before in zip(arrived, c.rows, strict=True):
        if isinstance(t, list):
            t = torch.cat(t).view(before.dtype).view(total, *before.shape[1:])
            t = t if index is None else t.index_select(0, index)
        rows.append(t)
    return replace(c, lengths=counts, rows=tuple(rows), samples=samples)


def _segments(keys: int, samples: np.ndarray) -> np.ndarray:
    """Where, among all features and samples, those of rank 0 are, then those of rank 1, and so on."""
    if keys == 1:
        return np.arange(samples.sum())
    return np.argsort(np.tile(np.repeat(np.arange(len(samples)), samples), keys), kind="stable")


def _rows_by_rank(counts: np.ndarray | None, samples: np.ndarray) -> np.ndarray:
    """Rows for each rank, where `counts` has the samples of rank 0 first, and so on; None: a row for each sample."""
    if counts is None:
        return samples
    ends = np.zeros(counts.shape[1] + 1, np.int64)
    np.cumsum(counts.sum(0), out=ends[1:])
    last = samples.cumsum()
    return ends[last] - ends[last - samples]


def _starts(counts: np.ndarray) -> np.ndarray:
    """The first row of each feature and sample."""
    flat = counts.ravel()
    return (np.cumsum(flat) - flat).reshape(counts.shape)


def _spans(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """start, start + 1, ... for each start, so many as its count."""
    return np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))


def _row_bytes(rows: torch.Tensor) -> int:
    return math.prod(rows.shape[1:]) * rows.element_size()


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    return rows.contiguous().view(-1).view(torch.uint8)
