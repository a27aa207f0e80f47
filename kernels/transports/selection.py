"""Which transport carries a launch, and which op stands for it in a graph.

    c10d     the group's own all-to-all: all_to_all_launch, all_to_all_rows_launch (reference.py)
    staged   copy engines and host memory, no SM: all_to_all_launch_staged, all_to_all_rows_launch_staged
    peer     symmetric memory, push into the receiver's window: ..._peer
    nixl     copy engines, host memory and NVIDIA's NIXL between hosts, no SM: ..._nixl
    auto     one of these, chosen when the first launch of a group leaves: ..._auto

The choice of `auto` is made by all ranks of a group together, from what each of them sees (rank_view.py), so it is the
same on every rank: what one rank cannot do, none does. It is not in a compiled graph, nor in the key of torch's caches:
code that was compiled on one cluster, or while a network was slow, serves on another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from freescale.compat import nixl
from freescale.kernels.transports.rank_view import RankView

SM_FREE_MARGIN = 1.2  # a transport without SMs may take so many times as long as the fastest

RULE = (  # for `python -m freescale doctor`
    "auto, on the CPU: c10d",
    "auto, over several hosts: nixl where every rank has it and RDMA, else c10d (NCCL)",
    "auto, in one host: staged; peer where all GPUs of the group reach each other and it proves itself",
    "auto then measures that one and c10d, where both can serve, at the size of the first launch; the slowest rank "
    "counts; c10d is taken if the other takes more than 20% longer",
)


class UnsupportedTransport(ValueError):
    """A transport was requested by name and cannot serve here."""


@dataclass(frozen=True)
class Candidates:
    """What `auto` may take."""

    without_sms: tuple[str, ...]  # of these, the first that proves itself
    compare: bool  # whether that one is measured against c10d; else it is taken. Without one c10d is, in any case
    reason: str


def choose_transport(requested: str, device_type: str) -> tuple[str, str]:
    """(transport, why), for a graph. `requested` is "auto" or a name; a name that cannot serve is an error."""
    if requested == "auto":
        if device_type == "cuda":
            return "auto", "chosen when the first launch of its group leaves"
        return "c10d", f"the rows are on the {device_type}"
    if reason := unsupported_reason(requested, device_type):
        raise UnsupportedTransport(f"freescale: FREESCALE_TRANSPORT={requested} cannot be met: {reason}")
    return requested, "it was asked for"


def unsupported_reason(name: str, device_type: str) -> str:
    """Why rows on such a device cannot go over the transport; empty if they can."""
    if name != "c10d" and device_type != "cuda":
        return f"{name} copies between GPUs and the rows are on the {device_type}"
    return nixl.missing_reason() if name == "nixl" else ""


def candidates(views: Sequence[RankView]) -> Candidates:
    """What `auto` may take for rows on GPUs, from what every rank of the group sees; and why."""
    hosts, gpus = {v.host for v in views}, {v.gpu for v in views}
    shared = len(gpus) < len(views)
    has_c10d = all(v.backend and not (shared and v.backend == "nccl") for v in views)  # NCCL wants a GPU for each rank
    if len(views) == 1:
        return Candidates(() if has_c10d else ("staged",), False, "the group has one rank")
    if len(hosts) > 1:
        return _between_hosts(views, f"the ranks are on {len(hosts)} hosts", has_c10d)
    if shared:
        return Candidates(("staged",), False, "several ranks share a GPU")
    unreached = [v.rank for v in views if not gpus <= v.reaches | {v.gpu}]
    if unreached:
        return Candidates(("staged",), has_c10d, f"the GPU of rank {unreached[0]} does not reach all others")
    return Candidates(("peer", "staged"), has_c10d, "all GPUs of the group reach each other")


def _between_hosts(views: Sequence[RankView], where: str, has_c10d: bool) -> Candidates:
    unable = [v for v in views if v.no_rdma]
    if not unable:
        return Candidates(("nixl",), has_c10d, f"{where}, with NIXL and RDMA on every one")
    reason = f"{where}, and on that of rank {unable[0].rank} {unable[0].no_rdma}"
    if has_c10d and all(v.backend == "nccl" for v in views):
        return Candidates((), False, reason)
    return Candidates(("staged",), has_c10d, f"{reason}; NCCL cannot carry the group")


def fastest(seconds: Mapping[str, Sequence[float]]) -> str:
    """Which to take. `seconds`: of each candidate, on each rank; the slowest rank's count."""
    slowest = {name: max(of_ranks) for name, of_ranks in seconds.items()}
    limit = SM_FREE_MARGIN * min(slowest.values())
    without_sms = [name for name in slowest if name != "c10d" and slowest[name] <= limit < float("inf")]
    return min(without_sms, key=slowest.__getitem__) if without_sms else "c10d"


def figures(seconds: Mapping[str, Sequence[float]], nbytes: int) -> str:
    """What was measured, in words."""
    words = (f"{name} {max(of_ranks) * 1e3:.3g} ms" for name, of_ranks in seconds.items())
    return f"for {nbytes / 2**20:.3g} MiB the slowest rank takes over {', over '.join(words)}"


def launch_op_for(op: Any, transport: str) -> Any:
    """The op that does over `transport` what the launch `op` does over c10d."""
    if transport == "c10d":
        return op
    return getattr(torch.ops.freescale, f"{op._schema.name.split('::')[1]}_{transport}").default
