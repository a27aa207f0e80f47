"""Rows whose zeros do not travel, the packing `lossless` of compression.py. This definition decides what is correct.

A slab travels as words of 32 bits. If that is shorter, first one bit for each value, the lowest bit of a byte first, 1
where any bit of the value is set (so -0.0 is no zero), filled up with zeros to a word; then those values. Otherwise all
values as they are: which of the two, its size tells. Sizes depend on the values, so they travel first, and the host
waits for those of the others; on a GPU it also waits for the device to have counted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from freescale.kernels.compression import Slabs
from freescale.kernels.row_packing import Packed


def pack(
    x: torch.Tensor, send_counts: torch.Tensor, recv_counts: torch.Tensor, rank: int,
    exchange_sizes: Callable[[torch.Tensor], torch.Tensor],
) -> Packed:  # fmt: skip
    """As row_packing.pack. `exchange_sizes`: from those that go to each rank to those that come from each."""
    slabs = [_words(s) for s in _slabs(x, Slabs.of(send_counts, rank))]
    sizes = torch.tensor([s.shape[0] for s in slabs])
    received = exchange_sizes(sizes)
    unpack = partial(_unpack, sizes=received.tolist(), slabs=Slabs.of(recv_counts, rank))
    return Packed(torch.cat(slabs).view(torch.uint8).view(-1, 4), sizes, received, unpack)


def _slabs(x: torch.Tensor, slabs: Slabs) -> list[torch.Tensor]:
    """The bits of each slab's values."""
    bits, dim = x.view(torch.int32).view(-1), x.shape[1]
    places = zip((slabs.first_row * dim).tolist(), (slabs.rows * dim).tolist(), strict=True)
    return [bits[first : first + n] for first, n in places]


def _words(bits: torch.Tensor) -> torch.Tensor:
    is_set = bits != 0
    eights = torch.nn.functional.pad(is_set, (0, -len(bits) % 32)).view(-1, 8)
    mask = (eights << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)
    packed = torch.cat([mask.view(torch.int32), bits[is_set]])
    return packed if len(packed) < len(bits) else bits


def _unpack(received: torch.Tensor, out: torch.Tensor, sizes: list[int], slabs: Slabs) -> None:
    for words, bits in zip(received.view(torch.int32).view(-1).split(sizes), _slabs(out, slabs), strict=True):
        if len(words) == len(bits):
            bits.copy_(words)
        else:
            mask = words[: -(-len(bits) // 32)].view(torch.uint8)
            eights = mask[:, None] >> torch.arange(8, dtype=torch.uint8, device=out.device) & 1
            is_set = eights.view(-1)[: len(bits)].bool()
            bits.zero_()
            bits[is_set] = words[-(-len(bits) // 32) :]
