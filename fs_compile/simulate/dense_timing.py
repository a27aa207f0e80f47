"""How long blocks of a sequence model compute on this machine: seconds per token, and per token squared."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from freescale.simulate.cluster import InputError

# (samples, length) of the batches that are timed.
BATCHES = {
    "cuda": ((512, 256), (128, 1024), (64, 2048), (32, 4096), (16, 8192), (4, 16384)),
    "cpu": ((32, 16), (16, 64), (8, 128), (4, 256), (2, 512)),
}
REPEATS = 15


@dataclass(frozen=True)
class Fit:
    per_token: float
    per_square: float
    constant: float  # seconds of a step, whatever its lengths
    jitter: float  # standard deviation of a step's time over the time, where nothing changes
    worst: float  # largest relative difference between a time and the fit
    rows: list[tuple[int, int, float]]  # samples, length, seconds


def load_block(where: str) -> Callable[..., nn.Module]:
    """Of "FILE:CLASS": a block made by CLASS(dim, heads, max_distance) and called with rows and offsets."""
    path, _, name = where.partition(":")
    file = Path(path)
    if not file.is_file():
        raise InputError(f"{path}: there is no such file; --block names the class of a model's blocks as FILE:CLASS")
    sys.path.insert(0, str(file.resolve().parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise InputError(f"{path}: the file has no {name or 'class'}; --block is FILE:CLASS")
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
    """Forward and backward, compiled by Inductor; in bfloat16 on a GPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    model: Any = torch.compile(Dense(make, dim, heads, layers).to(device, dtype), dynamic=True)
    times = {}
    for samples, length in BATCHES[device]:
        say(f"timing {samples} histories of {length}")
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
    """Least squares on relative errors, nothing negative. Times: repetitions of (samples, length)."""
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
