"""What stands under each figure in docs/paper.md and docs/benchmarks.md: a table and what it says, from the
numbers of figures_data.py.

The figure shows every point. The table has the first and the last one of an axis, and the rows that matter most.
"""

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


def _ends(values: Sequence[Any]) -> list[Any]:
    return [values[0], values[-1]] if len(values) > 1 else list(values)


def stragglers(d: dict[str, Any]) -> Lines:
    caps = sorted({r["cap"] for r in d["rows"]})
    share = {(r["ranks"], r["cap"]): r["straggler_share"] for r in d["rows"]}
    many = sorted({r["ranks"] for r in d["rows"]})
    rows = [[f"{ranks} ranks", *(f"{share[ranks, cap]:.1%}" for cap in caps)] for ranks in _ends(many)]
    over = [cap for cap in caps if share[many[-1], cap] > 0.2]
    since = f"exceeds 20% from a cap of {over[0]:,}" if over else "never exceeds 20%"
    return [*table(["straggler share, simulated", *(f"cap {c:,}" for c in caps)], rows), "",
            f"With {many[-1]} ranks the share {since}."]  # fmt: skip


def collisions(d: dict[str, Any]) -> Lines:
    values = _ends(sorted({r["values"] for r in d["synthetic"]}))
    of = {(r["exponent"], r["values"]): r for r in d["synthetic"]}

    def cell(r: dict[str, Any]) -> str:
        return f"{r['rows_share']:.1%} / {r['values_share']:.1%}"

    rows = [[f"Zipf {e:g}", *(cell(of[e, v]) for v in values)] for e in sorted({r["exponent"] for r in d["synthetic"]})]
    found = table(["unique rows / values that collide", *(f"{v:,} values" for v in values)], rows)
    if d["movielens"]:
        rows = [[str(r["samples"]), f"{r['values_per_rank']:.0f}", f"{r['rows_share']:.1%}", f"{r['values_share']:.1%}"]
                for r in _ends(d["movielens"])]  # fmt: skip
        found += ["", *table(["MovieLens-100K: users per batch", "values per rank", "unique rows", "values"], rows)]
    return found


def dispatch(d: dict[str, Any]) -> Lines:
    names = ("dispatch_ms", "combine_ms", "torch_loop_ms", "torch_whole_ms")
    head = ["ranks", "dispatch", "combine", "torch, loop over peers", "torch, one index"]
    ends = _ends(d["rows"])
    rows = [[str(r["ranks"]), *(f"{r[n]:.2f} ms" if r[n] < 1 else f"{r[n]:.1f} ms" for n in names)] for r in ends]
    return table(head, rows)


def balance(d: dict[str, Any]) -> Lines:
    rows = [
        [f"{words} {r[axis]:,}", f"{r['before_share']:.1%}", f"{r['after_share']:.1%}", f"{r['reduction']:.1%}"]
        for axis, words in (("cap", "cap"), ("batch", "batch"), ("ranks", "ranks"))
        for r in _ends(d[axis])
    ]
    head = ["straggler share, simulated", "TorchRec", "freescale", "time saved"]
    found = table(head, rows)
    if d["movielens"]:
        rows = [[str(r["ranks"]), r["cost"], f"{r['before']:.1%}", f"{r['after']:.2%}"] for r in d["movielens"][-2:]]
        found += ["", *table(["MovieLens-100K lengths: ranks", "compute grows with", "not balanced", "balanced"], rows)]
    return found


def exposed(d: dict[str, Any]) -> Lines:
    names = list(d["simulated"][0]["exposed_ms"])
    rows = [[f"{r['collision']:.0%}", f"{r['values_per_row']:.2f}", *(f"{r['exposed_ms'][n]:.1f} ms" for n in names)]
            for r in _ends(d["simulated"])]  # fmt: skip
    found = table(["colliding, simulated", "values per unique row", *names], rows)
    measured: dict[float, dict[str, float]] = {}
    for r in d["measured"]:
        measured.setdefault(r["collision"], {})[r["variant"]] = r["exposed_ms"]
    rows = [[f"{c:.0%}", f"{v['eager']:.0f} ms", f"{v['freescale']:.1f} ms"] for c, v in _ends(list(measured.items()))]
    found += ["", *table(["colliding, measured, 2 CPU ranks", "eager TorchRec", "freescale"], rows), ""]
    said = f"R² of a line through freescale's points: {d['simulated_r2']:.3f} simulated"
    return [*found, f"{said} (below 1.1 values per unique row), {d['measured_r2']:.3f} measured."]


