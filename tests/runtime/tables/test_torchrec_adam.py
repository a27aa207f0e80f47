"""Adam on TorchRec's tables, pooled and not, sharded in every way: as plain torch does it on whole tables.

FBGEMM has no Adam on the CPU to compare with; its modules are made all the same (adam_on_cpu.py).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

import adam_on_cpu
import pooled
import trec
from ranks import HAS_TORCHREC, run_ranks

pytestmark = [
    pytest.mark.skipif(not HAS_TORCHREC, reason="torchrec or fbgemm_gpu is not installed"),
    pytest.mark.timeout(900),
]

STEPS = 20
EPS = 1e-6  # that TorchRec adds to divisors
ADAM = {"eps": 1e-3, "beta1": 0.8, "beta2": 0.95}


def _build(optimizer: str, weight_decay: float) -> Any:
    adam_on_cpu.allow()
    return pooled.build(optimizer, **ADAM, weight_decay=weight_decay)


def _batch_of_rank(step: int, rank: int) -> Any:
    from unittest import mock

    with mock.patch.object(dist, "get_rank", lambda: rank):
        return pooled.batch_of(step)


def _looked_up(batch: Any) -> dict[str, list[torch.Tensor]]:
    """The ids of each table."""
    features, weighted, _ = batch
    feature_tables = [*pooled.POOLED.items(), ("viewed", "city"), *pooled.WEIGHTED.items(), *pooled.SEQUENCES.items()]
    parts = {**features.to_dict(), **weighted.to_dict()}
    found: dict[str, list[torch.Tensor]] = {}
    for feature, table in feature_tables:
        found.setdefault(table, []).append(parts[feature].values())
    return found


class _WeightedBags(torch.nn.Module):
    """What TorchRec computes of row-wise tables; torch has no weighted means."""

    def __init__(self, bags: Any) -> None:
        super().__init__()
        self.embedding_bags, self.configs = bags.embedding_bags, bags.embedding_bag_configs()

    def forward(self, features: Any) -> Any:
        from torchrec import KeyedTensor

        parts, found = features.to_dict(), []
        for config in self.configs:
            (feature,) = config.feature_names
            bag, part = self.embedding_bags[config.name], parts[feature]
            rows = bag.weight[part.values()] * part.weights()[:, None]
            lengths = part.lengths()
            of_bag, zeros = torch.repeat_interleave(lengths), rows.new_zeros(lengths.shape[0], rows.shape[1])
            weights = zeros[:, 0].index_add(0, of_bag, part.weights())
            divisor = (weights if config.pooling.value == "MEAN" else 1.0 + zeros[:, 0]) + EPS
            found.append(zeros.index_add(0, of_bag, rows) / divisor[:, None])
        names = [f for c in self.configs for f in c.feature_names]
        return KeyedTensor(names, [t.shape[1] for t in found], torch.cat(found, 1))


class _Rows(torch.nn.Module):
    """Of the tables of an EmbeddingCollection, which would turn them into float32."""

    def __init__(self, collection: Any) -> None:
        super().__init__()
        self.embeddings = collection.embeddings

    def forward(self, features: Any) -> dict[str, Any]:
        from torchrec import JaggedTensor

        parts = features.to_dict()
        return {
            name: JaggedTensor(table.weight[parts[name].values()], lengths=parts[name].lengths())
            for name, table in self.embeddings.items()
        }


def _adam(weight, grad, seen, state, step, lr, weight_decay, columns, row_wise):
    """One step of the rows that were looked up. Row-wise: of each shard's columns by themselves."""
    beta1, beta2 = ADAM["beta1"], ADAM["beta2"]
    square = grad.square()
    if row_wise:
        square = torch.cat([p.mean(1, keepdim=True).expand_as(p) for p in square.split(columns, 1)], 1)
    mean = beta1 * state[0] + (1 - beta1) * grad
    squares = beta2 * state[1] + (1 - beta2) * square
    direction = mean / (1 - beta1**step) / ((squares / (1 - beta2**step)).sqrt() + ADAM["eps"])
    new = weight - lr * (direction + weight_decay * weight)
    for old, now in ((weight, new), (state[0], mean), (state[1], squares)):
        old[seen] = now[seen]


