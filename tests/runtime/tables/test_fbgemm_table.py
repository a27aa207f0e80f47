"""FBGEMM's storage under our kernels: the same step as FBGEMM's own optimizer, and nothing that waits for the device.

On a GPU: as FBGEMM's own backward, which gets the gradients of all ranks and sums those of a row itself.
"""

from __future__ import annotations

import pytest
import torch

import on_gpu
from device_syncs import no_device_syncs
from freescale.compat import torchrec
from freescale.kernels import reference, row_kernels
from freescale.runtime.tables.fbgemm import ADAM, OPTIMIZERS, FbgemmTable

DIM, TABLES, FEATURES = 12, (40, 25, 60), [0, 0, 1, 2, 2]  # rows of each table, the table of each feature
ROWS = sum(TABLES)
LR, EPS = 0.1, 1e-3
BETAS = {"beta1": 0.8, "beta2": 0.95}  # FBGEMM's kernels round them to float32: of 1 - 0.999, four digits are left


def fbgemm_module(optimizer, device="cpu", **settings):
    ops = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    common = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    where = (common.EmbeddingLocation.HOST, ops.ComputeDevice.CPU)
    if device != "cpu":
        where = (common.EmbeddingLocation.DEVICE, ops.ComputeDevice.CUDA)
    specs = [(rows, DIM, *where) for rows in TABLES]
    emb = ops.SplitTableBatchedEmbeddingBagsCodegen(
        specs, feature_table_map=FEATURES, optimizer=ops.OptimType(optimizer), learning_rate=LR, eps=EPS,
        pooling_mode=common.PoolingMode.NONE, device=torch.device(device), **settings
    )  # fmt: skip
    rows, *states = stored(emb)
    rows.normal_()
    for state in states:
        state.uniform_()
    return emb


def stored(emb):
    """Its rows and the states of its optimizer."""
    found = [torchrec.flat_weight(emb), torchrec.flat_momentum(emb), torchrec.flat_squares(emb)]
    states = {"exact_sgd": 0, "adam": 2, "partial_row_wise_adam": 2}.get(emb.optimizer.value, 1)
    return [tensor.detach() for tensor in found[: 1 + states]]


def table_of(emb, device="cpu"):
    return FbgemmTable(emb, [], DIM, torch.device(device), world_size=2)


