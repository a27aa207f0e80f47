"""How much of the embedding exchange is waited for: TorchRec, plain Inductor and freescale on a link of chosen speed.

    sudo python benchmarks/overlap.py [--quick] [--json FILE]

Ranks are processes on this machine, one core each, every one in a network namespace behind a shaped link (netlab.py:
root and iproute2; without them ranks use the loopback interface, and figures say nothing about a link). All variants
train the example's HSTU model with a row-wise TorchRec table on the same batches, and take turns in the same processes:

    eager             TorchRec, synchronous
    pipeline          TorchRec's TrainPipelineSparseDist
    inductor          what freescale captures, compiled by Inductor without a pass of ours and without look-ahead
    find_exchanges .. look-ahead, and the passes of freescale one after the other
    freescale         everything

Two link speeds are derived from the run: eager TorchRec's exchange (rows and gradients) takes 0.5 and 2 times its
compute. Exposed time is the time that the training thread is blocked (overlap_variants.py says how that is known);
compute is the rest of a step. The meter's column is freescale's own account of exposed time. Figures are medians over
steps of all ranks, with the distance between the quartiles. Take them on a quiet machine with a core for each rank.

One more section: one rank alone, freescale against plain Inductor (`--single`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import netlab  # noqa: E402
from command_line import parser  # noqa: E402

FAST, SLOW, OWN = "exchange/compute 0.5", "exchange/compute 2", "own exchange/compute 2"
Rows = list[dict[str, Any]]


# ---- pure functions of the rows --------------------------------------------------------------------------------------


def r_squared(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Of the straight line that fits best; None where there is no line to fit."""
    n = len(x)
    if n < 3:
        return None
    mean_x, mean_y = sum(x) / n, sum(y) / n
    xx = sum((a - mean_x) ** 2 for a in x)
    yy = sum((b - mean_y) ** 2 for b in y)
    xy = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return None if xx == 0 or yy == 0 else xy * xy / (xx * yy)


def pick(rows: Rows, variant: str, link: str, collision: float | None = None) -> dict[str, Any] | None:
    """The row of a variant on a link with the nearest collision rate (0.12 unless said)."""
    wanted = 0.12 if collision is None else collision
    mine = [r for r in rows if r["variant"] == variant and r["link"] == link]
    return min(mine, key=lambda r: abs(r["collision"] - wanted), default=None)


def headlines(train: dict[str, Any], single: dict[str, Any]) -> dict[str, float | None]:
    """What the rows say in one number each; None for what was not measured."""
    rows, links, row_bytes = train["rows"], train["links_bits_per_second"], train["row_bytes"]
    found: dict[str, float | None] = dict.fromkeys(
        ("exposed_reduction_at_12pct", "linear_r2", "wire_bound_ratio", "single_rank_ratio", "pass_share_of_compile",
         "urgent_wire_ms", "exposed_over_urgent_at_12pct", "wire_bound_ratio_slow_link")
    )  # fmt: skip
    eager, ours = pick(rows, "eager", FAST), pick(rows, "freescale", FAST)
    if eager and ours:
        found["exposed_reduction_at_12pct"] = 1 - ours["exposed_ms"] / eager["exposed_ms"]
        near = min(train["collisions"], key=lambda c: abs(c["collision"] - ours["collision"]))
        found["urgent_wire_ms"] = wire_ms(2 * near["urgent_rows"] * row_bytes, links[FAST])
        found["exposed_over_urgent_at_12pct"] = ours["exposed_ms"] / found["urgent_wire_ms"]
        line = [r for r in rows if r["variant"] == "freescale" and r["link"] == FAST]
        found["linear_r2"] = r_squared([r["collision"] for r in line], [r["exposed_ms"] for r in line])
    for name, link in (("wire_bound_ratio", OWN), ("wire_bound_ratio_slow_link", SLOW)):
        if (bound := pick(rows, "freescale", link)) is not None:
            found[name] = bound["step_ms"] / wire_ms(bound["bytes"], links[link])
    found["meter_share_of_step"] = train.get("meter_share_of_step")
    found["single_rank_ratio"] = single.get("single_rank_ratio")
    if (cold := (single or train)["compiled"].get("freescale")) is not None:
        found["pass_share_of_compile"] = cold["pass_seconds"] / cold["seconds"]
    return found


def wire_ms(size: float, rate: float) -> float:
    return size * 8e3 / rate


def table(rows: Rows) -> str:
    """One line per row; the reduction is that of exposed time against eager on the same link and batches."""
    lines = [
        f"{'link':<24}{'collision':>10} {'variant':<18}{'step ms':>9}{'compute ms':>17}{'exposed ms':>16}       "
        f"{'meter ms':>10}{'MB sent':>9}{'exposed less':>14}"
    ]
    links = list(dict.fromkeys(r["link"] for r in rows))
    for r in sorted(rows, key=lambda r: (links.index(r["link"]), r["collision"])):
        base = pick(rows, "eager", r["link"], r["collision"])
        less = f"{1 - r['exposed_ms'] / base['exposed_ms']:.1%}" if base and base["exposed_ms"] else ""
        cells = "".join(
            f"{r[key]:>9.1f} ±{r[key + '_iqr']:<5.1f}" for key in ("step_ms", "compute_ms", "exposed_ms")
        )
        meter = "" if r["meter_ms"] is None else f"{r['meter_ms']:.1f}"
        what = f"{r['link']:<24}{r['collision']:>10.1%} {r['variant']:<18}"
        lines.append(f"{what}{cells}{meter:>10}{r['bytes'] / 1e6:>9.3f}{less:>14}")
    return "\n".join(lines)


