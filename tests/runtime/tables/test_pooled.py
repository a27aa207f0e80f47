"""Pooled and sequence features in one graph, sharded in every way: the training of eager TorchRec."""

from __future__ import annotations

import os
from collections import Counter
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import pooled
import trec
from listening import listen
from ranks import HAS_TORCHREC, run_ranks
from shared_ranks import Outcomes, run_together

pytestmark = [
    pytest.mark.skipif(not HAS_TORCHREC, reason="torchrec or fbgemm_gpu is not installed"),
    pytest.mark.timeout(900),
]

STEPS = 20


@lru_cache(maxsize=1)
def _compiled() -> tuple[Any, Any, Any]:
    """Of this rank: a model, the same compiled, and its beginning."""
    model = pooled.build()
    options = {"codegen": os.environ.get("FREESCALE_CODEGEN", "eager"), "strict": True}
    run = torch.compile(model, backend="freescale", fullgraph=True, options=options)
    return model, run, (trec.snapshot(model), trec.optimizer_state(model))


def _trained(ahead: bool, steps: int = STEPS, **loader: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and every row and state at the end, of a model that begins anew."""
    import freescale

    model, run, beginning = _compiled()
    trec.put_back(model, *beginning)
    data: Any = [pooled.batch_of(step) for step in range(steps)]
    losses = pooled.train(model, run, freescale.LookaheadLoader(data, run, **loader) if ahead else data)
    return losses, {**trec.snapshot(model), **trec.optimizer_state(model)}


def _against_eager() -> tuple[float, bool, Counter]:
    """Largest difference to eager TorchRec; whether look-ahead keeps every bit; graphs."""
    from freescale.driver import REPORT

    eager = pooled.build()
    losses = pooled.train(eager, eager, [pooled.batch_of(step) for step in range(STEPS)])
    expected = losses, {**trec.snapshot(eager), **trec.optimizer_state(eager)}
    assert losses[0] != losses[-1]
    plain = _trained(False)
    graphs = Counter(REPORT.graphs) + Counter(REPORT.from_cache)  # another rank may have compiled them
    ahead = _trained(True)
    return trec.difference(plain, expected), trec.same_bits(plain, ahead), graphs


@pytest.mark.thorough
def test_equals_eager_torchrec(checked):
    for difference, same, graphs in checked.of("against eager"):
        assert difference <= 1e-6 and same
        assert graphs == {"forward": 1, "backward": 1}


@pytest.mark.slow
def test_generated_code():
    env = {"FREESCALE_CODEGEN": "inductor"}
    for difference, same, _ in run_ranks(_against_eager, 2, timeout=800, env=env):
        assert difference <= 1e-6 and same


@pytest.mark.slow
def test_equals_eager_torchrec_on_four_ranks():
    for difference, same, _ in run_ranks(_against_eager, 4, timeout=800):
        assert difference <= 1e-6 and same


def _balanced() -> float:
    """Samples change ranks, with their weights."""
    plain = _trained(False, 6)
    balanced = _trained(True, 6, balance=True)
    totals = torch.tensor([plain[0], balanced[0]])  # a loss is a sum over samples
    dist.all_reduce(totals)
    return trec.difference((totals[1].tolist(), balanced[1]), (totals[0].tolist(), plain[1]))


@pytest.mark.thorough
def test_balance(checked):
    assert max(checked.of("balance")) <= 2e-6


def _checkpoint() -> float:
    """Three steps compiled, then three eager from their checkpoint, against six without a stop."""
    model, _, _ = _compiled()
    whole = pooled.build()
    for _ in range(2):
        pooled.train(whole, whole, [pooled.batch_of(step) for step in range(3)])
    _trained(True, 3)
    second = pooled.build()
    assert list(second.state_dict()) == list(model.state_dict())
    second.load_state_dict(model.state_dict())
    second.fused_optimizer.load_state_dict(model.fused_optimizer.state_dict())
    pooled.train(second, second, [pooled.batch_of(step) for step in range(3)])
    found, expected = ({**trec.snapshot(m), **trec.optimizer_state(m)} for m in (second, whole))
    return trec.difference(([1.0], found), ([1.0], expected))


@pytest.mark.thorough
def test_checkpoints_are_torchrec_s(checked):
    assert max(checked.of("checkpoint")) <= 1e-6


def _missing_weight(ahead: bool) -> str:
    """One rank has a weight too few."""
    from torchrec import KeyedJaggedTensor

    import freescale

    _, run, _ = _compiled()
    features, weighted, label = pooled.batch_of(1)
    if dist.get_rank() == 1:
        ids, lengths = weighted.values(), weighted.lengths()
        weighted = KeyedJaggedTensor(weighted.keys(), ids, torch.rand(ids.shape[0] - 1), lengths)
    batch = features, weighted, label
    with pytest.raises((ValueError, RuntimeError)) as caught:
        for b in freescale.LookaheadLoader([batch], run) if ahead else [batch]:
            run(b)
    return f"{caught.value}"


@pytest.mark.thorough
@pytest.mark.parametrize("ahead", (False, True), ids=("plain", "ahead"))
def test_weights_of_another_length_are_an_error_on_every_rank(ahead, checked):
    for error in checked.of(f"weights, ahead: {ahead}"):
        assert "rank 1" in error or "batch 0" in error
        assert "weights for" in error and "ids of the features" in error


def _bad_id() -> str:
    _, run, _ = _compiled()
    batch = pooled.batch_of(1)
    if dist.get_rank() == 1:
        batch[1].values()[0] = 4711
    with pytest.raises(IndexError) as caught:
        run(batch)
    return str(caught.value)


@pytest.mark.thorough
def test_an_id_outside_its_table_is_an_error_on_every_rank(checked):
    for error in checked.of("id"):
        assert "rank 1: id 4711 is outside table 'liked' (feature 'liked')" in error


def _floats_received(train: Any) -> int:
    """Bytes that TorchRec's collectives bring while `train` runs, what stays on the rank included."""
    received = []

    def counting(name: str, counted: int) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = args[counted] if len(args) > counted else kwargs[("output", "input")[counted]]
            received.append(tensor.nbytes if tensor.is_floating_point() else 0)
            return original(*args, **kwargs)

        return mock.patch.object(dist, name, call)

    # A reduce-scatter brings a partial sum from every rank: as much as it takes in.
    with counting("all_to_all_single", 0), counting("reduce_scatter_tensor", 1), counting("all_gather_into_tensor", 0):
        train()
    return sum(received)


def _bytes() -> tuple[int, int, int, int]:
    """Of eager TorchRec; of ours, all and urgent; of our pooled rows less what their sums would be."""
    import freescale

    data = [pooled.batch_of(step, samples=64) for step in range(4)]
    eager = pooled.build()
    theirs = _floats_received(lambda: pooled.train(eager, eager, data))
    model, run, beginning = _compiled()
    trec.put_back(model, *beginning)
    loader = freescale.LookaheadLoader(data, run)
    pooled.train(model, run, loader)
    stats = loader.stats()
    urgent = sum(s["bytes_urgent"] + s["bytes_back_urgent"] for s in stats)
    more = sum(s["bytes_urgent"] + s["bytes_early"] - s["bytes_if_pooled"] for s in stats if "bytes_if_pooled" in s)
    return theirs, urgent + sum(s["bytes_early"] + s["bytes_late"] for s in stats), urgent, more


@pytest.mark.thorough
def test_bags_that_share_rows_send_less_than_eager_torchrec(checked):
    for theirs, ours, urgent, more in checked.of("bytes"):
        assert 0 < urgent <= ours < theirs and more < 0, (theirs, ours, urgent, more)


def test_rows_that_are_more_than_their_sums_are_said_once(caplog):
    from torchrec import KeyedJaggedTensor

    from freescale.runtime.tables.fbgemm import FbgemmBags, PooledBytes

    kjt = KeyedJaggedTensor(["f", "g"], torch.arange(20), lengths=torch.full((4,), 5))
    table = FbgemmBags(None, [], 8, torch.device("cpu"), 2, [])
    exchange = SimpleNamespace(name="bags", table=table, features=["f", "g"], anchor=torch.empty(0, 8))
    plan = SimpleNamespace(stats={"bytes_urgent": 320, "bytes_early": 320})
    counted = PooledBytes()
    for _ in range(50):
        assert counted.count(exchange, plan, {"ids": kjt}) == {"bytes_if_pooled": 4 * 32}
    (said,) = (r.getMessage() for r in caplog.records if r.name.startswith("freescale"))
    assert "rows of bags are 5.0 times the bytes of its pooled sums" in said


class OneCollection(torch.nn.Module):
    def __init__(self, pooling: dict[str, str]) -> None:
        super().__init__()
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
        from torchrec.modules.embedding_configs import PoolingType

        self.bags = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=n, num_embeddings=20, embedding_dim=8, feature_names=[n], pooling=PoolingType[p]
                )
                for n, p in pooling.items()
            ]
        )

    def forward(self, features: Any) -> torch.Tensor:
        return self.bags(features).values()


