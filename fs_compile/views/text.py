"""A run as text for a terminal."""

from __future__ import annotations

from typing import Any

from freescale.views.summary import graph_lines, head_lines, shown_parts

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
    parts += [_balance(summary), _graphs(summary)]
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


def _balance(s: dict[str, Any]) -> str:
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