# ---- the run ---------------------------------------------------------------------------------------------------------


def run_section(section: str, ranks: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Run overlap_rank.py on every rank, with empty compile caches; what rank 0 found."""
    print(f"{section}: {ranks} rank{'s' if ranks > 1 else ''}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="freescale-overlap-") as folder:
        out = Path(folder) / "found.json"
        todo = json.dumps({**settings, "section": section, "out": str(out)})
        with netlab.Lab(ranks) as lab:
            cache = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache"}
            code = lab.run([sys.executable, str(HERE / "overlap_rank.py"), todo], cache)
        if code:
            sys.exit(f"freescale: a rank of the section {section!r} ended with exit code {code}")
        return json.loads(out.read_text())


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    p = parser(__doc__, "small model, no code generation, few steps: does it run?")
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--single", action="store_true", help="only: one rank, everything against plain Inductor")
    p.add_argument("--variants", metavar="A,B", help="only these, and eager (default: all)")
    p.add_argument("--collisions", metavar="C,D", help="collision rates (default: 0,0.03,0.12,0.3,0.6)")
    p.add_argument("--no-single", action="store_true", help="leave the one-rank comparison out")
    p.add_argument("--ratios", metavar="R,S", help="eager's exchange over its compute on each link (default: 0.5,2)")
    p.add_argument("--steps", type=int, help="measured steps of a block")
    p.add_argument("--rounds", type=int, help="blocks of every variant")
    p.add_argument("--ddp", action="store_true", help="average dense gradients too, as DDP does")
    return p.parse_args(words)


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    from freescale.config import PASS_NAMES

    # On the CPU the last pass, which chooses a transport, changes nothing: the one before it is everything already.
    steps = [name for name in PASS_NAMES[:-2] if name != "bucket_gradients"]  # there are no dense gradients here
    names = ["eager", "pipeline", "inductor", *steps, "freescale"]
    chosen: dict[str, Any] = {
        "variants": names, "collisions": [0.0, 0.03, 0.12, 0.30, 0.60], "ratios": [0.5, 2.0], "steps": 5, "rounds": 1,
        "samples": 80, "length": 63, "dim": 128, "heads": 2, "blocks": 2, "table_rows": 200_000,
        "codegen": "inductor", "ddp": args.ddp,
    }  # fmt: skip
    if args.quick:
        chosen |= {
            "variants": ["eager", "pipeline", "inductor", "freescale"], "collisions": [0.0, 0.12, 0.60], "steps": 2,
            "samples": 16, "blocks": 1, "table_rows": 20_000, "codegen": "eager",
        }  # fmt: skip
    if args.variants:
        wanted = {"eager", *args.variants.split(",")}
        if unknown := wanted - set(names):
            sys.exit(f"freescale: unknown variants {', '.join(sorted(unknown))}; there are {', '.join(names)}")
        chosen["variants"] = [name for name in names if name in wanted]
    if args.collisions:
        chosen["collisions"] = [float(c) for c in args.collisions.split(",")]
    if args.ratios:
        chosen["ratios"] = [float(r) for r in args.ratios.split(",")]
    return chosen | {k: v for k in ("steps", "rounds") if (v := getattr(args, k)) is not None}


def run_single(settings: dict[str, Any], quick: bool) -> dict[str, Any]:
    found = run_section("single", 1, {**settings, "steps": 3 if quick else 8, "rounds": 2 if quick else 6})
    print(
        f"one rank: a step of freescale over one of plain Inductor: {found['single_rank_ratio']:.4f} "
        f"(CPU time of all threads: {found['single_rank_cpu_ratio']:.4f})"
    )
    return found


def run_all(args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    single = {} if args.no_single else run_single(settings, args.quick)
    train = run_section("train", args.ranks, settings)
    print(table(train["rows"]))
    for name, reason in train["left_out"].items():
        print(f"{name} does not run here: {reason}")
    found = headlines(train, single)
    for name, value in found.items():
        print(f"{name:<30} {'not measured' if value is None else f'{value:.4f}'}")
    return {**found, **train, "single": single, "settings": settings}


def main() -> None:
    args, began = arguments(), time.perf_counter()
    settings = settings_of(args)
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"the machine is not quiet (load {load:.1f}): figures will be disturbed", file=sys.stderr)
    if args.single:
        result: Any = run_single(settings, args.quick)
    else:
        result = run_all(args, settings) | {"load_at_start": load, "seconds": time.perf_counter() - began}
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