def gradients(device="cpu"):
    """Of rows of all tables, the first and the last of them too, some from two ranks."""
    rows = torch.tensor([0, 3, 39, 40, 64, 65, 70, ROWS - 1])
    ends = torch.tensor([2, 1, 2, 1, 1, 2, 1, 2]).cumsum(0)
    order = torch.randperm(int(ends[-1]))
    return tuple(t.to(device) for t in (torch.randn(order.shape[0], DIM), rows, order, ends))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_our_step_is_fbgemm_s(optimizer):
    emb = fbgemm_module(optimizer)
    table = table_of(emb)
    grad, rows, order, ends = gradients()
    weight, momentum = table.weight.clone(), emb.momentum1_host.detach().clone()
    momentum = None if optimizer == "exact_sgd" else momentum.view(ROWS, -1).squeeze(1)
    summed = reference.sum_rows(grad, order, ends)
    table.apply_update(rows, summed)
    lr = emb.get_learning_rate()
    if momentum is None:  # FBGEMM 1.9 rounds the product and the sum once, 1.6 each of them
        once, twice = weight.clone(), weight.clone()
        once[rows] = (weight[rows].double() - lr * summed.double()).float()
        twice[rows] -= lr * summed
        assert torch.equal(table.weight, once) or torch.equal(table.weight, twice)
        return
    row_kernels.step_rows(weight, momentum, rows, summed, lr, EPS)
    assert torch.allclose(table.weight, weight, 3e-7, 1.2e-7)  # one rounding
    assert torch.allclose(emb.momentum1_host, momentum.view(-1), 2.4e-7, 0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_pass_is_sum_and_update(optimizer):
    one, two = fbgemm_module(optimizer), fbgemm_module(optimizer)
    two.weights_host.data.copy_(one.weights_host)
    two.momentum1_host.data.copy_(one.momentum1_host)
    grad, rows, order, ends = gradients()
    table_of(one).sum_and_update(grad, rows, order, ends)
    table_of(two).apply_update(rows, reference.sum_rows(grad, order, ends))
    assert torch.allclose(one.weights_host, two.weights_host, 3e-7, 1.2e-7)
    assert torch.allclose(one.momentum1_host, two.momentum1_host, 2.4e-7, 0)
    assert not torch.equal(one.weights_host, fbgemm_module(optimizer).weights_host)


def test_weight_decay_is_fbgemm_s_own():
    one, two = (fbgemm_module("exact_row_wise_adagrad", weight_decay=0.1) for _ in range(2))
    two.weights_host.data.copy_(one.weights_host)
    two.momentum1_host.data.copy_(one.momentum1_host)
    grad, rows, order, ends = gradients()
    table_of(one).sum_and_update(grad, rows, order, ends)
    table_of(two).apply_update(rows, reference.sum_rows(grad, order, ends))
    assert torch.equal(one.weights_host, two.weights_host) and torch.equal(one.momentum1_host, two.momentum1_host)


def test_a_rank_without_rows():
    table = table_of(None)
    nothing = torch.empty(0, dtype=torch.int64)
    table.sum_and_update(torch.empty(0, DIM), nothing, nothing, nothing)
    table.apply_update(nothing, torch.empty(0, DIM))
    assert table.weight.shape == (0, DIM)


def fbgemm_update(emb, table, grad, rows, order, ends):
    """FBGEMM's own backward of a lookup of every row as often as it has gradients."""
    each = rows.repeat_interleave(torch.diff(ends, prepend=ends.new_zeros(1)))
    embeddings = emb(table._table_and_row(each)[1], torch.searchsorted(each, table._table_starts)[table._tables_before])
    embeddings.backward(grad[order].to(embeddings.dtype))


class TestOnGpu:
    """Two steps on FBGEMM's storage, as FBGEMM's CUDA kernels take them."""

    # FBGEMM's Adam warns that it is experimental, its kernels of settings for another GPU.
    pytestmark = [
        *on_gpu.MARKS,
        pytest.mark.filterwarnings("ignore::UserWarning:fbgemm_gpu.*", "ignore:TBE B200 optimization:UserWarning"),
    ]

    @pytest.mark.parametrize("optimizer, weight_decay", (
        *((optimizer, 0.0) for optimizer in (*OPTIMIZERS, *ADAM)),
        *((optimizer, 0.1) for optimizer in ("exact_row_wise_adagrad", *ADAM)),
    ))  # fmt: skip
    def test_our_step_is_fbgemm_s_own_backward(self, optimizer, weight_decay):
        settings = {"weight_decay": weight_decay, **(BETAS if optimizer in ADAM else {})}
        ours, theirs = (fbgemm_module(optimizer, on_gpu.DEVICE, **settings) for _ in range(2))
        for mine, other in zip(stored(ours), stored(theirs), strict=True):
            other.copy_(mine)
        before = [tensor.clone() for tensor in stored(ours)]
        table = table_of(ours, on_gpu.DEVICE)
        for _ in range(2):
            batch = gradients(on_gpu.DEVICE)
            table.count_lookup()
            table.sum_and_update(*batch)
            fbgemm_update(theirs, table_of(theirs, on_gpu.DEVICE), *batch)
        for mine, other, start in zip(stored(ours), stored(theirs), before, strict=True):
            assert (mine - other).abs().max() <= 1e-6 * other.abs().max() and not torch.equal(other, start)
        if not weight_decay or optimizer in ADAM:  # else FBGEMM's own
            table.count_lookup()
            with no_device_syncs():
                table.sum_and_update(*batch)

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_float16_rows_have_the_bits_of_fbgemm_s_own_backward(self, optimizer):
        """FBGEMM takes the step; whole gradients, whose sums are exact."""
        fp16 = pytest.importorskip("fbgemm_gpu.split_embedding_configs").SparseType.FP16
        settings = {"weights_precision": fp16, "stochastic_rounding": False}
        ours, theirs = (fbgemm_module(optimizer, on_gpu.DEVICE, **settings) for _ in range(2))
        for mine, other in zip(stored(ours), stored(theirs), strict=True):
            other.copy_(mine)
        before = stored(ours)[0].clone()
        grad, *plan = gradients(on_gpu.DEVICE)
        grad = (4 * grad).round() / 8
        table_of(ours, on_gpu.DEVICE).sum_and_update(grad, *plan)
        fbgemm_update(theirs, table_of(theirs, on_gpu.DEVICE), grad, *plan)
        assert all(torch.equal(mine, other) for mine, other in zip(stored(ours), stored(theirs), strict=True))
        assert stored(ours)[0].dtype == torch.float16 and not torch.equal(stored(ours)[0], before)
