"""Measures how long several transports take for the same all-to-all, on every rank."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from freescale.compat import distributed
from freescale.kernels.transports import c10d
from freescale.kernels.transports.shared_segment import cpu_group

DEFAULT_BYTES, MAX_BYTES = 4 << 20, 64 << 20  # per rank: used if the first launch is empty, and the maximum
_ROW_BYTES = 256
_REPEATS = 3


def measure(
    transports: Mapping[str, Any], nbytes: int, group: dist.ProcessGroup, device: torch.device
) -> dict[str, list[float]]:
    """Seconds per rank, by name; None is the group's own all-to-all. Collective.

    A transport that fails on a rank took infinite time there.
    """
    everyone = cpu_group(group, distributed.timeout_of(group).total_seconds())
    rows = -(-size_of(nbytes) // (_ROW_BYTES * group.size()))  # per peer
    x = torch.zeros(rows * group.size(), _ROW_BYTES, dtype=torch.uint8, device=device)
    mine: dict[str, float] = {}
    for name, transport in transports.items():
        of_repeats = []
        for _ in range(1 + _REPEATS):  # the first one also opens connections
            dist.barrier(everyone)  # ranks on which it failed join too
            try:
                of_repeats.append(_seconds(transport, x, rows, group))
            except RuntimeError:
                of_repeats.append(float("inf"))
        mine[name] = min(of_repeats) if math.isfinite(max(of_repeats)) else float("inf")
    said: list[Any] = [None] * group.size()
    dist.all_gather_object(said, mine, group=everyone)
    return {name: [of_rank[name] for of_rank in said] for name in transports}


def size_of(nbytes: int) -> int:
    """Bytes that a rank sends in the measurement, given those of its first launch."""
    return min(nbytes or DEFAULT_BYTES, MAX_BYTES)


def _seconds(transport: Any, x: torch.Tensor, rows: int, group: dist.ProcessGroup) -> float:
    """Seconds of one all-to-all with equal rows per peer."""
    counts = torch.full((group.size(),), rows)
    _synchronize(x.device)
    start = time.perf_counter()
    if transport is None:
        per_peer = counts.tolist()
        c10d.start_all_to_all(torch.empty_like(x), x, per_peer, per_peer, group).wait()
    else:
        _, work = transport.start(x, counts, counts, x.shape[0], 0)
        work.wait()
    _synchronize(x.device)
    if transport is not None:
        transport.check()
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