def _other_shardings(pooling: dict[str, str], kinds: dict[str, str]) -> tuple[float, bool]:
    """Largest difference to eager TorchRec; whether look-ahead keeps every bit."""
    from torchrec import KeyedJaggedTensor

    import freescale

    data, results = [], []
    for step in range(8):
        g = torch.Generator().manual_seed(10 * step + dist.get_rank())
        lengths = torch.randint(0, 5, (4 * len(pooling),), generator=g)
        ids = torch.randint(0, 20, (int(lengths.sum()),), generator=g)
        data.append(KeyedJaggedTensor(keys=list(pooling), values=ids, lengths=lengths))
    for how in ("eager", "plain", "ahead"):
        torch.manual_seed(0)
        model = trec.shard(OneCollection(pooling), kinds, "rowwise_adagrad")
        if how != "eager":
            model.compile(backend="freescale", fullgraph=True, options={"codegen": "eager", "strict": True})
        losses = []
        for batch in freescale.LookaheadLoader(data, model) if how == "ahead" else data:
            loss = model(batch).tanh().square().sum()
            loss.backward()
            losses.append(float(loss.detach()))
        results.append((losses, {**trec.snapshot(model), **trec.optimizer_state(model)}))
    eager, plain, ahead = results
    return trec.difference(plain, eager), trec.same_bits(plain, ahead)


