"""How far are the predictions of `python -m freescale simulate` from measured steps?

    sudo python benchmarks/fidelity.py [--quick] [--json FILE] [--ranks 2 4]
    python benchmarks/fidelity.py --recorded benchmarks/results/overlap.json

Ranks train the example's HSTU model on this machine, one core each as far as there are cores, behind links shaped with
netlab.py (root and iproute2), as in overlap.py. Calibrated is what one run on an unshaped link says of each variant's
compute, and what a probe says of each shaped link. Everything else is predicted, with the plans of the same batches and
the order of the same passes. Times are without those in which the training thread waited for its core, since others may
use the machine, too; a transfer that had to wait for a core stays too long.

Where there are more ranks than cores, use --asleep: dense compute takes its time asleep (fidelity_asleep.py), so that
ranks that share a core do not make each other slower. Lookups, planning and gloo still use it.

With --recorded nothing is run: predictions are held against what overlap.py measured (fidelity_recorded.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import numpy as np  # noqa: E402

import collisions  # noqa: E402
import netlab  # noqa: E402
from command_line import parser  # noqa: E402
from freescale.simulate import graphs, variants  # noqa: E402
from freescale.simulate.cluster import PRESETS, Cluster  # noqa: E402
from freescale.simulate.collisions import CollisionCounter, Counts  # noqa: E402
from freescale.simulate.events import Compute, Program, Simulation  # noqa: E402
from freescale.simulate.workload import Batch  # noqa: E402

Rows = list[dict[str, Any]]
NAMES = {
    "eager TorchRec": variants.TORCHREC[0],
    "freescale, no look-ahead": variants.Variant("freescale, no look-ahead"),
    "freescale": variants.Variant("freescale", look_ahead=True),
}
STEPS = 8  # predicted


def planned(settings: dict[str, Any], ranks: int, collision: float) -> list[Counts]:
    """The batches that the ranks draw, planned."""
    shape = collisions.Shape(settings["samples"], settings["length"], settings["table_rows"])
    counter, counts = CollisionCounter(), []
    for t, rows in enumerate(collisions.unique_rows(shape, ranks, collision, STEPS, seed=1)):
        ids = [collisions.values_of(rows[r], shape, 1000 * t + r) for r in range(ranks)]
        each = np.full(ranks, shape.values)
        done = counter.count(Batch(each, each, np.concatenate(ids)), np.arange(ranks), np.ones(ranks, dtype=int))
        counts += [done] if done is not None else []
    return [*counts, counter.last()]


def cluster_of(settings: dict[str, Any], probe: dict[str, float]) -> Cluster:
    speed = probe["bytes_per_second"] / 1e9
    return replace(
        PRESETS["h100"], name="this machine", dim=settings["dim"], layers=settings["blocks"], ranks_per_host=1,
        inside_gb_per_s=speed, between_gb_per_s=speed, jitter=0.0, host_ms=0.0, host_ms_look_ahead=0.0, sm_tax=0.0,
        copy_tax=0.0, latency_us=probe["latency"] * 1e6, message_us=0.0, torchrec_link_share=probe["torchrec_share"],
    )  # fmt: skip


def predict(
    variant: variants.Variant,
    counts: list[Counts],
    c: Cluster,
    compute_ms: float,
    traced: dict[bool, Any],
    order: Program | None = None,
) -> float:
    """Milliseconds of a step. There is no average of dense gradients in this training, so no meeting at its end.

    `order`: in place of the one that the passes make.
    """
    row = c.dim * c.row_element_bytes
    first, second = counts[:2]
    sizes = {
        "urgent rows": first.unique, "urgent gradients": first.urgent_gradients if variant.look_ahead else first.unique,
        "early rows": second.unique - second.urgent, "late gradients": np.zeros(1),
    }  # fmt: skip
    sizes_in_bytes = {k: float(v.mean()) * row for k, v in sizes.items()}
    seconds = compute_ms / 1e3
    program = order or variants.program_of(
        variant,
        lambda ahead: graphs.program_of(traced[ahead], seconds, 0.0, sizes_in_bytes, c.between_gb_per_s * 1e9),
    )
    program = [i for i in program if isinstance(i, Compute) or i.what != "dense gradients"]
    work = np.zeros((len(counts), len(first.unique), 2))
    work[:, :, 0] = seconds
    transfers = variants.transfers_of(variant, counts, np.zeros(len(counts)), c)
    steps = Simulation(program, transfers, work).run().step()
    return float(steps[2:-1].mean() * 1e3)


def compare(settings: dict[str, Any], ranks: int, found: dict[str, Any], traced: dict[bool, Any]) -> Rows:
    counts, rows = planned(settings, ranks, settings["collision"]), []
    for setting in found["settings"]:
        c = cluster_of(settings, setting["probe"])
        for name in NAMES:
            predicted = predict(NAMES[name], counts, c, found["unshaped"][name]["compute_ms"], traced)
            measured = setting["measured"][name]
            rows.append(
                {
                    "ranks": ranks, "link": f"exchange/compute {setting['ratio']:g}", "variant": name,
                    "predicted_ms": predicted, "measured_ms": measured["step_ms"], "quartiles": measured["quartiles"],
                    "error": predicted / measured["step_ms"] - 1,
                }
            )  # fmt: skip
    return rows


def headlines(rows: Rows) -> dict[str, Any]:
    """The error of the median row, and pairs of variants that the prediction puts in the wrong order; `clearly`: where
    the quartiles of the two do not overlap."""
    pairs = [(a, b) for a, b in combinations(rows, 2) if (a["ranks"], a["link"]) == (b["ranks"], b["link"])]
    orders = [[a[key] < b[key] for key in ("predicted_ms", "measured_ms")] for a, b in pairs]
    wrong = [pair for pair, (predicted, measured) in zip(pairs, orders, strict=True) if predicted != measured]
    clearly = [
        (a, b) for a, b in wrong
        if a["quartiles"][1] < b["quartiles"][0] or b["quartiles"][1] < a["quartiles"][0]
    ]  # fmt: skip
    return {
        "median_error": statistics.median(abs(r["error"]) for r in rows) if rows else None,
        "worst_error": max((abs(r["error"]) for r in rows), default=None),
        "settings": len({(r["ranks"], r["link"]) for r in rows}),
        "pairs": len(pairs),
        "pairs_in_wrong_order": len(wrong),
        "pairs_clearly_in_wrong_order": len(clearly),
    }


def table(rows: Rows) -> str:
    names = f"{'predicted':>10}{'measured':>10}{'quartiles':>18}{'off':>8}"
    lines = [f"{'ranks':>5}  {'link':<38}{'variant':<32}{names}"]
    for r in rows:
        quartiles = f"{r['quartiles'][0]:.0f} to {r['quartiles'][1]:.0f}"
        lines.append(
            f"{r['ranks']:>5}  {r['link']:<38}{r['variant']:<32}{r['predicted_ms']:>10.1f}{r['measured_ms']:>10.1f}"
            f"{quartiles:>18}{r['error']:>8.1%}"
        )
    return "\n".join(lines)


def run_ranks(ranks: int, settings: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="freescale-fidelity-") as folder:
        out = Path(folder) / "found.json"
        todo = json.dumps({**settings, "out": str(out)})
        with netlab.Lab(ranks) as lab:
            code = lab.run([sys.executable, str(HERE / "fidelity_rank.py"), todo])
        if code:
            sys.exit(f"freescale: a rank of {ranks} ended with exit code {code}")
        return json.loads(out.read_text())


def arguments() -> argparse.Namespace:
    p = parser(__doc__, "2 ranks, two links, a small model: does it run?")
    p.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    p.add_argument("--ratios", type=float, nargs="+", default=[0.25, 0.5, 1.0, 2.0], help="exchange over compute")
    p.add_argument("--rounds", type=int, default=3, help="blocks of every variant on every link")
    p.add_argument("--codegen", choices=("eager", "inductor"), default="eager", help="or generate code")
    p.add_argument("--asleep", type=float, default=0.0, metavar="MS", help="of a step, in place of dense compute")
    p.add_argument("--recorded", metavar="FILE", help="hold predictions against what overlap.py has written there")
    return p.parse_args()


def main() -> None:
    args = arguments()
    if args.recorded:
        import fidelity_recorded

        rows = fidelity_recorded.compare(json.loads(Path(args.recorded).read_text()))
        show(rows, args.json, {"recorded": args.recorded})
        return
    if netlab.why_not() is not None:
        sys.exit(f"freescale: fidelity needs shaped links: {netlab.why_not()}")
    settings = {
        "samples": 40, "length": 63, "dim": 128, "heads": 2, "blocks": 2, "table_rows": 100_000, "collision": 0.12,
        "steps": 4, "rounds": args.rounds, "ratios": args.ratios, "codegen": args.codegen, "ddp": False,
        "asleep_ms": args.asleep,
    }  # fmt: skip
    if args.quick:
        settings |= {"samples": 16, "blocks": 1, "ratios": [0.5, 2.0], "rounds": 1, "steps": 3}
        args.ranks = [2]
    traced = {ahead: graphs.trace(settings["blocks"], ahead) for ahead in (True, False)}
    found = {ranks: run_ranks(ranks, settings) for ranks in args.ranks}
    rows = [r for ranks, f in found.items() for r in compare(settings, ranks, f, traced)]
    show(rows, args.json, {"found": found, "ran": settings})


def show(rows: Rows, path: str | None, more: dict[str, Any]) -> None:
    result = headlines(rows)
    print(table(rows), "", *(f"{k:<32} {v:.3g}" for k, v in result.items() if v is not None), sep="\n")
    if path:
        Path(path).write_text(json.dumps({**result, "rows": rows, **more}, indent=1) + "\n")


if __name__ == "__main__":
    main()
