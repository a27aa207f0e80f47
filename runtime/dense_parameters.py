"""Dense parameters whose gradients the compiled graphs average. Without DDP, which broadcasts rank 0's when it is
constructed, that happens here before the first graph that uses them runs. Buffers stay local, as in TorchRec."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping, Sequence

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from freescale.compat import distributed, dynamo
from freescale.runtime import agreement

log = logging.getLogger(__name__)

# Weak sets of tensors, by identity:
AVERAGED_BY_TABLES: MutableMapping[torch.Tensor, None] = WeakTensorKeyDictionary()  # by the lookup of replicated tables
AVERAGED_IN_GRAPHS: MutableMapping[torch.Tensor, None] = WeakTensorKeyDictionary()
_alike: MutableMapping[torch.Tensor, None] = WeakTensorKeyDictionary()  # broadcast from rank 0


def begin_alike(parameters: Sequence[tuple[str, torch.Tensor]], group_name: str, timeout: float) -> None:
    """Broadcast the values of the group's first rank to all ranks, once per tensor. Collective."""
    new = [(name, t) for name, t in parameters if t not in _alike]
    if not new:
        return
    texts = [f"{name} {list(t.shape)} {t.dtype}" for name, t in new]
    agreement.agree({"dense parameters": texts}, timeout, group_name)
    group = distributed.group_by_name(group_name)
    with torch.no_grad(), dynamo.outside_inference_mode():
        own = [t.detach().contiguous().reshape(-1).view(torch.uint8) for _, t in new]
        theirs = [t.clone() for t in own]
        distributed.broadcast(theirs, group)
        changed = [name for (name, t), a, b in zip(new, own, theirs, strict=True) if _take(t, a, b)]
    for _, tensor in new:
        _alike[tensor] = None
    if changed:
        log.info(
            "synchronized %d parameters (the first is %s) with rank %d, whose values differed",
            len(changed), changed[0], dist.get_global_rank(group, 0),
        )  # fmt: skip


def _take(tensor: torch.Tensor, own: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Copy the first rank's bytes into the tensor. Return whether they differ from its own."""
    if torch.equal(own, theirs):
        return False
    # Not through .data: autograd must see the change of a tensor that is already in use.
    tensor.detach().copy_(theirs.view(tensor.dtype).view(tensor.shape))
    return True
