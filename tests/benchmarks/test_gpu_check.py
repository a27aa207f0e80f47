"""benchmarks/gpu_check.sh with programs that only note how they were called: what it runs, in halves and as a whole."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from repo import ROOT

CHECKS = len(re.findall(r"^(?:start|check) ", (ROOT / "benchmarks/gpu_check.sh").read_text(), re.M))
STUB = """#!/bin/sh
echo "$(basename "$0") $*" >>"$CALLS"
case "$*" in *"$FAILING"*) exit 3;; esac
"""


def called(folder, failing="nothing", **variables) -> tuple[list[str], subprocess.CompletedProcess[str]]:
    """What the script ran, in order, and how it ended."""
    folder.mkdir()
    for name in ("python3", "pytest", "compute-sanitizer"):
        (folder / name).write_text(STUB)
        (folder / name).chmod(0o755)
    calls = folder / "calls"
    clean = {k: v for k, v in os.environ.items() if k not in ("PART", "ONLY", "QUICK", "BUDGET", "JOBS")}
    path = {"PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(calls), "FAILING": failing, "OUT": str(folder / "out")}
    command = ["bash", str(ROOT / "benchmarks/gpu_check.sh")]
    ended = subprocess.run(command, env={**clean, **path, **variables}, capture_output=True, text=True, timeout=60)
    assert not ended.stderr, ended.stderr
    return [c for c in calls.read_text().splitlines() if not re.search(r"-m (pip|zipfile|freescale)", c)], ended


def programs(calls: list[str]) -> list[str]:
    return sorted(" ".join(re.findall(r"(?:benchmarks|tests)/\S+(?:py|\])(?= |$)", c.split(" --json")[0])) for c in calls)


def test_two_halves_make_the_whole(tmp_path):
    whole, ended = called(tmp_path / "whole")
    assert ended.returncode == 0 and ended.stdout.count("passed") == len(whole) == CHECKS
    first, second = (called(tmp_path / part, PART=part)[0] for part in "12")
    assert programs(first + second) == programs(whole) and len(first) + len(second) == len(whole)
    assert all("step_torchrec.py" not in c or "--seconds" in c for c in second)
    assert not any("--seconds" in c for c in whole)


def test_every_test_of_a_gpu_is_run(tmp_path):
    calls = "\n".join(called(tmp_path / "x", JOBS="3")[0])
    marks = re.compile(r"mark\.gpu\b|^from interpreted import .*needs_gpu|on_gpu\.MARKS", re.M)
    marked = {str(f.relative_to(ROOT)) for f in (ROOT / "tests").rglob("test_*.py") if marks.search(f.read_text())}
    assert {"tests/kernels/test_nccl.py", "tests/runtime/samples/test_split_batch.py"} <= marked
    assert [f for f in sorted(marked) if f not in calls] == []


@pytest.mark.parametrize("name, failing", (("tests_nccl", "test_nccl.py"), ("contention", "contention.py")))
def test_a_failure_is_told_and_the_others_go_on(tmp_path, name, failing):
    calls, ended = called(tmp_path / "x", failing)
    assert ended.returncode == 1 and len(calls) == CHECKS
    assert re.findall(r"^(\S+) +FAILED \((\d+)\)", ended.stdout, re.M) == [(name, "3")]


def test_without_time_left_nothing_is_started(tmp_path):
    calls, ended = called(tmp_path / "x", ONLY="balance dispatch", BUDGET="10")
    assert calls == []
    assert ended.returncode == 1 and ended.stdout.count("FAILED (124)") == 2
