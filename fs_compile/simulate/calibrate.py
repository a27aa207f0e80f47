"""`simulate --calibrate`: measure this machine and write a cluster file.

The dense part is timed on one rank. Started on several ranks, by torchrun, the link between them is probed too, by an
all-to-all as freescale launches it and by torch's own; then every rank times the dense part at the same time, as in
training. What cannot be measured here is taken from a preset or file, and the file says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from freescale.compat import launcher_environment
from freescale.kernels.transports import c10d
from freescale.simulate import dense_timing
from freescale.simulate.cluster import Cluster, InputError, to_toml

PROBE_BYTES, PROBES = 1 << 22, 5
HEADS = 8
MEASURED = ["dim", "layers", "seconds_per_token", "seconds_per_token_squared", "jitter"]
MEASURED_BETWEEN_RANKS = ["between_gb_per_s", "inside_gb_per_s", "torchrec_link_share", "ranks_per_host", "latency_us"]


def main(path: str, block: str, base: Cluster, progress: Callable[[str], None]) -> None:
    if not Path(path).resolve().parent.is_dir():
        raise InputError(f"--calibrate {path}: there is no folder {Path(path).resolve().parent}")
    make = dense_timing.load_block(block)
    on_gpu, ranks = torch.cuda.is_available(), launcher_environment.launched_ranks()
    if not on_gpu:
        torch.set_num_threads(1)
        base = replace(base, dim=128, layers=2)  # a model that a core can be asked for
    measured = list(MEASURED)
    if ranks > 1:
        dist.init_process_group("nccl" if on_gpu else "gloo")
        base, measured = _with_link(base, progress), measured + MEASURED_BETWEEN_RANKS
    fit = dense_timing.measure(make, base.dim, HEADS if on_gpu else 2, base.layers, progress)
    cluster = replace(
        base,
        name=torch.cuda.get_device_name() if on_gpu else "CPU, one core for a rank",
        seconds_per_token=fit.per_token,
        seconds_per_token_squared=fit.per_square,
        jitter=min(fit.jitter, 0.5),
    )
    if ranks == 1 or dist.get_rank() == 0:
        comments = [
            f"measured by simulate --calibrate with {block}: {', '.join(measured)}; all else is that of {base.name}",
            f"the fit is off by {fit.worst:.0%} at most; {fit.constant * 1e3:.2f} ms are the same at any length",
            *(f"{n} histories of {length}: {seconds * 1e3:.2f} ms" for n, length, seconds in fit.rows),
        ]
        Path(path).write_text(to_toml(cluster, comments))
        print(f"wrote {path}", *comments, sep="\n  ")
    if ranks > 1:
        dist.destroy_process_group()


def _with_link(base: Cluster, progress: Callable[[str], None]) -> Cluster:
    """Of the default group: every rank is taken for a host of its own."""
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
    """Bytes per second by freescale's launches and by torch's all-to-all, and seconds of a very small one.

    `size`: bytes of a rank. Of several probes the median; of the ranks the slowest. Collective.
    """
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
