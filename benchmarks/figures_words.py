"""What stands under each figure in docs/paper.md: a table and what it says, from the numbers of figures_data.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from figures_data import PEC, SYNCHRONOUS
from freescale.simulate import findings

Lines = list[str]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Lines:
    return [_line(head), "|" + "---|" * len(head), *(_line(r) for r in rows)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def stragglers(d: dict[str, Any]) -> Lines:
    caps = sorted({r["cap"] for r in d["rows"]})
    share = {(r["ranks"], r["cap"]): r["straggler_share"] for r in d["rows"]}
    many = sorted({r["ranks"] for r in d["rows"]})
    rows = [[f"{ranks} ranks", *(f"{share[ranks, cap]:.1%}" for cap in caps)] for ranks in many]
    over = [cap for cap in caps if share[many[-1], cap] > 0.2]
    since = f"from a cap of {over[0]:,} on" if over else "nowhere"
    return [*table(["straggler share, simulated", *(f"cap {c:,}" for c in caps)], rows), "",
            f"With {many[-1]} ranks the share is over 20% {since}."]  # fmt: skip


def collisions(d: dict[str, Any]) -> Lines:
    values = sorted({r["values"] for r in d["synthetic"]})
    of = {(r["exponent"], r["values"]): r for r in d["synthetic"]}

    def cell(r: dict[str, Any]) -> str:
        return f"{r['rows_share']:.1%} / {r['values_share']:.1%}"

    rows = [[f"Zipf {e:g}", *(cell(of[e, v]) for v in values)] for e in sorted({r["exponent"] for r in d["synthetic"]})]
    found = table(["unique rows / values that collide", *(f"{v:,} values" for v in values)], rows)
    if d["movielens"]:
        rows = [[str(r["samples"]), f"{r['values_per_rank']:.0f}", f"{r['rows_share']:.1%}", f"{r['values_share']:.1%}"]
                for r in d["movielens"]]  # fmt: skip
        found += ["", *table(["MovieLens-100K: users in a batch", "values per rank", "unique rows", "values"], rows)]
    return found


def dispatch(d: dict[str, Any]) -> Lines:
    names = ("dispatch_ms", "combine_ms", "torch_loop_ms", "torch_whole_ms")
    head = ["ranks", "dispatch", "combine", "torch, a loop over peers", "torch, one index"]
    rows = [[str(r["ranks"]), *(f"{r[n]:.2f} ms" if r[n] < 1 else f"{r[n]:.1f} ms" for n in names)] for r in d["rows"]]
    first, last = d["rows"][0], d["rows"][-1]
    grown = {n: last[n] / first[n] for n in names}
    return [*table(head, rows), "",
            f"From {first['ranks']} to {last['ranks']} ranks dispatch takes {grown['dispatch_ms']:.2f} times as long, "
            f"combine {grown['combine_ms']:.2f}, the loop {grown['torch_loop_ms']:.1f}."]  # fmt: skip


def balance(d: dict[str, Any]) -> Lines:
    rows = [
        [f"{words} {r[axis]:,}", f"{r['before_share']:.1%}", f"{r['after_share']:.1%}", f"{r['reduction']:.1%}"]
        for axis, words in (("cap", "cap"), ("batch", "batch"), ("ranks", "ranks"))
        for r in d[axis]
    ]
    head = ["simulated", "straggler share, TorchRec", "freescale", "straggler time, less by"]
    least = min((r["reduction"], axis, r[axis]) for axis in ("cap", "batch", "ranks") for r in d[axis])
    found = [*table(head, rows), "", f"Least at {least[1]} {least[2]:,}: {least[0]:.1%}."]
    if d["movielens"]:
        rows = [[str(r["ranks"]), r["cost"], f"{r['before']:.1%}", f"{r['after']:.2%}"] for r in d["movielens"]]
        found += ["", *table(["MovieLens-100K lengths: ranks", "compute grows with", "not balanced", "balanced"], rows)]
    return found


def exposed(d: dict[str, Any]) -> Lines:
    names = list(d["simulated"][0]["exposed_ms"])
    rows = [[f"{r['collision']:.0%}", f"{r['values_per_row']:.2f}", *(f"{r['exposed_ms'][n]:.1f} ms" for n in names)]
            for r in d["simulated"]]  # fmt: skip
    found = table(["collide, simulated", "values per unique row", *names], rows)
    measured: dict[float, dict[str, float]] = {}
    for r in d["measured"]:
        measured.setdefault(r["collision"], {})[r["variant"]] = r["exposed_ms"]
    rows = [[f"{c:.0%}", f"{v['eager']:.0f} ms", f"{v['freescale']:.1f} ms"] for c, v in measured.items()]
    found += ["", *table(["collide, measured on 2 CPU ranks", "eager TorchRec", "freescale"], rows), ""]
    said = f"R² of a straight line through freescale's points: {d['simulated_r2']:.3f} simulated"
    return [*found, f"{said} (those with less than 1.1 values per unique row), {d['measured_r2']:.3f} measured."]


def contention(d: dict[str, Any]) -> Lines:
    besides = ("NCCL, both ranks", "copy kernel, blocks: 32", "staged")
    kept = {(r["work"], r["beside"]): r["kept"] for r in d["rows"]}
    works = list(dict.fromkeys(r["work"] for r in d["rows"]))
    rows = [
        [w, *(f"{kept[w, b]:.1%}" for b in besides), f"{kept[w, 'staged'] / kept[w, besides[0]] - 1:+.1%}",
         f"{kept[w, 'staged'] / kept[w, besides[1]] - 1:+.1%}"]
        for w in works
    ]  # fmt: skip
    head = ["speed kept beside", *besides, "staged over NCCL", "staged over copy kernel"]
    speed = {b: max(r["gb_per_s"] for r in d["rows"] if r["beside"] == b) for b in besides}
    return [*table(head, rows), "", f"Meanwhile NCCL carried at most {speed[besides[0]]:.1f} GB/s, the copy kernel "
            f"{speed[besides[1]]:.1f} and `staged` {speed['staged']:.1f}."]  # fmt: skip


def _outcome(r: dict[str, Any]) -> list[str]:
    bubbles = (r["exposed_ms"] + r["straggler_ms"]) / r["step_ms"]
    return [f"{r['step_ms']:.1f} ms", f"{r['compute_ms']:.1f}", f"{r['exposed_ms']:.1f}", f"{r['straggler_ms']:.1f}",
            f"{bubbles:.1%}"]  # fmt: skip


OUTCOME = ["step", "compute", "exposed", "straggler", "bubbles"]


def ranks(d: dict[str, Any]) -> Lines:
    rows = [[str(r["ranks"]), r["variant"], *_outcome(r)] for r in d["rows"]]
    of = {(r["ranks"], r["variant"]): r for r in d["rows"]}
    less = []
    for n in sorted({r["ranks"] for r in d["rows"]}):
        before, pec, after = (of[n, name] for name in (SYNCHRONOUS, PEC, "freescale"))
        less.append(f"{n}: exposed {findings.less(before['exposed_ms'], after['exposed_ms']):.1%} less, step "
                    f"{findings.less(before['step_ms'], after['step_ms']):.1%} less, "
                    f"{findings.less(pec['step_ms'], after['step_ms']):.1%} less than PEC's")  # fmt: skip
    said = f"freescale against synchronous TorchRec. {'; '.join(less)}."
    return [*table(["ranks", "simulated", *OUTCOME], rows), "", said]


def ablation(d: dict[str, Any]) -> Lines:
    found = [*table(["simulated", *OUTCOME], [[r["variant"], *_outcome(r)] for r in d["rows"]]), ""]
    saved = sum(p["bubbles_ms"] for p in d["parts"].values())
    rows = [
        [findings.PART_WORDS.get(n, "one graph, unique rows"), f"{p['bubbles_ms']:.1f} ms",
         f"{p['bubbles_ms'] / saved:.1%}", f"{p['step_ms']:.1f} ms"]
        for n, p in d["parts"].items()
    ]  # fmt: skip
    found += table(["takes away (mean over all orders of adding the parts)", "bubbles", "of all", "of the step"], rows)
    said = (
        f"Against synchronous TorchRec, bubbles are {d['bubble_reduction']:.1%} less in ms per step, exposed time "
        f"{d['exposed_reduction']:.1%} less, the step {d['step_reduction']:.1%} shorter."
    )
    return [*found, "", said]


WORDS: dict[str, Callable[[dict[str, Any]], Lines]] = {
    f.__name__: f for f in (stragglers, collisions, dispatch, balance, exposed, contention, ranks, ablation)
}
