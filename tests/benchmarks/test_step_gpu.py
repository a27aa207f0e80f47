"""benchmarks/step_gpu.py in its tiny size on the CPU: it runs, its figures are there, and its checks can fail."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from ranks import warm
from repo import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import step_gpu  # noqa: E402
import step_gpu_profile  # noqa: E402
import step_gpu_rank  # noqa: E402
import step_gpu_variants  # noqa: E402
from step_gpu_model import LR, Size, collision_share, exponent_for, lengths_of, plain_update  # noqa: E402


@pytest.mark.thorough
def test_a_tiny_run(tmp_path, monkeypatch, capsys):
    """In this process, so that its ranks are forks of one that has torch loaded."""
    command = ["step_gpu.py", "--device", "cpu", "--quick", "--rounds", "2", "--steps", "2", "--sizes", "8ms"]
    command += ["--variants", "plain", "c10d", "c10d-ahead", "c10d-planned", "c10d-ahead-tables", "--seconds", "250"]
    files = {"--json": "out.json", "--host-profile": "host.txt"}
    monkeypatch.setattr(sys, "argv", [*command, *(x for flag, name in files.items() for x in (flag, str(tmp_path / name)))])
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"):  # which it sets for its ranks
        monkeypatch.setenv(name, str(tmp_path) if name.endswith("DIR") else "1")
    warm()
    with pytest.raises(SystemExit) as ended:
        step_gpu.main()
    assert ended.value.code == 0, capsys.readouterr()
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["failed"] == {} and [s["size"] for s in found["sizes"]] == ["8ms"]
    (size,) = found["sizes"]
    rows = {r["variant"]: r for r in size["rows"]}
    assert list(rows) == ["dense", "plain", "c10d", "c10d-ahead", "c10d-planned", "c10d-ahead-tables"]
    for row in rows.values():
        assert row["steps"] == 4 and row["step_ms"] > 0
        assert set(row["host_ms"]) == {"next", "forward", "backward", "optimizer", "sum"}
    assert 0 < rows["c10d-ahead"]["colliding_share"] < 0.5
    checks = size["checks"]
    compared = {name for pair in checks["same_bits"] for name in pair.split(" = ")}
    assert compared >= {"c10d", "c10d-ahead", "c10d-planned"} and all(checks["same_bits"].values())
    assert 0 < checks["loss_difference"]["plain"] < 1e-2
    assert found["step_over_dense_8ms"] > 0 and found["lookahead_over_none_worst"] > 0
    assert isinstance(found["host_ms_added"], float) and isinstance(found["host_ms_per_further_exchange"], float)
    met = rows["c10d-ahead"]["meeting_ms"]
    assert 0 < met["last_rank"] <= met["median"] and "meeting_ms" not in rows["c10d"]
    assert all(row["host_skew_ms"] > 0 for row in rows.values())
    assert checks["same_bits"]["c10d-ahead-tables, every round"] and "c10d-ahead-tables" not in checks["loss_difference"]
    assert found["step_over_dense_45ms"] is None and found["compute_busy_45ms"] is None
    profiled = (tmp_path / "host.txt").read_text()
    assert "8ms, 2 ranks, c10d-ahead, planning thread" in profiled and "8ms, 2 ranks, dense, training thread" in profiled


def test_headlines():
    def size(name, ranks=2, **steps):
        rows = [
            {"variant": v.replace("_", "-"), "step_ms": ms, "slowest_rank_ms": ms + 1, "compute_busy": ms / 100, "host_ms": {"sum": ms / 2}}
            for v, ms in steps.items()
        ]  # fmt: skip
        return {"size": name, "ranks": ranks, "start": 0, "rows": rows}

    found = step_gpu.headlines([
        size("8ms", dense=7, plain=30, staged=10, staged_ahead=12, c10d=20, c10d_ahead=18, staged_ahead_tables=16),
        size("45ms", dense=39, plain=90, c10d_ahead=60, staged_ahead=50, staged_planned=70, staged_ahead_balance=80),
        size("60ms", dense=59, staged=70, staged_ahead=90, staged_planned=77),
        size("70ms", dense=69, staged=70, staged_ahead=60, staged_planned=77),
        size("150ms", dense=149, staged_ahead=160, staged_ahead_balance=95),
        size("150ms", ranks=4, dense=1, c10d_ahead=2) | {"rows": [{"variant": "c10d-ahead", "meeting_ms": {"last_rank": 0.1}}]},
    ])  # fmt: skip
    assert found == {
        "step_over_dense_8ms": 12 / 8,  # the faster transport, over the slowest rank's dense part
        "step_over_dense_45ms": 50 / 40,
        "step_over_dense_150ms": 160 / 150,
        "times_plain_nccl_45ms": 90 / 50,
        "host_ms_added": 12 / 2 - 7 / 2,
        "compute_busy_45ms": 0.5,
        "compute_busy_150ms": 0.95,  # with balance, where that is faster
        "balanced_busy_45ms": 0.8,
        "balanced_busy_150ms": 0.95,
        "lookahead_over_none_worst": 1.2,
        "host_ms_per_further_exchange": (16 - 12) / 2 / 2,
        "meeting_ms_4_ranks": 0.1,
    }
    starts = [size("8ms", dense=7, staged_ahead=ahead) | {"start": n} for n, ahead in enumerate((16, 12, 10))]
    of_starts = step_gpu.headlines(starts)
    assert of_starts["step_over_dense_8ms"] == 12 / 8 and of_starts["compute_busy_45ms"] is None


def test_a_variant_that_fails_does_not_lose_the_others(monkeypatch, capsys):
    said: list[tuple[list[str], list[str]]] = []

    def run(self):
        said.append((list(self.task.sizes), list(self.task.variants)))
        first = next(iter(self.task.sizes))
        if len(said) == 1:
            self.sizes, self.failed_at, self.failure = [{"size": first}], "c10d", "rank 1: no"
        else:
            self.sizes = [{"size": name} for name in self.task.sizes]

    monkeypatch.setattr(step_gpu.Ranks, "run", run)
    task = step_gpu_variants.Task("cpu", None, {"a": 1, "b": 2}, ["dense", "c10d", "plain"], "eager", None)  # type: ignore[arg-type]
    found = step_gpu.measure(2, task, 60)
    assert said == [(["a", "b"], ["dense", "c10d", "plain"]), (["b"], ["dense", "plain"])]
    assert found["sizes"] == [{"size": "a"}, {"size": "b"}] and found["failed"] == {"c10d": "rank 1: no"}


def _block(losses, digest=(1, 2)):
    return step_gpu_rank.Block(bits=(losses, digest))


def test_a_bit_that_differs_is_seen():
    good = [[_block([1.0]), _block([1.0])], [_block([2.0]), _block([2.0])]]  # [rank][round]
    table = [[_block([1.0], (1, 3)), _block([1.0], (1, 3))], good[1]]
    later = [[_block([1.0]), _block([1.5])], good[1]]
    same = lambda blocks: step_gpu_rank.compare(blocks, "inductor")["same_bits"]  # noqa: E731
    assert all(same({"c10d-ahead": good, "staged-ahead": good}).values())
    assert not same({"c10d-ahead": good, "staged-ahead": table})["c10d-ahead = staged-ahead"]
    assert not same({"c10d": later})["c10d, every round"]
    difference = step_gpu_rank.compare({"plain": [[_block([1.25])]], "c10d": [[_block([1.0])]]}, "inductor")
    assert difference["loss_difference"] == {"plain": 0.25}


def test_the_share_of_busy_time():
    kernel = lambda name, ts, dur, stream=7: {  # noqa: E731
        "cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": {"stream": stream}
    }  # fmt: skip
    markers = [kernel("erfinv_kernel", 100 * i, 2) for i in range(5)]
    assert step_gpu_profile.SETTLING == 2  # so the window is from 200 to 400
    work = [kernel("a", 110, 80), kernel("b", 220, 30), kernel("c", 240, 30), kernel("d", 390, 40)]
    elsewhere = [kernel("nccl", 200, 200, stream=9), {"cat": "gpu_memcpy", "name": "x", "ts": 300, "dur": 50, "args": {"stream": 7}}]
    assert step_gpu_profile.busy_steps(markers + work + elsewhere) == [(52, 100), (12, 100)]
    assert step_gpu_profile.busy_steps(markers[:3] + work) == []
    idle = step_gpu_profile.idle_ms(markers + work + elsewhere)  # of two steps, longest first
    assert [(place, ms * 2e3) for place, ms in idle.items()] == [
        ("x - d", 40), ("c - erfinv_kernel", 30), ("erfinv_kernel - b", 18)
    ]  # fmt: skip
    both = step_gpu_profile.busy_shares([[(52, 100), (12, 100)], [(40, 100), (60, 100)]])
    assert both == {"compute_busy": 164 / 400, "compute_busy_longest": (52 + 60) / 200}
    assert step_gpu_profile.busy_shares([[(1, 2)], []])["compute_busy"] is None
    packing = [kernel("_compress", 150, 10), kernel("_compress", 250, 3), kernel("_expand", 350, 5, stream=9)]
    assert step_gpu_profile.packing_ms(markers + work + packing) == pytest.approx(8 / 2 / 1e3)


def test_own_time_of_functions():
    import time

    def inner():
        time.sleep(0.02)

    def outer():
        inner()

    profile = step_gpu_profile.HostProfile()
    profile.start()
    outer()
    profile.stop()
    (slept,) = (name for name in profile.seconds if "sleep" in name)
    assert profile.calls[slept] == 1 and profile.seconds[slept] >= 0.02
    assert max(s for name, s in profile.seconds.items() if name != slept) < 0.01


def test_batches_are_as_wanted():
    import numpy as np

    share = collision_share(4000, 96, 2, exponent_for(0.12, 4000, 96, 2))
    assert share == pytest.approx(0.12, abs=0.02)
    lengths = lengths_of(np.random.default_rng(0), Size("x", 16, 100), equal=False)
    assert lengths.shape == (16,) and abs(lengths.sum() - 1600) < 16 and lengths.min() >= 2 and lengths.max() > 200
    assert set(lengths_of(np.random.default_rng(0), Size("x", 16, 100), equal=True)) == {100}


def test_the_plain_update_is_row_wise_adagrad():
    class Storage:
        weight, momentum = torch.zeros(6, 2), torch.zeros(6)

    rows, grads = torch.tensor([4, 0, 4]), torch.tensor([[1.0, 1.0], [3.0, 0.0], [1.0, 0.0]])
    plain_update(Storage, rows, grads)  # type: ignore[arg-type]
    expected = torch.zeros(6, 2)
    for row, total in ((4, [2.0, 1.0]), (0, [3.0, 0.0])):
        g = torch.tensor(total)
        assert Storage.momentum[row] == g.square().mean()
        expected[row] = -LR * g / g.square().mean().sqrt()
    assert torch.allclose(Storage.weight, expected)
