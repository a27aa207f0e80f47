"""A run as one self-contained HTML page, light and dark; its charts are SVG text with colors from CSS classes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from freescale.views import summary
from freescale.views.records import PARTS, Run, compilations, lacks_late_gradients, mean, named_graphs, settled
from freescale.views.timeline import lanes_of_graphs

WIDTH, LEFT, RIGHT, ROW, TOP = 900, 150, 70, 24, 24
AREA_HEIGHT = 220


def stacked_bars(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], unit: str) -> str:
    """One bar per row: (name, [(class, value), ...]), all on one scale."""
    longest = max((sum(v for _, v in parts) for _, parts in rows), default=0.0) or 1.0
    scale, height = (WIDTH - LEFT - RIGHT) / longest, TOP + ROW * len(rows)
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
    return _svg(height, [f'<text x="{LEFT}" y="14" class="dim">{escape(unit)}</text>', *shapes])


def stacked_area(layers: Sequence[tuple[str, Sequence[float]]], unit: str, ends: tuple[str, str]) -> str:
    """Layers over time: (class, values), lowest first. `ends`: labels of the first and last value."""
    count = len(layers[0][1]) if layers else 0
    if not count:
        return ""
    bottom, right = AREA_HEIGHT - 22, WIDTH - 20
    tops = [0.0] * count
    highest = max(sum(values[i] for _, values in layers) for i in range(count)) or 1.0
    xs = [LEFT / 2 + (right - LEFT / 2) * (i + 0.5) / count for i in range(count)]

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
    shapes.append(f'<line class="axis" x1="{LEFT / 2}" y1="{bottom}" x2="{right}" y2="{bottom}"/>')
    shapes.append(f'<text x="{LEFT / 2}" y="{AREA_HEIGHT - 4}" class="dim">{escape(ends[0])}</text>')
    shapes.append(f'<text x="{right}" y="{AREA_HEIGHT - 4}" class="dim" text-anchor="end">{escape(ends[1])}</text>')
    return _svg(AREA_HEIGHT, shapes)


def lanes(rows: Sequence[tuple[str, Sequence[tuple[float, float, str, str]]]], unit: str) -> str:
    """Lanes over time: (name, [(begin, end, class, label), ...])."""
    end = max((e for _, blocks in rows for _, e, _, _ in blocks), default=0.0) or 1.0
    right, height = WIDTH - 20, TOP + (ROW + 6) * len(rows) + 20
    scale = (right - LEFT) / end
    shapes = []
    for i, (name, blocks) in enumerate(rows):
        y = TOP + (ROW + 6) * i
        shapes.append(f'<text x="{LEFT - 8}" y="{y + 16}" text-anchor="end">{escape(name)}</text>')
        shapes.append(f'<line class="axis" x1="{LEFT}" y1="{y + ROW}" x2="{right}" y2="{y + ROW}"/>')
        for begin, until, kind, label in blocks:
            title = f"<title>{escape(label)}: {begin:.4g} to {until:.4g} {unit}</title>"
            size = max((until - begin) * scale, 1.5)
            shapes.append(_rect(kind, LEFT + begin * scale, y + 2, size, ROW - 3, title))
    shapes.append(f'<text x="{right}" y="{height - 4}" text-anchor="end" class="dim">{end:.4g} {escape(unit)}</text>')
    return _svg(height, shapes)


def _rect(kind: str, x: float, y: float, width: float, height: float, title: str) -> str:
    return f'<rect class="{kind}" x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}">{title}</rect>'


def _svg(height: float, shapes: list[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(shapes)}</svg>'


_RANKS = 32  # max bars
_POINTS = 400  # max points of a plot over time

_STYLE = """
:root{color-scheme:light dark;--ink:#1c2024;--dim:#60666c;--paper:#fff;--line:#d4d8dc;--compute:#8fb4d9;
--exposed:#d2493c;--loader:#e0a030;--straggler:#9a68c0;--host_bound:#7d8a4a;--urgent:#d2493c;--early:#3c8d6e;--late:#4a74c9;
--dense:#b07d2b}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8ea;--dim:#9aa2a9;--paper:#16191c;--line:#3a4046;--compute:#39618a}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:1000px;margin:2em auto;
padding:0 1em}
h1{font-size:1.4em}h2{font-size:1.15em;margin-top:2em}svg{width:100%;height:auto;display:block;margin:.6em 0}
svg text{font-size:13px;fill:var(--ink)}svg text.dim,.dim{fill:var(--dim);color:var(--dim)}.axis{stroke:var(--line)}
table{border-collapse:collapse;margin:.6em 0}td,th{padding:.2em .8em .2em 0;text-align:left;vertical-align:top;
border-bottom:1px solid var(--line)}td.n,th.n{text-align:right}.key{display:inline-block;margin-right:1.4em}
.key i{display:inline-block;width:12px;height:12px;margin-right:.4em}
pre{overflow-x:auto;font-size:12px;line-height:1.35;border:1px solid var(--line);padding:.6em}
.plus{color:#2e8b57}.minus{color:#c7493c}summary{cursor:pointer}
""" + "".join(f".{c}{{fill:var(--{c})}}i.{c}{{background:var(--{c})}}" for c in (*PARTS, *summary.CLASSES))


def page(run: Run) -> str:
    s = summary.summarize(run)
    first = f"<p><b>{escape(' '.join(s['verdict']))}</b></p>" if s["verdict"] else ""
    parts = [first, _head(s), _shares(s), _over_time(run, s), _traffic(s), _balance(s), _graphs(run, s)]
    return _document(f"freescale report: run {s['run']}", parts)


def explain_page(run: Run) -> str:
    s = summary.summarize(run)
    return _document(f"freescale explain: run {s['run']}", [_head(s), _graphs(run, s, open_texts=True)])


def _head(s: dict[str, Any]) -> str:
    return f"<p>{escape(' '.join(summary.head_lines(s)))}</p>"


def _document(title: str, parts: list[str]) -> str:
    body = "\n".join(p for p in parts if p)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f"<body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def _table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """The last column is aligned to the right."""

    def row(cells: Sequence[str], tag: str) -> str:
        *first, last = map(escape, cells)
        left = "".join(f"<{tag}>{cell}</{tag}>" for cell in first)
        return f'<tr>{left}<{tag} class="n">{last}</{tag}></tr>'

    return f"<table>{row(head, 'th') if head else ''}{''.join(row(cells, 'td') for cells in rows)}</table>"


def _key(names: dict[str, str]) -> str:
    spans = (f'<span class="key"><i class="{c}"></i>{escape(text)}</span>' for c, text in names.items())
    return f"<p>{''.join(spans)}</p>"


def _shares(s: dict[str, Any]) -> str:
    if not s["steps"]:
        return ""
    ranks = sorted(s["ranks"].items(), key=lambda item: -item[1]["compute"])[:_RANKS]
    parts = summary.shown_parts(s)
    bars = [(f"rank {n}", [(part, r[part] * 1e3) for part in parts]) for n, r in sorted(ranks)]
    shares = _table((summary.MEANING[part], f"{s['shares'][part]:.1%}") for part in parts)
    waits = _table((name, summary.milliseconds(seconds)) for name, seconds in s["waits"].items() if seconds > 0)
    chart = _key({part: summary.MEANING[part] for part in parts}) + stacked_bars(bars, "ms")
    return (
        f"<h2>Step time breakdown</h2><p>Median step {summary.milliseconds(s['median_step_seconds'])}, excluding the "
        f"first steps, which compile. Means per rank.</p>{chart}{shares}<p>Waits per step and rank, mean:</p>{waits}"
    )


def _over_time(run: Run, s: dict[str, Any]) -> str:
    steps = {n: settled(r.step) for n, r in run.ranks.items()}
    count = min((len(of) for of in steps.values()), default=0)
    if not count:
        return ""
    stride = -(-count // _POINTS)
    layers = []
    for part in summary.shown_parts(s):
        means = [mean(of[i][part] for of in steps.values()) * 1e3 for i in range(count)]
        layers.append((part, [mean(means[i : i + stride]) for i in range(0, count, stride)]))
    of_first_rank = next(iter(steps.values()))
    ends = f"step {of_first_rank[0]['step']}", f"step {of_first_rank[count - 1]['step']}"
    note = f" Each point is the mean of {stride} steps." if stride > 1 else ""
    return f"<h2>Over time</h2><p>Mean of the ranks.{note}</p>{stacked_area(layers, 'ms', ends)}"


def _traffic(s: dict[str, Any]) -> str:
    if not s["bytes_per_step"]:
        return ""
    bars, most = [], max(s["bytes_per_step"].values())
    unit, unit_name = (1e6, "MB") if most >= 1e6 else (1e3, "kB")
    for payload in ("rows", "gradients"):
        values = [(c, s["bytes_per_step"].get(f"{c} {payload}", 0.0) / unit) for c in summary.CLASSES]
        bars.append((payload, values))
    shares = "".join(
        f"<p>{share:.1%} of the unique rows of {escape(name)} were also in the previous batch.</p>"
        for name, share in s["collisions"].items()
    )
    chart = stacked_bars(bars, f"{unit_name} received per step and rank")
    return f"<h2>Traffic</h2>{_key({c: c for c in summary.CLASSES})}{chart}{shares}"


def _balance(s: dict[str, Any]) -> str:
    if (b := s["balance"]) is None:
        return ""
    rows = [("before, predicted", b["straggler_before"]), ("after, predicted", b["straggler_after"])]
    if b["straggler_measured"] == b["straggler_measured"]:
        rows.append(("after, measured", b["straggler_measured"]))
    bars = stacked_bars([(name, [("straggler", share * 100)]) for name, share in rows], "% of a step")
    moved = f"{b['moved_samples']:.1f} samples, {summary.size(b['moved_bytes'])} moved per step."
    return f"<h2>Straggler share</h2>{bars}<p>{moved}</p>"


def _graphs(run: Run, s: dict[str, Any], open_texts: bool = False) -> str:
    record = next(iter(run.ranks.values()))
    if not record.graph:
        return ""
    found = ["<h2>Graphs</h2>"]
    for name, graphs in compilations(record.graph).items():
        if found_lanes := lanes_of_graphs(graphs):
            keys = {"compute": "compute, predicted", **{c: f"{c}, on the wire" for c in summary.CLASSES}}
            found.append(f"<p>{escape(name)}: two steps, predicted for the traced batch:</p>")
            found.append(_key(keys) + lanes(found_lanes, "ms"))
    for (_, graph), entry in zip(named_graphs(record.graph), s["graphs"], strict=True):
        came, exchanges = summary.graph_lines(entry)
        found.append(f"<h3>{escape(came)}</h3>")
        sites = _table((name, str(count)) for name, count in entry["sites"].items())
        found.append(f"<p>{escape(exchanges)}.</p>{sites}")
        found += [f"<p>{escape(why)}</p>" for why in entry["refused"]]
        found.append(_launches(entry["timeline"]))
        found.append(_diffs(graph.get("texts", {}), open_texts))
    return "".join(found)


def _launches(timeline: list[dict[str, Any]]) -> str:
    launches = [e for e in timeline if e["do"] == "launch"]
    if not launches:
        return ""
    cells = ((e["what"], e["kind"], summary.size(e["bytes"])) for e in launches)
    none_yet = "<p>The traced first step has no late gradients; later steps have some.</p>"
    note = none_yet if lacks_late_gradients(timeline) else ""
    return _table(cells, ("launch", "kind", "bytes in the traced batch")) + note


def _diffs(texts: dict[str, str], opened: bool) -> str:
    found = ""
    for after, lines in summary.pass_diffs(texts):
        colored = "\n".join(map(_line, lines))
        found += f"<details{' open' * opened}><summary>{escape(after)}</summary><pre>{colored}</pre></details>"
    return found


def _line(line: str) -> str:
    kind = {"+": "plus", "-": "minus"}.get(line[:1], "")
    return f'<span class="{kind}">{escape(line)}</span>' if kind else escape(line)
