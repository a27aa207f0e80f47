"""Pack rows for sending, and unpack them. Defined by compression.py; on a GPU Triton kernels do the work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from freescale.kernels import compression
from freescale.kernels.compression import Packing, Slabs


@dataclass(frozen=True)
class Packed:
    """Packed rows to send, and how to unpack the received ones."""

    x: torch.Tensor  # uint8 [sent, bytes]
    send_counts: torch.Tensor  # per peer; 0 for this rank
    recv_counts: torch.Tensor
    unpack: Callable[[torch.Tensor, torch.Tensor], None]  # (received, output rows)

    @property
    def n_recv(self) -> int:
        return int(self.recv_counts.sum())  # counts are on the CPU


def pack(
    text: str, x: torch.Tensor, send_counts: torch.Tensor, recv_counts: torch.Tensor, rank: int, launch_number: int
) -> Packed:
    """Pack float32 rows [n, dim], grouped by peer, without this rank's own (see copy_own). `launch_number`: determines,
    with a value's position, how `fp8:stochastic` rounds it."""
    packing, send, recv = compression.parse(text), Slabs.of(send_counts, rank), Slabs.of(recv_counts, rank)
    unpack: Callable[[torch.Tensor, torch.Tensor], None]
    if packing.kind == "largest":
        packed, unpack = take_largest(x, send, packing), partial(put_back, slabs=recv, packing=packing)
    else:
        packed = _narrow(of_others(x, send_counts, rank), packing, launch_number)
        unpack = partial(_widen, packing=packing, counts=recv_counts, rank=rank)
    send_rows, recv_rows = (compression.packed_counts(slabs.rows, packing) for slabs in (send, recv))
    return Packed(packed, send_rows, recv_rows, unpack)


def copy_own(
    text: str, x: torch.Tensor, out: torch.Tensor, send_counts: torch.Tensor, recv_counts: torch.Tensor, rank: int
) -> None:
    """Copy the rows that this rank sends to itself, uncompressed; TorchRec's codecs round them, too."""
    packing = compression.parse(text)
    sent, received = _own_rows(send_counts, rank), _own_rows(recv_counts, rank)
    n, expected = sent.stop - sent.start, received.stop - received.start
    if n != expected:
        raise ValueError(f"freescale: rank {rank} sends {n} rows to itself and expects {expected}")
    if n:
        out[received] = compression.decode(compression.encode(x[sent], packing), packing) if packing.codec else x[sent]


def _own_rows(counts: torch.Tensor, rank: int) -> slice:
    numbers = counts.tolist()
    begin = sum(numbers[:rank])
    return slice(begin, begin + numbers[rank])


def of_others(x: torch.Tensor, counts: torch.Tensor, rank: int) -> torch.Tensor:
    parts = around(x, counts, rank)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def around(x: torch.Tensor, counts: torch.Tensor, rank: int) -> list[torch.Tensor]:
    """The nonempty parts before and after this rank's rows; at least one tensor."""
    own = _own_rows(counts, rank)
    parts = [x[: own.start], x[own.stop :]]
    return [p for p in parts if p.shape[0]] or parts[:1]


def _narrow(x: torch.Tensor, packing: Packing, launch_number: int) -> torch.Tensor:
    if packing.kind == "fp8":
        number = launch_number if packing.stochastic else None
        if x.is_cuda:
            from freescale.kernels import compression_triton

            return compression_triton.to_fp8(x, number)
        return compression.to_fp8(x, number)
    narrow = compression.encode(x, packing) if packing.codec else x.to(compression.WIDE_TYPES[packing.kind])
    return narrow.view(torch.uint8)


def _widen(packed: torch.Tensor, out: torch.Tensor, packing: Packing, counts: torch.Tensor, rank: int) -> None:
    begin = 0
    for part in around(out, counts, rank):
        rows = packed[begin : begin + part.shape[0]]
        if packing.kind == "fp8":
            if part.is_cuda:
                from freescale.kernels import compression_triton

                compression_triton.from_fp8(rows, part)
            else:
                compression.from_fp8(rows, part)
        else:
            narrow = rows.view(compression.WIDE_TYPES[packing.kind])
            part.copy_(compression.decode(narrow, packing) if packing.codec else narrow)
        begin += part.shape[0]


def take_largest(x: torch.Tensor, slabs: Slabs, packing: Packing, clear: bool = False) -> torch.Tensor:
    """compress(); on a GPU in one pass over memory. `clear`: zero the selected values in `x`."""
    if x.is_cuda:
        from freescale.kernels import compression_triton

        return compression_triton.compress(x, slabs, packing, clear)
    packed = compression.compress(x, slabs, packing)
    if clear:
        x.view(-1)[compression.entries_of(packed, slabs, packing, x.shape[1])[0]] = 0.0
    return packed


def put_back(packed: torch.Tensor, out: torch.Tensor, slabs: Slabs, packing: Packing, add: bool = False) -> None:
    """expand(); with `add`, add to `out`."""
    if out.is_cuda:
        from freescale.kernels import compression_triton

        compression_triton.expand(packed, out, slabs, packing, add)
    elif add:
        places, values = compression.entries_of(packed, slabs, packing, out.shape[1])
        out.view(-1)[places] += values  # positions are distinct
    else:
        compression.expand(packed, out, slabs, packing)