def test_sums_beside_means():
    pooling, kinds = {"a": "SUM", "b": "MEAN"}, {"a": "row_wise", "b": "table_wise"}
    for difference, same in run_ranks(_other_shardings, 2, pooling, kinds):
        assert difference <= 1e-6 and same


@pytest.mark.slow
@pytest.mark.parametrize("pooling, kinds", (
    ({"a": "SUM", "b": "MEAN"}, dict.fromkeys("ab", "table_row_wise")),
    ({"a": "SUM", "b": "MEAN", "c": "SUM"}, {"a": "grid_shard", "b": "table_column_wise", "c": "column_wise"}),
), ids=("rows on a host", "grid"))  # fmt: skip
def test_other_shardings_on_two_hosts_of_two_ranks(pooling, kinds):
    for difference, same in run_ranks(_other_shardings, 4, pooling, kinds, env={"LOCAL_WORLD_SIZE": "2"}, timeout=500):
        assert difference <= 1e-6 and same


def _left_to_torchrec(pooling: dict[str, str], kinds: dict[str, str]) -> tuple[bool, str]:
    """Whether what comes out is TorchRec's own, and why it is."""
    from torchrec import KeyedJaggedTensor

    from freescale.runtime.tables import torchrec_support

    torch._dynamo.reset()
    torchrec_support._warn_once.cache_clear()
    said = listen("freescale.runtime.tables.torchrec_support")
    model = trec.shard(OneCollection(pooling), kinds, "sgd")
    lengths = torch.tensor([2, 0, 3] * len(pooling))
    ids = torch.randint(0, 20, (int(lengths.sum()),))
    features = KeyedJaggedTensor(keys=list(pooling), values=ids, lengths=lengths)
    expected = model(features)
    found = torch.compile(model, backend="freescale", options={"codegen": "eager", "strict": False})(features)
    return torch.equal(found, expected), said[-1]


def _means_that_are_none() -> list[tuple[bool, str]]:
    both = {"some": "MEAN", "other": "SUM"}
    return [
        _left_to_torchrec(both, {"some": "row_wise", "other": "table_wise"}),
        _left_to_torchrec({"some": "MEAN"}, {"some": "grid_shard"}),
    ]


def test_means_that_are_none_in_torchrec_are_left_to_it():
    ((beside, by_parts),) = run_ranks(_means_that_are_none, 1)
    assert beside[0] and "'some' is row_wise and mean-pooled" in beside[1] and "'other'" in beside[1]
    assert by_parts[0] and "'some' is grid_shard and mean-pooled" in by_parts[1]


CHECKS = {
    "against eager": _against_eager,
    "balance": _balanced,
    "bytes": _bytes,
    "checkpoint": _checkpoint,
    "weights, ahead: True": partial(_missing_weight, True),
    "weights, ahead: False": partial(_missing_weight, False),
    "id": _bad_id,
}


@pytest.fixture(scope="module")
def checked() -> Outcomes:
    return run_together(CHECKS, 2, timeout=500)
