"""What grows with the number of ranks, and what with the number of features?

    python benchmarks/world_size.py [--quick] [--json FILE] [--ranks 2 8 16] [--parts ranks features graphs]

ranks      Real gloo ranks on this machine train a small model over a LookaheadLoader: start-up (what a loader makes:
           groups, connections), agreement, the rendezvous before a step, planning of a batch, and memory.
           Each rank has 40,000 ids, of 128 samples, say, however many ranks there are; planning also with 4,000 ids.
           With more ranks than cores they wait for each other to get a core, so CPU time per rank stands beside the
           wall time, and growth is that of CPU time.
features   CPU time of a process until a collection of 8 and one of 64 features has done its first step (TorchRec, one
           table each, looked ahead), with empty caches, with generated code and without.
graphs     Compile time, graph size and guards in fake worlds (nothing travels) of 8 to 1024 ranks.

Growth is fitted as a + b * ranks (by least squares on relative errors), from which 1024 and 4096 ranks are estimated:
an estimate of the part that grows evenly, not a measurement.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from command_line import parser

SUPPORT = Path(__file__).resolve().parent.parent / "tests" / "support"
QUANTITIES = ("start-up", "agreement", "meeting", "requests", "plans", "requests, few ids", "plans, few ids")
FEATURE_HEADLINES = ("compile_64_over_8_features", "compile_64_over_8_features_eager")
PARTS = ("ranks", "features", "graphs")
HEADLINES = {
    "startup_growth_8_to_64": ("start-up", "agreement"),
    "meeting_growth_8_to_64": ("meeting",),
    "planning_growth_8_to_64": ("requests", "plans"),
    "planning_growth_8_to_64_few_ids": ("requests, few ids", "plans, few ids"),
}
SECONDS = 400  # for one set of ranks


# ---- real ranks ------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_ranks(world: int) -> list[dict[str, float]]:
    from world_size_rank import rank_main

    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch._inductor.compile_fx", "world_size_rank"])
    store, pipes, processes = f"127.0.0.1:{free_port()}", [], []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        processes.append(context.Process(target=rank_main, args=(rank, world, store, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    end, found = time.monotonic() + SECONDS, []
    try:
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(max(end - time.monotonic(), 0)):
                sys.exit(f"{world} ranks: rank {rank} was not done within {SECONDS} s")
            found.append(pipe.recv())
            if isinstance(found[-1], str):
                sys.exit(f"{world} ranks: rank {rank} failed:\n{found[-1]}")
    finally:
        for p in processes:
            p.kill()
            p.join(10)
    return found


def measure_ranks(worlds: list[int], repetitions: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for _ in range(repetitions):
        for world in worlds:
            ranks = run_ranks(world)
            rows.append({"ranks": world} | {k: statistics.median(r[k] for r in ranks) for k in ranks[0]})
            print(f"  {world} ranks: done", file=sys.stderr, flush=True)
    return rows


def middle(rows: list[dict[str, Any]], name: str, world: int) -> float:
    return statistics.median(r[name] for r in rows if r["ranks"] == world)


def fit(rows: list[dict[str, Any]], name: str) -> tuple[float, float]:
    """a and b of a + b * ranks."""
    worlds = np.array([r["ranks"] for r in rows], dtype=float)
    values = np.array([r[name] for r in rows])
    a, b = np.linalg.lstsq(np.stack([1 / values, worlds / values], 1), np.ones_like(values), rcond=None)[0]
    return float(a), float(b)


def show_ranks(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Prints the table. Returns estimates and growths."""
    worlds = sorted({r["ranks"] for r in rows})
    names = ("torch's group", *QUANTITIES)
    print(f"\nper rank, ms: wall (CPU); {os.cpu_count()} cores. Start-up and agreement once, the others per step")
    print(f"{'ranks':>6}" + "".join(f"{name:>20}" for name in names) + f"{'MiB':>8}")
    for world in worlds:
        times = [(middle(rows, n, world) * 1e3, middle(rows, f"{n} cpu", world) * 1e3) for n in names]
        cells = "".join(f"{f'{wall:.3g} ({cpu:.3g})':>20}" for wall, cpu in times)
        print(f"{world:>6}{cells}{middle(rows, 'memory', world) / 2**20:>8.1f}")
    found: dict[str, Any] = {"growth": {}, "estimates": {}}
    if len(worlds) < 2:
        return found
    first, last = 8 if 8 in worlds and worlds[-1] > 8 else worlds[0], worlds[-1]
    print(f"\nCPU time per rank, {last} over {first} ranks; by the fit, ms at 1024 and 4096 ranks:")
    for name in QUANTITIES:
        growth = middle(rows, f"{name} cpu", last) / middle(rows, f"{name} cpu", first)
        a, b = fit(rows, f"{name} cpu")
        estimates = {world: (a + b * world) * 1e3 for world in (1024, 4096)}
        found["growth"][name], found["estimates"][name] = growth, estimates
        print(f"{name:>18} {growth:>8.2f} {estimates[1024]:>10.3g} {estimates[4096]:>10.3g}")

    def both(names: tuple[str, ...], world: int) -> float:
        return sum(middle(rows, f"{n} cpu", world) for n in names)

    if (first, last) == (8, 64):
        for headline, of in HEADLINES.items():
            found[headline] = both(of, last) / both(of, first)
    return found


# ---- features --------------------------------------------------------------------------------------------------------


