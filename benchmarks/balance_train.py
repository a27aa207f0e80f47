"""Two real ranks train the example's HSTU model, balanced and not in turns: do they wait less, and is it free?

    python benchmarks/balance_train.py [--quick] [--json FILE]

Ranks are processes of one thread, one core each, on gloo. Two kinds of batches, each balanced and not in turns:

    lognormal   lengths as in production, a tenth as long: median 100, sigma 1.0, cap 2,100. `on` is the default method
                with the cost fitted during the run. It should bring down the time that the average rank waits for the
                slowest, and with it the time of a step
    equal       every history has 160 ids, so there is nothing to gain; `moving` balances random numbers in place of
                costs by the method `zigzag`, which sends half of the samples to the other rank. What that does to the
                time of a step is what moving costs

Straggler shares are mean idle time over step time, medians over steps: predicted from the costs, measured by
freescale's meter (wall time), and measured as CPU time of the training threads, which others on the machine disturb
less. `ratio` compares a step with the same step of `off`, by wall time and by CPU time of all threads, on the rank that
took longest: medians and quartiles over steps.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]

import numpy as np  # noqa: E402

from command_line import parser  # noqa: E402

RANKS, ITEMS, DIM, HEADS, BLOCKS, BATCH = 2, 20_000, 32, 2, 2, 16
MODES = {"lognormal": ("off", "on"), "equal": ("off", "moving")}
SKIPPED_FIRST, SKIPPED_LAST = 2, 1  # steps of a loop that do not count: they have no neighbour to hide behind
CORES = sorted(os.sched_getaffinity(0))


def batches(kind: str, rank: int, steps: int, seed: int) -> list[dict[str, Any]]:
    import torch

    random = np.random.default_rng([seed, rank])
    made = []
    for _ in range(steps):
        lengths = np.full(BATCH, 160)  # about the mean of the others
        if kind == "lognormal":
            lengths = np.clip(random.lognormal(np.log(100), 1.0, BATCH), 1, 2100).astype(np.int64)
        popularity = random.random(int(lengths.sum()) + BATCH) ** 4  # some items are far more popular than others
        ids = torch.from_numpy((popularity * ITEMS).astype(np.int64))
        made.append(
            {
                "history": ids[BATCH:],
                "history_lengths": torch.from_numpy(lengths),
                "candidate": ids[:BATCH],
                "number": torch.from_numpy(random.random(BATCH)),
                "labels": torch.from_numpy((random.random(BATCH) < 0.5).astype(np.float32)),
            }
        )
    return made


def build(codegen: str) -> tuple[Any, Any]:
    """The model, and the model compiled. Its tables are freescale's own, so that TorchRec is not needed."""
    import torch
    from torch import nn

    import freescale
    from hstu import HSTU, segment_sum

    class Recommender(HSTU):
        def logits(self, batch: Any) -> Any:
            lengths = batch["history_lengths"]
            offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            x = self.embeddings["history"](batch["history"])
            for block in self.blocks:
                x = block(x, offsets)
            pooled = segment_sum(x, offsets) / lengths.clamp(min=1).unsqueeze(1)
            return (self.head(pooled) * self.embeddings["candidate"](batch["candidate"])).sum(dim=1)

        def forward(self, batch: Any) -> Any:
            loss = nn.functional.binary_cross_entropy_with_logits(self.logits(batch), batch["labels"], reduction="sum")
            return loss / self.normalizer

    torch.manual_seed(0)
    tables = {
        name: freescale.ShardedEmbedding(ITEMS, DIM, name=name, optimizer="rowwise_adagrad", lr=0.05)
        for name in ("history", "candidate")
    }
    model = Recommender(nn.ModuleDict(tables), DIM, HEADS, BLOCKS, max_distance=128, normalizer=BATCH)
    return model, torch.compile(model, backend="freescale", fullgraph=True, options={"codegen": codegen})


