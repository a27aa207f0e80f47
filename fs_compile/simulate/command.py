"""`python -m freescale simulate`: simulate a step at many ranks."""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from freescale.simulate.cluster import PRESETS, Cluster, InputError, find, to_toml

SWEEPS = ("ranks", "cap", "batch", "collision", "link")


def add_arguments(p: argparse.ArgumentParser) -> None:
    presets = ", ".join(PRESETS)
    p.add_argument("--cluster", default="h100", help=f"{presets}, or a TOML file (default h100)")
    p.add_argument("--dump-preset", action="store_true", help="only print --cluster as TOML, as a start")
    p.add_argument("--ranks", type=int, default=256, help="2 to 4096 (default 256)")
    p.add_argument("--steps", type=int, default=20, help="simulated steps (default 20)")
    p.add_argument("--batch", type=int, default=128, help="samples per rank (default 128)")
    p.add_argument("--median", type=float, default=1000.0, help="median of lognormal history lengths (default 1000)")
    p.add_argument("--sigma", type=float, default=1.0, help="standard deviation of their logarithm (default 1.0)")
    p.add_argument("--cap", type=int, default=21_000, help="the longest history (default 21000)")
    p.add_argument("--collision", type=float, default=0.12, help="share of rows that collide (default 0.12)")
    p.add_argument("--rows", type=int, default=1_000_000_000, help="rows of the table (default 1e9)")
    p.add_argument("--histories", metavar="FILE.npz", help="real histories: arrays `lengths` and `ids`")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--sweep", nargs="+", choices=(*SWEEPS, "all"), default=[], help="parameters to vary, one at a time")
    p.add_argument("--plots", metavar="DIR", help="plot the results as PNG (requires freescale[plots])")
    p.add_argument("--json", metavar="FILE", help="write all results")
    p.add_argument("--calibrate", metavar="FILE.toml", help="only measure this machine, and write a cluster file")
    p.add_argument("--block", default="examples/hstu.py:HSTUBlock", metavar="FILE:CLASS", help="what --calibrate times")


def main(args: argparse.Namespace) -> int:
    try:
        if args.dump_preset:
            print(to_toml(find(args.cluster), []), end="")
        elif args.calibrate:
            from freescale.simulate import calibrate

            require_writable("--calibrate", Path(args.calibrate))
            calibrate.main(args.calibrate, args.block, find(args.cluster), Progress())
        else:
            run(args, _checked(args))
    except InputError as error:
        print(f"freescale: {error}", file=sys.stderr)
        return 2
    return 0


def _checked(args: argparse.Namespace) -> Cluster:
    limits = {
        "ranks": (2, 4096), "steps": (1, 1000), "batch": (1, 100_000), "median": (1, 1e6), "sigma": (0, 5),
        "cap": (1, 1_000_000), "collision": (0, 1), "rows": (1000, 10**13), "seed": (0, 2**31),
    }  # fmt: skip
    for name, (low, high) in limits.items():
        value = getattr(args, name)
        if not low <= value <= high:
            raise InputError(f"--{name} must be at least {low:g} and at most {high:g}, found {value}")
    if args.histories and args.sweep:
        raise InputError("--sweep varies generated batches; remove --histories")
    cluster = find(args.cluster)
    if args.json:
        require_writable("--json", Path(args.json))
    if args.plots:
        require_writable("--plots", Path(args.plots), folder=True)  # first: the import takes seconds
        from freescale.simulate.plots import require_matplotlib

        require_matplotlib()
    return cluster


def require_writable(option: str, path: Path, *, folder: bool = False) -> None:
    """Called before the work. Creates the folder."""
    try:
        if folder:
            path.mkdir(exist_ok=True)
        elif path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=path if folder else path.parent):
            pass
    except OSError as error:
        raise InputError(f"{option} {path}: cannot write there: {error.strerror}") from None


