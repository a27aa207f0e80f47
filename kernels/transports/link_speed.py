"""The all-to-all bandwidth of a process group, measured once per group at start-up.

Passes read the `estimate` and never measure, since a pass may run on one rank alone (if the others hit the cache).

A probe of 2 MB is noisy, so the best of several counts, rounded to a power of two. So most runs on the same link get
the same number and place launches alike. With 10% noise, about one link in four is close enough to the middle between
two powers to be rounded either way. That is harmless: code loaded from a cache may have been compiled for another link
anyway. So the estimate may only affect where launches are placed, and must not be part of torch's cache keys.
"""

from __future__ import annotations

import math
import time

import torch
import torch.distributed as dist

bytes_per_second: dict[str, float] = {}  # received per rank, by group name
DEFAULT = 10e9  # bytes per second, for groups that were not measured
_WARM_UP_BYTES, _PROBE_BYTES = 1 << 14, 1 << 21  # per rank
_PROBES = 6  # the best of 2 varies by a factor of 10 between ranks that share two busy cores, of 6 by a factor of 2


def measure(group: dist.ProcessGroup, device: torch.device, gbps: float = 0.0) -> float:
    """Measure, or use `gbps` (gigabits per second) if positive. Collective; the first result is kept."""
    name = group.group_name
    if name not in bytes_per_second:
        bytes_per_second[name] = gbps * 1e9 / 8 if gbps > 0 else rounded(_probe(group, device))
    return bytes_per_second[name]


def rounded(speed: float) -> float:
    """The nearest power of two, by ratio."""
    return 2.0 ** round(math.log2(speed))


def estimate(group_name: str) -> float:
    """The measured speed, or a default."""
    return bytes_per_second.get(group_name, DEFAULT)


def _probe(group: dist.ProcessGroup, device: torch.device) -> float:
    if group.size() == 1:
        return DEFAULT
    _all_to_all_seconds(group, device, _WARM_UP_BYTES)
    latency = min(_all_to_all_seconds(group, device, _WARM_UP_BYTES) for _ in range(3))
    seconds = min(_all_to_all_seconds(group, device, _PROBE_BYTES) for _ in range(_PROBES))
    from_peers = _PROBE_BYTES * (group.size() - 1) / group.size()  # data for itself is not sent
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
