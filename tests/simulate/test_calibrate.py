"""Calibration: what is fitted to times, what is written, the link between two ranks."""

from __future__ import annotations

import sys

import pytest
import torch

from freescale.__main__ import main
from freescale.simulate import calibrate, cluster
from ranks import run_ranks

BLOCK = """
import time

import torch


class Block(torch.nn.Module):
    def __init__(self, dim, heads, max_distance):
        super().__init__()
        self.linear = torch.nn.Linear(dim, dim)

    def forward(self, x, offsets):
        time.sleep(4e-5 * x.shape[0])
        return x + self.linear(x)
"""


def test_the_fit_finds_what_times_were_made_of():
    lengths = ((64, 100), (16, 1000), (4, 8000), (32, 200))
    times = {(n, length): [0.002 + n * length * 3e-7 + n * length**2 * 5e-11] * 3 for n, length in lengths}
    fit = calibrate.fit(times)
    assert (fit.constant, fit.per_token, fit.per_square) == pytest.approx((0.002, 3e-7, 5e-11), rel=1e-6)
    assert fit.worst < 1e-6 and fit.jitter == 0.0


def test_nothing_negative_is_fitted():
    fit = calibrate.fit({(1, length): [length * 1e-6 - 5e-6] for length in (10, 100, 1000, 10000)})
    assert min(fit.constant, fit.per_token, fit.per_square) >= 0


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_a_cluster_file_is_written(tmp_path, monkeypatch, capsys):
    """With a block that sleeps for every token, so that no load hides what it takes, and without code generation."""
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(calibrate, "BATCHES", {"cpu": ((4, 8), (2, 64), (1, 256))})
    threads = torch.get_num_threads()
    (tmp_path / "tiny_block.py").write_text(BLOCK)
    path = tmp_path / "mine.toml"
    try:
        assert main(["simulate", "--calibrate", str(path), "--block", f"{tmp_path}/tiny_block.py:Block"]) == 0
    finally:
        torch.set_num_threads(threads)
        sys.path.remove(str(tmp_path))
    found = cluster.find(str(path))
    assert (found.dim, found.layers, found.name) == (128, 2, "CPU, one core per rank")
    assert found.seconds_per_token + found.seconds_per_token_squared > 0
    assert found.between_gb_per_s == cluster.PRESETS["h100"].between_gb_per_s
    assert "measured by simulate --calibrate" in path.read_text() and f"wrote {path}" in capsys.readouterr().out


def test_a_block_that_is_not_there(tmp_path, capsys):
    (tmp_path / "other_block.py").write_text(BLOCK)
    words = ["simulate", "--calibrate", str(tmp_path / "x.toml"), "--block", f"{tmp_path}/other_block.py:None_such"]
    assert main(words) == 2
    assert "the file has no None_such" in capsys.readouterr().err
    sys.path.remove(str(tmp_path))


def _probe() -> tuple[float, float, float]:
    return calibrate.probe_link(torch.device("cpu"), 1 << 16)


def test_the_link_between_two_ranks():
    for ours, theirs, latency in run_ranks(_probe, 2):
        assert ours > 1e3 and theirs > 1e3 and 0 < latency < 60