def contention(d: dict[str, Any]) -> Lines:
    besides = ("NCCL, both ranks", "copy kernel, blocks: 32", "staged")
    kept = {(r["work"], r["beside"]): r["kept"] for r in d["rows"]}
    works = [w for w in dict.fromkeys(r["work"] for r in d["rows"]) if "length 2048" not in w]
    rows = [[w, *(f"{kept[w, b]:.1%}" for b in besides)] for w in works]
    head = ["throughput retained beside", *besides]
    speed = {b: max(r["gb_per_s"] for r in d["rows"] if r["beside"] == b) for b in besides}
    return [*table(head, rows), "", f"NCCL carried at most {speed[besides[0]]:.1f} GB/s, the copy kernel "
            f"{speed[besides[1]]:.1f}, `staged` {speed['staged']:.1f}."]  # fmt: skip


def _outcome(r: dict[str, Any]) -> list[str]:
    bubbles = (r["exposed_ms"] + r["straggler_ms"]) / r["step_ms"]
    return [f"{r['step_ms']:.1f} ms", f"{r['compute_ms']:.1f}", f"{r['exposed_ms']:.1f}", f"{r['straggler_ms']:.1f}",
            f"{bubbles:.1%}"]  # fmt: skip


OUTCOME = ["step", "compute", "exposed", "straggler", "bubbles"]


def ranks(d: dict[str, Any]) -> Lines:
    of = {(r["ranks"], r["variant"]): r for r in d["rows"]}
    rows = []
    for n in sorted({r["ranks"] for r in d["rows"]}):
        before, pec, after = (of[n, name] for name in (SYNCHRONOUS, PEC, "freescale"))
        steps = (f"{r['step_ms']:.1f} ms" for r in (before, pec, after))
        shorter, less = (f"{findings.less(before[k], after[k]):.1%}" for k in ("step_ms", "exposed_ms"))
        rows.append([str(n), *steps, shorter, f"{before['exposed_ms']:.1f} ms", f"{after['exposed_ms']:.1f} ms", less])
    head = ["ranks, simulated", "step, TorchRec", "PEC", "freescale", "shorter by"]
    return table([*head, "exposed, TorchRec", "freescale", "less by"], rows)


def ablation(d: dict[str, Any]) -> Lines:
    shown = [r for r in d["rows"] if "copies" not in r["variant"]]  # the figure has all; `saved by` says what copies do
    found = [*table(["simulated", *OUTCOME], [[r["variant"], *_outcome(r)] for r in shown]), ""]
    saved = sum(p["bubbles_ms"] for p in d["parts"].values())
    rows = [
        [findings.PART_WORDS[n], f"{p['bubbles_ms']:.1f} ms",
         f"{p['bubbles_ms'] / saved:.1%}", f"{p['step_ms']:.1f} ms"]
        for n, p in d["parts"].items()
    ]  # fmt: skip
    found += table(["saved by", "bubbles", "share", "step"], rows)
    said = (
        f"Against synchronous TorchRec: bubbles {d['bubble_reduction']:.1%} less in ms per step, exposed time "
        f"{d['exposed_reduction']:.1%} less, step {d['step_reduction']:.1%} shorter."
    )
    return [*found, "", said]


def gpu_steps(d: dict[str, Any]) -> Lines:
    def times(words: str, variant: str) -> Lines:
        return [words, *(f"{r['step_ms'][variant]:.1f}" if variant in r["step_ms"] else "-" for r in d["rows"])]

    gain = [r["step_ms"]["sparsedist"] / r["step_ms"][r["ours"]] for r in d["rows"]]
    rows = [
        ["limit", *(f"{r['limit_ms']:.1f}" for r in d["rows"])],
        times("`TrainPipelineSparseDist`", "sparsedist"),
        times("freescale, default", "default"),
        times("`balance=True`", "balance"),
        times("`overlap=False`", "no-overlap"),
        times("`FREESCALE_TRANSPORT=c10d`", "default-c10d"),
        ["exposed", *(f"{r['exposed_ms']:.1f}" for r in d["rows"])],
        ["times as fast", *(f"{g:.2f}" for g in gain)],
    ]
    head = ["ms per step", *(f"{r['size']}, {r['link']}" for r in d["rows"])]
    return table(head, rows)


WORDS: dict[str, Callable[[dict[str, Any]], Lines]] = {
    f.__name__: f for f in (stragglers, collisions, dispatch, balance, exposed, contention, ranks, ablation, gpu_steps)
}