def loop(model: Any, run: Any, loader: Any) -> Iterator[None]:
    import torch
    import torch.distributed as dist

    dense = list(model.parameters())
    optimizer = torch.optim.Adam(dense, lr=1e-3)
    for batch in loader:
        yield
        optimizer.zero_grad(set_to_none=False)
        run(batch).backward()
        gradients = torch.cat([p.grad.view(-1) for p in dense])
        dist.all_reduce(gradients)
        for p, g in zip(dense, (gradients / RANKS).split([p.numel() for p in dense]), strict=True):
            p.grad.copy_(g.view_as(p))
        optimizer.step()


def block(model: Any, run: Any, data: list[Any], mode: str, fit: Any) -> dict[str, Any]:
    """One loop over the data. Times of each step that counts, of all ranks: [ranks, steps]."""
    import torch.distributed as dist

    import freescale

    random = freescale.BalanceOptions(method="zigzag", cost=freescale.LengthCost(1.0, 0.0), lengths=numbers_of)
    balance = {"off": False, "on": freescale.BalanceOptions(cost=fit), "moving": random}[mode]
    loader = freescale.LookaheadLoader(data, run, balance=balance)
    freescale.meter.clear()
    dist.barrier()
    clocks = np.array([(time.thread_time(), time.process_time()) for _ in loop(model, run, loader)])
    counted = slice(SKIPPED_FIRST, len(data) - SKIPPED_LAST)
    steps = freescale.meter.steps()[counted]
    mine = [[s["seconds"] for s in steps], [s["compute"] for s in steps], *np.diff(clocks, axis=0)[counted].T]
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, np.array(mine))
    found = dict(zip(("seconds", "compute", "cpu", "all_cpu"), np.array(everyone).transpose(1, 0, 2), strict=True))
    return {**found, "stats": loader.balance_stats()[counted]}


def numbers_of(batch: dict[str, Any]) -> Any:
    return batch["number"]


