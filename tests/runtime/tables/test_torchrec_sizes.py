"""Sizes of TorchRec's features in a planned step are the plan's, which are on the host: nothing is read back for them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import sympy
import torch

import trec
from ranks import run_ranks

pytest.importorskip("torchrec")


def _graphs_and_error():
    import freescale
    from freescale.passes.graph import graph_text

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


@pytest.fixture(scope="module")
def graphs_and_error():
    (found,) = run_ranks(_graphs_and_error, 1)
    return found


def test_no_size_is_read_back(graphs_and_error):
    texts, error = graphs_and_error
    assert "_local_scalar_dense(" not in texts["forward"] + texts["backward"]
    assert "the ids or lengths of batch 2 were changed in place" in error


def test_sizes_of_many_keys_are_no_longer_than_those_of_few(graphs_and_error):
    """What keys in a row have together is a difference of two sizes, and where all are joined again, one size."""
    texts, _ = graphs_and_error
    sizes = re.findall(r"float32\[([^,\]]*), 8\]", texts["forward"] + texts["backward"])
    assert len(sizes) > 10 and max(size.count("s") for size in sizes) <= 2


def _caches_fakes(features):
    """Whether torch kept what ops return for fake tensors when it traced a collection of so many features."""
    import torch
    from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

    import freescale

    names = [f"feature{i}" for i in range(features)]
    configs = [EmbeddingConfig(name=f"of {n}", num_embeddings=9, embedding_dim=4, feature_names=[n]) for n in names]

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.collection = EmbeddingCollection(tables=configs, device=torch.device("cpu"))

        def forward(self, batch):
            return sum(part.values().sum() for part in self.collection(batch).values())

    torch._dynamo.config.fake_tensor_cache_enabled = True  # as it is outside the tests
    found = []
    freescale.observe(lambda direction, name, graph: found.extend(n.meta.get("val") for n in graph.nodes))
    model = trec.shard(Model(), {c.name: "row_wise" for c in configs}, "sgd")
    model.compile(backend="freescale", options={"codegen": "eager"})
    batch = KeyedJaggedTensor(
        keys=names, values=torch.arange(2 * features) % 9, lengths=torch.ones(2 * features, dtype=torch.int64)
    )
    for b in freescale.LookaheadLoader([batch], model):
        model(b)
    (mode,) = {v.fake_mode for v in found if isinstance(v, torch._subclasses.FakeTensor)}
    return mode.cache_enabled


@pytest.mark.thorough
def test_where_each_of_many_features_has_a_size_of_its_own_no_fake_is_kept():
    assert run_ranks(_caches_fakes, 1, 2) == [True]
    assert run_ranks(_caches_fakes, 1, 16) == [False]


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


@pytest.mark.thorough
def test_generated_code_of_collections_that_share_a_kjt():
    """Each reads the lengths. Were these one node of the graph, sizes of the second collection would be unknown."""
    assert max(run_ranks(_two_collections_of_one_kjt, 1)) <= 1e-6


def test_what_growing_slots_imply():
    """Sizes of slots that grow from one to the next: which relations hold for all of them, and which for some."""
    from freescale.compat.dynamo_settings import _is_implied

    a, b, c, other = sympy.symbols("a b c other", integer=True)
    slots = [a, b, c]
    for implied in (sympy.Ge(b - a, 0), sympy.Le(a, c), sympy.Ge(c + b, 2 * a), sympy.Le(b, c + a), sympy.Ge(c, -3)):
        assert _is_implied(implied, slots), implied
    for open_question in (
        sympy.Ge(a, b), sympy.Ge(c - b, 1), sympy.Gt(b, a), sympy.Eq(a, b), sympy.Ne(a, 1), sympy.Ge(2 * b, c + a),
        sympy.Le(a, other), sympy.Ge(a * b, 0), sympy.Ge(sympy.Mod(c, 2), 0),
    ):  # fmt: skip
        assert not _is_implied(open_question, slots), open_question


def _guards_of_sizes():
    import torch._dynamo.guards as guards

    import freescale

    code, build = [], guards.build_guard_function

    def keep(parts, closure_args):
        code.extend(parts)
        return build(parts, closure_args)

    guards.build_guard_function = keep
    model = trec.build("row_wise", "rowwise_adagrad", small=True)
    model.compile(backend="freescale", options={"codegen": "eager"})
    # (Of products of a few numbers Inductor's decompositions ask how many they are: these batches have more.)
    for features, weight in freescale.LookaheadLoader([trec.batch(s, 0, samples=20) for s in range(2)], model):
        model(features, weight).backward()
    return [part for part in code if part.count("slots[") > 1]


@pytest.mark.thorough
def test_guards_of_slots_ask_only_for_features_of_no_id_and_of_one():
    """Those have graphs of their own, as in torch. That slots grow is true of every batch, and never checked."""
    (guards,) = run_ranks(_guards_of_sizes, 1)
    assert guards, "a test of nothing"
    assert [g for g in guards if not g.endswith((") != 0", ") != 1"))] == []
