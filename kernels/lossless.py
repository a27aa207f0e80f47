"""Rows whose zeros do not travel, the packing `lossless` of compression.py. This definition decides what is correct.

A slab travels as words of 32 bits. If that is shorter, first one bit for each value, the lowest bit of a byte first, 1
where any bit of the value is set (so -0.0 is no zero), those of a row filled up with zeros to whole words; then those
values. Otherwise all values as they are: which of the two, its size tells. Sizes depend on the values, so they travel
first, and the host waits for those of the others; on a GPU it also waits for the device to have counted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate

import torch
from torch.nn.functional import pad

from freescale.kernels.compression import Slabs
from freescale.kernels.row_packing import Packed, around, of_others


def pack(
    x: torch.Tensor, send_counts: torch.Tensor, recv_counts: torch.Tensor, rank: int,
    exchange_sizes: Callable[[torch.Tensor], torch.Tensor],
) -> Packed:  # fmt: skip
    """As row_packing.pack. `exchange_sizes`: from those that go to each rank to those that come from each."""
    rows = Slabs.of(send_counts, rank).rows.tolist()
    bits = of_others(x, send_counts, rank).view(torch.int32)
    is_set = bits != 0
    ends = torch.tensor(list(accumulate(rows, initial=0)), device=x.device)
    n_set = pad(is_set.sum(1).cumsum(0), (1, 0))[ends].diff().tolist()
    words, sizes = [], []
    for mask, every, nonzero in zip(
        _masks(is_set).split(rows), bits.split(rows), bits[is_set].split(n_set), strict=True
    ):
        shorter = mask.numel() + nonzero.numel() < every.numel()
        words += [mask.reshape(-1), nonzero] if shorter else [every.reshape(-1)]
        sizes.append(min(mask.numel() + nonzero.numel(), every.numel()))
    received = exchange_sizes(torch.tensor(sizes))
    unpack = partial(_unpack, sizes=received.tolist(), counts=recv_counts, rank=rank)
    return Packed(torch.cat(words).view(torch.uint8).view(-1, 4), torch.tensor(sizes), received, unpack)


def _words_of_row(dim: int) -> int:
    return -(-dim // 32)


def _eight(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def _masks(is_set: torch.Tensor) -> torch.Tensor:
    """int32 [rows, words of a row]."""
    rows, dim = is_set.shape
    eights = pad(is_set, (0, -dim % 32)).view(-1, 8)
    in_bytes = (eights << _eight(is_set.device)).sum(1, dtype=torch.uint8)
    return in_bytes.view(torch.int32).view(rows, _words_of_row(dim))


def _unpack(received: torch.Tensor, out: torch.Tensor, sizes: list[int], counts: torch.Tensor, rank: int) -> None:
    slabs, dim = received.view(torch.int32).view(-1).split(sizes), out.shape[1]
    rows = Slabs.of(counts, rank).rows.tolist()
    everything = out.new_full((max(rows) * _words_of_row(dim),), -1, dtype=torch.int32)
    masks, values = [], []
    for words, n in zip(slabs, rows, strict=True):
        m, packed = n * _words_of_row(dim), words.numel() < n * dim
        masks.append(words[:m] if packed else everything[:m])
        values.append(words[m:] if packed else words)
    eights = torch.cat(masks).view(torch.uint8)[:, None] >> _eight(out.device) & 1
    is_set = eights.view(sum(rows), 32 * _words_of_row(dim))[:, :dim].bool()
    bits = torch.zeros_like(is_set, dtype=torch.int32).masked_scatter_(is_set, torch.cat(values))
    parts = around(out, counts, rank)
    for part, arrived in zip(parts, bits.split([p.shape[0] for p in parts]), strict=True):
        part.view(torch.int32).copy_(arrived)
