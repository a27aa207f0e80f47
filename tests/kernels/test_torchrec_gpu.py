"""Real TorchRec on a GPU that two ranks share: KeyedJaggedTensors that are wrong or change after they were planned."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from device_syncs import no_device_syncs
from keyed_batches import CHANGES, MALFORMED, change_one_batch, change_within_keys, train_on_malformed
from ranks import HAS_TORCHREC, run_ranks
from shared_ranks import Outcomes, run_together

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not HAS_TORCHREC, reason="TorchRec is not installed"),
]
ONE_RANK_A_HOST = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}  # else TorchRec puts shards of rank 1 on cuda:1
CHECKS = {
    "within a key": partial(change_within_keys, "cuda"),
    **{name: partial(change_one_batch, change, "cuda") for name, change in CHANGES.items()},
    **{
        f"{name}, ahead: {ahead}": partial(train_on_malformed, parts, ahead, "cuda")
        for ahead in (True, False)
        for name, (parts, _) in MALFORMED.items()
    },
}


@pytest.fixture(scope="module")
def checked() -> Outcomes:
    return run_together(CHECKS, 2, backend="cpu:gloo,cuda:nccl", env=ONE_RANK_A_HOST, timeout=300, group_timeout=60)


@pytest.mark.parametrize("change", CHANGES)
def test_a_batch_that_changes_after_it_was_planned_is_an_error_on_every_rank(change, checked):
    """Of Python: the device and its context are as they were."""
    for error in checked.of(change):
        assert "rank 1: the ids or lengths of batch 1 were changed in place" in error


def test_lengths_may_change_within_a_key(checked):
    assert all(checked.of("within a key"))


@pytest.mark.parametrize("ahead", (False, True), ids=("plain", "ahead"))
@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_batch_is_an_error_on_every_rank(name, ahead, checked):
    for rank, (error, good) in enumerate(checked.of(f"{name}, ahead: {ahead}")):
        assert MALFORMED[name][1] in error and good
        assert "rank 1" in error or (ahead and rank == 1)


def _compare_lengths(lengths: list[list[int]]) -> None:
    import freescale.kernels  # noqa: F401

    ids, planned = torch.tensor([1, 2, 3], device="cuda"), torch.tensor([1, 2, 3], device="cuda")
    of_kjt = torch.tensor(lengths, device="cuda"), torch.tensor([2, 1], device="cuda")
    token, name = torch.empty(0, 3, device="cuda"), "a name as long as those of modules deep in a model are " * 4
    for _ in range(2):  # the first time compiles
        with no_device_syncs():
            torch.ops.freescale.expect_ids(token, [ids], planned, torch.tensor(7), name, *of_kjt)
        torch.cuda.synchronize()


def test_lengths_that_the_model_makes_itself_are_compared_on_the_device():
    run_ranks(_compare_lengths, 1, [[1, 1], [0, 1]])
    for wrong in ([[1, 0], [1, 1]], [[3, -1], [0, 1]]):
        (error,) = run_ranks(_compare_lengths, 1, wrong, expect_errors=True)
        assert "device-side assert" in error
