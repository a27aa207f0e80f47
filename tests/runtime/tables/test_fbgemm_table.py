"""FBGEMM's storage under our kernels: the same step as FBGEMM's own optimizer, and nothing that waits for the device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from device_syncs import no_device_syncs
from freescale.kernels import reference, row_kernels
from freescale.runtime.tables.fbgemm import OPTIMIZERS, FbgemmTable
from interpreted import needs_gpu

DIM, TABLES, FEATURES = 12, (40, 25, 60), [0, 0, 1, 2, 2]  # rows of each table, the table of each feature
ROWS = sum(TABLES)
LR, EPS = 0.1, 1e-3


def fbgemm_module(optimizer, **settings):
    ops = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    common = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    specs = [(rows, DIM, common.EmbeddingLocation.HOST, ops.ComputeDevice.CPU) for rows in TABLES]
    emb = ops.SplitTableBatchedEmbeddingBagsCodegen(
        specs, feature_table_map=FEATURES, optimizer=ops.OptimType(optimizer), learning_rate=LR, eps=EPS,
        pooling_mode=common.PoolingMode.NONE, **settings
    )  # fmt: skip
    emb.weights_host.data.normal_()
    if emb.momentum1_host.is_floating_point():  # SGD has a placeholder
        emb.momentum1_host.data.uniform_()
    return emb


def stand_in(optimizer, device):
    """FBGEMM's storage as it is on a GPU, for where there is no FBGEMM."""
    per_row = {"exact_sgd": 0, "exact_adagrad": DIM, "exact_row_wise_adagrad": 1}[optimizer]
    none = torch.empty(0, device=device)
    return SimpleNamespace(
        embedding_specs=[(rows, DIM) for rows in TABLES],
        feature_table_map=FEATURES,
        weights_dev=torch.randn(ROWS * DIM, device=device),
        weights_host=none,
        momentum1_dev=torch.rand(ROWS * per_row, device=device),
        momentum1_host=none,
        momentum1_uvm=none,
        momentum2_uvm=none,
        optimizer=SimpleNamespace(value=optimizer),
        optimizer_args=SimpleNamespace(eps=EPS, weight_decay=0.0, max_norm=0.0, gradient_clipping=False),
        get_learning_rate=lambda: float(torch.tensor(LR)),
    )


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


class TestOnGpu:
    pytestmark = needs_gpu

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_stand_in_for_fbgemm_s_storage(self, optimizer):
        emb = stand_in(optimizer, "cuda")
        table, (grad, rows, order, ends) = table_of(emb, "cuda"), gradients("cuda")
        weight, momentum = table.weight.clone(), table._momentum(OPTIMIZERS[optimizer])
        momentum = None if momentum is None else momentum.clone()
        table.sum_and_update(grad, rows, order, ends)  # compiles, which waits for the device
        row_kernels.update_rows_reference(weight, momentum, grad, rows, order, ends, emb.get_learning_rate(), EPS)
        assert torch.allclose(table.weight, weight, 1e-6, 2.4e-7)
        assert momentum is None or torch.allclose(emb.momentum1_dev, momentum.view(-1), 5e-7, 0)
        with no_device_syncs():
            table.sum_and_update(grad, rows, order, ends)
