"""A run as one self-contained HTML page with plots, light and dark."""

from __future__ import annotations

import difflib
from html import escape
from typing import Any

from freescale.views import svg
from freescale.views.compilations import compilations, lacks_late_gradients, named_graphs
from freescale.views.records import Run, mean, settled
from freescale.views.step_parts import PARTS
from freescale.views.summary import CLASSES, graph_lines, head_lines, shown_parts, summarize
from freescale.views.text import MEANING, milliseconds, size
from freescale.views.timeline import lanes_of_graphs

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
""" + "".join(f".{c}{{fill:var(--{c})}}i.{c}{{background:var(--{c})}}" for c in (*PARTS, *CLASSES))


def page(run: Run, about: str = "report") -> str:
    s = summarize(run)
    first = f"<p><b>{escape(' '.join(s['verdict']))}</b></p>" if s["verdict"] else ""
    parts = [first, _head(s), _shares(s), _over_time(run, s), _traffic(s), _balance(s), _graphs(run, s)]
    return _document(f"freescale {about}: run {s['run']}", parts)


def explain_page(run: Run) -> str:
    s = summarize(run)
    return _document(f"freescale explain: run {s['run']}", [_head(s), _graphs(run, s, open_texts=True)])


def _head(s) -> str:
    return f"<p>{escape(' '.join(head_lines(s)))}</p>"


def _document(title: str, parts: list[str]) -> str:
    body = "\n".join(p for p in parts if p)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f"<body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def _key(names: dict[str, str]) -> str:
    spans = (f'<span class="key"><i class="{c}"></i>{escape(text)}</span>' for c, text in names.items())
    return f"<p>{''.join(spans)}</p>"


def _shares(s: dict[str, Any]) -> str:
    if not s["steps"]:
        return ""
    ranks = sorted(s["ranks"].items(), key=lambda item: -item[1]["compute"])[:_RANKS]
    parts = shown_parts(s)
    bars = [(f"rank {n}", [(part, r[part] * 1e3) for part in parts]) for n, r in sorted(ranks)]
    rows = "".join(
        f'<tr><td>{escape(MEANING[part])}</td><td class="n">{s["shares"][part]:.1%}</td></tr>' for part in parts
    )
    waits = "".join(
        f'<tr><td>{escape(name)}</td><td class="n">{milliseconds(seconds)}</td></tr>'
        for name, seconds in s["waits"].items() if seconds > 0
    )  # fmt: skip
    chart = _key({part: MEANING[part] for part in parts}) + svg.stacked_bars(bars, "ms")
    return (
        f"<h2>Step time breakdown</h2><p>Median step {milliseconds(s['median_step_seconds'])}, excluding the first "
        f"steps, which compile. Means per rank.</p>{chart}"
        f"<table>{rows}</table><p>Waits per step and rank, mean:</p><table>{waits}</table>"
    )


def _over_time(run: Run, s: dict[str, Any]) -> str:
    steps = {n: settled(r.step) for n, r in run.ranks.items()}
    count = min((len(of) for of in steps.values()), default=0)
    if not count:
        return ""
    stride = -(-count // _POINTS)
    layers = []
    for part in shown_parts(s):
        means = [mean(of[i][part] for of in steps.values()) * 1e3 for i in range(count)]
        layers.append((part, [mean(means[i : i + stride]) for i in range(0, count, stride)]))
    of_first_rank = next(iter(steps.values()))
    ends = f"step {of_first_rank[0]['step']}", f"step {of_first_rank[count - 1]['step']}"
    note = f" Each point is the mean of {stride} steps." if stride > 1 else ""
    return f"<h2>Over time</h2><p>Mean of the ranks.{note}</p>{svg.stacked_area(layers, 'ms', ends)}"


def _traffic(s: dict[str, Any]) -> str:
    if not s["bytes_per_step"]:
        return ""
    bars, most = [], max(s["bytes_per_step"].values())
    unit, unit_name = (1e6, "MB") if most >= 1e6 else (1e3, "kB")
    for payload in ("rows", "gradients"):
        values = [(c, s["bytes_per_step"].get(f"{c} {payload}", 0.0) / unit) for c in CLASSES]
        bars.append((payload, values))
    shares = "".join(
        f"<p>{share:.1%} of the unique rows of {escape(name)} were also in the previous batch.</p>"
        for name, share in s["collisions"].items()
    )
    chart = svg.stacked_bars(bars, f"{unit_name} received per step and rank")
    return f"<h2>Traffic</h2>{_key({c: c for c in CLASSES})}{chart}{shares}"


def _balance(s: dict[str, Any]) -> str:
    if (b := s["balance"]) is None:
        return ""
    rows = [("before, predicted", b["straggler_before"]), ("after, predicted", b["straggler_after"])]
    if b["straggler_measured"] == b["straggler_measured"]:
        rows.append(("after, measured", b["straggler_measured"]))
    bars = svg.stacked_bars([(name, [("straggler", share * 100)]) for name, share in rows], "% of a step")
    moved = f"{b['moved_samples']:.1f} samples, {size(b['moved_bytes'])} moved per step."
    return f"<h2>Straggler share</h2>{bars}<p>{moved}</p>"


def _graphs(run: Run, s: dict[str, Any], open_texts: bool = False) -> str:
    record = next(iter(run.ranks.values()))
    if not record.graph:
        return ""
    found = ["<h2>Graphs</h2>"]
    for name, graphs in compilations(record.graph).items():
        if lanes := lanes_of_graphs(graphs):
            keys = {"compute": "compute, predicted", **{c: f"{c}, on the wire" for c in CLASSES}}
            found.append(f"<p>{escape(name)}: two steps, predicted for the traced batch:</p>")
            found.append(_key(keys) + svg.lanes(lanes, "ms"))
    for (_, graph), entry in zip(named_graphs(record.graph), s["graphs"], strict=True):
        came, exchanges = graph_lines(entry)
        found.append(f"<h3>{escape(came)}</h3>")
        sites = "".join(f'<tr><td>{escape(n)}</td><td class="n">{c}</td></tr>' for n, c in entry["sites"].items())
        found.append(f"<p>{escape(exchanges)}.</p><table>{sites}</table>")
        found += [f"<p>{escape(why)}</p>" for why in entry["refused"]]
        found.append(_launches(entry["timeline"]))
        found.append(_diffs(graph.get("texts", {}), open_texts))
    return "".join(found)


def _launches(timeline: list[dict[str, Any]]) -> str:
    launches = [e for e in timeline if e["do"] == "launch"]
    if not launches:
        return ""
    cells = (
        f"<tr><td>{escape(e['what'])}</td><td>{escape(e['kind'])}</td><td class='n'>{size(e['bytes'])}</td></tr>"
        for e in launches
    )
    none_yet = "<p>The traced first step has no late gradients; later steps have some.</p>"
    note = none_yet if lacks_late_gradients(timeline) else ""
    head = "<tr><th>launch</th><th>kind</th><th class='n'>bytes in the traced batch</th></tr>"
    return f"<table>{head}{''.join(cells)}</table>{note}"


def _diffs(texts: dict[str, str], opened: bool) -> str:
    names, found = list(texts), []
    for before, after in zip(names[:-1], names[1:], strict=True):
        lines = list(difflib.unified_diff(texts[before].splitlines(), texts[after].splitlines(), lineterm="", n=2))[2:]
        if lines:
            colored = "\n".join(_line(line) for line in lines)
            found.append(f"<details{' open' * opened}><summary>{escape(after)}</summary><pre>{colored}</pre></details>")
    return "".join(found)


def _line(line: str) -> str:
    kind = {"+": "plus", "-": "minus"}.get(line[:1], "")
    return f'<span class="{kind}">{escape(line)}</span>' if kind else escape(line)
