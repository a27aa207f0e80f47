"""What benchmarks/contention.py makes of NCCL's figures; the rest of it needs a GPU."""

from __future__ import annotations

import multiprocessing as mp
import sys
import time

import pytest

from repo import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
pytest.importorskip("triton")  # of its attention
import contention_nccl  # noqa: E402


def test_blocks_of_a_kernel_in_a_trace():
    kernel = lambda name, blocks: {"cat": "kernel", "name": name, "args": {"grid": [blocks, 1, 1]}}  # noqa: E731
    nccl, other = kernel("ncclDevKernel_SendRecv(ncclDevKernelArgs)", 4), kernel("elementwise", 400)
    assert contention_nccl.most_blocks([nccl, other, {"cat": "cpu_op", "name": "nccl:all_to_all"}], "nccl") == 4
    assert contention_nccl.most_blocks([other], "nccl") is None


def test_half_of_the_loss_is_the_own_kernels():
    alone, both = 1.0, 1.2  # seconds
    assert contention_nccl.own(alone / both) == pytest.approx(alone / 1.1)


def test_the_first_word_counts():
    heard, say = zip(*(mp.Pipe(duplex=False) for _ in range(2)), strict=True)
    say[1].close()  # the second rank ended: not a result
    say[0].send({"rows": []})
    assert contention_nccl.first_word(list(heard), time.monotonic() + 5) == {"rows": []}
    say[0].close()
    assert "without a word" in contention_nccl.first_word(list(heard), time.monotonic() + 5)["failed"]
    quiet, _kept = mp.Pipe(duplex=False)
    assert "not done" in contention_nccl.first_word([quiet], time.monotonic() + 0.1)["failed"]
