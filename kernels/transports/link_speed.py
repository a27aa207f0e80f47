"""The all-to-all bandwidth of a process group, measured once per group at start-up. Passes read the `estimate` and
never measure, since a pass may run on one rank alone (if the others hit the cache). It may only affect where launches
are placed, and is not part of torch's cache keys: code loaded from a cache may have been compiled for another link.

A probe of 2 MB is noisy, so the best of several counts, rounded to a power of two. `measure_transports` times several
transports for the same all-to-all; `auto` chooses by it.
"""

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
    return 2.0 ** round(math.log2(speed))


def estimate(group_name: str) -> float:
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
    _synchronize(device)
    start = time.perf_counter()
    dist.all_to_all_single(out, x, group=group)
    _synchronize(device)
    return time.perf_counter() - start


DEFAULT_BYTES, MAX_BYTES = 4 << 20, 64 << 20  # per rank: used if the first launch is empty, and the maximum
_ROW_BYTES = 256
_REPEATS = 3


def measure_transports(
    transports: Mapping[str, Any], nbytes: int, group: dist.ProcessGroup, device: torch.device
) -> dict[str, list[float]]:
    """Seconds per rank, by name; None: the group's own all-to-all. Infinite where a transport fails. Collective."""
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
    of_ranks = distributed.gather_objects(mine, everyone)
    return {name: [seconds[name] for seconds in of_ranks] for name in transports}


def size_of(nbytes: int) -> int:
    """Bytes that a rank sends in the measurement, given those of its first launch."""
    return min(nbytes or DEFAULT_BYTES, MAX_BYTES)


def _seconds(transport: Any, x: torch.Tensor, rows: int, group: dist.ProcessGroup) -> float:
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
