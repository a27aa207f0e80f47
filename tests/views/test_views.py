"""What a record shows: sums, sentences for what cannot be read, pages without a network, traces, profiles."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from freescale.__main__ import main
from freescale.views import page, profile, records, summary, timeline


def ticks(*seconds: float) -> list[int]:
    return [round(s / records.TICK) for s in seconds]


def step(number: int, seconds: float = 0.1, name: str = "urgent rows of item", **parts: float) -> dict:
    """What it waits for, 30 ms long, counts as far as `exposed` says."""
    spent = {part: parts.get(part, 0.0) for part in records.PARTS}
    spent["compute"] = seconds - sum(spent.values())
    launch = [name, *ticks(0.01, 0.02, 0.05), 4000, *ticks(spent["exposed"], 0.04)]
    loader = ["loader", *ticks(0.0, 0.0, 0.02), 0, *ticks(spent["loader"], 0.02)]
    entry = {"kind": "step", "step": number, "seconds": seconds, "at": 1e9 + number, **spent}
    return entry | {"launches": [launch, loader]}


def graph(direction: str = "forward", **more) -> dict:
    launch = {"do": "launch", "what": "urgent rows of item", "payload": "rows", "priority": "urgent", "table": "item"}
    launch |= {"kind": "chunk", "bytes": 4000, "size": "4*s0", "seconds": 0.004}
    order = [launch, {"do": "compute", "what": "mm", "nodes": 3, "seconds": 0.003}, {"do": "wait", "what": launch["what"]}]
    entry = {"kind": "graph", "compilation": "0/0", "direction": direction, "exchanges": 1, "sites": {"find_exchanges": 1}, "refused": []}
    entry |= {"seconds": 2.0, "from_cache": False, "timeline": order, "texts": {"before": "a\nb", "find_exchanges": "a\nc"}}
    return entry | more


def write(folder: Path, rank: int = 0, world: int = 2, run: str = "r1", lines: list | None = None, tail: str = "") -> Path:
    start = {"kind": "start", "run": run, "rank": rank, "world": world, "at": 1e9, "torch": "2", "device": "cpu"}
    path = folder / f"{run}-rank{rank:05d}.jsonl"
    path.write_text("".join(json.dumps(e) + "\n" for e in [start, *(lines or [])]) + tail)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    plans = [{"kind": "plan", "step": 1, "exchange": "item", "unique_rows": 10, "colliding_rows": 3}]
    moved = {"kind": "balance", "step": 1, "predicted_before": 0.4, "predicted_after": 0.1, "measured": 0.12, "moved_samples": 2}
    slow = [step(0, 9.0), step(1, exposed=0.03, loader=0.02), step(2, exposed=0.01), step(3, straggler=0.01)]
    write(tmp_path, 0, lines=[graph(), graph("backward", from_cache=True), *slow, *plans, moved])
    write(tmp_path, 1, lines=[graph(), *[step(i, exposed=0.01) for i in range(4)]])
    return tmp_path


def test_sums(folder):
    s = summary.summarize(records.read(folder))
    assert s["steps"] == 4 and s["ranks_missing"] == [] and s["median_step_seconds"] == 0.1
    assert sum(s["shares"].values()) == pytest.approx(1)
    # Without the step that compiles. In step 1, rank 0 waits 30 ms and rank 1, which is busy 40 ms longer, waits 10.
    assert s["shares"]["exposed"] == pytest.approx((0.0 + 0.01 + 4 * 0.01) / 0.7)
    assert s["shares"]["straggler"] == pytest.approx((0.03 + 0.01) / 0.7)
    assert s["bytes_per_step"] == {"urgent rows": 4000} and s["collisions"] == {"item": 0.3}
    assert s["balance"]["straggler_measured"] == 0.12


def test_text_says_what_matters(folder):
    said = summary.text_report(summary.summarize(records.read(folder)))
    for words in ("2 ranks, 4 steps", "waiting for rows or gradients", "urgent rows of item", "before, 10.0% after",
                  "train, backward graph, loaded from torch's cache", "30.0% of the unique rows", "median step"):  # fmt: skip
        assert words in said
    assert "GPU idle" not in said and "host_bound" not in said
    assert "GPU idle" not in page.page(records.read(folder))


def verdict_of(tmp_path: Path, *of_ranks: list, **more) -> str:
    for rank, lines in enumerate(of_ranks):
        write(tmp_path, rank, world=len(of_ranks), lines=[*lines, *more.get("also", [])])
    return summary.text_report(summary.summarize(records.read(tmp_path))).split("\n\n")[0]


PLAN = {"kind": "plan", "step": 1, "exchange": "item"}
MOVED = {"kind": "balance", "step": 1, "predicted_before": 0.4, "predicted_after": 0.1}


def test_verdict(tmp_path):
    """Rank 1 waits 40 of 100 ms for urgent rows, rank 0 waits 10, and is busy 30 ms longer. All bytes are waited for."""
    steps = [[step(i, exposed=exposed) for i in range(4)] for exposed in (0.01, 0.04)]
    assert verdict_of(tmp_path, *steps, also=[PLAN]) == (
        "Ranks waited 25.0% of the time, mostly for a rank with more work (rank 1 longest: 30.0%).\n"
        "0% of the received bytes arrived before they were needed.\n"
        "Try LookaheadLoader(balance=True): with equal work on all ranks, a step would be 15% shorter."
    )
    said = verdict_of(tmp_path, *steps, also=[PLAN, MOVED])
    assert "Compare the compute of the ranks" in said and "balance=True" not in said
    even = [[step(i, exposed=0.03) for i in range(4)]] * 2
    said = verdict_of(tmp_path, *even, also=[PLAN])
    assert "mostly for urgent rows (rank 0 longest: 30.0%)" in said and "Try another transport" in said
    assert "Try a LookaheadLoader" in verdict_of(tmp_path, *even)
    write(tmp_path, 1, world=3, lines=[*even[0], PLAN])  # without a record of rank 2, ranks are as they knew themselves
    write(tmp_path, 0, world=3, lines=[*[step(i, exposed=0.01, straggler=0.02) for i in range(4)], PLAN])
    found = summary.summarize(records.read(tmp_path))
    assert found["shares"]["straggler"] == pytest.approx(0.1) and found["ranks_missing"] == [2]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"loader": 0.04, "exposed": 0.01}, "50.0% of the time, mostly for the loader (rank 0 longest: 40.0%)."),
        ({"host_bound": 0.03, "exposed": 0.02}, "mostly for the host, which left the GPU idle"),
        ({"loader": 0.02, "exposed": 0.015, "host_bound": 0.015}, "50.0% of the time, the largest part for the loader"),
    ],
)
def test_verdict_names_the_longest_wait(tmp_path, parts, words):
    said = verdict_of(tmp_path, [step(i, **parts) for i in range(4)], [step(i, **parts) for i in range(4)])
    assert words in said and "0% of the received bytes" in said


def test_verdict_where_little_is_waited_for(tmp_path):
    """What was there when it was needed is hidden; nothing is advised, and of one rank no rank is named."""
    said = verdict_of(tmp_path, [step(i, exposed=4e-5) for i in range(4)])
    assert said.splitlines() == [
        "Ranks waited 0.0% of the time, mostly for urgent rows.",
        "100% of the received bytes arrived before they were needed.",
    ]


def test_gpu_without_work_is_shown_where_it_was_measured(tmp_path):
    write(tmp_path, world=1, lines=[step(i, host_bound=0.03) for i in range(4)])
    said = summary.text_report(summary.summarize(records.read(tmp_path)))
    assert "host_bound" in said and "GPU idle before the model call" in said


def test_training_and_evaluation_have_timelines_of_their_own(tmp_path):
    """In the order in which they were compiled: the evaluation before the first backward pass."""
    evaluation = graph(compilation="0/1", timeline=[{"do": "compute", "what": "mm", "nodes": 1, "seconds": 0.002}])
    write(tmp_path, world=1, lines=[graph(), evaluation, graph("backward"), graph("forward", compilation="2/0")])
    run = records.read(tmp_path)
    said = timeline.text_timeline(run.ranks[0].graph)
    assert [line.partition(" graph")[0] for line in said.splitlines() if "exchange" in line] == [
        "train, forward", "train, backward", "eval, forward", "eval 2, forward",
    ]  # fmt: skip
    assert "train, predicted for the traced batch: 8 ms per step, 2 ms exposed" in said
    assert "eval, predicted for the traced batch: 2 ms per step, 0 ms exposed" in said
    made = page.explain_page(run)
    assert made.count("<svg") == 3 and "eval: two steps, predicted" in made


def test_page_needs_no_network_and_has_its_plots(folder):
    made = page.page(records.read(folder))
    assert made.count("<svg") == 5 and "prefers-color-scheme:dark" in made
    assert not re.search(r"(src|href)=|https?://|@import|url\(", made)
    assert '<span class="plus">+c</span>' in made


def test_what_follows_from_launches_and_what_a_gpu_says_of_them(tmp_path):
    """Two launches of one name add up. On a GPU, the host's waits count as far as its stream stood still."""
    twice = step(0, exposed=0.01, loader=0.02)
    twice["launches"].append(twice["launches"][0])
    write(tmp_path, world=1, lines=[twice, step(1, loader=0.02) | {"waits": {"loader": 0.005}}])
    first, second = records.read(tmp_path).ranks[0].step
    assert first["waits"] == pytest.approx({"urgent rows of item": 0.02, "loader": 0.02})
    assert first["bytes"] == {"urgent rows of item": 8000, "loader": 0}
    assert first["flight"]["urgent rows of item"] == pytest.approx(0.08)
    assert second["waits"]["loader"] == 0.005


