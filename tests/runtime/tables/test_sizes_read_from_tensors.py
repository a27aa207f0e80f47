"""Models that read a size from a tensor of the batch: one graph where torch can, else several, with a warning that names
the line; never a model that does not compile although Inductor alone compiles it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import trec
from listening import listen
from ranks import HAS_TORCHREC, run_ranks

pytestmark = pytest.mark.skipif(not HAS_TORCHREC, reason="torchrec or fbgemm_gpu is not installed")
STEPS = 3


class Reads(nn.Module):
    def __init__(self, pooled: bool = False) -> None:
        super().__init__()
        import torchrec

        kind = "EmbeddingBag" if pooled else "Embedding"
        config = getattr(torchrec, f"{kind}Config")(
            name="item", num_embeddings=20, embedding_dim=8, feature_names=["item"]
        )
        self.tables, self.pooled = getattr(torchrec, f"{kind}Collection")(tables=[config]), pooled
        self.token = nn.Parameter(torch.ones(1, 8))

    def forward(self, kjt: Any, counts: torch.Tensor) -> torch.Tensor:
        found = self.tables(kjt)
        rows = found.values() if self.pooled else found["item"].values()
        return (rows + self.more(counts)).tanh().sum() / 4

    def more(self, counts: torch.Tensor) -> torch.Tensor:
        return self.token.expand(int(counts.sum()), 8).sum(0)


class Tiles(Reads):
    """torch's backward of `tile` asks whether there is any copy."""

    def more(self, counts: torch.Tensor) -> torch.Tensor:
        copies = int(counts.sum())
        return self.token.tile(copies, 1).sum(0)


class TilesFound(Reads):
    def more(self, counts: torch.Tensor) -> torch.Tensor:
        copies = counts.nonzero().shape[0]
        return self.token.tile(copies, 1).sum(0)


class Branches(Reads):
    def more(self, counts: torch.Tensor) -> torch.Tensor:
        return self.token if int(counts.sum()) > 4 else -self.token


class BreaksInALoop(TilesFound):
    """torch compiles nothing of a function with a graph break in a loop."""

    def more(self, counts: torch.Tensor) -> torch.Tensor:
        total = self.token.sum(0)
        for _ in range(2):
            total = total + self.token.tile(counts[counts > 0].shape[0], 1).sum(0)
        return total


class Broadcasts(Reads):
    """torch assumes that the two sizes are equal."""

    def more(self, counts: torch.Tensor) -> torch.Tensor:
        several, one = int(counts.max()), int(counts.min()) + 1
        return (self.token.expand(several, 8) * torch.ones(one, 8)).sum(0)


class LooksUpTwo(nn.Module):
    """torch assumes that both features have equally many values."""

    def __init__(self) -> None:
        super().__init__()
        from torchrec import EmbeddingCollection, EmbeddingConfig

        tables = [EmbeddingConfig(num_embeddings=50, embedding_dim=8, name=f"t_{f}", feature_names=[f]) for f in ("a", "b")]
        self.embeddings = EmbeddingCollection(device=torch.device("meta"), tables=tables)

    def forward(self, features: Any) -> torch.Tensor:
        found = self.embeddings(features)
        return (found["a"].values() * found["b"].values()).sum()


KINDS = {"one graph": Reads, "tile": Tiles, "tile found": TilesFound, "branch": Branches, "loop": BreaksInALoop}
LINES = {"loop": "does not compile more (", "tile": "copies = int(counts.sum())", "tile found": "copies = counts.nonzero()", "branch": "if int(counts.sum())"}  # in a warning


def _batches() -> list[Any]:
    from torchrec import KeyedJaggedTensor

    draw = torch.Generator().manual_seed(torch.distributed.get_rank())
    found = []
    for step in range(STEPS):
        lengths = torch.randint(1, 4, (3,), generator=draw)
        ids = torch.randint(0, 20, (int(lengths.sum()),), generator=draw)
        found.append((KeyedJaggedTensor(["item"], ids, lengths=lengths), torch.tensor([step, 0, 2])))
    return found


