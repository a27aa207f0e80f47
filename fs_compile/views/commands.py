"""`python -m freescale report` and `explain`. Exit code 1: the command failed; 2: invalid arguments."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from freescale import config
from freescale.views import page, profile, records, timeline
from freescale.views.records import named_graphs
from freescale.views.summary import pass_diffs, summarize, text_report
from freescale.views.timeline import text_timeline


def report(args: argparse.Namespace) -> int:
    try:
        if args.folder is None and args.profile is None:
            raise records.RecordError("expected a folder with records, or --profile FILE")
        found: dict[str, Any] = {}
        texts = []
        if args.folder is not None:
            run = records.read(args.folder, args.run_name)
            found = summarize(run)
            texts.append(text_report(found))
            if args.html:
                _write(args.html, page.page(run))
            if args.trace:
                _write(args.out, json.dumps(timeline.trace(run, *_range(args.trace))))
        if args.profile is not None:
            found["profile"] = profile.analyse(Path(args.profile))
            texts.append(profile.text_profile(found["profile"]))
    except records.RecordError as error:
        return _refuse(error)
    _finish("\n\n".join(texts), found, args.json)
    return 0


def explain(args: argparse.Namespace) -> int:
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        return _refuse("explain expects a command: python -m freescale explain -- torchrun train.py")
    with tempfile.TemporaryDirectory(prefix="freescale-explain-") as folder:
        try:
            code = subprocess.run(command, env=config.environment(record=folder), check=False).returncode
        except OSError as error:
            return _refuse(f"cannot run {command[0]}: {error.strerror or error}")
        if code:
            print(f"freescale: {command[0]} exited with code {code}; compiled until then:", file=sys.stderr)
        try:
            run = records.read(folder)
        except records.RecordError:
            return _refuse("the command compiled nothing with freescale") if not code else 1
        graphs = next(iter(run.ranks.values())).graph
        if args.html:
            _write(args.html, page.explain_page(run))
        text = text_timeline(graphs) or "the command compiled no graph"
        if args.graphs:
            text += "".join(_text_diffs(name, g) for name, g in named_graphs(graphs))
        _finish(text, {"graphs": graphs}, args.json)
    return 1 if code else 0


def _text_diffs(name: str, graph: dict[str, Any]) -> str:
    found = ""
    for after, lines in pass_diffs(graph.get("texts", {})):
        title = f"{name}, {graph['direction']}, {after}"
        found += "\n".join([f"--- before {title}", f"+++ after {title}", *lines, ""])
    return f"\n{found}" if found else ""


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    try:
        return int(first), int(last or first)
    except ValueError:
        raise records.RecordError(f"--trace must be a step or a range, such as 7 or 5-9; found {text!r}") from None


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise records.RecordError(f"cannot write {path}: {error.strerror or error}") from None
    print(f"wrote {path}", file=sys.stderr)


def _finish(text: str, found: dict[str, Any], json_file: str | None) -> None:
    if json_file == "-":
        print(json.dumps(found, indent=1))
        return
    if json_file:
        _write(json_file, json.dumps(found, indent=1))
    print(text)


def _refuse(why: object) -> int:
    print(f"freescale: {why}", file=sys.stderr)
    return 2
