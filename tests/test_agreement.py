"""Ranks that would run different programs: a sentence on every rank, no hang."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from ranks import run_ranks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        import freescale

        self.table = freescale.ShardedEmbedding(32, 4)

    def forward(self, ids):
        return self.table(ids).sum()


def _step(options=None, late=0):
    import time

    if dist.get_rank() == 1:
        time.sleep(late)
    model = torch.compile(Model(), backend="freescale", fullgraph=True, options=options or {"codegen": "eager"})
    return float(model(torch.tensor([1, 2, 31])).detach())


def test_same_flags_run():
    a, b = run_ranks(_step, 2, env={"FREESCALE_CODEGEN": "eager"})
    assert a == b


def test_different_flags_raise_on_every_rank():
    for error in run_ranks(_step, 2, env_of={1: {"FREESCALE_PASSES": "none"}}, expect_errors=True):
        assert "ranks disagree: FREESCALE_PASSES is 'all' on rank 0 and 'none' on rank 1" in error


def test_a_bad_flag_on_one_rank_raises_on_every_rank():
    for env in ({"FREESCALE_CODEGEN": "fast"}, {"FREESCALE_PASES": "none"}):
        first, second = run_ranks(_step, 2, env_of={1: env}, expect_errors=True)
        name = next(iter(env))
        assert "rank 1 failed before the first step" in first and name in first
        assert name in second and "ConfigError" in second


def test_a_rank_that_does_not_come_is_named():
    results = run_ranks(_step, 2, None, 8, env={"FREESCALE_TIMEOUT": "2"}, expect_errors=True)
    assert "rank 1 did not reach the first compiled step" in results[0]
