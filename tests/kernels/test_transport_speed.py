"""Transports are measured on every rank with the same messages; one that fails has taken for ever."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from freescale.kernels.transports import link_speed
from ranks import run_ranks


class Carries:
    """Nothing, at once; on rank 1 it may fail."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.started = fails, []

    def start(self, x, send_counts, recv_counts, n_recv, priority):
        self.started.append((x.nbytes, send_counts.tolist(), recv_counts.tolist(), n_recv))
        return x, self

    def wait(self):
        pass

    def check(self):
        if self.fails and dist.get_rank() == 1:
            raise RuntimeError("freescale: rank 0 is gone")


def _measure(nbytes):
    works, fails = Carries(), Carries(fails=True)
    found = link_speed.measure_transports({"a": works, "b": fails, "c10d": None}, nbytes, dist.group.WORLD, torch.device("cpu"))
    return found, works.started


def test_every_rank_knows_the_seconds_of_all():
    (found, sent), other = run_ranks(_measure, 2, 1 << 16)
    assert other == (found, sent)
    assert list(found) == ["a", "b", "c10d"] and all(len(seconds) == 2 for seconds in found.values())
    assert math.isinf(found["b"][1]) and not math.isinf(found["b"][0])
    assert all(0 < s < 100 for name in ("a", "c10d") for s in found[name])
    assert sent == [(1 << 16, [128, 128], [128, 128], 256)] * len(sent)


def test_an_empty_launch_and_a_huge_one_are_measured_at_a_fixed_size():
    sizes = [link_speed.size_of(n) for n in (0, 1000, 1 << 40)]
    assert sizes == [link_speed.DEFAULT_BYTES, 1000, link_speed.MAX_BYTES]