def _reference(
    beginning: dict[str, torch.Tensor], optimizer: str, weight_decay: float, steps: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same training in one process, unsharded and in float64: this rank's losses, and whole tables."""
    torch.manual_seed(0)
    model = pooled.Model().double()
    model.weighted = _WeightedBags(model.weighted)
    model.sequences, model.tags = _Rows(model.sequences), _Rows(model.tags)
    tables = {n.split(".")[-2]: p for n, p in model.named_parameters() if n.split(".")[-2] in pooled.ROWS}
    dense = [p for p in model.parameters() if all(p is not t for t in tables.values())]
    states = {name: (torch.zeros_like(t), torch.zeros_like(t)) for name, t in tables.items()}
    for name, table in tables.items():
        table.data.copy_(beginning[name])
    world, rank, losses = dist.get_world_size(), dist.get_rank(), []
    for step in range(steps):
        model.zero_grad()
        seen = {name: torch.zeros(t.shape[0], dtype=torch.bool) for name, t in tables.items()}
        for r in range(world):
            batch = _batch_of_rank(step, r)
            features, weighted, label = batch
            wide = type(weighted)(weighted.keys(), weighted.values(), weighted.weights().double(), weighted.lengths())
            loss = model((features, wide, label.double()))
            loss.backward()
            if r == rank:
                losses.append(float(loss.detach()))
            for name, ids in _looked_up(batch).items():
                seen[name][torch.cat(ids)] = True
        with torch.no_grad():
            for p in dense:
                p -= 0.05 * p.grad
            for name, table in tables.items():
                columns = 4 if pooled.KINDS[name] == "column_wise" else table.shape[1]
                _adam(
                    table.data, table.grad / world, seen[name], states[name], step + 1, 0.1 / (1 + step % 7), weight_decay,
                    columns, optimizer == "partial_rowwise_adam"
                )  # fmt: skip
    return losses, {name: t.detach() for name, t in tables.items()}


def _tables(model: Any) -> dict[str, torch.Tensor]:
    """Whole tables, of this rank's shards: rows and columns that others hold are not a number."""
    found = {}
    for name, value in model.state_dict().items():
        table = name.split(".")[-2]
        if table in pooled.ROWS:
            whole = torch.full(tuple(value.size()), float("nan"))
            for shard in value.local_shards():
                (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                whole[row : row + rows, column : column + columns] = shard.tensor
            found[table] = whole
    return found


def _whole_tables(model: Any) -> dict[str, torch.Tensor]:
    """Of all ranks' shards."""
    found = {}
    for name, mine in _tables(model).items():
        found[name] = mine.nan_to_num(0.0)
        dist.all_reduce(found[name])
    return found


def _trained(model: Any, run: Any, ahead: bool, steps: range) -> list[float]:
    import freescale

    data: Any = [pooled.batch_of(step) for step in steps]
    return pooled.train(model, run, freescale.LookaheadLoader(data, run) if ahead else data, steps.start)


def _state(model: Any) -> dict[str, torch.Tensor]:
    return {**trec.snapshot(model), **trec.optimizer_state(model)}


def _equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(v, b[k]) for k, v in a.items())


def _difference(model: Any, found: list[float], expected: tuple[list[float], dict[str, torch.Tensor]]) -> float:
    """The largest, of a loss or of a table, each relative to the largest number of its kind."""
    losses, tables = expected
    worst = max(abs(a - b) for a, b in zip(found, losses, strict=True)) / max(map(abs, losses))
    of_all = _tables(model)
    assert of_all.keys() == pooled.ROWS.keys()
    for name, table in of_all.items():
        mine = ~table.isnan()
        if mine.any():
            worst = max(worst, float((table[mine] - tables[name][mine]).abs().max() / tables[name].abs().max()))
    return worst


def _check(optimizer: str, weight_decay: float) -> dict[str, Any]:
    from freescale.driver import REPORT

    model, half = _build(optimizer, weight_decay), STEPS // 2
    options = {"codegen": "eager", "strict": True}
    run = torch.compile(model, backend="freescale", fullgraph=True, options=options)
    beginning = trec.snapshot(model), trec.optimizer_state(model)
    expected = _reference(_whole_tables(model), optimizer, weight_decay, STEPS)
    losses = _trained(model, run, False, range(STEPS))
    graphs = Counter(REPORT.graphs) + Counter(REPORT.from_cache)  # another rank may have compiled them
    plain, difference = _state(model), _difference(model, losses, expected)
    trec.put_back(model, *beginning)
    trec.set_optimizer_step(model, 0)
    ahead = _trained(model, run, True, range(half))
    middle = trec.snapshot(model), trec.optimizer_state(model)
    second = _build(optimizer, weight_decay)  # what TorchRec itself makes of the checkpoint
    second.load_state_dict(model.state_dict())
    second.fused_optimizer.load_state_dict(model.fused_optimizer.state_dict())
    loads = _equal(_state(second), _state(model)) and any("exp_avg_sq" in name for name in middle[1])
    ahead += _trained(model, run, True, range(half, STEPS))
    same = ahead == losses and _equal(_state(model), plain)
    trec.put_back(model, *middle)
    trec.set_optimizer_step(model, half)
    restarted = _trained(model, run, True, range(half, STEPS)) == losses[half:] and _equal(_state(model), plain)
    return {"difference": difference, "same": same, "loads": loads, "restarted": restarted, "graphs": graphs}


def _hold(outcomes: list[dict[str, Any]]) -> None:
    for found in outcomes:
        assert found["difference"] <= 1e-6
        assert found["same"] and found["loads"] and found["restarted"]
        assert found["graphs"] == {"forward": 1, "backward": 1}


class OneTable(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from torchrec import EmbeddingCollection, EmbeddingConfig

        table = EmbeddingConfig(name="tag", num_embeddings=30, embedding_dim=8, feature_names=["tag"])
        self.tags = EmbeddingCollection(tables=[table], device=torch.device("cpu"))
        self.dense = torch.nn.ParameterList([torch.linspace(0.5, 2.0, 8)])

    def forward(self, features: Any, weight: torch.Tensor) -> torch.Tensor:
        return (self.tags(features)["tag"].values() * self.dense[0]).square().sum() * weight


def _one_table(steps: int = 8) -> float:
    """The largest difference of a row with look-ahead, relative to the largest number of the table."""
    from torchrec import KeyedJaggedTensor

    import freescale

    def ids(step: int, rank: int) -> torch.Tensor:
        return torch.randint(0, 30, (9,), generator=torch.Generator().manual_seed(10 * step + rank))

    def batch(step: int) -> tuple[Any, torch.Tensor]:
        lengths = torch.tensor([4, 0, 5])
        return KeyedJaggedTensor(["tag"], ids(step, dist.get_rank()), lengths=lengths), torch.tensor(1.0)

    adam_on_cpu.allow()
    torch.manual_seed(0)
    model = trec.shard(OneTable(), {"tag": "row_wise"}, "adam", **ADAM, weight_decay=0.1)
    run = torch.compile(model, backend="freescale", fullgraph=True, options={"codegen": "eager", "strict": True})
    world, table = dist.get_world_size(), _whole_tables(model)["tag"].double()
    beginning, states = table.clone(), (torch.zeros_like(table), torch.zeros_like(table))
    trec.train_on(model, run, freescale.LookaheadLoader([batch(step) for step in range(steps)], run), lr=0.0)
    scale = torch.linspace(0.5, 2.0, 8).double()
    for step in range(steps):
        grad, seen = torch.zeros_like(table), torch.zeros(30, dtype=torch.bool)
        for looked_up in (ids(step, rank) for rank in range(world)):
            grad.index_add_(0, looked_up, 2 * table[looked_up] * scale.square() / world)
            seen[looked_up] = True
        _adam(table, grad, seen, states, step + 1, 0.1 / (1 + step % 7), 0.1, 8, False)
    found = _tables(model)["tag"]
    mine = ~found.isnan()
    assert mine.any() and not torch.equal(table, beginning)
    return float((found[mine] - table[mine]).abs().max() / table.abs().max())


def test_adam_of_one_table_as_plain_torch():
    assert max(run_ranks(_one_table, 2)) <= 1e-6


@pytest.mark.thorough
def test_adam_as_plain_torch_with_look_ahead_without_and_after_a_restart():
    _hold(run_ranks(_check, 2, "adam", 0.1, timeout=600))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "optimizer"), [(4, "adam"), (2, "partial_rowwise_adam")])
def test_on_four_ranks_and_partial_rowwise(ranks, optimizer):
    _hold(run_ranks(_check, ranks, optimizer, 0.0, timeout=800))


def _evaluate_in_between() -> tuple[list[int], list[int]]:
    """FBGEMM counts every lookup, whether it is trained or not."""
    model = _build("adam", 0.0)
    run = torch.compile(model, backend="freescale", options={"codegen": "eager"})
    counts = []
    for step in range(3):
        pooled.train(model, run, [pooled.batch_of(step)])
        with torch.no_grad():
            run(pooled.batch_of(10 + step))
        counts.append(sorted({int(emb.iter) for emb in trec.fbgemm_modules(model)}))
    host = sorted({int(emb.iter_cpu) for emb in trec.fbgemm_modules(model)})
    return counts, host


@pytest.mark.slow
def test_an_evaluation_counts_as_in_fbgemm():
    for counts, host in run_ranks(_evaluate_in_between, 2, timeout=300):
        assert counts == [[2], [4], [6]] and host == [6]
