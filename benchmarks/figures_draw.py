"""The figures of docs/paper.md and docs/benchmarks.md as SVG, one function each, from the numbers of figures_data.py.

The same numbers give the same bytes: no date, no random names. The background is white, so that a dark page does not
shine through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from freescale.simulate.plots import COLORS

OURS, THEIRS, OTHER, GREY = "#2e8b57", "#4c78a8", "#b279a2", "#888888"
LINES = (THEIRS, "#f58518", OURS, OTHER, "#e45756")
OF_VARIANT = {"TorchRec, synchronous": THEIRS, "TorchRec, PEC": OTHER, "freescale": OURS, "eager": THEIRS}
Axes = Any


def pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    fonts = {"font.size": 9, "axes.titlesize": 9, "legend.fontsize": 8, "svg.fonttype": "none"}
    matplotlib.rcParams.update({**fonts, "svg.hashsalt": "freescale", "axes.spines.top": False})
    matplotlib.rcParams.update({"axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25})
    from matplotlib import pyplot as found

    return found


def panels(count: int, width: float = 4.2, height: float = 3.0) -> tuple[Any, Sequence[Axes]]:
    figure, axes = pyplot().subplots(1, count, figsize=(width * count, height), layout="constrained", squeeze=False)
    figure.set_facecolor("white")
    return figure, axes[0]


def save(figure: Any, path: Path) -> Path:
    figure.savefig(path, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
    # matplotlib leaves blanks at the ends of lines
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
    pyplot().close(figure)
    return path


def finish(axes: Axes, x: str, y: str, title: str, *, log_x: Sequence[float] = (), bottom: float | None = 0) -> None:
    axes.set(xlabel=x, ylabel=y, title=title)
    if len(log_x):
        axes.set_xscale("log")
        axes.set_xticks(log_x, [f"{v / 1e6:g}M" if v >= 1e6 else f"{v:g}" for v in log_x])
        axes.minorticks_off()
    if bottom is not None:
        axes.set_ylim(bottom=bottom)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)


def stragglers(data: dict[str, Any]) -> Any:
    figure, (axes,) = panels(1, 5.6, 3.2)
    caps = sorted({r["cap"] for r in data["rows"]})
    for ranks, color in zip(sorted({r["ranks"] for r in data["rows"]}), LINES, strict=False):
        shares = [100 * r["straggler_share"] for r in data["rows"] if r["ranks"] == ranks]
        axes.plot(caps, shares, "o-", color=color, label=f"{ranks} ranks")
    axes.axhline(20, color=GREY, lw=1, ls=":")
    title = "Waiting for slower ranks, synchronous TorchRec"
    finish(axes, "longest history, tokens", "% of a step (simulated)", title, log_x=caps)
    return figure


def collisions(data: dict[str, Any]) -> Any:
    real = data["movielens"]
    figure, axes = panels(2 if real else 1)
    values = sorted({r["values"] for r in data["synthetic"]})
    for exponent, color in zip(sorted({r["exponent"] for r in data["synthetic"]}), LINES, strict=False):
        mine = [r for r in data["synthetic"] if r["exponent"] == exponent]
        axes[0].plot(values, [100 * r["rows_share"] for r in mine], "o-", color=color, label=f"exponent {exponent:g}")
        axes[0].plot(values, [100 * r["values_share"] for r in mine], "s:", color=color, ms=4)
    finish(axes[0], "values in a batch", "% in the batch before, too", "Zipf ids, 50M rows", log_x=values)
    axes[0].set_ylim(0, 100)
    axes[0].legend(frameon=False, loc="upper center", ncols=2)
    if real:
        samples = [r["samples"] for r in real]
        axes[1].plot(samples, [100 * r["rows_share"] for r in real], "o-", color=OURS, label="unique rows")
        axes[1].plot(samples, [100 * r["values_share"] for r in real], "s:", color=OURS, ms=4, label="values")
        finish(axes[1], "users in a batch", "", f"MovieLens-100K, {real[0]['items']} rows", log_x=samples)
        axes[1].legend(frameon=False, loc="lower right")
    return figure


def dispatch(data: dict[str, Any]) -> Any:
    figure, (axes,) = panels(1, 5.6, 3.2)
    rows = data["rows"]
    lines = {
        "torch_loop_ms": ("torch, a loop over peers", THEIRS), "torch_whole_ms": ("torch, one index", OTHER),
        "dispatch_ms": ("dispatch, one kernel", OURS), "combine_ms": ("combine, one kernel", "#f58518"),
    }  # fmt: skip
    many = [r["ranks"] for r in rows]
    for name, (label, color) in lines.items():
        axes.plot(many, [r[name] for r in rows], "o-", color=color, label=label)
    axes.set_yscale("log")
    finish(axes, "ranks", f"ms ({data['gpu']}, measured)", "Samples packed for other ranks", log_x=many, bottom=None)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(0.0, 0.28), ncols=2)
    return figure


def balance(data: dict[str, Any]) -> Any:
    figure, axes = panels(3, 3.4)
    for where, (axis, words) in zip(
        axes, {"cap": "longest history", "batch": "samples per rank", "ranks": "ranks"}.items(), strict=True
    ):
        rows = data[axis]
        places = range(len(rows))
        for shift, kind, label, color in ((-0.2, "before", "TorchRec", THEIRS), (0.2, "after", "freescale", OURS)):
            shares = [100 * r[f"{kind}_share"] for r in rows]
            where.bar([p + shift for p in places], shares, 0.4, color=color, label=label)
        where.set_xticks(places, [str(r[axis]) for r in rows])
        finish(where, words, "straggler, % of a step (simulated)" if axis == "cap" else "", "")
        where.set_ylim(top=1.25 * where.get_ylim()[1])
        where.legend(frameon=False, ncols=2, loc="upper center")
    return figure


def exposed(data: dict[str, Any]) -> Any:
    figure, axes = panels(2)
    shares = [100 * r["collision"] for r in data["simulated"]]
    for name in data["simulated"][0]["exposed_ms"]:
        times = [r["exposed_ms"][name] for r in data["simulated"]]
        axes[0].plot(shares, times, "o-", color=OF_VARIANT[name], label=name)
    measured = [r for r in data["measured"] if r["variant"] == "freescale"]
    x, y = [100 * r["collision"] for r in measured], [r["exposed_ms"] for r in measured]
    axes[1].plot(x, y, "o-", color=OURS, label="freescale")
    finish(axes[0], "% of rows that collide", "exposed, ms per step", "simulated, H100")
    axes[0].set_ylim(top=1.45 * axes[0].get_ylim()[1])
    axes[0].legend(frameon=False, loc="upper left")
    finish(axes[1], "% of rows that collide", "", "measured, 2 CPU ranks on a shaped link")
    return figure


def contention(data: dict[str, Any]) -> Any:
    figure, (axes,) = panels(1, 7.6, 3.6)
    works = list(dict.fromkeys(r["work"] for r in data["rows"]))
    kept = {(r["work"], r["beside"]): 100 * r["kept"] for r in data["rows"]}
    besides = {"NCCL, both ranks": THEIRS, "copy kernel, blocks: 32": "#f58518", "staged": OURS}
    for n, (beside, color) in enumerate(besides.items()):
        places = [i + (n - 1) * 0.27 for i in range(len(works))]
        axes.barh(places, [kept[w, beside] for w in works], 0.27, color=color, label=f"beside {beside}")
    axes.set_yticks(range(len(works)), [w.replace(", fwd + bwd", "") for w in works])
    axes.invert_yaxis()
    axes.set_xlim(0, 104)
    finish(axes, f"% of the speed alone ({data['gpu']}, measured)", "", "", bottom=None)
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.4, 1.12), ncols=3)
    return figure


def ranks(data: dict[str, Any]) -> Any:
    figure, (axes,) = panels(1, 6.4, 3.2)
    many, names = sorted({r["ranks"] for r in data["rows"]}), list(dict.fromkeys(r["variant"] for r in data["rows"]))
    for n, name in enumerate(names):
        rows = [r for r in data["rows"] if r["variant"] == name]
        places, under = [i + (n - 1) * 0.27 for i in range(len(many))], [0.0] * len(many)
        for kind, color in COLORS.items():
            sizes = [r[f"{kind}_ms"] for r in rows]
            axes.bar(places, sizes, 0.25, bottom=under, color=color, label=kind if n == 0 else None)
            under = [a + b for a, b in zip(under, sizes, strict=True)]
        for place, high in zip(places, under, strict=True):
            axes.text(place, high, name.replace("TorchRec, ", ""), ha="center", va="bottom", fontsize=6.5, rotation=20)
    axes.set_xticks(range(len(many)), [str(m) for m in many])
    finish(axes, "ranks", "ms per step (simulated)", "")
    axes.set_ylim(top=1.3 * axes.get_ylim()[1])
    axes.legend(frameon=False, ncols=3, loc="upper left")
    return figure


def ablation(data: dict[str, Any]) -> Any:
    rows = data["rows"]
    figure, (axes,) = panels(1, 7.6, 0.32 * len(rows) + 1.0)
    names, left = [r["variant"] for r in rows], [0.0] * len(rows)
    for kind, color in COLORS.items():
        sizes = [r[f"{kind}_ms"] for r in rows]
        axes.barh(names, sizes, left=left, color=color, label=kind)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for y, total in enumerate(left):
        axes.text(total, y, f" {total:.1f}", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(left))
    finish(axes, "ms per step, mean over ranks (simulated)", "", "", bottom=None)
    axes.legend(frameon=False, loc="lower right")
    return figure


def gpu_steps(data: dict[str, Any]) -> Any:
    figure, axes = panels(2, 4.4, 3.2)
    bars: dict[str, tuple[str, Callable[[dict[str, Any]], float]]] = {
        "limit": (GREY, lambda r: r["limit_ms"]),
        "TrainPipelineSparseDist": (THEIRS, lambda r: r["step_ms"]["sparsedist"]),
        "freescale": (OURS, lambda r: r["step_ms"][r["ours"]]),
    }
    for where, link in zip(axes, ("slow", "fast"), strict=True):
        rows = [r for r in data["rows"] if r["link"] == link]
        for n, (label, (color, height)) in enumerate(bars.items()):
            places = [i + (n - 1) * 0.3 for i in range(len(rows))]
            drawn = where.bar(places, [height(r) for r in rows], 0.28, color=color, label=label)
            where.bar_label(drawn, fmt="%.1f", fontsize=6.5)
        words = {"default": "", "balance": "\n(freescale: balanced)"}
        where.set_xticks(range(len(rows)), [r["size"].replace("ms", " ms") + words[r["ours"]] for r in rows])
        finish(where, "", f"ms per step ({data['gpu']}, measured)" if link == "slow" else "", f"{link} link")
        where.set_ylim(top=1.1 * max(r["step_ms"]["sparsedist"] for r in data["rows"]))
        where.legend(frameon=False, loc="upper left")
    return figure


DRAWN: dict[str, Callable[[dict[str, Any]], Any]] = {
    f.__name__: f for f in (stragglers, collisions, dispatch, balance, exposed, contention, ranks, ablation, gpu_steps)
}
