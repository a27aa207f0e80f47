"""How many ids a feature has in a batch, none or one among them: which graphs depend on it, with TorchRec's tables."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import trec
from ranks import HAS_TORCHREC, run_ranks

pytestmark = pytest.mark.skipif(not HAS_TORCHREC, reason="torchrec or fbgemm_gpu is not installed")
FEATURES, BATCHES = 4, 30


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

        configs = [
            EmbeddingBagConfig(name=f"t{i}", feature_names=[f"f{i}"], num_embeddings=20, embedding_dim=8)
            for i in range(FEATURES)
        ]
        self.tables = EmbeddingBagCollection(configs)

    def forward(self, kjt: Any) -> torch.Tensor:
        return self.tables(kjt).values().tanh().sum()


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from torchrec import EmbeddingCollection, EmbeddingConfig

        configs = [
            EmbeddingConfig(name=f"t{i}", feature_names=[f"f{i}"], num_embeddings=20, embedding_dim=8)
            for i in range(FEATURES)
        ]
        self.tables, self.mix = EmbeddingCollection(configs), nn.Linear(8, 8)

    def forward(self, kjt: Any) -> torch.Tensor:
        found = self.tables(kjt)
        return sum(self.mix(found[f"f{i}"].values()).tanh().sum() for i in range(FEATURES))  # type: ignore[return-value]


class InBatchNegatives(Sequences):
    """Asks for more about the sizes of rows than a graph knows for which they may be anything."""

    def forward(self, kjt: Any) -> torch.Tensor:
        rows = self.tables(kjt)["f0"].values()
        return nn.functional.cross_entropy(self.mix(rows) @ rows.T, torch.arange(rows.shape[0]), reduction="sum")


def _batches(lengths_of_features: tuple[int, ...] = (0, 0, 1, 2, 5)) -> list[Any]:
    """Of 4 samples; many features have no id or one in all of them together."""
    from torchrec import KeyedJaggedTensor

    drawn, found = random.Random(dist.get_rank()), []
    for number in range(BATCHES):
        lengths = [0] * (4 * FEATURES)
        for feature in range(FEATURES):
            for _ in range(drawn.choice(lengths_of_features)):
                lengths[4 * feature + drawn.randrange(4)] += 1
        generator = torch.Generator().manual_seed(number)
        values = torch.randint(0, 20, (sum(lengths),), generator=generator)
        keys = [f"f{i}" for i in range(FEATURES)]
        found.append(KeyedJaggedTensor(keys=keys, values=values, lengths=torch.tensor(lengths)))
    return found


def _graphs(kind: type[nn.Module], ahead: bool, *lengths: int) -> tuple[int, bool]:
    import freescale
    from freescale import backend

    torch.manual_seed(0)
    model = trec.shard(kind(), {f"t{i}": ("row_wise", "table_wise")[i % 2] for i in range(FEATURES)}, "sgd")
    start = trec.snapshot(model), trec.optimizer_state(model)
    expected, batches = [], _batches(*[lengths] if lengths else [])
    for batch in batches:
        loss = model(batch)
        loss.backward()
        expected.append(loss.detach())
    trec.put_back(model, *start)
    model.compile(backend="freescale", options={"codegen": "eager", "strict": True})
    losses = []
    for batch in freescale.LookaheadLoader(batches, model) if ahead else batches:
        loss = model(batch)
        loss.backward()
        losses.append(loss.detach())
    same = torch.allclose(torch.stack(losses), torch.stack(expected), atol=1e-5)
    return max(backend.COMPILED.values()), same


@pytest.mark.parametrize("ahead", (
    pytest.param(False, marks=pytest.mark.thorough), pytest.param(True, marks=pytest.mark.slow),
), ids=("plain", "ahead"))  # fmt: skip
def test_graphs_of_pooled_features_do_not_depend_on_their_sizes(ahead):
    """But on whether there is any id, or one, in all of the batch: that is the size of the user's own tensor."""
    for graphs, same in run_ranks(_graphs, 2, Pooled, ahead, timeout=200):
        assert graphs <= 3 and same


@pytest.mark.parametrize("ahead", (
    pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.thorough),
), ids=("plain", "ahead"))  # fmt: skip
def test_graphs_of_sequences_do_not_depend_on_which_feature_has_no_id_or_one(ahead):
    """Under a LookaheadLoader, which knows it beforehand, batches with such a feature have one more graph together."""
    for graphs, same in run_ranks(_graphs, 2, Sequences, ahead, timeout=200):
        assert graphs <= 3 + ahead and same
    for graphs, same in run_ranks(_graphs, 2, Sequences, ahead, 2, 3, 5, timeout=200):
        assert graphs == 1 and same


@pytest.mark.thorough
def test_a_model_that_asks_for_the_sizes_of_rows():
    """Of batches in which a feature may have no id or one, too. Torch itself has a graph for each of these sizes."""
    for graphs, same in run_ranks(_graphs, 1, InBatchNegatives, True, timeout=200):
        assert graphs <= 5 and same