def test_names_are_escaped(tmp_path):
    write(tmp_path, world=1, lines=[step(0, exposed=0.01, name="<b>&")])
    made = page.page(records.read(tmp_path))
    assert "&lt;b&gt;&amp;" in made and "<b>&" not in made


def test_a_run_without_steps(tmp_path):
    write(tmp_path, world=1, lines=[graph(exchanges=0, timeline=[], texts={})])
    run = records.read(tmp_path)
    assert "No step was completed" in summary.text_report(summary.summarize(run)) and "No step was completed" in page.page(run)


def test_a_killed_rank_and_one_without_a_record(tmp_path):
    write(tmp_path, 1, lines=[step(0)], tail='{"kind": "step", "ste')
    said = summary.text_report(summary.summarize(records.read(tmp_path)))
    assert "No record of rank 0" in said and "rank 1 is truncated" in said


@pytest.mark.parametrize(
    ("lines", "tail", "words"),
    [
        ([], "nonsense\n{}\n", "line 2: not a line of a record"),
        ([{"kind": "stap"}], "", "line 2: field 'kind' is 'stap'"),
        ([{"kind": "step", "step": 1}], "", "line 2: a line of kind 'step' is missing the field 'seconds'"),
        ([step(0) | {"launches": [["x", 0.1, 0.2, 0.3, 4, 0.1]]}], "", "line 2: its launches were written by another version"),
        ([{"kind": "graph", "direction": "forward"}], "", "line 2: a line of kind 'graph' is missing the field 'compilation'"),
    ],
)
def test_lines_that_cannot_be_read(tmp_path, lines, tail, words, capsys):
    path = write(tmp_path, lines=lines, tail=tail)
    assert main(["report", str(tmp_path)]) == 2
    assert f"{path}, {words}" in capsys.readouterr().err


