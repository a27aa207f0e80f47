"""Which transport carries a launch.

    c10d     the group's own all-to-all
    staged   copy engines and memory that the ranks of one host share, no SM
    nixl     copy engines, host memory and NVIDIA's NIXL between hosts, no SM
    auto     one of these, chosen at the first launch of a group by all ranks together, from what each reports

The choice is not part of a compiled graph or of torch's cache keys: code compiled on one cluster runs on another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from freescale.compat import cuda, distributed, nixl
from freescale.kernels.transports.shared_segment import cpu_group, host_id

SM_FREE = ("staged", "nixl")
SM_FREE_MARGIN = 1.2  # an SM-free transport may take this many times as long as the fastest

RULE = (  # for `python -m freescale doctor`
    "auto, on the CPU: c10d",
    "auto, over several hosts: nixl if every rank has NIXL and RDMA, else c10d (NCCL)",
    "auto, on one host: staged",
    "auto then measures that transport and c10d, if both are supported, at the size of the first launch; the slowest "
    "rank counts; c10d is chosen if the other takes more than 20% longer",
)


class UnsupportedTransport(ValueError):
    """A transport was requested by name and is not supported here."""


@dataclass(frozen=True)
class RankView:
    rank: int
    host: str  # equal for ranks that can share memory
    gpu: str
    backend: str = "nccl"  # carries the group's all-to-all of CUDA tensors; empty: none does
    no_rdma: str = ""  # why this rank has no SM-free RDMA; empty: it has
    nccl_shares_gpus: bool = False  # NCCL is configured to allow several ranks per GPU


@dataclass(frozen=True)
class Candidates:
    """The candidates of `auto`. If there are two, they are measured."""

    sm_free: str  # if it passes its self-test; empty: none
    no_c10d: str  # why the group's all-to-all cannot carry CUDA rows, and what to do; empty: it can
    reason: str

    @property
    def has_c10d(self) -> bool:
        return not self.no_c10d


def choose_transport(requested: str, device_type: str) -> tuple[str, str]:
    """(transport, reason), for a graph. `requested` is "auto" or a name; an unsupported name is an error."""
    if requested == "auto":
        if device_type == "cuda":
            return "auto", "chosen at the first launch of its group"
        return "c10d", f"the rows are on the {device_type}"
    if reason := unsupported_reason(requested, device_type):
        raise UnsupportedTransport(f"freescale: FREESCALE_TRANSPORT={requested} is not supported here: {reason}")
    return requested, "requested"


def unsupported_reason(name: str, device_type: str) -> str:
    if name != "c10d" and device_type != "cuda":
        return f"{name} copies between GPUs and the rows are on the {device_type}"
    return nixl.missing_reason() if name == "nixl" else ""


def gather_views(group: dist.ProcessGroup, device: torch.device, nbytes: int) -> tuple[list[RankView], int]:
    """All ranks' views, in rank order, and the largest `nbytes`. Collective."""
    everyone = cpu_group(group, distributed.timeout_of(group).total_seconds())
    views, sizes = zip(*distributed.gather_objects((look(group, device), nbytes), everyone), strict=True)
    return list(views), max(sizes)


def look(group: dist.ProcessGroup, device: torch.device) -> RankView:
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return RankView(
        dist.get_rank(),
        host_id(),
        str(torch.cuda.get_device_properties(device.index or 0).uuid),  # indices may differ between ranks
        backends.get("cuda", ""),
        no_rdma_reason(),
        cuda.nccl_shares_gpus(),
    )


def no_rdma_reason(root: str = "/") -> str:
    """Why NIXL cannot use RDMA on this host; empty if it can."""
    devices = sorted(Path(root, "sys/class/infiniband").glob("*"))
    if not devices:
        return "there is no RDMA device"
    if not any(_is_active(port) for device in devices for port in device.glob("ports/*/state")):
        return "no port of an RDMA device is active"
    if not any(Path(root, "dev/infiniband").glob("uverbs*")):
        return "/dev/infiniband is missing, so RDMA devices cannot be used"
    return "" if nixl.version() is not None else "NIXL is not installed"


def _is_active(port: Path) -> bool:
    try:
        return "ACTIVE" in port.read_text()
    except OSError:
        return False


def candidates(views: Sequence[RankView]) -> Candidates:
    """The candidates of `auto` for rows on GPUs, from the views of all ranks; and the reason."""
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
            return Candidates("", no_c10d, f"{where}; rank {unable[0].rank}: {unable[0].no_rdma}")
        return Candidates("nixl", no_c10d, f"{where}, all with NIXL and RDMA")
    return Candidates("staged", no_c10d, "several ranks share a GPU" if shared else "the ranks are on one host")


def fastest(seconds: Mapping[str, Sequence[float]]) -> str:
    """Choose a transport. `seconds`: per candidate, per rank; the slowest rank counts."""
    slowest = {name: max(of_ranks) for name, of_ranks in seconds.items()}
    limit = SM_FREE_MARGIN * min(slowest.values())
    without_sms = [name for name in slowest if name != "c10d" and slowest[name] <= limit < float("inf")]
    return min(without_sms, key=slowest.__getitem__) if without_sms else "c10d"


def figures(seconds: Mapping[str, Sequence[float]], nbytes: int) -> str:
    words = (f"{name} {max(of_ranks) * 1e3:.3g} ms" for name, of_ranks in seconds.items())
    return f"for {nbytes / 2**20:.3g} MiB the slowest rank takes: {', '.join(words)}"
