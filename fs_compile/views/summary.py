"""Figures of a run, and the run as text for a terminal."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from freescale.views.records import PARTS, RankRecord, Run, mean, median, named_graphs, settled
from freescale.views.verdict import verdict

CLASSES = ("urgent", "early", "late", "dense")


def summarize(run: Run) -> dict[str, Any]:
    ranks = {number: rank_summary(r) for number, r in sorted(run.ranks.items())}
    steps = [s for r in run.ranks.values() for s in settled(r.step)]
    whole = sum(s["seconds"] for s in steps)
    any_rank = next(iter(run.ranks.values()))
    found = {
        "run": run.name,
        "world": run.world,
        "ranks_recorded": len(run.ranks),
        "ranks_missing": run.missing,
        "not_ended": [number for number, r in sorted(run.ranks.items()) if not r.end],
        "cut_off": [number for number, r in sorted(run.ranks.items()) if r.cut_off],
        "torch": any_rank.start.get("torch"),
        "device": any_rank.start.get("device"),
        "steps": max((len(r.step) for r in run.ranks.values()), default=0),
        "median_step_seconds": median(s["seconds"] for s in steps),
        "shares": {part: sum(s[part] for s in steps) / whole if whole else 0.0 for part in PARTS},
        "waits": _waits(steps),
        "bytes_per_step": _bytes(steps),
        "collisions": _collisions(any_rank),
        "balance": _balance(any_rank),
        "graphs": [_graph(run, name, g) for name, g in named_graphs(any_rank.graph)],
        "ranks": ranks,
    }
    return {"verdict": verdict(run, found), **found}


def shown_parts(s: dict[str, Any]) -> list[str]:
    """Parts of a step to show. `host_bound` is omitted on a CPU, where it does not occur."""
    return [part for part in PARTS if part != "host_bound" or s["device"] != "cpu" or s["shares"][part] > 0]


def head_lines(s: dict[str, Any]) -> list[str]:
    """What was recorded, and what is missing, as sentences."""
    lines = [f"{s['world']} ranks, {s['steps']} steps, torch {s['torch']}, {s['device']}."]
    if s["ranks_missing"]:
        lines.append(f"No record of rank {', '.join(map(str, s['ranks_missing']))}.")
    if len(s["not_ended"]) == s["ranks_recorded"]:
        lines.append("No rank exited normally: killed, or still training.")
    elif s["not_ended"]:
        lines.append(f"Rank {', '.join(map(str, s['not_ended']))} did not exit normally: killed, or still training.")
    if s["cut_off"]:
        lines.append(f"The record of rank {', '.join(map(str, s['cut_off']))} is truncated.")
    if not s["steps"]:
        lines.append("No step was completed.")
    return lines


def rank_summary(rank: RankRecord) -> dict[str, Any]:
    steps = settled(rank.step)
    entry: dict[str, Any] = {"steps": len(rank.step), "median_step_seconds": median(s["seconds"] for s in steps)}
    entry |= {part: mean(s[part] for s in steps) for part in PARTS}
    return entry


def _waits(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Mean seconds per step and rank by cause of the wait, longest first."""
    names = dict.fromkeys(name for s in steps for name in s["waits"])
    waits = {name: mean(s["waits"].get(name, 0.0) for s in steps) for name in names}
    return dict(sorted(waits.items(), key=lambda item: -item[1]))