def test_bad_folders(tmp_path, capsys):
    assert main(["report", str(tmp_path / "nothing")]) == 2 and "is not a folder" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2 and "has no records" in capsys.readouterr().err
    write(tmp_path, run="r1", world=1)
    write(tmp_path, run="r2", world=1)
    assert main(["report", str(tmp_path)]) == 2 and "records of 2 runs: r1, r2; choose one with --run" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--run", "r2"]) == 0
    assert main(["report", str(tmp_path), "--run", "r3"]) == 2 and "no run 'r3'" in capsys.readouterr().err
    assert main(["report"]) == 2 and "expected a folder with records" in capsys.readouterr().err


def test_files_of_the_command(folder, tmp_path, capsys):
    out = [str(tmp_path / name) for name in ("a.html", "a.json", "a.trace")]
    assert main(["report", str(folder), "--html", out[0], "--json", out[1], "--trace", "1-2", "--out", out[2]]) == 0
    assert json.loads(Path(out[1]).read_text())["world"] == 2 and Path(out[0]).read_text().startswith("<!doctype html>")
    events = json.loads(Path(out[2]).read_text())["traceEvents"]
    assert {e["name"] for e in events} >= {"step 1", "step 2", "urgent rows of item", "wait for urgent rows of item"}
    assert main(["report", str(folder), "--trace", "77", "--out", out[2]]) == 2
    assert "no step 77; it has 0 to 3" in capsys.readouterr().err
    assert main(["report", str(folder), "--trace", "x"]) == 2 and "--trace must be a step" in capsys.readouterr().err


def test_trace_keeps_the_ranks_apart(folder):
    events = timeline.trace(records.read(folder), 1, 1)["traceEvents"]
    waits = [e for e in events if e["name"] == "wait for urgent rows of item"]
    assert [e["pid"] for e in waits] == [0, 1] and waits[0]["dur"] == pytest.approx(0.03e6)


