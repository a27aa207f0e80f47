"""Random batches against one plain process, and every kind of table in one model."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from plain_table import whole_table
from ranks import HAS_TORCHREC, run_ranks
from shared_ranks import Outcomes, run_together

ROWS = {"item": 6, "one": 1}  # few rows, so that ids alternate in and out; and a table of one row
WORLD = 2
Step = list[dict[str, list[int]]]  # per rank the ids of each table


class Model(nn.Module):
    def __init__(self, optimizer: str) -> None:
        super().__init__()
        import freescale

        self.tables = nn.ModuleDict()
        for name, rows in ROWS.items():
            torch.manual_seed(rows)
            table = freescale.ShardedEmbedding(rows, 3, name=name, optimizer=optimizer, lr=0.5, dtype=torch.float64)
            self.tables[name] = table

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum(torch.tanh(self.tables[name](batch[name])).square().sum() for name in ROWS)


def plain(optimizer: str, steps: list[Step]) -> dict[str, torch.Tensor]:
    """The tables after training, by one process that sees every rank's ids. Nothing of ours but how they begin."""
    tables, moments = {}, {}
    for name, rows in ROWS.items():
        torch.manual_seed(rows)
        whole = whole_table(rows, 3, torch.float64)
        tables[name], moments[name] = nn.Parameter(whole), torch.zeros(rows, dtype=torch.float64)
    for step in steps:
        loss = sum(
            torch.tanh(tables[name][torch.tensor(ids[name], dtype=torch.long)]).square().sum()
            for ids in step
            for name in ROWS
        )
        grads = torch.autograd.grad(loss / len(step), list(tables.values()))
        with torch.no_grad():
            for (name, table), grad in zip(tables.items(), grads, strict=True):
                scale = torch.tensor(0.5)
                if optimizer == "rowwise_adagrad":
                    moments[name] += grad.square().mean(1)
                    scale = 0.5 / (moments[name].sqrt() + 1e-8)[:, None]
                table -= torch.where(grad != 0, scale * grad, 0.0)
    return {name: t.detach() for name, t in tables.items()}


ids = st.one_of(
    st.just([]),
    st.integers(0, 5).flatmap(lambda i: st.lists(st.just(i), min_size=1, max_size=5)),  # all the same
    st.lists(st.integers(0, 5), max_size=6),
)
rank_ids = st.fixed_dictionaries({"item": ids, "one": st.lists(st.just(0), max_size=3)})
alternating = st.tuples(*[rank_ids] * 4).map(lambda r: [[r[0], r[1]], [r[2], r[3]]] * 3)
random_steps = st.lists(st.lists(rank_ids, min_size=WORLD, max_size=WORLD), min_size=1, max_size=6)


@cache
def _compiled() -> tuple[Model, Any]:
    """For both optimizers: the graphs do not know them."""
    model = Model("rowwise_adagrad")
    options = {"codegen": "eager", "strict": True}
    return model, torch.compile(model, backend="freescale", fullgraph=True, options=options)


def _no_single_ids(steps: list[Step]) -> list[Step]:
    """A lookup of one id is a graph of its own: twice the same, so that there are fewer to compile."""
    return [[{name: i * 2 if len(i) == 1 else i for name, i in mine.items()} for mine in step] for step in steps]


