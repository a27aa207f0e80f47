"""What measures the example's attention: a broken job loses only itself, an error names its kernel, graphs keep memory."""

from __future__ import annotations

import os
import sys
import time

import pytest
import torch

from interpreted import HAS_TRITON, needs_gpu
from repo import ROOT

sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks")]
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="no triton")


def job(what: str) -> str:
    if what == "raise":
        raise ValueError("so\nand so")
    if what == "die":
        os._exit(3)
    if what == "sleep":
        time.sleep(600)
    return what + " done"


@pytest.mark.thorough
def test_a_job_that_breaks_its_process_loses_nothing_else():
    from separate_process import Failed, results

    got = dict(results(job, ["a", "raise", "b", "die", "c"]))
    why = {"raise": Failed("ValueError: so"), "die": Failed("its process ended with 3")}
    assert got == {"a": "a done", "b": "b done", "c": "c done", **why}


def test_jobs_end_in_time():
    from separate_process import results

    begun = time.monotonic()
    assert not list(results(job, ["sleep", "a"], seconds=1))
    assert time.monotonic() - begun < 60


class Kernel:
    """Stands for a kernel."""

    def __init__(self, works: bool) -> None:
        self.works = works

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, **kwargs) -> None:
        if not self.works:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nand advice")


@needs_triton
def test_a_check_names_the_kernel_that_failed(monkeypatch):
    import hstu_attention_work as work
    import hstu_kernels
    import hstu_triton

    for name, works in (("list_tiles", True), ("expand_bias", True), ("forward", False)):
        monkeypatch.setattr(hstu_kernels, name, Kernel(works))
    checked = work.Checked()
    with work.launched_by(checked), pytest.raises(RuntimeError) as raised:
        work.Inputs([20], device="cpu").works()["forward"]()
    programs = 8 * hstu_triton.TILE // hstu_triton.HALF.forward["QUERIES"]
    assert str(raised.value) == (
        f"hstu_kernels.forward, grid ({programs},): RuntimeError: CUDA error: an illegal memory access was encountered "
        "(fine before it: hstu_kernels.list_tiles, hstu_kernels.expand_bias)"
    )
    assert isinstance(hstu_kernels.forward, Kernel)  # as it was


class TestOnGpu:
    pytestmark = needs_gpu

    @pytest.mark.parametrize("part", ("forward", "backward"))
    def test_a_graph_keeps_what_its_work_needs(self, part):
        """Nothing else holds the inputs when the graph is replayed, and their memory would be other data by then."""
        import graph_timing
        import hstu_attention_work as work

        inputs = work.Inputs([300, 0, 129])
        right = inputs.works()[part]()
        right = [x.clone() for x in ((right,) if part == "forward" else right)]
        replayed = graph_timing.Replayed(inputs.works()[part], 2)
        del inputs
        torch.cuda.empty_cache()
        used = [torch.full((1 << 20,), 123456789, device="cuda") for _ in range(64)]
        for x in (replayed.last,) if part == "forward" else replayed.last:
            x.fill_(torch.nan)
        assert replayed.milliseconds() > 0
        got = (replayed.last,) if part == "forward" else replayed.last
        assert all(torch.equal(a, b) for a, b in zip(got, right, strict=True)) and len(used) == 64

    def test_launches_take_about_as_long_as_a_graph(self):
        import graph_timing
        import hstu_attention_work as work

        forward = work.Inputs([2048] * 8).works()["forward"]
        ms = graph_timing.medians({kind: kind(forward, 10) for kind in (graph_timing.Replayed, graph_timing.Launched)}, 5)
        assert 0.5 < ms[graph_timing.Launched] / ms[graph_timing.Replayed] < 2
