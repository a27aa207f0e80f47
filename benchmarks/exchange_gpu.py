"""All-to-all between ranks that share one GPU and one host: `staged` against gloo's own all-to-all on CUDA tensors.

    python benchmarks/exchange_gpu.py [--quick] [--json FILE]

Several processes on one GPU under MPS, which this script starts and stops. Every rank sends the same number of bytes,
split unevenly over the ranks, itself included. Wall time is that of the slowest rank, from a common start to the last
byte on every device; it includes the launch, which a training step does ahead. `in a row` are four such messages,
launched one after another, as the chunks of a step are. GB/s counts what all ranks send in that time: each byte crosses
the PCIe link once in each direction, and all ranks share that link. Its rate is measured in the same run: plain copies
of pinned memory by all ranks at once, both directions busy, bytes of one direction.
"""

from __future__ import annotations

import os
import resource
import tempfile
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from command_line import parser
from freescale.kernels.transports import staged
from gpu_machine import machine, mps, quartiles, write

WORLDS, SIZES = (2, 4, 8), (1, 4, 32, 128, 512)  # MB per rank
WIDTH = 128  # floats in a row
IN_A_ROW = 4
wait = torch.ops._c10d_functional.wait_tensor.default


def counts_of(world: int, rows: int) -> torch.Tensor:
    """rows[i, j] from rank i to rank j, uneven; every row sums to `rows`."""
    weights = torch.rand(world, world, generator=torch.Generator().manual_seed(world)) + 0.2
    counts = (weights / weights.sum(1, keepdim=True) * rows).long()
    counts[:, 0] += rows - counts.sum(1)
    return counts


def slowest(seconds: float) -> float:
    t = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(t, dist.ReduceOp.MAX)
    return float(t)


def timed(fn) -> float:
    torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    fn()
    torch.cuda.synchronize()
    return slowest(time.perf_counter() - start)


def pcie(nbytes: int, both: bool) -> float:
    """GB/s of one direction, all ranks together; with `both`, while the other direction is as busy."""
    device = torch.empty(2, nbytes, dtype=torch.uint8, device="cuda")
    host = torch.empty(2, nbytes, dtype=torch.uint8, pin_memory=True)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]

    def copies():
        for _ in range(8):
            with torch.cuda.stream(streams[0]):
                host[0].copy_(device[0], non_blocking=True)
            if both:
                with torch.cuda.stream(streams[1]):
                    device[1].copy_(host[1], non_blocking=True)

    timed(copies)
    best = min(timed(copies) for _ in range(3))
    return 8 * nbytes * dist.get_world_size() / best / 1e9


