"""join_pieces: what it leaves out, what it leaves alone, and that no bit changes."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from freescale.config import Config
from freescale.passes.graph import graph_text
from freescale.passes.join_pieces import join_pieces
from ranks import HAS_TORCHREC, run_ranks

x = torch.arange(24.0).view(6, 4)


def traced(fn):
    gm = make_fx(fn, tracing_mode="symbolic")(x, torch.zeros(2), torch.zeros(5))
    gm.graph.eliminate_dead_code()
    return gm


def pieces(x, a, b):
    n, m = a.shape[0], b.shape[0]
    return torch.split(x, [n, m - n, x.shape[0] - m])


def slices(x, a, b):
    n, m = a.shape[0], b.shape[0]
    return x[:n], x[n:m], x[m:]


@pytest.mark.parametrize("cut", (pieces, slices))
def test_joins_what_was_cut(cut):
    gm = traced(lambda x, a, b: torch.cat(cut(x * 2, a, b)) + 1)
    expected = gm(x, torch.zeros(2), torch.zeros(5))
    assert join_pieces(gm, Config()) == 1
    gm.graph.lint()
    gm.recompile()
    text = graph_text(gm.graph)
    assert not any(op in text for op in ("aten.cat", "aten.split", "aten.slice")), text
    assert torch.equal(gm(x, torch.zeros(2), torch.zeros(5)), expected)


@pytest.mark.parametrize("fn", (
    lambda x, a, b: torch.cat(pieces(x * 2, a, b)[::-1]) + 1,  # another order
    lambda x, a, b: torch.cat(pieces(x * 2, a, b)[:2]) + 1,  # not all of it
    lambda x, a, b: torch.cat(slices(x * 2, a, b)[1:]) + 1,
    lambda x, a, b: torch.cat([*slices(x * 2, a, b)[:2], (x * 2)[b.shape[0]:]]) + 1,  # of another tensor
    lambda x, a, b: torch.cat([x[::2], x[1::2]]) + 1,  # with steps
    lambda x, a, b: torch.cat([x[:3], x[2:]]) + 1,  # they overlap
    lambda x, a, b: torch.cat(torch.split(x * 2, [2, 4])[:1] * 2, 1) + 1,  # along another dimension
    lambda x, a, b: torch.cat(pieces((x * 2).t().contiguous().t(), a, b)) + 1,  # laid out in another way
    lambda x, a, b: torch.cat(pieces(x, a, b)),  # the result may be written to, the input is the caller's
    lambda x, a, b: (lambda y: (y, torch.cat(pieces(y, a, b))))(x * 2),  # two results, of which one may be written to
), ids=range(10))  # fmt: skip
def test_leaves_alone(fn):
    gm = traced(fn)
    before = graph_text(gm.graph)
    assert join_pieces(gm, Config()) == 0 and graph_text(gm.graph) == before


class Joined(torch.nn.Module):
    """All features of a collection in one tensor, as its look-up has them."""

    def __init__(self):
        super().__init__()
        from torchrec import EmbeddingCollection, EmbeddingConfig

        self.names = ["a", "b", "c"]
        configs = [
            EmbeddingConfig(name=f"of {n}", num_embeddings=20, embedding_dim=4, feature_names=[n]) for n in self.names
        ]
        self.collection = EmbeddingCollection(tables=configs, device=torch.device("cpu"))
        self.out = torch.nn.Linear(4, 1)

    def forward(self, batch):
        found = self.collection(batch)
        return self.out(torch.cat([found[n].values() for n in self.names])).square().sum()


def _losses_and_cats():
    from torchrec import KeyedJaggedTensor

    import freescale
    import trec

    def batch(seed):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(0, 5, (9,), generator=generator)
        values = torch.randint(0, 20, (int(lengths.sum()),), generator=generator)
        return KeyedJaggedTensor(keys=["a", "b", "c"], values=values, lengths=lengths)

    cats: dict[tuple[str, str], int] = {}

    def count(direction, name, graph):
        cats[direction, name] = sum(n.target is torch.ops.aten.cat.default for n in graph.nodes)

    freescale.observe(count)
    results = []
    for passes in ("all", "-join_pieces"):
        torch.manual_seed(0)
        model = trec.shard(Joined(), {f"of {n}": "row_wise" for n in "abc"}, "rowwise_adagrad")
        model.compile(backend="freescale", options={"codegen": "eager", "passes": passes})
        losses = []
        for b in freescale.LookaheadLoader([batch(i) for i in range(4)], model):
            loss = model(b)
            loss.backward()
            losses.append(loss.item())
        results.append((losses, dict(cats)))
        cats.clear()
    return results


@pytest.mark.thorough
@pytest.mark.skipif(not HAS_TORCHREC, reason="needs TorchRec")
def test_features_that_a_model_joins():
    (((losses, cats), (expected, _)),) = run_ranks(_losses_and_cats, 1)
    assert losses == expected
    for direction in ("forward", "backward"):
        assert cats[direction, "join_pieces"] == cats[direction, "split_exchanges"] - 1
