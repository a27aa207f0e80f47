"""The `c10d` transport: the group's own all-to-all. Gloo's often takes twice its wire time, as if the two directions
took turns; sends and receives do not, if every receive is posted before the first send."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from freescale.compat import distributed

MAX_PAIRWISE_RANKS = 32  # one send and one receive per rank, issued one by one
_last_tag: dict[str, int] = {}  # per group name: every all-to-all has its own tag


class PairwiseWork:
    def __init__(self, works: list[dist.Work]) -> None:
        self.works = works

    def is_completed(self) -> bool:
        return all(w.is_completed() for w in self.works)

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def start_all_to_all(
    out: torch.Tensor, x: torch.Tensor, recv: list[int], send: list[int], group: dist.ProcessGroup
) -> dist.Work | PairwiseWork:
    """Start an all-to-all of rows: `send[p]` rows of `x` to peer p, `recv[p]` rows of `out` from it."""
    if x.device.type == "cpu" and group.size() <= MAX_PAIRWISE_RANKS and distributed.is_gloo(group):
        return _start_pairwise(out, x, recv, send, group)
    work: Any = dist.all_to_all_single(out, x, recv, send, group=group, async_op=True)
    return work


def _start_pairwise(
    out: torch.Tensor, x: torch.Tensor, recv: list[int], send: list[int], group: dist.ProcessGroup
) -> PairwiseWork:
    tag = _last_tag[group.group_name] = _last_tag.get(group.group_name, 0) % 2**30 + 1
    rank, world = group.rank(), group.size()
    ends_in, ends_out = list(accumulate(recv)), list(accumulate(send))
    works = []
    for p in ((rank - i) % world for i in range(1, world)):
        if recv[p]:
            works.append(group.recv([out[ends_in[p] - recv[p] : ends_in[p]]], p, tag))
    for p in ((rank + i) % world for i in range(1, world)):
        if send[p]:
            works.append(group.send([x[ends_out[p] - send[p] : ends_out[p]]], p, tag))
    if send[rank] != recv[rank]:
        raise ValueError(f"freescale: rank {rank} sends {send[rank]} rows to itself and expects {recv[rank]}")
    out[ends_in[rank] - recv[rank] : ends_in[rank]] = x[ends_out[rank] - send[rank] : ends_out[rank]]
    return PairwiseWork(works)
