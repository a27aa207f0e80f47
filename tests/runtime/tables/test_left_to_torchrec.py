"""Collections that are left to TorchRec's own code: what they return is TorchRec's, and other models hear nothing of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import trec
from listening import listen
from ranks import HAS_TORCHREC, run_ranks
from shared_ranks import Outcomes, run_together

pytestmark = pytest.mark.skipif(not HAS_TORCHREC, reason="TorchRec is not installed")

OPTIONS = {"codegen": "eager"}


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

        table = EmbeddingBagConfig(name="a", num_embeddings=20, embedding_dim=8, feature_names=["a"])
        self.bags = EmbeddingBagCollection([table])

    def forward(self, features: Any) -> torch.Tensor:
        return self.bags(features).values().tanh().square().sum()


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from torchrec import EmbeddingCollection, EmbeddingConfig

        table = EmbeddingConfig(name="a", num_embeddings=20, embedding_dim=8, feature_names=["a"])
        self.sequences = EmbeddingCollection([table])

    def forward(self, features: Any) -> torch.Tensor:
        return self.sequences(features)["a"].values().tanh().square().sum()


def _build(model: type[nn.Module], kind: str) -> Any:
    torch.manual_seed(0)
    return trec.shard(model(), {"a": kind}, "sgd")


def _ids(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(10 * step + dist.get_rank())
    lengths = torch.randint(1, 5, (3,), generator=g)
    return torch.randint(0, 20, (int(lengths.sum()),), generator=g), lengths


def _bags_of(steps: int) -> list[Any]:
    from torchrec import KeyedJaggedTensor

    return [KeyedJaggedTensor(["a"], ids, lengths=lengths) for ids, lengths in map(_ids, range(steps))]


def _losses(run: Any, batches: Any) -> list[float]:
    losses = []
    for features in batches:
        loss = run(features)
        loss.backward()
        losses.append(float(loss.detach()))
    return losses


def _exchanges_after_a_refused_model(built_before: bool) -> tuple[bool, int, int]:
    """Of a second model of its class: whether its losses are TorchRec's, also with look-ahead; its exchanges."""
    import freescale

    torch._dynamo.reset()
    served = _build(Bags, "table_wise") if built_before else None
    refused = _build(Bags, "data_parallel")
    refused.compile(backend="freescale", options=OPTIONS)
    _losses(refused, _bags_of(2))
    served = _build(Bags, "table_wise") if served is None else served
    expected = _losses(_build(Bags, "table_wise"), _bags_of(6))
    before = freescale.report()["exchanges"]
    served.compile(backend="freescale", options=OPTIONS)
    plain = _losses(served, _bags_of(3))
    after = freescale.report()["exchanges"]
    ahead = _losses(served, freescale.LookaheadLoader(_bags_of(6)[3:], served))
    close = all(abs(a - b) <= 1e-6 for a, b in zip(plain + ahead, expected, strict=True))
    return close, after["forward"] - before["forward"], after["backward"] - before["backward"]


def test_a_refused_model_leaves_the_next_one_of_its_class_alone(checked):
    for close, forward, backward in checked.of("built before: False"):
        assert close and (forward, backward) == (1, 1)


@pytest.mark.thorough
def test_a_refused_model_leaves_one_that_was_built_before_alone():
    for close, forward, backward in run_ranks(_exchanges_after_a_refused_model, 2, True):
        assert close and (forward, backward) == (1, 1)


def _tensor_dict() -> tuple[list[float], list[float], list[str]]:
    from tensordict import TensorDict

    from freescale.runtime.tables import torchrec_support

    torch._dynamo.reset()
    torchrec_support._warn_once.cache_clear()
    said = listen("freescale.runtime.tables.torchrec_support")
    nested = [torch.nested.nested_tensor_from_jagged(ids, lengths=lengths) for ids, lengths in map(_ids, range(2))]
    batches = [TensorDict({"a": values}, batch_size=[3]) for values in nested]
    eager, compiled = _build(Sequences, "row_wise"), _build(Sequences, "row_wise")
    run = torch.compile(compiled, backend="freescale", options=OPTIONS)
    return _losses(eager, batches), _losses(run, batches), list(said)


def test_sequences_of_a_tensor_dict_are_left_to_torchrec(checked):
    for expected, found, (warning,) in checked.of("TensorDict"):
        assert found == expected
        assert "features of table 'a' are not a KeyedJaggedTensor" in warning


CHECKS = {
    "TensorDict": _tensor_dict,
    "built before: False": partial(_exchanges_after_a_refused_model, False),
}


@pytest.fixture(scope="module")
def checked() -> Outcomes:
    return run_together(CHECKS, 2, group_timeout=60)
