"""How fast a process group carries an all-to-all, measured once per group, at start-up.

Passes read the `estimate`; they never measure, since a pass may run on one rank alone (the others had a cache hit).

A probe of 2 MB is noisy, so the best of several counts, and it is rounded to a power of two: most starts on the same
link see the same number and place launches alike. A link near the middle between two powers may be taken for either
(with a noise of 10%, about one link in four can). That is harmless, since compiled code that comes out of a cache may
have been made for another link altogether: nothing but where launches stand among the compute may depend on the
estimate, and the key of torch's caches must not.
"""

from __future__ import annotations

import math
import time

import torch
import torch.distributed as dist

bytes_per_second: dict[str, float] = {}  # that one rank receives, per group name
DEFAULT = 10e9  # bytes per second of a group that was not measured
_WARM_UP_BYTES, _PROBE_BYTES = 1 << 14, 1 << 21  # per rank
_PROBES = 6  # the best of 2 scatters by a factor of 10 between ranks that share two busy cores, of 6 by one of 2


def measure(group: dist.ProcessGroup, device: torch.device, gbps: float = 0.0) -> float:
    """Measure, or take `gbps` (gigabits per second) if it is more than 0. Collective; the first result stays."""
    name = group.group_name
    if name not in bytes_per_second:
        bytes_per_second[name] = gbps * 1e9 / 8 if gbps > 0 else rounded(_probe(group, device))
    return bytes_per_second[name]


def rounded(speed: float) -> float:
    """The nearest power of two, by ratio."""
    return 2.0 ** round(math.log2(speed))


def estimate(group_name: str) -> float:
    """What was measured, or a default."""
    return bytes_per_second.get(group_name, DEFAULT)


def _probe(group: dist.ProcessGroup, device: torch.device) -> float:
    if group.size() == 1:
        return DEFAULT
    _all_to_all_seconds(group, device, _WARM_UP_BYTES)
    latency = min(_all_to_all_seconds(group, device, _WARM_UP_BYTES) for _ in range(3))
    seconds = min(_all_to_all_seconds(group, device, _PROBE_BYTES) for _ in range(_PROBES))
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
