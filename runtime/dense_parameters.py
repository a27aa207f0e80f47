"""Dense parameters whose gradients the compiled graphs average: track them, and synchronize them at the start.

DistributedDataParallel broadcasts rank 0's parameters when it is constructed. Without DDP, that happens here, before
the first graph that uses them runs. Buffers stay local, as in TorchRec's DistributedModelParallel.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from freescale.compat import distributed, dynamo
from freescale.runtime import agreement

log = logging.getLogger(__name__)

_BROADCAST_BYTES = 25 << 20  # per broadcast


class TensorSet:
    """A weak set of tensors, by identity."""

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[torch.Tensor]] = {}

    def add(self, tensor: torch.Tensor) -> None:
        key = id(tensor)
        self._refs[key] = weakref.ref(tensor, lambda _: self._refs.pop(key, None))

    def __contains__(self, tensor: torch.Tensor) -> bool:
        ref = self._refs.get(id(tensor))
        return ref is not None and ref() is tensor


AVERAGED_BY_TABLES = TensorSet()  # replicated tables: their lookup averages the gradient itself
AVERAGED_IN_GRAPHS = TensorSet()
_alike = TensorSet()  # broadcast from rank 0


def begin_alike(parameters: Sequence[tuple[str, torch.Tensor]], group_name: str, timeout: float) -> None:
    """Broadcast the values of the group's first rank to all ranks, once per tensor. Collective."""
    new = [(name, t) for name, t in parameters if t not in _alike]
    if not new:
        return
    texts = [f"{name} {list(t.shape)} {t.dtype}" for name, t in new]
    agreement.agree({"dense parameters": texts}, timeout, group_name)
    group = distributed.group_by_name(group_name)
    with torch.no_grad(), dynamo.outside_inference_mode():
        changed = [name for part in _parts(new) for name in _receive(part, group)]
    for _, tensor in new:
        _alike.add(tensor)
    if changed:
        log.info(
            "synchronized %d parameters (the first is %s) with rank %d, whose values differed",
            len(changed), changed[0], dist.get_global_rank(group, 0),
        )  # fmt: skip


def _parts(parameters: list[tuple[str, torch.Tensor]]) -> list[list[tuple[str, torch.Tensor]]]:
    """Split by device and size."""
    parts: list[list[tuple[str, torch.Tensor]]] = []
    size = 0
    for name, tensor in sorted(parameters, key=lambda p: str(p[1].device)):
        if not parts or parts[-1][0][1].device != tensor.device or size + tensor.nbytes > _BROADCAST_BYTES:
            parts.append([])
            size = 0
        parts[-1].append((name, tensor))
        size += tensor.nbytes
    return parts


def _receive(part: list[tuple[str, torch.Tensor]], group: dist.ProcessGroup) -> list[str]:
    """Return the names of parameters that differed on this rank."""
    mine = [_bytes(t) for _, t in part]
    flat = torch.cat(mine)
    dist.broadcast(flat, dist.get_global_rank(group, 0), group=group)
    changed = []
    for (name, tensor), own, theirs in zip(part, mine, flat.split([m.numel() for m in mine]), strict=True):
        if not torch.equal(own, theirs):
            # Not through .data: autograd must see the change of a tensor that is already in use.
            tensor.detach().copy_(theirs.clone().view(tensor.dtype).view(tensor.shape))
            changed.append(name)
    return changed


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
