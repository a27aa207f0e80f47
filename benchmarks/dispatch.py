"""Samples packed for 32 to 512 ranks and made into a batch again, on a GPU: Triton against PyTorch indexing.

    python benchmarks/dispatch.py [--quick] [--json FILE]

Ranks are SIMULATED: one GPU packs what one rank sends, and unpacks the same bytes as if they had come from so many
peers; nothing travels. The batch: 4,096 samples with histories lognormal(median 1000, sigma 1.0, at most 21,000); 10
features of int64 and 4 of float32 per event, 6 float32 per sample; every sample moves, in random order.

Bytes are those of the values, read once and written once; the tables that say what goes where are made within the timed
region and not counted. `ms` is the device's time with the launches queued ahead, `wall ms` that of calls one after
another, whichever of host and device is slower. PyTorch, twice: `loop` indexes per peer and feature, `whole` builds one
index per feature for all peers and then cuts it, the best that indexing can do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from command_line import parser
from freescale.kernels import sample_packing as d
from gpu_machine import machine, quartiles, write

WORLDS = (32, 64, 128, 256, 512)
SAMPLES = 4096
Run = Callable[[], Any]


def make_batch() -> list[d.Jagged]:
    lengths = (torch.randn(SAMPLES, device="cuda") + math.log(1000)).exp().clamp(max=21_000).long()
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    single, n = torch.arange(SAMPLES + 1, device="cuda"), int(offsets[-1])
    ids = [d.Jagged(torch.randint(0, 1 << 40, (n,), device="cuda"), offsets) for _ in range(10)]
    events = [d.Jagged(torch.randn(n, device="cuda"), offsets) for _ in range(4)]
    return [*ids, *events, *(d.Jagged(torch.randn(SAMPLES, device="cuda"), single) for _ in range(6))]


def taken(feature: d.Jagged, samples: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of some samples, one after another, and their lengths."""
    begin = feature.offsets[samples]
    lengths = feature.offsets[samples + 1] - begin
    ends = lengths.cumsum(0)
    moved = torch.repeat_interleave(begin - ends + lengths, lengths)
    return feature.values[moved + torch.arange(moved.shape[0], device=moved.device)], lengths


def torch_loop(features: list[d.Jagged], perm: torch.Tensor, world: int) -> list[torch.Tensor]:
    return [taken(f, mine)[0] for mine in perm.chunk(world) for f in features]


def torch_whole(features: list[d.Jagged], perm: torch.Tensor, world: int) -> list[torch.Tensor]:
    """Per feature in the order of `perm`, then each peer's part of each feature to its place."""
    parts = []
    for f in features:
        values, lengths = taken(f, perm)
        parts.append(values.split(lengths.view(world, -1).sum(1).tolist()))
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for peer in range(world):
        for part in parts:
            by_type.setdefault(part[peer].dtype, []).append(part[peer])
    return [torch.cat(p) for p in by_type.values()]


def device_ms(run: Run, rounds: int) -> list[float]:
    run()
    torch.cuda.synchronize()
    times = []
    for _ in range(rounds):
        torch.cuda._sleep(4_000_000)  # the launches below are queued while it lasts
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return times


def wall_ms(run: Run, rounds: int) -> float:
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(rounds):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / rounds * 1e3


def measure(features: list[d.Jagged], world: int, rounds: int, slow_rounds: int) -> list[dict[str, Any]]:
    perm = torch.randperm(SAMPLES, device="cuda")
    ends = torch.arange(1, world + 1, device="cuda") * (SAMPLES // world)
    kinds, entries = [d.spec_of(f) for f in features], [f.values.shape[0] for f in features]
    slabs, home = d.dispatch(features, perm, ends), torch.argsort(perm)
    for a, b in zip(d.combine(slabs, home, ends, kinds, entries), features, strict=True):
        assert torch.equal(a.values, b.values) and torch.equal(a.offsets, b.offsets)
    for mine, theirs in zip(slabs.data.values(), torch_whole(features, perm, world), strict=True):
        assert torch.equal(mine, theirs.view(mine.dtype))
    copied = torch.empty(1 << 30, device="cuda", dtype=torch.int8).random_()
    room, moved = torch.empty_like(copied), 2 * sum(f.values.nbytes for f in features)
    copy = 2 * copied.nbytes / quartiles(device_ms(lambda: room.copy_(copied), rounds))[0] / 1e6
    loop, whole = (wall_ms(lambda f=f: f(features, perm, world), slow_rounds) for f in (torch_loop, torch_whole))
    found = []
    for name, run in (
        ("dispatch", lambda: d.dispatch(features, perm, ends)),
        ("combine", lambda: d.combine(slabs, home, ends, kinds, entries)),
    ):
        ms, low, high = quartiles(device_ms(run, rounds))
        wall = wall_ms(run, rounds)
        row = {"what": name, "ranks": world, "ms": ms, "ms_quartiles": [low, high], "wall_ms": wall}
        row |= {"gb_per_s": moved / ms / 1e6, "copy_gb_per_s": copy, "share_of_copy": moved / ms / 1e6 / copy}
        row |= {"torch_loop_ms": loop, "torch_whole_ms": whole, "over_loop": loop / wall, "over_whole": whole / wall}
        found.append(row)
        print(
            f"{world:>5} {name:>9} {ms:>7.3f} {wall:>8.3f} {row['gb_per_s']:>6.0f} {row['share_of_copy']:>8.1%} "
            f"{loop:>9.1f} {whole:>9.1f} {row['over_loop']:>9.0f}x",
            flush=True,
        )
    return found


def main() -> None:
    args = parser(__doc__, "32 and 512 ranks, five rounds").parse_args()
    torch.manual_seed(1)
    worlds, rounds, slow = ((32, 512), 5, 1) if args.quick else (WORLDS, 20, 3)
    features = make_batch()
    total = sum(f.values.nbytes for f in features)
    print(f"SIMULATED ranks; {SAMPLES} samples, {len(features)} features, {total / 1e6:.0f} MB of values")
    print(f"{'ranks':>5} {'':>9} {'ms':>7} {'wall ms':>8} {'GB/s':>6} {'of copy':>8}", end=" ")
    print(f"{'loop ms':>9} {'whole ms':>9} {'over loop':>10}")
    found = [row for world in worlds for row in measure(features, world, rounds, slow)]

    def of(name: str) -> list[dict[str, Any]]:
        return [row for row in found if row["what"] == name]

    headlines = {f"{n}_share_of_copy": min(r["share_of_copy"] for r in of(n)) for n in ("dispatch", "combine")}
    headlines |= {f"{n}_over_torch_at_512": of(n)[-1]["over_loop"] for n in ("dispatch", "combine")}
    headlines |= {f"{n}_growth_32_to_512": of(n)[-1]["ms"] / of(n)[0]["ms"] for n in ("dispatch", "combine")}
    for name, value in headlines.items():
        print(f"{name}: {value:.3f}")
    write(args.json, {"machine": machine(), "simulated_ranks": True, **headlines, "quick": args.quick, "rows": found})


if __name__ == "__main__":
    main()