def compile_seconds(features: int, codegen: str) -> float:
    """Until the first step of a collection of so many features is done, in this process."""
    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(SUPPORT))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

    import freescale
    import trec

    names = [f"feature{i}" for i in range(features)]

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            configs = [
                EmbeddingConfig(name=f"of {n}", num_embeddings=50, embedding_dim=8, feature_names=[n]) for n in names
            ]
            self.collection = EmbeddingCollection(tables=configs, device=torch.device("cpu"))
            self.out = torch.nn.Linear(8, 1)

        def forward(self, batch: KeyedJaggedTensor) -> torch.Tensor:
            found = self.collection(batch)
            return self.out(torch.cat([found[n].values() for n in names])).sum()

    def batch(seed: int) -> KeyedJaggedTensor:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(0, 4, (features * 3,), generator=generator)
        values = torch.randint(0, 50, (int(lengths.sum()),), generator=generator)
        return KeyedJaggedTensor(keys=names, values=values, lengths=lengths)

    model = trec.shard(Model(), {f"of {n}": "row_wise" for n in names}, "rowwise_adagrad")
    model.compile(backend="freescale", options={"codegen": codegen})
    for b in freescale.LookaheadLoader([batch(i) for i in range(2)], model):
        began = time.process_time()
        model(b).backward()
        return time.process_time() - began
    raise AssertionError


# ---- graphs ----------------------------------------------------------------------------------------------------------


def compile_in_fake_world(world: int) -> dict[str, float]:
    """One cold compilation of forward and backward in this process."""
    sys.path.insert(0, str(SUPPORT))
    import torch

    from fake_world import fake_world, graphs_of
    from one_table import Model

    torch.compile(torch.nn.Linear(2, 2), backend="freescale")(torch.ones(1, 2))  # imports and warm-up
    with fake_world(1, world):
        model = torch.compile(Model(), backend="freescale", fullgraph=True, options={"codegen": "eager"})
        start = time.perf_counter()
        texts = graphs_of(lambda: model(torch.arange(5) % 3).backward())
        seconds = time.perf_counter() - start
        entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(Model.forward.__code__)
        guards = sum(len(str(e.guard_manager).splitlines()) for e in entries)
    nodes = sum(len(text.splitlines()) for (_, name), text in texts.items() if name != "before")
    return {"ranks": world, "seconds": seconds, "nodes": nodes, "guards": guards}


def in_a_fresh_process(part: str, number: int, *more: str) -> Any:
    command = [sys.executable, "-W", "ignore", __file__, "--one", part, str(number), *more]
    with tempfile.TemporaryDirectory() as caches:  # empty: as at the first start
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": caches}
        done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def measure_features(repetitions: int) -> dict[str, Any]:
    seconds: dict[str, dict[int, list[float]]] = {c: {8: [], 64: []} for c in ("inductor", "eager")}
    for _ in range(repetitions):
        for codegen in seconds:
            for features in seconds[codegen]:
                seconds[codegen][features].append(in_a_fresh_process("features", features, codegen))
    result: dict[str, Any] = {"feature_seconds": seconds}
    for codegen, of in seconds.items():
        for features, s in of.items():
            print(
                f"{features} features, {codegen}: first step after {statistics.median(s):.1f} s of CPU"
                f" ({min(s):.1f} to {max(s):.1f})"
            )
        headline = "compile_64_over_8_features" + ("" if codegen == "inductor" else "_eager")
        result[headline] = statistics.median(of[64]) / statistics.median(of[8])
    return result


def measure_graphs(repetitions: int) -> dict[str, Any]:
    worlds, rows = (8, 64, 256, 1024), []
    for _ in range(repetitions):
        rows += [in_a_fresh_process("graphs", world) for world in worlds]
    print(f"\n{'ranks':>6} {'compile s (median)':>20} {'nodes':>6} {'guards':>7}")
    for world in worlds:
        row = next(r for r in rows if r["ranks"] == world)
        print(f"{world:>6} {middle(rows, 'seconds', world):>20.2f} {row['nodes']:>6} {row['guards']:>7}")
    growth = middle(rows, "seconds", 1024) / middle(rows, "seconds", 8)
    return {"graph_rows": rows, "compile_time_1024_over_8": growth}


# ---- the program -----------------------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    p = parser(__doc__, "one repetition instead of three, at most 8 ranks unless --ranks says so, no features")
    p.add_argument("--ranks", type=int, nargs="+", help="numbers of real ranks (default 2 4 8 16 32 64)")
    p.add_argument("--parts", nargs="+", choices=PARTS, help="default: all")
    p.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    args = p.parse_args()
    args.ranks = args.ranks or ([2, 4, 8] if args.quick else [2, 4, 8, 16, 32, 64])
    args.parts = args.parts or (["ranks", "graphs"] if args.quick else list(PARTS))
    return args


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    args = arguments()
    if args.one:
        part, number, *more = args.one
        measure = compile_seconds if part == "features" else compile_in_fake_world
        print(json.dumps(measure(int(number), *more)))
        return
    repetitions = 1 if args.quick else 3
    result: dict[str, Any] = dict.fromkeys((*HEADLINES, *FEATURE_HEADLINES))
    if "ranks" in args.parts:
        rows = measure_ranks(args.ranks, repetitions)
        result |= {"cores": os.cpu_count(), "rank_rows": rows} | show_ranks(rows)
    if "features" in args.parts:
        result |= measure_features(repetitions)
    if "graphs" in args.parts:
        result |= measure_graphs(repetitions)
    print()
    for name in (*HEADLINES, *FEATURE_HEADLINES, "compile_time_1024_over_8"):
        if result.get(name) is not None:
            print(f"{name}: {result[name]:.2f}")
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