def rank_main(rank: int, folder: str, rounds: int, steps: int, codegen: str) -> None:
    import torch
    import torch.distributed as dist

    import freescale

    os.sched_setaffinity(0, {CORES[rank % len(CORES)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    model, run = build(codegen)
    fit = freescale.FittedCost()
    block(model, run, batches("lognormal", rank, 12, seed=99), "on", fit)  # compile, and get the fit going
    found: dict[tuple[str, str], list[dict[str, Any]]] = {(k, m): [] for k in MODES for m in MODES[k]}
    for i in range(rounds):
        for kind, modes in MODES.items():
            data = batches(kind, rank, steps, seed=i)
            for mode in modes[:: 1 if i % 2 else -1]:
                found[kind, mode].append(block(model, run, data, mode, fit))
    if rank == 0:
        rows = [row(kind, mode, blocks, found[kind, "off"]) for (kind, mode), blocks in found.items()]
        about = {"ranks": RANKS, "rounds": rounds, "steps": steps, "codegen": codegen, "fit": fit.stats()}
        Path(folder, "result.json").write_text(json.dumps({**about, "rows": rows}))
    dist.barrier()
    dist.destroy_process_group()


def idle_share(times: np.ndarray, seconds: np.ndarray) -> float:
    """Mean idle time over step time, median over steps. times: [ranks, steps]."""
    return float(np.median((times.max(0) - times.mean(0)) / seconds.mean(0)))


def row(kind: str, mode: str, blocks: list[dict[str, Any]], off: list[dict[str, Any]]) -> dict[str, Any]:
    seconds, compute, cpu, all_cpu = (
        np.concatenate([b[k] for b in blocks], 1) for k in ("seconds", "compute", "cpu", "all_cpu")
    )
    stats = [s for b in blocks for s in b["stats"]]

    def median(key: str) -> float | None:
        return float(np.median([s[key] for s in stats])) if stats else None

    def ratio(key: str) -> list[float]:
        """Quartiles over steps, each against the same step of `off`, of the rank where it took longest."""
        ratios = [b[key].max(0) / o[key].max(0) for b, o in zip(blocks, off, strict=True)]
        return np.percentile(np.concatenate(ratios), [25, 50, 75]).tolist()

    return {
        "lengths": kind,
        "balance": mode,
        "step_ms": 1e3 * float(np.median(seconds)),
        "step_ms_iqr": 1e3 * float(np.subtract(*np.percentile(seconds, [75, 25]))),
        "ratio": ratio("seconds"),
        "cpu_ms": 1e3 * float(np.median(all_cpu.max(0))),
        "cpu_ratio": ratio("all_cpu"),
        "idle_ms": 1e3 * float(np.median(compute.max(0) - compute.mean(0))),
        "straggler": idle_share(compute, seconds),
        "straggler_cpu": idle_share(cpu, cpu.max(0, keepdims=True)),
        "predicted_before": median("predicted_before"),
        "predicted_after": median("predicted_after"),
        "moved_samples": median("moved_samples"),
        "moved_bytes": median("moved_bytes"),
        "balancing_ms": None if (took := median("seconds")) is None else 1e3 * took,
        "counted_steps": seconds.shape[1],
    }


def in_ranks(main: Callable[..., None], *args: Any) -> None:
    """main(rank, *args) in a process for each rank."""
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=main, args=(rank, *args)) for rank in range(RANKS)]
    for p in ranks:
        p.start()
    for p in ranks:
        p.join()
    if any(p.exitcode for p in ranks):
        raise RuntimeError(f"freescale: the ranks of the training run ended with {[p.exitcode for p in ranks]}")


def run(quick: bool, codegen: str | None = None) -> dict[str, Any]:
    """Train, print a table, return it."""
    rounds, steps = (3, 8) if quick else (12, 24)
    with tempfile.TemporaryDirectory() as folder:
        in_ranks(rank_main, folder, rounds, steps, codegen or ("eager" if quick else "inductor"))
        result: dict[str, Any] = json.loads(Path(folder, "result.json").read_text())
    table(result)
    return result


def table(result: dict[str, Any]) -> None:
    fit = result["fit"]
    print(f"{RANKS} ranks on gloo, {len(CORES)} cores, {result['rounds']} rounds of {result['steps']} steps", end="; ")
    print(f"fitted cost {fit['a']:.3g} * L + {fit['b']:.3g} * L**2 s, {fit['constant'] * 1e3:.1f} ms per step")
    columns = {
        "lengths": 10, "balance": 8, "step ms": 8, "iqr": 7, "ratio (quartiles)": 20, "CPU ms": 7,
        "CPU ratio (quartiles)": 22, "idle ms": 8, "idle": 7, "CPU idle": 9, "predicted": 10, "before": 7,
        "moved kB": 9, "took ms": 8,
    }  # fmt: skip
    print(" ".join(f"{name:>{width}}" for name, width in columns.items()))
    for r in result["rows"]:
        (low, ratio, high), (cpu_low, cpu_ratio, cpu_high) = r["ratio"], r["cpu_ratio"]
        cells = [
            r["lengths"], r["balance"], f"{r['step_ms']:.1f}", f"{r['step_ms_iqr']:.1f}",
            f"{ratio:.3f} ({low:.2f}-{high:.2f})", f"{r['cpu_ms']:.1f}",
            f"{cpu_ratio:.3f} ({cpu_low:.2f}-{cpu_high:.2f})", f"{r['idle_ms']:.1f}", f"{r['straggler']:.1%}",
            f"{r['straggler_cpu']:.1%}",
        ]  # fmt: skip
        if r["moved_bytes"] is not None:
            cells += [f"{r['predicted_after']:.1%}", f"{r['predicted_before']:.1%}", f"{r['moved_bytes'] / 1e3:.1f}",
                      f"{r['balancing_ms']:.1f}"]  # fmt: skip
        print(" ".join(f"{cell:>{width}}" for cell, width in zip(cells, columns.values(), strict=False)))


def main() -> None:
    p = parser(__doc__, "fewer rounds, no code generation: under a minute")
    p.add_argument("--codegen", choices=("inductor", "eager"))
    args = p.parse_args()
    result = run(args.quick, args.codegen)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
