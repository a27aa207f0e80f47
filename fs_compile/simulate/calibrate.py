"""`simulate --calibrate`: measure this machine and write a cluster file.

The dense part is timed on one rank; with several (torchrun) on all of them concurrently, after a probe of the link.
Values that cannot be measured here come from a preset or file, and the output says so.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from freescale.compat import cuda
from freescale.kernels.transports import c10d
from freescale.simulate.cluster import Cluster, InputError, to_toml

PROBE_BYTES, PROBES = 1 << 22, 5
HEADS = 8
# (samples, length) of the timed batches.
BATCHES = {
    "cuda": ((512, 256), (128, 1024), (64, 2048), (32, 4096), (16, 8192), (4, 16384)),
    "cpu": ((32, 16), (16, 64), (8, 128), (4, 256), (2, 512)),
}
REPEATS = 15
MEASURED = ["dim", "layers", "seconds_per_token", "seconds_per_token_squared", "jitter"]
MEASURED_BETWEEN_RANKS = ["between_gb_per_s", "inside_gb_per_s", "torchrec_link_share", "ranks_per_host", "latency_us"]


def main(path: str, block: str, base: Cluster, progress: Callable[[str], None]) -> None:
    make = load_block(block)
    on_gpu, ranks = torch.cuda.is_available(), cuda.launched_ranks()
    if not on_gpu:
        torch.set_num_threads(1)
        base = replace(base, dim=128, layers=2)  # a model small enough for one core
    measured = list(MEASURED)
    if ranks > 1:
        dist.init_process_group("nccl" if on_gpu else "gloo")
        base, measured = _with_link(base, progress), measured + MEASURED_BETWEEN_RANKS
    fit = measure(make, base.dim, HEADS if on_gpu else 2, base.layers, progress)
    cluster = replace(
        base,
        name=torch.cuda.get_device_name() if on_gpu else "CPU, one core per rank",
        seconds_per_token=fit.per_token,
        seconds_per_token_squared=fit.per_square,
        jitter=min(fit.jitter, 0.5),
    )
    if ranks == 1 or dist.get_rank() == 0:
        comments = [
            f"measured by simulate --calibrate with {block}: {', '.join(measured)}; all else is from {base.name}",
            f"largest error of the fit {fit.worst:.0%}; {fit.constant * 1e3:.2f} ms are independent of length",
            *(f"{n} histories of length {length}: {seconds * 1e3:.2f} ms" for n, length, seconds in fit.rows),
        ]
        Path(path).write_text(to_toml(cluster, comments))
        print(f"wrote {path}", *comments, sep="\n  ")
    if ranks > 1:
        dist.destroy_process_group()


def _with_link(base: Cluster, progress: Callable[[str], None]) -> Cluster:
    """Probe the link of the default group. Every rank counts as its own host."""
    progress("probing the link")
    ours, theirs, latency = probe_link(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return replace(
        base,
        between_gb_per_s=ours / 1e9,
        inside_gb_per_s=ours / 1e9,
        torchrec_link_share=min(theirs / ours, 1.0),
        ranks_per_host=1,
        latency_us=latency * 1e6,
    )


def probe_link(device: torch.device, size: int = PROBE_BYTES) -> tuple[float, float, float]:
    """Bytes per second of freescale's all-to-all and of torch's, and seconds of a very small one. `size`: bytes per
    rank. Median over probes; slowest rank. Collective."""
    group = dist.group.WORLD
    assert group is not None
    world = group.size()

    def seconds(probed: int, own: bool) -> float:
        each = max(probed // 4 // world, 1)
        x, out = (torch.zeros(each * world, device=device) for _ in range(2))
        taken = []
        for _ in range(PROBES):
            dist.barrier(group)
            began = time.perf_counter()
            if own:
                c10d.start_all_to_all(out, x, [each] * world, [each] * world, group).wait()
            else:
                dist.all_to_all_single(out, x, group=group)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            taken.append(time.perf_counter() - began)
        slowest = torch.tensor(sorted(taken)[PROBES // 2], device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest)

    travels = size * (world - 1) / world
    latency = seconds(64, True)
    ours, theirs = (travels / max(seconds(size, own) - latency, 1e-9) for own in (True, False))
    return ours, theirs, latency


@dataclass(frozen=True)
class Fit:
    per_token: float
    per_square: float
    constant: float  # seconds of a step, independent of lengths
    jitter: float  # relative standard deviation of repeated steps
    worst: float  # largest relative error of the fit
    rows: list[tuple[int, int, float]]  # samples, length, seconds


def load_block(where: str) -> Callable[..., nn.Module]:
    """Load "FILE:CLASS": CLASS(dim, heads, max_distance) makes a block that is called with rows and offsets."""
    path, _, name = where.partition(":")
    file = Path(path)
    if not file.is_file():
        raise InputError(f"{path}: no such file; --block must be FILE:CLASS, the class of a model's blocks")
    sys.path.insert(0, str(file.resolve().parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise InputError(f"{path}: the file has no {name or 'class'}; --block must be FILE:CLASS")
    return getattr(module, name)


class Dense(nn.Module):
    def __init__(self, make: Callable[..., nn.Module], dim: int, heads: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make(dim, heads, 512) for _ in range(layers))

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, offsets)
        return x.float().square().mean()


def measure(make: Callable[..., nn.Module], dim: int, heads: int, layers: int, say: Callable[[str], None]) -> Fit:
    """Time forward and backward, compiled by Inductor; in bfloat16 on a GPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    model: Any = torch.compile(Dense(make, dim, heads, layers).to(device, dtype), dynamic=True)
    times = {}
    for samples, length in BATCHES[device]:
        say(f"timing {samples} histories of length {length}")
        x = torch.randn(samples * length, dim, device=device, dtype=dtype, requires_grad=True)
        offsets = torch.arange(samples + 1, device=device) * length
        times[samples, length] = [_seconds(model, x, offsets) for _ in range(REPEATS + 3)][3:]
    return fit(times)


def _seconds(model: Any, x: torch.Tensor, offsets: torch.Tensor) -> float:
    def wait() -> None:
        if x.is_cuda:
            torch.cuda.synchronize()

    wait()
    began = time.perf_counter()
    model(x, offsets).backward()
    wait()
    return time.perf_counter() - began


def fit(times: dict[tuple[int, int], list[float]]) -> Fit:
    """Non-negative least squares on relative errors. `times`: repetitions by (samples, length)."""
    y = np.array([np.median(t) for t in times.values()])
    terms = np.array([(1.0, n * length, n * length**2) for n, length in times])
    kept = [0, 1, 2]
    while True:
        scaled = terms[:, kept] / y[:, None]
        norm = np.linalg.norm(scaled, axis=0)
        found = np.linalg.lstsq(scaled / norm, np.ones_like(y), rcond=None)[0] / norm
        if (found >= 0).all():
            break
        kept.pop(int(np.argmin(found * norm)))
    coefficients = np.zeros(3)
    coefficients[kept] = found
    worst = float(np.abs(terms @ coefficients / y - 1).max())
    spread = [float(np.subtract(*np.percentile(t, [75, 25])) / 1.349 / np.median(t)) for t in times.values()]
    rows = [(n, length, float(s)) for (n, length), s in zip(times, y, strict=True)]
    constant, per_token, per_square = (float(c) for c in coefficients)
    return Fit(per_token, per_square, constant, float(np.median(spread)), worst, rows)
