"""How fast a process group carries an all-to-all, measured once per group, at start-up.

Passes read `speed`; they never measure, since a pass may run on one rank alone (the others had a cache hit). It differs
a little in every process, so compiled code that comes out of a cache was made for another value: nothing but where
launches stand among the compute may depend on it.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

# Bytes per second that one rank receives, per group name.
speed: dict[str, float] = {}
ASSUMED = 10e9  # of a group that was not measured
_WARM, _PROBE = 1 << 14, 1 << 21  # bytes per rank


def measure(group: dist.ProcessGroup, device: torch.device, gbps: float = 0.0) -> float:
    """Measure, or take `gbps` (gigabits per second) if it is more than 0. Collective; the first result stays."""
    name = group.group_name
    if name not in speed:
        speed[name] = gbps * 1e9 / 8 if gbps > 0 else _probe(group, device)
    return speed[name]


def of(group_name: str) -> float:
    return speed.get(group_name, ASSUMED)


def _probe(group: dist.ProcessGroup, device: torch.device) -> float:
    if group.size() == 1:
        return ASSUMED
    _seconds(group, device, _WARM)
    latency = min(_seconds(group, device, _WARM) for _ in range(3))
    taken = min(_seconds(group, device, _PROBE) for _ in range(2))
    foreign = _PROBE * (group.size() - 1) / group.size()  # what a rank sends to itself does not travel
    return foreign / max(taken - latency, 1e-6)


def _seconds(group: dist.ProcessGroup, device: torch.device, size: int) -> float:
    per_rank = max(size // group.size(), 1)
    x = torch.zeros(per_rank * group.size(), dtype=torch.uint8, device=device)
    out = torch.empty_like(x)
    dist.barrier(group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    dist.all_to_all_single(out, x, group=group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
