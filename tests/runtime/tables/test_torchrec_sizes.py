"""Sizes of TorchRec's features in a planned step are the plan's, which are on the host: nothing is read back for them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import trec
from ranks import run_ranks

pytest.importorskip("torchrec")


def _graphs_and_error():
    import freescale
    from freescale.passes.graph_text import graph_text

    texts = {}

    def keep(direction, name, graph):
        if name == "before":
            texts[direction] = graph_text(graph)

    model = trec.build("row_wise", "rowwise_adagrad", small=True)
    batches = [trec.batch(step, 0, samples=4) for step in range(3)]
    model.compile(backend="freescale", options={"codegen": "eager"})
    error = None
    freescale.observe(keep)
    for number, (features, weight) in enumerate(freescale.LookaheadLoader(batches, model)):
        if number == 2:
            features.lengths()[-1] += 1
        try:
            model(features, weight).backward()
        except RuntimeError as e:
            error = str(e)
            break
    return texts, error


def test_no_size_is_read_back():
    ((texts, error),) = run_ranks(_graphs_and_error, 1)
    assert "_local_scalar_dense(" not in texts["forward"] + texts["backward"]
    assert "lengths of a KeyedJaggedTensor miss its values" in error


def test_sizes_of_many_keys_are_no_longer_than_those_of_few():
    """What keys in a row have together is a difference of two sizes, and where all are joined again, one size."""
    ((texts, _),) = run_ranks(_graphs_and_error, 1)
    sizes = re.findall(r"float32\[([^,\]]*), 8\]", texts["forward"] + texts["backward"])
    assert len(sizes) > 10 and max(size.count("s") for size in sizes) <= 2


class TwoCollections(torch.nn.Module):
    """Of one KeyedJaggedTensor. The columns of the second come apart, so that no tensor is as long as its feature."""

    def __init__(self) -> None:
        super().__init__()
        from torchrec import EmbeddingCollection, EmbeddingConfig

        def table(name: str, feature: str) -> Any:
            return EmbeddingConfig(name=name, num_embeddings=9, embedding_dim=8, feature_names=[feature])

        self.one = EmbeddingCollection([table("f", "f"), table("g", "g")])
        self.two = EmbeddingCollection([table("columns", "g")])
        self.out = torch.nn.Linear(8, 1)

    def forward(self, features):
        rows = torch.cat([self.one(features)["f"].values(), self.two(features)["g"].values()])
        return (self.out(rows.tanh()) * rows).sum()


def _two_collections_of_one_kjt() -> float:
    from torchrec import KeyedJaggedTensor

    kinds = {"f": "row_wise", "g": "row_wise", "columns": "column_wise"}
    model = trec.shard(TwoCollections(), kinds, "sgd")
    ids, lengths = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([2, 1, 0, 2])
    features = KeyedJaggedTensor(keys=["f", "g"], values=ids, lengths=lengths)
    expected = float(model(features).detach())
    loss = torch.compile(model, backend="freescale", fullgraph=True)(features)
    loss.backward()
    return abs(float(loss.detach()) - expected)


def test_generated_code_of_collections_that_share_a_kjt():
    """Each reads the lengths. Were these one node of the graph, sizes of the second collection would be unknown."""
    assert max(run_ranks(_two_collections_of_one_kjt, 1)) <= 1e-5