def _random(optimizer: str, single_ids: bool) -> int:
    """The same examples on every rank: hypothesis does not shrink here, since ranks would shrink differently."""
    import freescale
    import freescale.backend as backend

    model, compiled = _compiled()
    for table in model.tables.values():
        table.optimizer = optimizer
    start = {k: v.clone() for k, v in Model("rowwise_adagrad").state_dict().items()}
    seen = []

    @settings(max_examples=60 if single_ids else 44, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(st.one_of(random_steps, alternating))
    def check(steps: list[Step]) -> None:
        steps = steps if single_ids else _no_single_ids(steps)
        model.load_state_dict(start)
        mine = [{n: torch.tensor(s[dist.get_rank()][n], dtype=torch.long) for n in ROWS} for s in steps]
        for batch in freescale.LookaheadLoader(mine, compiled):
            compiled(batch).backward()
        expected = plain(optimizer, steps)
        for name, table in model.tables.items():
            first = dist.get_rank() * -(-ROWS[name] // WORLD)
            there = expected[name][first : first + table.weight.shape[0]]
            assert torch.allclose(table.weight, there, rtol=1e-12, atol=1e-13), (name, steps)
        seen.append(len(steps))

    check()
    # with a plan, and for the comparison without; each again where this rank looks up no id, or one, in either table
    assert max(backend.COMPILED.values()) <= 2 * (9 if single_ids else 4)
    return len(seen)


OPTIMIZERS = ("sgd", "rowwise_adagrad")


def test_random_batches_equal_one_plain_process():
    assert min(run_ranks(_random, WORLD, "rowwise_adagrad", False)) >= 40


@pytest.fixture(scope="module")
def checked() -> Outcomes:
    return run_together({optimizer: partial(_random, optimizer, True) for optimizer in OPTIMIZERS}, WORLD)


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_random_batches_with_single_ids_equal_one_plain_process(optimizer, checked):
    assert min(checked.of(optimizer)) >= 40


# ---- every kind of table at once ----------------------------------------------------------------------------------


def _everything(wrapped: bool, steps: int = 30):
    from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

    import freescale
    import trec

    class Both(nn.Module):
        """Two collections of different width and a native table."""

        def __init__(self) -> None:
            super().__init__()
            wide = [
                EmbeddingConfig(name="item", num_embeddings=50, embedding_dim=8, feature_names=["item"]),
                EmbeddingConfig(name="user", num_embeddings=20, embedding_dim=8, feature_names=["user"]),
            ]
            narrow = [EmbeddingConfig(name="tag", num_embeddings=9, embedding_dim=4, feature_names=["tag"])]
            self.wide = EmbeddingCollection(tables=wide, device=torch.device("cpu"))
            self.narrow = EmbeddingCollection(tables=narrow, device=torch.device("cpu"))
            self.extra = freescale.ShardedEmbedding(30, 4, name="extra", optimizer="rowwise_adagrad", lr=0.1)

        def forward(self, features, more):
            found = {**self.wide(features), **self.narrow(features)}
            parts = [torch.tanh(found[name].values()).square().sum() for name in ("item", "user", "tag")]
            return sum(parts) + torch.tanh(self.extra(more["extra"])).square().sum()

    def batch(step: int):
        g = torch.Generator().manual_seed(10 * step + dist.get_rank())
        lengths = torch.randint(0, 5, (3, 4), generator=g)
        sizes = (50, 20, 9)
        values = [torch.randint(0, n, (int(k.sum()),), generator=g) for n, k in zip(sizes, lengths, strict=True)]
        kjt = KeyedJaggedTensor(["item", "user", "tag"], torch.cat(values), lengths=lengths.view(-1))
        return kjt, {"extra": torch.randint(0, 30, (step % 5,), generator=g)}

    torch._dynamo.reset()
    torch.manual_seed(0)
    kinds = {"item": "row_wise", "user": "table_wise", "tag": "table_wise"}
    model = trec.shard(Both(), kinds, "rowwise_adagrad")
    run = torch.compile(model, backend="freescale", fullgraph=True, options={"codegen": "eager", "strict": True})
    data = [batch(step) for step in range(steps)]
    loader = freescale.LookaheadLoader(data, run) if wrapped else data
    losses = []
    for features, more in loader:
        loss = run(features, more)
        loss.backward()
        losses.append(float(loss.detach()))
    found = {s["exchange"].split("#")[0] for s in loader.stats()} if wrapped else set()
    return losses, trec.snapshot(model), found


def _both_ways():
    plainly, ahead = _everything(False), _everything(True)
    assert plainly[0] == ahead[0] and plainly[0][0] != plainly[0][-1]
    assert all(torch.equal(plainly[1][n], ahead[1][n]) for n in plainly[1])
    return sorted(ahead[2])


@pytest.mark.thorough
@pytest.mark.skipif(not HAS_TORCHREC, reason="torchrec or fbgemm_gpu is not installed")
def test_collections_of_different_width_and_a_native_table_at_once():
    for names in run_ranks(_both_ways, 2):
        assert len(names) == 4 and "extra" in names, names
