"""Training over NCCL: bit for bit what training over gloo gives.

NCCL runs its own kernels between ranks that share a GPU (ranks.py makes it take them for different hosts); they run
side by side under MPS, where there is one, and take turns otherwise.
"""

from __future__ import annotations

import sys
from functools import cache

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from repo import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from gpu_machine import mps  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
OPTIMIZERS, STEPS = ("sgd", "rowwise_adagrad"), 40
BACKENDS = ("nccl", "cpu:gloo,cuda:nccl")


@pytest.fixture(autouse=True, scope="module")
def side_by_side():
    with mps():
        yield


def _train(transports):
    """What carries CUDA tensors; losses and all state by (transport, optimizer, look-ahead); what else was opened."""
    from freescale.kernels.transports import open_transports
    from two_tables import Trainer

    torch.cuda.set_device(0)
    found = {}
    for transport in transports:
        for optimizer in OPTIMIZERS:
            trainer = Trainer(optimizer, "all", "eager", "cuda", transport)
            for look_ahead in (False, True):
                losses, state, _ = trainer.train(0.3, STEPS, look_ahead)
                found[transport, optimizer, look_ahead] = losses, {k: v.cpu() for k, v in state.items()}
            torch._dynamo.reset()
    open_transports.check()
    opened = open_transports.names()
    open_transports.close()
    carrier = dist.group.WORLD._get_backend(torch.device("cuda")).name()
    return carrier, found, opened


@cache
def over_gloo(world):
    return run_ranks(_train, world, ("c10d",), timeout=200)


@pytest.mark.parametrize("world", (2, 4))
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_bits_as_over_gloo(world, backend):
    """With and without look-ahead; with NCCL alone also over `staged`, which then needs a group of its own."""
    transports = ("c10d", "staged") if backend == "nccl" else ("c10d",)
    ranks = run_ranks(_train, world, transports, backend=backend, timeout=200, group_timeout=100)
    for (carrier, found, opened), (carrier_of_gloo, expected, _) in zip(ranks, over_gloo(world), strict=True):
        assert (carrier, carrier_of_gloo) == ("nccl", "gloo")
        assert opened == [t for t in transports if t != "c10d"]
        assert len(found) == 2 * len(OPTIMIZERS) * len(transports)
        for (transport, optimizer, look_ahead), (losses, state) in found.items():
            wanted_losses, wanted = expected["c10d", optimizer, look_ahead]
            where = (transport, optimizer, look_ahead)
            assert len(losses) == STEPS and losses == wanted_losses, where
            assert state.keys() == wanted.keys() and all(torch.equal(state[k], wanted[k]) for k in state), where


def _bad_id():
    import freescale

    table = freescale.ShardedEmbedding(16, 4, name="item", device="cuda")
    table(torch.tensor([3, 99 if dist.get_rank() == 1 else 1], device="cuda"))


def test_an_id_outside_its_table_is_an_error_on_every_rank():
    for error in run_ranks(_bad_id, 2, backend="nccl", expect_errors=True, timeout=100):
        assert "rank 1: id 99 is outside table 'item'" in error
