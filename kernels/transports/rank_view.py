"""What a rank reports about its machine for the choice of a transport (selection.py)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from freescale.compat import cuda, distributed, nixl
from freescale.kernels.transports.shared_segment import cpu_group, host_id


@dataclass(frozen=True)
class RankView:
    """One rank of a group with rows on a GPU."""

    rank: int
    host: str  # equal for ranks that can share memory
    gpu: str
    backend: str = "nccl"  # carries the group's all-to-all of CUDA tensors; empty: none does
    no_rdma: str = ""  # why this rank has no SM-free RDMA; empty: it has
    nccl_shares_gpus: bool = False  # NCCL is configured to allow several ranks per GPU


def gather(group: dist.ProcessGroup, device: torch.device, nbytes: int) -> tuple[list[RankView], int]:
    """All ranks' views, in rank order, and the largest `nbytes`. Collective."""
    everyone: list[Any] = [None] * group.size()
    seconds = distributed.timeout_of(group).total_seconds()
    dist.all_gather_object(everyone, (look(group, device), nbytes), group=cpu_group(group, seconds))
    return [view for view, _ in everyone], max(size for _, size in everyone)


def look(group: dist.ProcessGroup, device: torch.device) -> RankView:
    """This rank's view."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return RankView(
        dist.get_rank(),
        host_id(),
        _gpu_name(device.index or 0),
        backends.get("cuda", ""),
        no_rdma_reason(),
        cuda.nccl_shares_gpus(),
    )


def _gpu_name(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)  # indices may differ between ranks


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