class Progress:
    """A progress line on a terminal, starting after two seconds."""

    def __init__(self) -> None:
        self._began, self._drawn = time.monotonic(), False

    def __call__(self, words: str) -> None:
        if sys.stderr.isatty() and time.monotonic() - self._began > 2:
            print(f"\r\x1b[K{time.monotonic() - self._began:4.0f} s  {words}", end="", file=sys.stderr, flush=True)
            self._drawn = True

    def clear(self) -> None:
        if self._drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._drawn = False


def run(args: argparse.Namespace, cluster: Cluster) -> None:
    from freescale.simulate import findings, plots
    from freescale.simulate.study import Study, points
    from freescale.simulate.variants import TORCHREC, freescale_variants
    from freescale.simulate.workload import Generated, Recorded, Workload

    began, progress = time.monotonic(), Progress()
    names = ("ranks", "batch", "median", "sigma", "cap", "collision", "rows", "seed")
    workload = Workload(**{name: getattr(args, name) for name in names})
    source = Recorded(workload, Path(args.histories)) if args.histories else Generated(workload)
    study = Study(source, cluster, args.steps, progress)
    outcomes = study.run_all([*TORCHREC, *freescale_variants()])
    progress.clear()
    sentences = [findings.verdict(outcomes), *findings.parts_that_do_not_pay(outcomes)]
    print(findings.described(study), "", findings.table(outcomes), "", findings.shares(outcomes), "", sep="\n")
    print(findings.headline_lines(outcomes), *sentences, sep="\n")
    result: dict[str, Any] = {"simulated": True, **findings.headlines(outcomes), "sentences": sentences}
    result |= {"workload": asdict(source.workload), "cluster": asdict(cluster), "steps": args.steps}
    result |= {"planned_owners": study.owners, "parts": findings.part_shares(outcomes)}
    result["rows"] = [findings.row(o) for o in outcomes]
    if not args.histories:
        result["elsewhere"] = _elsewhere(workload, cluster, progress)
    axes = SWEEPS if "all" in args.sweep else dict.fromkeys(args.sweep)
    swept = {axis: points(axis, workload, cluster, progress) for axis in axes}
    progress.clear()
    for found in swept.values():
        print("", findings.sweep_table(found), sep="\n")
    result["sweeps"] = {axis: [findings.point_row(p) for p in found] for axis, found in swept.items()}
    if args.plots:
        folder = Path(args.plots)
        title = f"{args.ranks} ranks, {cluster.name}, histories up to {args.cap}, batch {args.batch}"
        made = [plots.variants(outcomes, title, folder / "variants.png")]
        made += [plots.sweep(found, title, folder / f"{axis}.png") for axis, found in swept.items()]
        print("", *(f"wrote {path}" for path in made), sep="\n")
    if args.json:
        result["seconds"] = time.monotonic() - began
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


def _elsewhere(workload: Any, cluster: Cluster, progress: Progress) -> dict[str, list[str]]:
    """The same on one host, and with short histories: is it worth it there?"""
    from freescale.simulate import findings
    from freescale.simulate.study import point
    from freescale.simulate.variants import TORCHREC, freescale_variants

    host = max(min(cluster.ranks_per_host, workload.ranks, 64), 2)
    short = replace(workload, median=20.0, cap=100, ranks=min(workload.ranks, 64))
    cases = {
        f"{host} ranks of one host": ("ranks", float(host), workload),
        f"{short.ranks} ranks, histories of up to {short.cap}": ("cap", 100.0, short),
    }
    found = {}
    for name, (axis, value, changed) in cases.items():
        chosen = [*TORCHREC, *freescale_variants()]
        outcomes = point(axis, value, changed, cluster, progress, chosen).outcomes
        found[name] = [findings.verdict(outcomes), *findings.parts_that_do_not_pay(outcomes)]
    progress.clear()
    print("\nelsewhere:", *(f"  {name}: {s}" for name, sentences in found.items() for s in sentences), sep="\n")
    return found
