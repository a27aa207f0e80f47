"""benchmarks/host_path.py, where no driver is: its messages are issued, waited for and counted all the same."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from repo import ROOT


@pytest.mark.thorough
@pytest.mark.skipif(torch.cuda.is_available(), reason="benchmarks/gpu_check.sh runs it")
def test_launches_and_waits(tmp_path):
    command = [sys.executable, "benchmarks/host_path.py", "--quick", "--json", str(tmp_path / "found.json")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["peers"] for row in rows] == [1, 8, 64]
    names = ("C", "Python", "C, op")
    assert all(row[name][what] > 0 for row in rows for name in names for what in ("launch_us", "wait_us"))
