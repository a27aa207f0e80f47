"""How fast a process group carries an all-to-all, measured once per group, at start-up.

Passes read the `estimate`; they never measure, since a pass may run on one rank alone (the others had a cache hit). It
differs a little in every process, so compiled code that comes out of a cache was made for another value: nothing but
where launches stand among the compute may depend on it.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

bytes_per_second: dict[str, float] = {}  # that one rank receives, per group name
DEFAULT = 10e9  # bytes per second of a group that was not measured
_WARM_UP_BYTES, _PROBE_BYTES = 1 << 14, 1 << 21  # per rank


def measure(group: dist.ProcessGroup, device: torch.device, gbps: float = 0.0) -> float:
    """Measure, or take `gbps` (gigabits per second) if it is more than 0. Collective; the first result stays."""
    name = group.group_name
    if name not in bytes_per_second:
        bytes_per_second[name] = gbps * 1e9 / 8 if gbps > 0 else _probe(group, device)
    return bytes_per_second[name]


def estimate(group_name: str) -> float:
    """What was measured, or a default."""
    return bytes_per_second.get(group_name, DEFAULT)


def _probe(group: dist.ProcessGroup, device: torch.device) -> float:
    if group.size() == 1:
        return DEFAULT
    _all_to_all_seconds(group, device, _WARM_UP_BYTES)
    latency = min(_all_to_all_seconds(group, device, _WARM_UP_BYTES) for _ in range(3))
    seconds = min(_all_to_all_seconds(group, device, _PROBE_BYTES) for _ in range(2))
    from_peers = _PROBE_BYTES * (group.size() - 1) / group.size()  # what a rank sends to itself does not travel
    return from_peers / max(seconds - latency, 1e-6)


def _all_to_all_seconds(group: dist.ProcessGroup, device: torch.device, size: int) -> float:
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
