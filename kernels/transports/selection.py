"""Which transport carries a launch, and which op stands for it in a graph.

    c10d     the group's own all-to-all: all_to_all_launch, all_to_all_rows_launch (reference.py)
    staged   copy engines and host memory, no SM: all_to_all_launch_staged, all_to_all_rows_launch_staged
    peer     symmetric memory, push into the receiver's window: ..._peer
    nixl     copy engines, host memory and NVIDIA's NIXL between hosts, no SM: ..._nixl; where it is asked for

The choice follows from the request and from `selection_facts`: alike on machines of one kind, so alike on every rank.
(The text that ranks compare before the first launch names the transport.) A compiled graph has the choice in it, so
these facts belong to the key of torch's caches.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from freescale.compat import distributed, launcher_environment, nixl


class UnsupportedTransport(ValueError):
    """A transport was requested by name and cannot serve here."""


def choose_transport(requested: str, group_name: str, device_type: str) -> tuple[str, str]:
    """(transport, why). `requested` is "auto" or a name; a name that cannot serve is an error."""
    if requested == "auto":
        return _choose_automatically(group_name, device_type)
    if reason := unsupported_reason(requested, device_type):
        raise UnsupportedTransport(f"freescale: FREESCALE_TRANSPORT={requested} cannot be met: {reason}")
    return requested, "it was asked for"


def unsupported_reason(name: str, device_type: str) -> str:
    """Why rows on such a device cannot go over the transport; empty if they can."""
    if name != "c10d" and device_type != "cuda":
        return f"{name} copies between GPUs and the rows are on the {device_type}"
    return nixl.missing_reason() if name == "nixl" else ""


def _choose_automatically(group_name: str, device_type: str) -> tuple[str, str]:
    if device_type != "cuda":
        return "c10d", f"the rows are on the {device_type}"
    ranks = dist.get_process_group_ranks(distributed.group_by_name(group_name))
    ranks_per_host = launcher_environment.ranks_per_host()
    if ranks_per_host and len({rank // ranks_per_host for rank in ranks}) > 1:
        return "staged", "the ranks are on several hosts"
    if 1 < len(ranks) <= peer_accessible_gpus():
        return "peer", "every rank's GPU can write into every other's"
    return "staged", "the ranks' GPUs cannot all reach each other"


def selection_facts() -> str:
    """What `auto` looks at, beside the group and the rows."""
    if not (torch.cuda.is_initialized() and dist.is_initialized()):  # then no rows of ours are on a GPU
        return ""
    ranks_per_host = launcher_environment.ranks_per_host()
    return f"{dist.get_world_size()} ranks, {ranks_per_host} of a host, {peer_accessible_gpus()} joined GPUs"


@cache
def peer_accessible_gpus() -> int:
    """How many of this host's GPUs, from the first one on, can all write into each other's memory."""
    n = 0
    while n < torch.cuda.device_count() and all(
        torch.cuda.can_device_access_peer(a, b) for other in range(n) for a, b in ((other, n), (n, other))
    ):
        n += 1
    return n


def launch_op_for(op: Any, transport: str) -> Any:
    """The op that does over `transport` what the launch `op` does over c10d."""
    if transport == "c10d":
        return op
    return getattr(torch.ops.freescale, f"{op._schema.name.split('::')[1]}_{transport}").default
