"""Plots of a study, with matplotlib (`freescale[plots]`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from freescale.simulate import findings
from freescale.simulate.cluster import InputError
from freescale.simulate.study import AXES, Outcome, Point

COLORS = {"compute": "#4c78a8", "exposed": "#f58518", "straggler": "#e45756"}


def require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InputError("--plots requires matplotlib, which is not installed: pip install freescale[plots]") from None


def _figure(width: float, height: float) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def variants(outcomes: Sequence[Outcome], title: str, path: Path) -> Path:
    figure, axes = _figure(9, 0.45 * len(outcomes) + 1.4)
    names, left = [o.variant.name for o in outcomes], [0.0] * len(outcomes)
    for kind, color in COLORS.items():
        sizes = [getattr(o, f"{kind}_ms") for o in outcomes]
        axes.barh(names, sizes, left=left, color=color, label=kind)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for y, o in enumerate(outcomes):
        axes.text(left[y], y, f" {o.bubbles:.1%} bubbles", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(left))
    axes.set_xlabel("ms per step, mean over ranks (simulated)")
    axes.set_title(title, fontsize=10)
    axes.legend(loc="lower right", fontsize=8)
    return _save(figure, path)


def sweep(found: Sequence[Point], title: str, path: Path) -> Path:
    """Bubbles as a share of the step along an axis; a hollow mark where freescale is not worth it."""
    figure, axes = _figure(7, 4.2)
    values = [p.value for p in found]
    for n, name in enumerate(o.variant.name for o in found[0].outcomes):
        shares = [100 * findings.named(p.outcomes, name).bubbles for p in found]
        (line,) = axes.plot(values, shares, marker="o", label=name, zorder=2 + n)
        if name == "freescale":
            hollow = [(v, s) for v, s, p in zip(values, shares, found, strict=True) if not findings.pays(p.outcomes)]
            if hollow:
                x, y = zip(*hollow, strict=True)
                axes.plot(x, y, "o", mfc="white", mec=line.get_color(), zorder=9, label="freescale is not worth it")
    if min(values) > 0 and max(values) / min(values) > 8:
        axes.set_xscale("log")
        axes.set_xticks(values, [f"{v:g}" for v in values])
        axes.minorticks_off()
    axes.set_xlabel(AXES[found[0].axis][0])
    axes.set_ylabel("bubbles, % of the step (simulated)")
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8)
    return _save(figure, path)
