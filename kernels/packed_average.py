"""Compressed average of dense gradients: only the largest values are sent, the others in later steps.

Each rank adds its error (dense_error.py) to its bucket, sends the largest values of each block (compression.py) to all
other ranks, and keeps the rest as the new error. Every rank sums the received values in rank order, so the results are
bit-identical on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from freescale.compat import distributed
from freescale.kernels import compression, dense_error, row_packing


def start(
    gradients: list[torch.Tensor], parameters: str, group: dist.ProcessGroup, text: str
) -> tuple[torch.Tensor, dist.Work, int, Callable[[], None]]:
    """Return the average, its Work, the bytes to receive, and a function to call after the wait."""
    packing = compression.parse(text)
    errors = dense_error.errors_of(parameters.split(", "), gradients, group.rank())
    sent = pack_with_error(gradients, errors, packing)
    received = sent.new_empty((group.size(), *sent.shape))
    work = distributed.start_all_gather(received.view(-1), sent.view(-1), group)
    out = torch.empty(sum(g.numel() for g in gradients), device=sent.device)
    return out, work, (group.size() - 1) * sent.nbytes, partial(average, received, out, packing)


def pack_with_error(
    gradients: list[torch.Tensor], errors: list[torch.Tensor], packing: compression.Packing
) -> torch.Tensor:
    """Return the packed values; `errors` becomes the rest. Nothing is lost or rounded except in gradient + error.
    Nonfinite values that do not fit in this message are dropped, since they would stay in the error forever."""
    flat = torch.cat([(g + e).reshape(-1) for g, e in zip(gradients, errors, strict=True)])
    sent = row_packing.take_largest(flat[:, None], _one_slab(flat), packing, clear=True)
    flat.nan_to_num_(0.0, 0.0, 0.0)
    for error, rest in zip(errors, flat.split([e.numel() for e in errors]), strict=True):
        error.copy_(rest.view(error.shape))
    return sent


def _one_slab(x: torch.Tensor) -> compression.Slabs:
    return compression.Slabs.of(torch.tensor([x.shape[0]]))


def average(received: torch.Tensor, out: torch.Tensor, packing: compression.Packing) -> None:
    if received.is_cuda:
        received.record_stream(torch.cuda.current_stream(received.device))  # may differ from the launch's stream
    with torch.no_grad():
        out.zero_()
        for sent in received:  # one per rank
            row_packing.put_back(sent, out[:, None], _one_slab(out), packing, add=True)
        out.mul_(1.0 / received.shape[0])
