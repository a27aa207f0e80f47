"""The average of dense gradients of which only the largest values travel; the others wait for a later step.

To its part of a bucket each rank adds what it has not sent yet (dense_error.py), sends the largest values of each block
(compression.py) to all others, and keeps the rest. All ranks add up what all have sent, in the order of ranks: the same
numbers everywhere.
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
    """The average, its work, how many bytes arrive, and what is to be called after the wait."""
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
    """What is sent of gradients and errors; `errors` becomes the rest. Nothing is lost and nothing is rounded, but for
    the sum of the two. What is not finite and has no place in this message is dropped: it would never go away."""
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
        received.record_stream(torch.cuda.current_stream(received.device))  # it may not be the one of the launch
    with torch.no_grad():
        out.zero_()
        for sent in received:  # by rank
            row_packing.put_back(sent, out[:, None], _one_slab(out), packing, add=True)
        out.mul_(1.0 / received.shape[0])
