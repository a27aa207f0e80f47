"""Which transport carries a launch.

    c10d     the group's own all-to-all
    staged   copy engines and memory that the ranks of one host share, no SM
    nixl     copy engines, host memory and NVIDIA's NIXL between hosts, no SM
    auto     one of these, chosen at the first launch of a group

The choice of `auto` is made by all ranks of a group together, from what each of them sees (rank_view.py), so it is the
same on every rank: what one rank cannot do, none does. It is not in a compiled graph, nor in the key of torch's caches:
code that was compiled on one cluster, or while a network was slow, serves on another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from freescale.compat import nixl
from freescale.kernels.transports.rank_view import RankView

SM_FREE = ("staged", "nixl")
SM_FREE_MARGIN = 1.2  # a transport without SMs may take so many times as long as the fastest

RULE = (  # for `python -m freescale doctor`
    "auto, on the CPU: c10d",
    "auto, over several hosts: nixl where every rank has it and RDMA, else c10d (NCCL)",
    "auto, in one host: staged",
    "auto then measures that one and c10d, where both can serve, at the size of the first launch; the slowest rank "
    "counts; c10d is taken if the other takes more than 20% longer",
)


class UnsupportedTransport(ValueError):
    """A transport was requested by name and cannot serve here."""


@dataclass(frozen=True)
class Candidates:
    """What `auto` may take. Where there are two, they are measured."""

    sm_free: str  # if it proves itself; empty: none
    no_c10d: str  # why the group's own all-to-all cannot carry rows on a GPU, and what to do; empty: it can
    reason: str

    @property
    def has_c10d(self) -> bool:
        return not self.no_c10d


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
    no_c10d = ""
    if not all(v.backend for v in views):
        no_c10d = "give the group a backend for CUDA, as cpu:gloo,cuda:nccl"
    elif shared and any(v.backend == "nccl" and not v.nccl_shares_gpus for v in views):
        no_c10d = "NCCL needs a GPU for each rank"
    if len(views) == 1:
        return Candidates("staged" if no_c10d else "", no_c10d, "the group has one rank")
    if len(hosts) > 1:
        where = f"the ranks are on {len(hosts)} hosts"
        if unable := [v for v in views if v.no_rdma]:
            return Candidates("", no_c10d, f"{where}, and on that of rank {unable[0].rank} {unable[0].no_rdma}")
        return Candidates("nixl", no_c10d, f"{where}, with NIXL and RDMA on every one")
    return Candidates("staged", no_c10d, "several ranks share a GPU" if shared else "the ranks are on one host")


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
