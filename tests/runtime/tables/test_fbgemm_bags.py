"""FBGEMM modules that pool, with tables of several widths: their rows, and FBGEMM's own step on them."""

from __future__ import annotations

import pytest
import torch
from test_fbgemm_table import BETAS, stored

import on_gpu
from freescale.kernels import reference, row_kernels
from freescale.runtime.tables.fbgemm import ADAM, OPTIMIZERS, FbgemmBags, unsupported_reason

SPECS, FEATURES = ((40, 8), (25, 12), (60, 8), (9, 12)), [0, 0, 1, 2, 3, 3]  # rows and width; the table of each feature
LR, EPS = 0.1, 1e-3


def module(optimizer, specs=SPECS, mean=False, device="cpu", **settings):
    ops = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    common = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    where = (common.EmbeddingLocation.HOST, ops.ComputeDevice.CPU)
    if device != "cpu":
        where = (common.EmbeddingLocation.DEVICE, ops.ComputeDevice.CUDA)
    emb = ops.SplitTableBatchedEmbeddingBagsCodegen(
        [(*spec, *where) for spec in specs], device=torch.device(device),
        feature_table_map=FEATURES, optimizer=ops.OptimType(optimizer), learning_rate=LR, eps=EPS,
        pooling_mode=common.PoolingMode.MEAN if mean else common.PoolingMode.SUM, **settings
    )  # fmt: skip
    torch.manual_seed(0)
    rows, *states = stored(emb)
    rows.normal_()
    for state in states:
        state.uniform_()
    return emb


def bags_of(emb, dim, tables, device="cpu"):
    return FbgemmBags(emb, [], dim, torch.device(device), 2, tables)


def rows_of(emb, tables):
    """A copy."""
    return torch.cat([emb.split_embedding_weights()[t].detach() for t in tables])


def momentum_of(emb, tables):
    states = emb.split_optimizer_states()
    return torch.cat([states[t][0].detach() for t in tables])


@pytest.mark.parametrize("dim, tables", ((8, [0, 2]), (12, [1, 3])))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mean", (False, True), ids=("sum", "mean"))
def test_some_tables_of_a_module(dim, tables, optimizer, mean):
    emb = module(optimizer, mean=mean)
    assert unsupported_reason(emb) is None
    table, others = bags_of(emb, dim, tables), [t for t in range(4) if t not in tables]
    weight, untouched = rows_of(emb, tables), [rows_of(emb, [t]) for t in others]
    rows = torch.tensor([0, 3, SPECS[tables[0]][0] - 1, SPECS[tables[0]][0], weight.shape[0] - 1])
    assert torch.equal(table.gather(rows), weight[rows])
    grad = torch.randn(rows.shape[0], dim)
    momentum = None if optimizer == "exact_sgd" else momentum_of(emb, tables)
    table.apply_update(rows, grad)
    row_kernels.step_rows(weight, momentum, rows, grad, emb.get_learning_rate(), EPS)
    assert torch.allclose(rows_of(emb, tables), weight, 3e-7, 1.2e-7)  # one rounding
    assert momentum is None or torch.allclose(momentum_of(emb, tables), momentum, 3e-7, 0)
    assert all(torch.equal(rows_of(emb, [t]), before) for t, before in zip(others, untouched, strict=True))


def test_rows_of_one_table_alone_and_none():
    """The other tables of the width have no bags then."""
    emb = module("exact_sgd")
    table, weight = bags_of(emb, 12, [1, 3]), rows_of(emb, [1, 3])
    nothing = torch.empty(0, dtype=torch.int64)
    table.apply_update(nothing, torch.empty(0, 12))
    assert torch.equal(rows_of(emb, [1, 3]), weight)
    rows, grad = torch.tensor([30, 33]), torch.ones(2, 12)
    table.apply_update(rows, grad)
    weight[rows] -= emb.get_learning_rate()
    assert torch.allclose(rows_of(emb, [1, 3]), weight, 3e-7, 1.2e-7)


def test_tables_of_one_width_are_one_matrix():
    """As a GPU's kernel wants them; sums of duplicates are the definition's."""
    specs = [(rows, 8) for rows, _ in SPECS]
    one, two = module("exact_row_wise_adagrad", specs), module("exact_row_wise_adagrad", specs)
    a, b = (bags_of(emb, 8, [0, 1, 2, 3]) for emb in (one, two))
    assert torch.equal(a.weight, rows_of(one, range(4))) and a.weight.is_contiguous()
    grad, rows = torch.randn(5, 8), torch.tensor([0, 41, 133])
    order, ends = torch.tensor([4, 0, 1, 3, 2]), torch.tensor([2, 3, 5])
    a.sum_and_update(grad, rows, order, ends)
    b.apply_update(rows, reference.sum_rows(grad, order, ends))
    assert torch.allclose(a.weight, b.weight, 3e-7, 1.2e-7)