def _train(kind: str, ahead: bool, pooled: bool, **how: Any) -> dict[str, Any]:
    import freescale
    from freescale.compat import dynamo_settings

    torch._dynamo.reset()
    dynamo_settings.GRAPH_BREAKS.clear()
    said = listen()

    def train(compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = trec.shard(KINDS[kind](pooled), {"item": "row_wise"}, "sgd")
        batches: Any = _batches()
        if compiled:
            model.compile(backend="freescale", options={"codegen": "eager"}, **how)
            batches = freescale.LookaheadLoader(batches, model) if ahead else batches
        losses = []
        for kjt, counts in batches:
            loss = model(kjt, counts)
            loss.backward()
            losses.append(loss.detach())
        return [torch.stack(losses), *trec.snapshot(model).values()]

    worst = max(float((a - b).abs().max()) for a, b in zip(train(False), train(True), strict=True) if a.numel())
    return {"difference": worst, "breaks": freescale.report()["graph_breaks"], "said": said}


def check(kind: str, ahead: bool, pooled: bool) -> None:
    for rank, found in enumerate(run_ranks(_train, 2, kind, ahead, pooled)):
        said = found["said"]
        assert found["difference"] < 1e-6, found
        assert (found["breaks"] == 0) == (kind == "one graph"), found
        if kind == "one graph":
            assert said == []
        elif rank != 0:  # rank 0 says it for all
            assert not any("test_sizes_read" in s for s in said)
        else:
            assert any(LINES[kind] in s and "test_sizes_read" in s for s in said), said
            assert len(set(said)) == len(said)  # each once
            if "tile" in kind:
                assert any("in one graph what depends on the size that is read there" in s for s in said), said


QUICK = ("one graph", "branch")


@pytest.mark.parametrize("kind", QUICK)
def test_under_a_loader(kind):
    check(kind, ahead=True, pooled=False)


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "ahead", "pooled"), [
    pytest.param(
        kind, ahead, pooled, id=f"{kind}-{'ahead' if ahead else 'plain'}-{'pooled' if pooled else 'sequences'}",
        marks=pytest.mark.slow if ahead == pooled else [],
    )
    for kind in KINDS for ahead in (False, True) for pooled in (False, True)
    if pooled or not ahead or kind not in QUICK
])  # fmt: skip
def test_others(kind, ahead, pooled):
    check(kind, ahead, pooled)


def _refused() -> str:
    from freescale.install import DependsOnData

    with pytest.raises(DependsOnData) as caught:
        _train("tile", True, False, fullgraph=True)
    return str(caught.value)


@pytest.mark.thorough
def test_what_cannot_be_one_graph_is_an_error_that_says_what_to_do():
    for said in run_ranks(_refused, 2):
        assert "Compile the embedding collections alone" in said and "data-dependent expression Eq(u" in said, said


def _assumed(options: dict[str, Any]) -> str:
    torch._dynamo.reset()
    model = trec.shard(Broadcasts(), {"item": "row_wise"}, "sgd")
    model.compile(backend="freescale", options=options)
    with pytest.raises(RuntimeError, match="torch compiled one graph by assuming") as caught:
        model(*_batches()[0])
    return str(caught.value)


@pytest.mark.parametrize("options", (pytest.param({}, marks=pytest.mark.thorough), {"codegen": "eager"}), ids=("inductor", "eager"))
def test_an_assumption_of_torch_that_fails_names_the_lines(options):
    for said in run_ranks(_assumed, 2, options):
        assert "several, one = int(counts.max())" in said and "torch._dynamo.graph_break()" in said, said


def _assumed_of_lookup() -> str:
    from torchrec import KeyedJaggedTensor

    torch._dynamo.reset()
    model = trec.shard(LooksUpTwo(), {"t_a": "row_wise", "t_b": "row_wise"}, "sgd")
    model.compile(backend="freescale", options={"codegen": "eager"})
    with pytest.raises(RuntimeError, match="torch compiled one graph by assuming") as caught:
        for lengths in ([2, 3, 3, 2], [2, 3, 3, 4]):
            model(KeyedJaggedTensor(["a", "b"], torch.arange(sum(lengths)), lengths=torch.tensor(lengths)))
    return str(caught.value)


def test_the_line_of_a_lookup_is_the_users():
    for said in run_ranks(_assumed_of_lookup, 2):
        assert "found = self.embeddings(features)" in said and "torchrec_collection.py" not in said, said
        assert "assuming Eq(u0, u1), which" in said, said
