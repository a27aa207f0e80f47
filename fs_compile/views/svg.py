"""Small charts as SVG text. Colors are CSS classes of the surrounding page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

LEFT, RIGHT, ROW, TOP = 150, 70, 24, 24


def stacked_bars(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], unit: str, width: int = 900) -> str:
    """One bar per row: (name, [(class, value), ...]), all on one scale."""
    longest = max((sum(v for _, v in parts) for _, parts in rows), default=0.0) or 1.0
    scale, height = (width - LEFT - RIGHT) / longest, TOP + ROW * len(rows)
    shapes = []
    for i, (name, parts) in enumerate(rows):
        x, y = float(LEFT), TOP + ROW * i
        shapes.append(f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>')
        for kind, value in parts:
            title = f"<title>{escape(kind)}: {value:.4g} {unit}</title>"
            size = max(value, 0) * scale
            shapes.append(_rect(kind, x, y + 3, size, ROW - 7, title))
            x += size
        shapes.append(f'<text x="{x + 6:.1f}" y="{y + 15}">{sum(v for _, v in parts):.4g}</text>')
    return _svg(width, height, [f'<text x="{LEFT}" y="14" class="dim">{escape(unit)}</text>', *shapes])


def stacked_area(
    layers: Sequence[tuple[str, Sequence[float]]], unit: str, ends: tuple[str, str], width: int = 900, height: int = 220
) -> str:
    """Layers over time: (class, values), lowest first. `ends`: labels of the first and last value."""
    count = len(layers[0][1]) if layers else 0
    if not count:
        return ""
    bottom = height - 22
    tops = [0.0] * count
    highest = max(sum(values[i] for _, values in layers) for i in range(count)) or 1.0
    xs = [LEFT / 2 + (width - LEFT / 2 - 20) * (i + 0.5) / count for i in range(count)]

    def y(value: float) -> float:
        return bottom - (bottom - TOP) * value / highest

    shapes = [f'<text x="4" y="{TOP - 8}" class="dim">{highest:.4g} {escape(unit)}</text>']
    for kind, values in layers:
        under = [(x, y(t)) for x, t in zip(xs, tops, strict=True)]
        tops = [t + max(v, 0.0) for t, v in zip(tops, values, strict=True)]
        over = [(x, y(t)) for x, t in zip(xs, tops, strict=True)]
        if count == 1:
            (x, low), (_, high) = under[0], over[0]
            under, over = [(x - 10, low), (x + 10, low)], [(x - 10, high), (x + 10, high)]
        points = " ".join(f"{x:.1f},{v:.1f}" for x, v in [*under, *reversed(over)])
        shapes.append(f'<polygon class="{kind}" points="{points}"><title>{escape(kind)}</title></polygon>')
    shapes.append(f'<line class="axis" x1="{LEFT / 2}" y1="{bottom}" x2="{width - 20}" y2="{bottom}"/>')
    shapes.append(f'<text x="{LEFT / 2}" y="{height - 4}" class="dim">{escape(ends[0])}</text>')
    shapes.append(f'<text x="{width - 20}" y="{height - 4}" class="dim" text-anchor="end">{escape(ends[1])}</text>')
    return _svg(width, height, shapes)


def lanes(rows: Sequence[tuple[str, Sequence[tuple[float, float, str, str]]]], unit: str, width: int = 900) -> str:
    """Lanes over time: (name, [(begin, end, class, label), ...])."""
    end = max((e for _, blocks in rows for _, e, _, _ in blocks), default=0.0) or 1.0
    scale, height = (width - LEFT - 20) / end, TOP + (ROW + 6) * len(rows) + 20
    shapes = []
    for i, (name, blocks) in enumerate(rows):
        y = TOP + (ROW + 6) * i
        shapes.append(f'<text x="{LEFT - 8}" y="{y + 16}" text-anchor="end">{escape(name)}</text>')
        shapes.append(f'<line class="axis" x1="{LEFT}" y1="{y + ROW}" x2="{width - 20}" y2="{y + ROW}"/>')
        for begin, until, kind, label in blocks:
            title = f"<title>{escape(label)}: {begin:.4g} to {until:.4g} {unit}</title>"
            size = max((until - begin) * scale, 1.5)
            shapes.append(_rect(kind, LEFT + begin * scale, y + 2, size, ROW - 3, title))
    end_at = f'x="{width - 20}" y="{height - 4}" text-anchor="end"'
    shapes.append(f'<text {end_at} class="dim">{end:.4g} {escape(unit)}</text>')
    return _svg(width, height, shapes)


def _rect(kind: str, x: float, y: float, width: float, height: float, title: str) -> str:
    return f'<rect class="{kind}" x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}">{title}</rect>'


def _svg(width: int, height: float, shapes: list[str]) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(shapes)}</svg>'
