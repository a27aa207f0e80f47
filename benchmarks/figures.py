"""The figures of the FreeScale paper (arXiv 2604.24073) again, and two that it does not have.

    python benchmarks/figures.py [--only NAME ...] [--redraw] [--quick] [--json FILE] [--out DIR]

Simulates what is simulated, reads what was measured from benchmarks/results/, draws DIR/figures/*.svg and writes the
tables between the markers of DIR/paper.md and DIR/benchmarks.md. `make figures` runs it. Numbers go to --json, as a
part of what is there already; --redraw takes them from it. A second run changes nothing.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import figures_data
import figures_draw
import figures_words
from command_line import parser
from freescale.simulate.command import Progress

ROOT = Path(__file__).parent.parent
RESULTS = figures_data.RESULTS / "figures.json"
PAGES = {name: "benchmarks.md" if name == "gpu_steps" else "paper.md" for name in figures_data.FIGURES}


def with_tables(page: str, found: dict[str, Any]) -> str:
    """The page with the table of each figure between `<!-- NAME -->` and `<!-- /NAME -->`."""
    for name, data in found.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        if begin not in page or end not in page:
            raise ValueError(f"the page has no place for the figure {name}: {begin} and {end}")
        lines = "\n".join(figures_words.WORDS[name](data))
        page = re.sub(f"{begin}.*?{end}", lambda _, t=f"{begin}\n{lines}\n{end}": t, page, flags=re.S)
    return page


def drawn(found: dict[str, Any], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    return [figures_draw.save(figures_draw.DRAWN[n](data), folder / f"{n}.svg") for n, data in found.items()]


def numbers(names: list[str], settings: figures_data.Settings) -> dict[str, Any]:
    progress, found = Progress(), {}
    points = figures_data.Points(settings, progress)
    for name in names:
        began = time.monotonic()
        found[name] = figures_data.FIGURES[name](points)
        progress.clear()
        print(f"{name:<12}{time.monotonic() - began:6.1f} s", flush=True)
    return found


def main() -> None:
    p = parser(__doc__, "few ranks, few points, one step; into build/ unless --out says where")
    p.add_argument("--only", nargs="+", choices=tuple(figures_data.FIGURES), metavar="NAME",
                   help=f"of {', '.join(figures_data.FIGURES)}")  # fmt: skip
    p.add_argument("--redraw", action="store_true", help="draw the numbers of --json, simulate nothing")
    p.add_argument("--out", metavar="DIR", help="folder of the pages and figures/ (default docs)")
    args = p.parse_args()
    names = args.only or list(figures_data.FIGURES)
    out = Path(args.out) if args.out else ROOT / ("build" if args.quick else "docs")
    file = Path(args.json) if args.json else None if args.quick else RESULTS
    known = json.loads(file.read_text()) if file is not None and file.exists() else {}
    if args.redraw:
        if missing := [n for n in names if n not in known]:
            sys.exit(f"freescale: --redraw has no numbers of {', '.join(missing)}: there are none in {file}")
        found = {n: known[n] for n in names}
    else:
        found = numbers(names, figures_data.QUICK if args.quick else figures_data.Settings())
    for path in drawn(found, out / "figures"):
        print(f"drawn: {path}")
    for page in sorted({PAGES[n] for n in found}):
        if (path := out / page).exists():
            path.write_text(with_tables(path.read_text(), {n: data for n, data in found.items() if PAGES[n] == page}))
    if file is not None and not args.redraw:
        ordered = {n: (known | found)[n] for n in figures_data.FIGURES if n in known | found}
        file.write_text(json.dumps(ordered, indent=1) + "\n")


if __name__ == "__main__":
    main()