def test_predicted_timeline():
    """4 ms on the wire, 3 ms of compute beside it: 1 ms is exposed."""
    blocks, seconds, exposed = timeline.predict([graph()], 1)
    assert seconds == pytest.approx(0.004) and exposed == pytest.approx(0.001)
    assert [len(blocks[lane]) for lane in timeline.LANES] == [1, 1, 0, 0, 0]
    said = timeline.text_timeline([graph()])
    assert said.index("launch urgent rows") < said.index("compute 3.0000 ms") < said.index("wait for urgent rows")
    assert "4 ms per step, 1 ms exposed" in said
    tiny = [{**e, "seconds": e.get("seconds", 0) / 1e4} for e in graph()["timeline"]]
    assert "0.0004 ms per step, 0.0001 ms exposed" in timeline.text_timeline([graph(timeline=tiny)])  # not 0.00
    assert timeline.lanes_of_graphs([graph(timeline=[])]) == []


def test_charts_of_nothing():
    assert page.stacked_area([], "ms", ("", "")) == "" and "<svg" in page.stacked_bars([], "ms") and "<svg" in page.lanes([], "ms")


# ---- profiles of torch -----------------------------------------------------------------------------------------------


def event(category: str, begin: float, end: float, stream: int = 7, correlation: int = 0, name: str = "k") -> dict:
    args = {"stream": stream, "device": 0, "correlation": correlation}
    return {"ph": "X", "cat": category, "name": name, "ts": begin * 1e6, "dur": (end - begin) * 1e6, "args": args}


def test_profile_says_what_the_compute_stream_waits_for(tmp_path):
    """Kernels 0-1, 3-4, 5-6: the second was launched at 2 (host) and waited for a copy until 3; the third was launched
    in time, and nothing was on its way."""
    events = [
        *(event("kernel", a, b, correlation=c) for c, (a, b) in enumerate([(0, 1), (3, 4), (5, 6)], 1)),
        *(event("cuda_runtime", at, at + 0.1, 0, c) for c, at in ((1, -1), (2, 2), (3, 3.5))),
        event("gpu_memcpy", 0.5, 3, stream=9),
        event("kernel", 0.2, 0.4, stream=11, name="ncclDevKernel_SendRecv"),
        {"ph": "i", "name": "mark"},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = profile.analyse(path)
    assert found["seconds"] == pytest.approx(6) and found["kernels"] == 3
    assert found["shares"] == pytest.approx({"busy": 0.5, "host": 1 / 6, "exposed": 1 / 6, "gap": 1 / 6})
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert found["communication_seconds"] == pytest.approx(2.7) and found["communication_hidden"] == pytest.approx(0.7 / 2.7)


def test_profile_of_the_command(tmp_path, capsys):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [event("kernel", 0, 1), event("kernel", 1, 2)]}))
    assert main(["report", "--profile", str(path)]) == 0 and "compute stream busy" in capsys.readouterr().out
    for content, words in (('{"traceEvents": []}', "has no GPU kernels"), ("{}", "the field 'traceEvents'"), ("x", "is not a torch profiler trace")):
        path.write_text(content)
        assert main(["report", "--profile", str(path)]) == 2 and words in capsys.readouterr().err
    assert main(["report", "--profile", str(tmp_path / "no")]) == 2 and "cannot read" in capsys.readouterr().err


def test_explain_of_what_is_no_command(capsys):
    assert main(["explain"]) == 2 and "expects a command" in capsys.readouterr().err
    assert main(["explain", "--", "/nowhere/at/all"]) == 2 and "cannot run /nowhere/at/all" in capsys.readouterr().err
    assert main(["explain", "--", "true"]) == 2 and "compiled nothing with freescale" in capsys.readouterr().err
    assert main(["explain", "--", "false"]) == 1


def test_a_reader_that_has_enough_is_no_error(folder):
    """As in `python -m freescale report runs/a | head -3`: nobody reads the rest."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "freescale", "report", str(folder)]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    os.close(writing)
    assert done.stderr == "" and done.returncode == 0


def test_records_from_before_the_rendezvous_had_its_name(tmp_path):
    write(tmp_path, world=1, lines=[step(0) | {"waits": {"meeting of the ranks": 0.03}}])
    (read,) = records.read(tmp_path).ranks[0].step
    assert read["waits"]["rendezvous"] == 0.03 and "meeting of the ranks" not in read["waits"]