def test_weight_decay_is_fbgemm_s_own():
    """Also where a module's tables are updated width by width, and not in one call."""
    ops = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    decay = {"weight_decay": 0.1, "weight_decay_mode": ops.WeightDecayMode.L2}
    one, two = (module("exact_row_wise_adagrad", **decay) for _ in range(2))
    rows = torch.tensor([1, 4, 10, 2])  # one of each table
    pooled = one(rows, torch.tensor([0, 1, 1, 2, 3, 4, 4]))  # through the first feature of each
    pooled.sum().backward()
    order, ends = torch.tensor([0, 1]), torch.tensor([1, 2])
    bags_of(two, 8, [0, 2]).sum_and_update(torch.ones(2, 8), torch.tensor([1, 50]), order, ends)
    bags_of(two, 12, [1, 3]).sum_and_update(torch.ones(2, 12), torch.tensor([4, 27]), order, ends)
    assert torch.equal(one.weights_host, two.weights_host) and torch.equal(one.momentum1_host, two.momentum1_host)
    assert not torch.equal(one.weights_host, module("exact_row_wise_adagrad").weights_host)


def test_a_rank_without_rows():
    table = bags_of(None, 8, [])
    nothing = torch.empty(0, dtype=torch.int64)
    table.apply_update(nothing, torch.empty(0, 8))
    table.sum_and_update(torch.empty(0, 8), nothing, nothing, nothing)
    assert table.weight.shape == (0, 8) and table.gather(nothing).shape == (0, 8)


IDS = ([0, 3, 39], [0, 24], [1, 59], [2, 8])  # of each table


def fbgemm_update(emb, specs, grads):
    """FBGEMM's own backward: a bag of each row, through the first feature of its table."""
    device = grads[0].device
    features, bags = [FEATURES.index(t) for t in range(len(specs))], max(map(len, IDS))
    lengths = torch.zeros(len(FEATURES), bags, dtype=torch.int64)
    for feature, ids in zip(features, IDS, strict=True):
        lengths[feature, : len(ids)] = 1
    offsets = torch.nn.functional.pad(lengths.flatten().cumsum(0), (1, 0))
    pooled = emb(torch.tensor(sum(IDS, [])).to(device), offsets.to(device))
    grad = torch.zeros_like(pooled)
    for feature, ids, of_table, (_, dim) in zip(features, IDS, grads, specs, strict=True):
        first = sum(specs[t][1] for t in FEATURES[:feature])
        grad[: len(ids), first : first + dim] = of_table
    pooled.backward(grad)


class TestOnGpu:
    # FBGEMM's Adam warns that it is experimental.
    pytestmark = [*on_gpu.MARKS, pytest.mark.filterwarnings("ignore::UserWarning:fbgemm_gpu.*", "ignore:TBE B200 optimization:UserWarning")]

    @pytest.mark.parametrize("widths", ("some", "one"))
    @pytest.mark.parametrize("optimizer", (*OPTIMIZERS, *ADAM))
    @pytest.mark.parametrize("mean", (False, True), ids=("sum", "mean"))
    def test_our_step_is_fbgemm_s_own_backward(self, optimizer, mean, widths):
        """Of one width: our kernel, on all tables at once."""
        specs = SPECS if widths == "some" else [(rows, 8) for rows, _ in SPECS]
        settings = BETAS if optimizer in ADAM else {}
        ours, theirs = (module(optimizer, specs, mean, on_gpu.DEVICE, **settings) for _ in range(2))
        before = [tensor.clone() for tensor in stored(ours)]
        assert all(torch.equal(a, b) for a, b in zip(before, stored(theirs), strict=True))
        of_width = {dim: [t for t, spec in enumerate(specs) if spec[1] == dim] for _, dim in specs}
        tables = {dim: bags_of(ours, dim, tables, on_gpu.DEVICE) for dim, tables in of_width.items()}
        for _ in range(2):
            grads = [torch.randn(len(ids), dim).to(on_gpu.DEVICE) for ids, (_, dim) in zip(IDS, specs, strict=True)]
            for table in tables.values():
                table.count_lookup()
            for dim, of_tables in of_width.items():
                starts = torch.tensor([0, *(specs[t][0] for t in of_tables)]).cumsum(0).tolist()
                rows = [start + i for start, t in zip(starts, of_tables, strict=False) for i in IDS[t]]
                order = torch.arange(len(rows), device=on_gpu.DEVICE)
                summed = torch.cat([grads[t] for t in of_tables])
                tables[dim].sum_and_update(summed, torch.tensor(rows, device=on_gpu.DEVICE), order, order + 1)
            fbgemm_update(theirs, specs, grads)
        for mine, other, start in zip(stored(ours), stored(theirs), before, strict=True):
            assert (mine - other).abs().max() <= 1e-6 * other.abs().max() and not torch.equal(other, start)