class Case:
    """One size: the tensors, and the two ways to exchange them."""

    def __init__(self, megabytes: int, transport: Any) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        counts = counts_of(world, megabytes * 1_000_000 // (4 * WIDTH))
        self.send, self.recv = counts[rank].clone(), counts[:, rank].clone()
        self.n, self.transport = int(self.recv.sum()), transport
        self.x = torch.rand(int(self.send.sum()), WIDTH, device="cuda")
        self.out = self.x.new_empty(self.n, WIDTH)
        self.launch_seconds: list[float] = []

    def staged(self) -> None:
        start = time.perf_counter()
        out = self.transport.launch(self.x, self.send, self.recv, self.n, 1)
        self.launch_seconds.append(time.perf_counter() - start)
        self.arrived = wait(out)

    def staged_in_a_row(self) -> None:
        outs = [self.transport.launch(self.x, self.send, self.recv, self.n, 1) for _ in range(IN_A_ROW)]
        for out in outs:
            wait(out)

    def gloo(self) -> None:
        dist.all_to_all_single(self.out, self.x, self.recv.tolist(), self.send.tolist())


def measure(megabytes: int, transport: Any, quick: bool) -> dict[str, Any]:
    case = Case(megabytes, transport)
    repeats = {"staged": 5 if quick else 15, "gloo": 3 if megabytes < 128 else 2}
    seconds: dict[str, list[float]] = {"staged": [], "gloo": []}
    cpu: dict[str, float] = {"staged": 0.0, "gloo": 0.0}
    timed(case.staged)
    if megabytes <= 32:
        timed(case.gloo)
    case.launch_seconds.clear()
    for turn in range(max(repeats.values())):
        for how in ("staged", "gloo"):
            if turn < repeats[how]:
                before = resource.getrusage(resource.RUSAGE_SELF)
                seconds[how].append(timed(getattr(case, how)))
                after = resource.getrusage(resource.RUSAGE_SELF)
                cpu[how] += after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert torch.equal(case.arrived, case.out), "staged and gloo differ"
    moved = megabytes * 1e-3 * dist.get_world_size()
    row: dict[str, Any] = {"ranks": dist.get_world_size(), "mb_per_rank": megabytes}
    for how in ("staged", "gloo"):
        middle, low, high = quartiles(seconds[how])
        row[f"{how}_ms"], row[f"{how}_ms_quartiles"] = middle * 1e3, [low * 1e3, high * 1e3]
        row[f"{how}_gb_per_s"] = moved / middle
        row[f"{how}_cpu_cores_per_rank"] = cpu[how] / sum(seconds[how])
        row[f"{how}_repeats"] = len(seconds[how])
    in_a_row = quartiles([timed(case.staged_in_a_row) for _ in range(3 if quick else 7)])[0]
    row["staged_in_a_row_gb_per_s"] = IN_A_ROW * moved / in_a_row
    row["launch_ms"] = quartiles(case.launch_seconds)[0] * 1e3
    return row


def urgent_beside_bulk(transport: Any) -> dict[str, float]:
    """A 1 MB message of priority 0: alone, and launched right behind 256 MB of priority 2."""
    small, bulk = Case(1, transport), Case(256, transport)
    found: dict[str, list[float]] = {"alone": [], "beside": [], "bulk": []}
    for _ in range(9):
        for beside in (False, True):
            torch.cuda.synchronize()
            dist.barrier()
            if beside:
                start = time.perf_counter()
                out = transport.launch(bulk.x, bulk.send, bulk.recv, bulk.n, 2)
            begin = time.perf_counter()
            wait(transport.launch(small.x, small.send, small.recv, small.n, 0))
            torch.cuda.current_stream().synchronize()
            found["beside" if beside else "alone"].append(slowest(time.perf_counter() - begin))
            if beside:
                wait(out)
                torch.cuda.current_stream().synchronize()
                found["bulk"].append(slowest(time.perf_counter() - start))
    return {f"urgent_{k}_ms" if k != "bulk" else "bulk_ms": quartiles(v)[0] * 1e3 for k, v in found.items()}


def rank_main(rank: int, world: int, store: str, quick: bool, pieces: list[int], results: Any) -> None:
    torch.cuda.set_device(0)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    rates = {"both_ways": pcie(64 << 20, True), "one_way_alone": pcie(64 << 20, False)}
    rows, by_piece = [], {}
    for piece in pieces:
        transport = staged.open_transport(
            dist.group.WORLD, piece_bytes=piece, ring_bytes=2 * staged.RING_BYTES
        )
        case = Case(128, transport)
        timed(case.staged)
        by_piece[piece] = 0.128 * world / quartiles([timed(case.staged) for _ in range(5)])[0]
        transport.close()
    transport = staged.open_transport(dist.group.WORLD)
    for megabytes in SIZES if not quick else SIZES[:4]:
        rows.append(measure(megabytes, transport, quick))
        rows[-1]["pinned_bytes_of_the_host"] = transport.pinned_bytes
    urgent = urgent_beside_bulk(transport)
    rates["both_ways_again"] = pcie(64 << 20, True)
    transport.check()
    transport.close()
    if rank == 0:
        results.put({"ranks": world, "pcie_gb_per_s": rates, "gb_per_s_by_piece": by_piece, "rows": rows, **urgent})
    dist.barrier()
    os._exit(0)


def main() -> None:
    args = parser(__doc__, "2 ranks, up to 128 MB").parse_args()
    context, worlds = mp.get_context("spawn"), []
    with mps() as under_mps:
        print(f"one GPU, {'under MPS' if under_mps else 'WITHOUT MPS: ranks take turns'}; uneven counts")
        for world in WORLDS if not args.quick else WORLDS[:1]:
            with tempfile.TemporaryDirectory() as folder:
                results = context.SimpleQueue()
                pieces = [1 << 20, 2 << 20, 4 << 20, 8 << 20, 16 << 20] if world == 2 and not args.quick else []
                arguments = (world, f"{folder}/store", args.quick, pieces, results)
                ranks = [context.Process(target=rank_main, args=(r, *arguments)) for r in range(world)]
                for r in ranks:
                    r.start()
                while results.empty() and all(r.exitcode in (None, 0) for r in ranks):
                    time.sleep(0.1)
                if results.empty():
                    for r in ranks:
                        r.kill()
                    raise SystemExit(f"a rank of {world} failed")
                worlds.append(results.get())
                for r in ranks:
                    r.join()
            show(worlds[-1])
        described = machine()
    finish(worlds, described, under_mps, args.json)


def show(found: dict[str, Any]) -> None:
    rate = found["pcie_gb_per_s"]
    print(f"\n{found['ranks']} ranks; PCIe, GB/s of one direction: {rate}")
    if found["gb_per_s_by_piece"]:
        pieces = {k >> 20: round(v, 1) for k, v in found["gb_per_s_by_piece"].items()}
        print("128 MB per rank, GB/s by MiB of the largest piece:", pieces)
    print(f"{'MB per rank':>11} {'staged ms':>10} {'GB/s':>6} {'of PCIe':>7} {'in a row':>8} {'gloo ms':>9}", end=" ")
    print(f"{'GB/s':>6} {'ratio':>6} {'launch ms':>9} {'cores: staged':>13} {'gloo':>5} {'pinned MB':>9}")
    for r in found["rows"]:
        share, row = (r[name] / rate["both_ways"] for name in ("staged_gb_per_s", "staged_in_a_row_gb_per_s"))
        ratio = r["staged_gb_per_s"] / r["gloo_gb_per_s"]
        print(
            f"{r['mb_per_rank']:>11} {r['staged_ms']:>10.2f} {r['staged_gb_per_s']:>6.1f} {share:>7.1%} "
            f"{row:>8.1%} {r['gloo_ms']:>9.1f} {r['gloo_gb_per_s']:>6.2f} {ratio:>5.1f}x {r['launch_ms']:>9.2f} "
            f"{r['staged_cpu_cores_per_rank']:>13.2f} {r['gloo_cpu_cores_per_rank']:>5.2f} "
            f"{r['pinned_bytes_of_the_host'] / 1e6:>9.0f}"
        )
    print(
        f"1 MB urgent: alone {found['urgent_alone_ms']:.2f} ms, behind 256 MB of early rows "
        f"{found['urgent_beside_ms']:.2f} ms (those take {found['bulk_ms']:.2f} ms)"
    )


def finish(worlds: list[dict[str, Any]], described: dict[str, Any], under_mps: bool, path: str | None) -> None:
    rows = [(w["pcie_gb_per_s"]["both_ways"], r) for w in worlds for r in w["rows"] if r["mb_per_rank"] >= 32]
    shares = {(r["ranks"], r["mb_per_rank"]): r["staged_gb_per_s"] / rate for rate, r in rows}
    alone = min(w["rows"][-1]["staged_gb_per_s"] / w["pcie_gb_per_s"]["one_way_alone"] for w in worlds)
    ratios = [r["staged_gb_per_s"] / r["gloo_gb_per_s"] for _, r in rows]
    largest = max(size for _, size in shares)
    headlines = {
        "staged_over_gloo": min(ratios),  # the worst from 32 MB per rank up
        "staged_share_of_pcie": min(share for (_, size), share in shares.items() if size == largest),
        "staged_share_of_pcie_other_way_idle": alone,  # of what one direction does while the other is not used
        "staged_share_of_pcie_from_128_mb": min(share for (_, size), share in shares.items() if size >= 128),
        "staged_share_of_pcie_from_32_mb": min(shares.values()),
        "staged_share_of_pcie_in_a_row_from_32_mb": min(r["staged_in_a_row_gb_per_s"] / rate for rate, r in rows),
    }
    print("\n" + "\n".join(f"{name}: {value:.3f}" for name, value in headlines.items()))
    write(path, {"machine": described, "mps": under_mps, **headlines, "worlds": worlds})


if __name__ == "__main__":
    main()
