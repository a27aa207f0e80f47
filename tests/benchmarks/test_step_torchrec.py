"""benchmarks/step_torchrec.py in its tiny size on the CPU: it runs, its figures are there, and they are the right ones."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from ranks import HAS_TORCHREC, warm
from repo import ROOT

pytestmark = pytest.mark.skipif(not HAS_TORCHREC, reason="torchrec or fbgemm_gpu is not installed")
sys.path.insert(0, str(ROOT / "benchmarks"))
if HAS_TORCHREC:
    import step_torchrec
    import step_torchrec_model
    import step_torchrec_rank


def _run(monkeypatch, tmp_path, *arguments: str) -> tuple[int, dict]:
    """In this process, so that its ranks are forks of one that has torch loaded."""
    file = tmp_path / "out.json"
    command = ["step_torchrec.py", "--device", "cpu", "--quick", "--seconds", "250", "--json", str(file), *arguments]
    monkeypatch.setattr(sys, "argv", command)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"):  # which it sets for its ranks
        monkeypatch.setenv(name, str(tmp_path) if name.endswith("DIR") else "1")
    warm()
    with pytest.raises(SystemExit) as ended:
        step_torchrec.main()
    return ended.value.code, json.loads(file.read_text())


@pytest.mark.thorough
def test_a_tiny_run(tmp_path, monkeypatch, capsys):
    variants = ("dense", "sparsedist", "balance")
    code, found = _run(monkeypatch, tmp_path, "--sizes", "lognormal", "--no-check", "--variants", *variants)
    assert code == 0 and found["failed"] == {}, capsys.readouterr()
    (size,) = found["sizes"]
    rows = {r["variant"]: r for r in size["rows"]}
    assert tuple(rows) == variants and all(r["ms"] > 0 and r["peak_bytes"] is None for r in rows.values())
    assert size["slowest_rank_ms"] >= size["mean_rank_ms"] > 0
    assert {"exposed", "straggler", "host_bound"} < set(rows["balance"]["meter_ms"])
    assert found["times_sparsedist_worst"] == rows["sparsedist"]["ms"] / rows["balance"]["ms"]


@pytest.mark.slow
def test_every_variant_trains_the_same(tmp_path, monkeypatch, capsys):
    variants = [v for v in step_torchrec_rank.VARIANTS if not v.endswith("-c10d")]  # on the CPU, that is `auto`
    code, found = _run(monkeypatch, tmp_path, "--sizes", "45ms", "--variants", *variants)
    assert code == 0, capsys.readouterr()
    without_cuda = {"2 ranks, gloo, pec"}
    assert set(found["failed"]) == without_cuda
    names = [v for v in variants if v not in ("pec", "balance")]
    assert [r["variant"] for r in found["sizes"][0]["rows"]] == names
    assert set(found["checked"]) == {*names, "balance"} - {"dense"}
    assert 0 < found["max_abs_diff"] == max(found["checked"].values()) < 5e-6


def test_a_variant_that_fails_does_not_lose_the_others(monkeypatch, capsys):
    said = []

    def run(self):
        said.append(([s.name for s in self.task.sizes], list(self.task.variants)))
        if len(said) == 1:
            self.sizes, self.failed_at, self.failure = [{"size": "8ms"}], "plain", "rank 1: no"
        else:
            self.sizes = [{"size": s.name} for s in self.task.sizes]

    monkeypatch.setattr(step_torchrec.Ranks, "run", run)
    args = SimpleNamespace(
        device="cpu", variants=["dense", "plain", "eager"], sizes=["8ms", "45ms"], codegen="eager", quick=True, rounds=0
    )
    found = step_torchrec.measure(2, "gloo", args, 1e12, check=False)
    assert said == [(["8ms", "45ms"], ["dense", "plain", "eager"]), (["45ms"], ["dense", "eager"])]
    assert [s["size"] for s in found["sizes"]] == ["8ms", "45ms"] and found["failed"] == {"plain": "rank 1: no"}


def _size(name: str, link: str, ranks: int = 2, cap: int = 0, **ms: float) -> dict:
    rows = [{"variant": v, "ms": t, "peak_bytes": 10 * t if v != "dense" else None} for v, t in ms.items()]
    return {"size": name, "link": link, "ranks": ranks, "cap": cap, "rows": rows, "slowest_rank_ms": 70.0, "mean_rank_ms": 50.0}


def test_headlines():
    found = step_torchrec.headlines(
        [
            _size("45ms", "slow", dense=50, sparsedist=120, default=60, no_overlap=70),
            _size("45ms", "fast", dense=45, sparsedist=60, default=48),
            _size("lognormal", "fast", cap=99, dense=71, sparsedist=104, default=72, balance=52),
            _size("lognormal", "fast", ranks=4, cap=99, dense=70, sparsedist=80, balance=60),
        ],
        {"default": 1e-7, "no-overlap": 3e-7},
    )
    measured = {k: v for k, v in found.items() if v is not None}
    assert measured == {
        "times_sparsedist_slow_45ms": 2.0,
        "times_sparsedist_fast_45ms": 60 / 48,
        "times_sparsedist_fast_lognormal": 2.0,  # with balance
        "times_sparsedist_fast_lognormal_4_ranks": 80 / 60,
        "times_sparsedist_worst": 60 / 48,
        "step_over_limit_slow_45ms": 60 / 50,
        "step_over_limit_fast_45ms": 48 / 45,
        "step_over_limit_fast_lognormal": 52 / (71 - 70 + 50),
        "step_over_limit_fast_lognormal_4_ranks": 60 / (70 - 70 + 50),
        "memory_over_sparsedist_worst": 48 / 60,
        "max_abs_diff": 3e-7,
    }
    assert found["times_sparsedist_fast_8ms"] is None


def test_turns_count_the_same_batches():
    turn = step_torchrec_model.turn_of
    numbered = [SimpleNamespace(fresh=lambda n=n: n) for n in range(5)]
    assert list(turn(numbered, 2, 5, 1)) == [3, 4, 0, 1, 2, 3, 4, 0]
    assert list(turn(numbered, 6, 2, 0)) == [4, 0, 1, 2, 3, 4, 0, 1]


def test_links_and_ranks_that_cannot_be(monkeypatch, capsys):
    args = SimpleNamespace(device="cuda", nccl="/lib/nccl.so", ranks=[2])
    slow, fast = (step_torchrec.environment(1, 2, args, link) for link in ("slow", "fast"))
    assert slow["NCCL_HOSTID"] == "rank1" and "LD_PRELOAD" not in slow
    assert fast["LD_PRELOAD"].startswith("/lib/nccl.so") and "NCCL_HOSTID" not in fast
    assert not torch.cuda.is_available() or "GiB" in step_torchrec.why_no_gpu(SimpleNamespace(ranks=[10_000]))
    monkeypatch.setattr(sys, "argv", ["step_torchrec.py", "--device", "cpu", "--variants", "sparse"])
    with pytest.raises(SystemExit):
        step_torchrec.arguments()
    assert "sparse is none of dense, eager" in capsys.readouterr().err