def _bytes(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Mean bytes received per step and rank, by class and payload."""
    total: dict[str, float] = {}
    for s in steps:
        for name, size in s["bytes"].items():
            if size or name.split(" ")[0] in CLASSES:
                key = " ".join(name.split(" ")[:2])
                total[key] = total.get(key, 0.0) + size
    return {name: size / len(steps) for name, size in total.items()}


def _collisions(rank: RankRecord) -> dict[str, float]:
    """Per exchange, the share of a batch's unique rows that were also in the previous batch."""
    found: dict[str, list[float]] = {}
    for plan in rank.plan:
        if plan.get("unique_rows"):
            found.setdefault(plan["exchange"], []).append(plan.get("colliding_rows", 0) / plan["unique_rows"])
    return {name: mean(shares) for name, shares in found.items()}


def _balance(rank: RankRecord) -> dict[str, float] | None:
    if not rank.balance:
        return None
    measured = [b["measured"] for b in rank.balance if b.get("measured") is not None]
    return {
        "straggler_before": mean(b["predicted_before"] for b in rank.balance),
        "straggler_after": mean(b["predicted_after"] for b in rank.balance),
        "straggler_measured": mean(measured) if measured else float("nan"),
        "moved_samples": mean(b.get("moved_samples", 0) for b in rank.balance),
        "moved_bytes": mean(b.get("moved_bytes", 0) for b in rank.balance),
    }


def _graph(run: Run, name: str, graph: dict[str, Any]) -> dict[str, Any]:
    """One graph, and the number of ranks that compiled it: with a shared cache, one rank compiles for all."""
    of_all = [g for r in run.ranks.values() for g in r.graph]
    same = [g for g in of_all if all(g[k] == graph[k] for k in ("compilation", "direction"))]
    entry = {k: graph[k] for k in ("direction", "exchanges", "sites", "refused", "seconds", "from_cache")}
    entry |= {"name": name, "timeline": graph.get("timeline", [])}
    return entry | {"compiled_on": sum(not g["from_cache"] for g in same), "of_ranks": len(run.ranks)}


def graph_lines(g: dict[str, Any]) -> tuple[str, str]:
    """How a graph was obtained, and its number of exchanges, as text."""
    came = "compiled" if g["compiled_on"] else "loaded from torch's cache"
    if 0 < g["compiled_on"] < g["of_ranks"]:
        came = f"compiled on {g['compiled_on']} of {g['of_ranks']} ranks, loaded from torch's cache on the others,"
    return f"{g['name']}, {g['direction']} graph, {came} in {g['seconds']:.1f} s", exchanges_in_words(g)


def exchanges_in_words(g: dict[str, Any]) -> str:
    if not g["sites"]:
        return "passes are off, exchanges were not counted"
    return f"{g['exchanges']} exchange{'s' * (g['exchanges'] != 1)}"


def pass_diffs(texts: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Each pass that changed a graph, and the lines of a unified diff. `texts`: the graph after each pass."""
    for before, after in pairwise(texts):
        lines = list(difflib.unified_diff(texts[before].splitlines(), texts[after].splitlines(), lineterm="", n=2))
        if lines:
            yield after, lines[2:]


MEANING = {
    "compute": "compute",
    "exposed": "waiting for rows or gradients",
    "loader": "waiting for the loader or the planner",
    "straggler": "waiting for a rank with more work",
    "host_bound": "GPU idle before the model call",
}
_BAR = 40  # characters for a whole step
_RANKS = 16  # max ranks to show


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    raise AssertionError


def text_report(summary: dict[str, Any]) -> str:
    head = "\n".join([f"run {summary['run']}", *head_lines(summary)])
    parts = ["\n".join(summary["verdict"]), head, _where(summary), _ranks(summary), _traffic(summary)]
    parts += [_balance_lines(summary), _graphs(summary)]
    return "\n\n".join(p for p in parts if p)


def _where(s: dict[str, Any]) -> str:
    if not s["steps"]:
        return ""
    median = milliseconds(s["median_step_seconds"])
    lines = [f"step time breakdown, mean over ranks and steps (median step {median}; excluding steps that compile)"]
    for part in shown_parts(s):
        share = s["shares"][part]
        lines.append(f"  {MEANING[part]:38}{share:7.1%}  {'#' * round(share * _BAR)}")
    waits = {name: seconds for name, seconds in s["waits"].items() if seconds > 0}
    lines += [f"    {name:46}{milliseconds(seconds):>10}" for name, seconds in waits.items()]
    return "\n".join(lines)


def _ranks(s: dict[str, Any]) -> str:
    if not s["steps"]:
        return ""
    parts = shown_parts(s)
    lines = ["per rank: the median step, and the mean of each part"]
    lines.append(f"{'rank':>6}{'steps':>7}{'median step':>13}" + "".join(f"{part:>12}" for part in parts))
    ranks = sorted(s["ranks"].items(), key=lambda item: -item[1]["compute"])
    shown = sorted(ranks[:_RANKS])
    for number, r in shown:
        cells = "".join(f"{milliseconds(r[part]):>12}" for part in parts)
        lines.append(f"{number:>6}{r['steps']:>7}{milliseconds(r['median_step_seconds']):>13}{cells}")
    if len(ranks) > len(shown):
        lines.append(f"  and {len(ranks) - len(shown)} more ranks with less compute")
    return "\n".join(lines)


def _traffic(s: dict[str, Any]) -> str:
    lines = [f"  {name:22}{size(count):>12}" for name, count in s["bytes_per_step"].items()]
    if lines:
        lines.insert(0, "received per step and rank, mean")
    for name, share in s["collisions"].items():
        lines.append(f"  {share:.1%} of the unique rows of {name} were also in the previous batch")
    return "\n".join(lines)


def _balance_lines(s: dict[str, Any]) -> str:
    if (b := s["balance"]) is None:
        return ""
    measured = "" if b["straggler_measured"] != b["straggler_measured"] else f", measured {b['straggler_measured']:.1%}"
    return (
        f"balance: straggler share {b['straggler_before']:.1%} before, {b['straggler_after']:.1%} after (predicted)"
        f"{measured}; {b['moved_samples']:.1f} samples and {size(b['moved_bytes'])} moved per step"
    )


def _graphs(s: dict[str, Any]) -> str:
    lines = []
    for g in s["graphs"]:
        came, exchanges = graph_lines(g)
        sites = "".join(f"{', ' if i else '; '}{name} {n}" for i, (name, n) in enumerate(g["sites"].items()))
        lines.append(f"{came}: {exchanges}{sites}")
        lines += [f"  {why}" for why in g["refused"]]
    return "\n".join(lines)
