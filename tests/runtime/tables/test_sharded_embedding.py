"""The native table against one plain process that holds everything: same losses, same rows."""

from __future__ import annotations

from functools import lru_cache
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from freescale.kernels.planning.owners import Shard
from freescale.runtime.tables import sharded_embedding
from plain_table import CASES, STEPS, Sharded, ids_of, plain
from ranks import run_ranks


@lru_cache(maxsize=1)  # the next one resets Dynamo
def compiled(sharding, dtype, codegen, passes, built_with):
    """Of this rank: a model, the same compiled, and its beginning."""
    torch._dynamo.reset()
    model = Sharded(sharding, built_with, dtype)
    options = {"codegen": codegen, "passes": passes, "strict": True}
    run = torch.compile(model, backend="freescale", fullgraph=True, options=options)
    return model, run, {k: v.clone() for k, v in model.state_dict().items()}


def train(model, run):
    dense = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        dense.zero_grad(set_to_none=False)
        loss = run(ids_of(step, dist.get_rank()))
        loss.backward()
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        dense.step()
        losses.append(float(loss.detach()))
    return losses, model.table.weight.clone(), model.table.momentum.clone()


def train_compiled(sharding, optimizer, dtype, codegen="eager", passes="all", built_with="rowwise_adagrad"):
    """A model that is `built_with` an optimizer that keeps a state can be trained with each: graphs do not know it."""
    model, run, beginning = compiled(sharding, dtype, codegen, passes, built_with)
    model.load_state_dict(beginning)
    model.table.optimizer = optimizer
    return train(model, run)


def _all_cases(dtype):
    """In float32 each is built with its own optimizer."""
    own = dtype == torch.float32
    built_with = {optimizer: optimizer if own else "rowwise_adagrad" for _, optimizer in CASES}
    return [train_compiled(*case, dtype, built_with=built_with[case[1]])[:2] for case in CASES]


@pytest.mark.parametrize("world, dtype, tolerance", (
    (2, torch.float32, 1e-6),
    pytest.param(4, torch.float64, 1e-12, marks=pytest.mark.thorough),
    pytest.param(2, torch.float64, 1e-12, marks=pytest.mark.slow),
    pytest.param(4, torch.float32, 1e-6, marks=pytest.mark.slow),
), ids=("f32-2", "f64-4", "f64-2", "f32-4"))  # fmt: skip
def test_equals_one_plain_process(world, dtype, tolerance):
    ranks = run_ranks(_all_cases, world, dtype)
    for case, (sharding, optimizer) in enumerate(CASES):
        losses, table = plain(world, optimizer, dtype)
        got = torch.cat([r[case][1] for r in ranks])  # shards lie in rank order in both layouts
        scale = float(table.abs().max())
        assert float((got - table).abs().max()) <= tolerance * scale, (sharding, optimizer)
        for rank in range(world):
            for step in range(STEPS):
                expected = losses[step][rank]
                assert abs(ranks[rank][case][0][step] - expected) <= tolerance * max(1.0, abs(expected))


def _same_bits(cases):
    """Passes on and off, and the module without torch.compile at all: one arithmetic."""
    on, off = ([train_compiled(*case, torch.float32, passes=passes) for case in cases] for passes in ("all", "none"))
    for a, b in zip(on, off, strict=True):
        assert a[0] == b[0]
        assert torch.equal(a[1], b[1]) and torch.equal(a[2], b[2])
    # Without torch.compile the table works as well.
    model = Sharded("row_wise", "sgd", torch.float32)
    c, compiled = train(model, model), on[cases.index(("row_wise", "sgd"))]
    assert torch.allclose(c[1], compiled[1], rtol=1e-6, atol=1e-7)
    return True


def _same_bits_in_generated_code():
    """Passes on and off agree too, since the passes of this version leave the arithmetic alone."""
    a = train_compiled("row_wise", "sgd", torch.float32, "inductor", "all", "sgd")
    b = train_compiled("row_wise", "sgd", torch.float32, "inductor", "none", "sgd")
    assert a[0] == b[0] and torch.equal(a[1], b[1])
    model = Sharded("row_wise", "sgd", torch.float32)
    c = train(model, model)
    assert torch.allclose(c[1], a[1], rtol=1e-6, atol=1e-7)
    return True


def test_passes_do_not_change_a_bit():
    assert run_ranks(_same_bits, 2, [case for case in CASES if case[0] == "row_wise"]) == [True, True]


@pytest.mark.thorough
def test_passes_do_not_change_a_bit_of_any_case():
    assert run_ranks(_same_bits, 2, CASES) == [True, True]


@pytest.mark.thorough
def test_passes_do_not_change_a_bit_of_generated_code():
    assert run_ranks(_same_bits_in_generated_code, 2) == [True, True]


def _bad_arguments():
    import freescale

    for kwargs, words in (
        ({"optimizer": "lamb"}, "one of sgd, rowwise_adagrad, adagrad, adam, partial_rowwise_adam, found 'lamb'"),
        ({"weight_decay": 0.1}, "weight_decay requires adam or partial_rowwise_adam, found sgd"),
        ({"sharding": "column_wise"}, "row_wise or table_wise"),
        ({"sharding": "table_wise", "owner": 9}, "owner 9 is not a rank"),
    ):
        with pytest.raises(ValueError, match=words):
            freescale.ShardedEmbedding(8, 4, **kwargs)
    covers_half = [Shard(0, 0, 4, 0, 0)]
    with mock.patch.object(sharded_embedding, "_shards_of_all", lambda *_: covers_half):
        with pytest.raises(ValueError, match="do not cover table 'item', which has 8 rows: no shard holds row 4"):
            freescale.ShardedEmbedding(8, 4, name="item")
    return True


def test_bad_arguments_are_named():
    assert run_ranks(_bad_arguments, 1) == [True]


def test_no_process_group_is_said():
    import freescale

    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="needs a process group"):
        freescale.ShardedEmbedding(8, 4)


def _state():
    model = Sharded("row_wise", "rowwise_adagrad", torch.float32)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    other = Sharded("row_wise", "rowwise_adagrad", torch.float32)
    other.table.weight.zero_()
    other.load_state_dict(state)
    assert torch.equal(other.table.weight, model.table.weight)
    found = torch.compile(other.table, backend="freescale", options={"codegen": "eager"})(torch.tensor([3, 60]))
    assert torch.equal(found, model.table.weight[[3, 60]])  # the compiled table reads what was loaded
    return sorted(state)


def test_state_dict_holds_rows_and_optimizer_state():
    (names,) = run_ranks(_state, 1)
    assert names == ["out.bias", "out.weight", "table.momentum", "table.weight"]


def _padded() -> None:
    """Padded ids, [B, T], are refused with what to write instead: eagerly, compiled, and by the loader."""
    import freescale

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = freescale.ShardedEmbeddingCollection({"a": 9, "b": 9}, 4)

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return sum(x.sum() for x in self.tables(batch).values())

    batch = {"a": torch.arange(6), "b": torch.zeros(2, 3, dtype=torch.int64)}
    said = r"feature 'b' must be a tensor of 1 dimension, found 2. Flatten padded ids .*ids.flatten"
    model = Model()
    with pytest.raises(ValueError, match=said):
        model(batch)
    with pytest.raises(Exception, match=said):
        torch.compile(model, backend="freescale", options={"codegen": "eager"})(batch)
    model.compile(backend="freescale", options={"codegen": "eager"})
    with pytest.raises(ValueError, match=said):
        next(iter(freescale.LookaheadLoader([batch] * 3, model)))


def test_padded_ids_are_refused():
    run_ranks(_padded, 1)
