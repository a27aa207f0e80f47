"""How evenly every method balances, against the lower bound, how long it takes, and how many bytes move.

    python benchmarks/balance.py [--quick] [--json FILE] [--no-train]

A straggler share is 1 - mean load / largest load. `bound` is that share for max(mean load, longest sample), which no
assignment can beat; `floor`, where larger, is what equal counts make of it: the rank of the longest sample must take as
many samples as the others. A row stands for several draws of the lengths: it shows the draw with the median distance
between straggler share and bound, and `worst_above` is the largest distance. `ms` is the median over draws of the
fastest of several calls, in CPU time of the one thread that they use. Small instances have a row `exact`. All but the
training run (balance_train.py) simulates the ranks.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from command_line import parser
from freescale.runtime.balance import assignment, integer_problem, solver, swaps
from freescale.runtime.balance.sample_cost import FittedCost

SIZES = ((8, 32), (64, 128), (256, 128))
SMALL = (3, 4)  # ranks, batch: few enough to try everything
METHODS = ("none", "zigzag", "kk", "lpt", "variable", "default")
COSTS = ("L", "L^2", "fitted")
BYTES_PER_POSITION = 8


def lognormal(random: np.random.Generator, samples: int, median: float, sigma: float) -> np.ndarray:
    return np.clip(random.lognormal(np.log(median), sigma, samples), 1, 21_000).astype(np.int64)


def zipf(random: np.random.Generator, samples: int) -> np.ndarray:
    lengths = np.arange(1, 4096)
    return random.choice(lengths, samples, p=lengths**-1.2 / (lengths**-1.2).sum())


LENGTHS = {
    "lognormal(1000, 1.0)": lambda random, samples: lognormal(random, samples, 1000, 1.0),
    "lognormal(3379, 0.894)": lambda random, samples: lognormal(random, samples, 3379, 0.894),
    "zipf(1.2)": zipf,
}


def fitted_cost() -> FittedCost:
    """Fitted to 40 steps of 8 ranks whose times are 2 ms + (L + L**2 / 3000) * 0.1 us, 3% noise, some hiccups."""
    random, fit = np.random.default_rng(0), FittedCost()
    for _ in range(40):
        features = np.array([fit.features(lognormal(random, 32, 1000, 1.0)) for _ in range(8)])
        seconds = (2e-3 + features @ [1e-7, 1e-7 / 3000]) * (1 + 0.03 * random.standard_normal(8))
        fit.observe(features, seconds * np.where(random.random(8) < 0.03, 4, 1))
    return fit


def costs_by(cost: str, lengths: np.ndarray, fit: FittedCost) -> np.ndarray:
    real = lengths.astype(np.float64)
    return {"L": real, "L^2": real**2}[cost] if cost != "fitted" else fit(real)


def fastest(call, repetitions: int) -> tuple[Any, float]:
    times = []
    for _ in range(repetitions):
        start = time.thread_time()
        result = call()
        times.append(1e3 * (time.thread_time() - start))
    return result, min(times)


def floor(costs: np.ndarray, ranks: int) -> float:
    target = integer_problem.make_problem(costs, ranks, None, None, None, None, None)
    return 1 - float(target.costs.sum()) / ranks / max(target.load_lower_bound(), 1)


def exact(costs: np.ndarray, ranks: int) -> solver.BalanceResult:
    """The best of all assignments with equal counts."""
    p = integer_problem.make_problem(costs, ranks, None, None, None, None, None)
    rank = assignment.exact(p, int(p.costs.sum()) + 1, swaps.OperationBudget(10**7))
    assert rank is not None
    return solver.balance(costs, ranks, method="none", home=rank)


def measure(name: str, ranks: int, batch: int, cost: str, fit: FittedCost, seeds: int, repetitions: int) -> list[dict]:
    """One row per method. Draws are the outer loop, methods the inner one."""
    results: dict[str, list[tuple[solver.BalanceResult, float, float]]] = {}
    for seed in range(seeds):
        lengths = LENGTHS[name](np.random.default_rng(seed), ranks * batch)
        costs = costs_by(cost, lengths, fit)
        for method in METHODS:
            sizes = lengths * BYTES_PER_POSITION
            done, ms = fastest(partial(solver.balance, costs, ranks, method=method, sizes=sizes), repetitions)
            results.setdefault(method, []).append((done, ms, floor(costs, ranks)))
        if (ranks, batch) == SMALL:
            results.setdefault("exact", []).append((*fastest(lambda c=costs: exact(c, ranks), 1), floor(costs, ranks)))
    return [row(name, ranks, batch, cost, method, found) for method, found in results.items()]


def row(name: str, ranks: int, batch: int, cost: str, method: str, found: list) -> dict[str, Any]:
    by_distance = sorted(found, key=lambda f: f[0].straggler - f[0].bound)
    shown, _, least = by_distance[len(found) // 2]
    return {
        "lengths": name,
        "ranks": ranks,
        "batch": batch,
        "cost": cost,
        "method": method,
        "straggler": shown.straggler,
        "bound": shown.bound,
        "ms": statistics.median(ms for _, ms, _ in found),
        "moved_bytes": shown.moved_bytes,
        "floor": least,
        "worst_above": by_distance[-1][0].straggler - by_distance[-1][0].bound,
        "ms_min": min(ms for _, ms, _ in found),
        "ms_max": max(ms for _, ms, _ in found),
        "draws": len(found),
    }


def table(rows: list[dict]) -> None:
    print(f"{'lengths':<23} {'ranks':>9} {'cost':>6} {'method':>8} {'straggler':>9} {'bound':>8} {'above':>8}", end=" ")
    print(f"{'worst':>8} {'ms':>7} {'min':>7} {'max':>7} {'moved MB':>8}")
    for r in rows:
        above = r["straggler"] - r["bound"]
        print(f"{r['lengths']:<23} {r['ranks']:>5}x{r['batch']:<3} {r['cost']:>6} {r['method']:>8}", end=" ")
        print(f"{r['straggler']:>9.3%} {r['bound']:>8.3%} {above:>8.3%} {r['worst_above']:>8.3%}", end=" ")
        print(f"{r['ms']:>7.2f} {r['ms_min']:>7.2f} {r['ms_max']:>7.2f} {r['moved_bytes'] / 1e6:>8.2f}")


def summary(rows: list[dict]) -> None:
    """The default against the bound: the median draw of each row, and the worst draw of all."""
    for ranks, batch in SIZES:
        mine = [r for r in rows if r["method"] == "default" and (r["ranks"], r["batch"]) == (ranks, batch)]
        plain = [r for r in mine if r["cost"] != "fitted"]
        above = max(r["straggler"] - r["bound"] for r in plain)
        worst = max(r["worst_above"] for r in plain)
        print(
            f"default {ranks}x{batch}, cost L and L^2: at most {above:.3%} above the bound (worst draw {worst:.3%});",
            end=" ",
        )
        print(f"slowest row {max(r['ms'] for r in mine):.2f} ms, slowest draw {max(r['ms_max'] for r in mine):.2f} ms")


def training(quick: bool) -> dict[str, Any] | None:
    """The run of two real ranks, if it is there."""
    try:
        import balance_train
    except ImportError:
        print("no training run: benchmarks/balance_train.py is not there")
        return None
    return balance_train.run(quick=quick)


def main() -> None:
    p = parser(__doc__, "3 draws instead of 9")
    p.add_argument("--no-train", action="store_true", help="leave the training run out")
    args = p.parse_args()
    seeds, repetitions = (3, 3) if args.quick else (9, 7)
    fit = fitted_cost()
    print(f"SIMULATED ranks, one thread. Fitted cost: {fit.current.a:.3g} * L + {fit.current.b:.3g} * L**2 seconds")
    rows = []
    for ranks, batch in (SMALL, *SIZES):
        for name in LENGTHS:
            for cost in COSTS:
                rows += measure(name, ranks, batch, cost, fit, seeds, repetitions)
    table(rows)
    summary(rows)
    result: dict[str, Any] = {"simulated_ranks": True, "fit": fit.stats(), "rows": rows}
    if not args.no_train and (trained := training(args.quick)) is not None:
        result["training"] = trained
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
