"""What a rank sees of the machine it is on, as far as the choice of a transport depends on it (selection.py)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from freescale.compat import distributed, launcher_environment, nixl
from freescale.kernels.transports.shared_segment import cpu_group, host_id


@dataclass(frozen=True)
class RankView:
    """One rank of a group whose rows are on a GPU."""

    rank: int
    host: str  # the same for ranks that can share memory
    gpu: str
    backend: str = "nccl"  # that carries the group's own all-to-all of rows on a GPU; empty: none does
    no_rdma: str = ""  # why this rank cannot do RDMA without SMs; empty: it can
    nccl_shares_gpus: bool = False  # NCCL is told to serve several ranks on a GPU


def gather(group: dist.ProcessGroup, device: torch.device, nbytes: int) -> tuple[list[RankView], int]:
    """What every rank sees, in rank order, and the largest `nbytes` of any. Collective."""
    everyone: list[Any] = [None] * group.size()
    seconds = distributed.timeout_of(group).total_seconds()
    dist.all_gather_object(everyone, (look(group, device), nbytes), group=cpu_group(group, seconds))
    return [view for view, _ in everyone], max(size for _, size in everyone)


def look(group: dist.ProcessGroup, device: torch.device) -> RankView:
    """What this rank sees."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return RankView(
        dist.get_rank(),
        host_id(),
        _gpu_name(device.index or 0),
        backends.get("cuda", ""),
        no_rdma_reason(),
        launcher_environment.nccl_shares_gpus(),
    )


def _gpu_name(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)  # ranks may number them differently


def no_rdma_reason(root: str = "/") -> str:
    """Why NIXL cannot do RDMA on this host, in words; empty if it can."""
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
