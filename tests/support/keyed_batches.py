"""A model with one pooled and one sequence collection, and invalid KeyedJaggedTensors, some changed after planning; and
a model that builds its KeyedJaggedTensor itself from invalid tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import trec

KEYS, ROWS = ["liked", "history"], 20
OPTIONS = {"codegen": "eager", "strict": True}


class Model(nn.Module):
    """Pools one feature, and uses the other as a sequence, so that every length affects the loss."""

    def __init__(self) -> None:
        super().__init__()
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig

        size = {"num_embeddings": ROWS, "embedding_dim": 8}
        self.bags = EmbeddingBagCollection([EmbeddingBagConfig(name="liked", feature_names=["liked"], **size)])
        self.sequences = EmbeddingCollection([EmbeddingConfig(name="history", feature_names=["history"], **size)])

    def forward(self, features: Any) -> torch.Tensor:
        pooled, found = self.bags(features).values(), self.sequences(features)["history"]
        sums = torch.segment_reduce(found.values(), "sum", lengths=found.lengths(), unsafe=True)
        places = torch.arange(1, sums.shape[0] + 1, device=sums.device)[:, None]
        return (pooled.tanh() * places).sum() + (sums.tanh() * places).sum()


@cache
def compiled(device: str) -> Any:
    torch.manual_seed(0)
    model = trec.shard(Model(), dict.fromkeys(KEYS, "row_wise"), "sgd", device=device)
    model.compile(backend="freescale", fullgraph=True, options=OPTIONS)
    return model


def batch(step: int) -> Any:
    from torchrec import KeyedJaggedTensor

    g = torch.Generator().manual_seed(10 * step + dist.get_rank())
    lengths = torch.randint(1, 5, (6,), generator=g)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=g)
    return KeyedJaggedTensor(keys=KEYS, values=ids, lengths=lengths)


def train(model: Any, batches: Any) -> tuple[list[float], list[torch.Tensor]]:
    losses = []
    for features in batches:
        loss = model(features)
        loss.backward()
        losses.append(float(loss.detach()))
    return losses, list(trec.snapshot(model).values())


# ---- after a batch was planned ------------------------------------------------------------------------------


def move_to_other_key(features: Any) -> None:
    features.lengths()[0] -= 1
    features.lengths()[3] += 1


def _negative(features: Any) -> None:
    features.lengths()[1] += features.lengths()[0] + 1
    features.lengths()[0] = -1


def _other_id(features: Any) -> None:
    features.values()[0] = (features.values()[0] + 1) % ROWS


def move_within_key(features: Any) -> None:
    features.lengths()[0] -= 1
    features.lengths()[1] += 1


CHANGES = {"key": move_to_other_key, "negative": _negative, "id": _other_id}


def change_one_batch(change: Callable[[Any], None], device: str = "cpu") -> str:
    """The error on each rank after a change on rank 1."""
    import freescale

    model = compiled(device)
    with pytest.raises(RuntimeError) as caught:
        for step, features in enumerate(freescale.LookaheadLoader(map(batch, range(3)), model)):
            if step == 1 and dist.get_rank() == 1:
                change(features)
            model(features).backward()
    return str(caught.value)


def change_within_keys(device: str = "cpu") -> bool:
    """Look-ahead is bit-identical to plain training for changes that the model sees."""
    import freescale

    model = compiled(device)
    beginning = trec.snapshot(model), trec.optimizer_state(model)

    def changed(batches: Any) -> Iterator[Any]:
        for features in batches:
            features = features.to(torch.device(device))
            move_within_key(features)
            yield features

    results = []
    for batches in (map(batch, range(3)), freescale.LookaheadLoader(map(batch, range(3)), model)):
        trec.put_back(model, *beginning)
        results.append(train(model, changed(batches)))
    (plain, rows), (ahead, rows_ahead) = results
    return plain == ahead and all(map(torch.equal, rows, rows_ahead))


# ---- malformed from the beginning ---------------------------------------------------------------------------


def _malformed(**parts: Any) -> Any:
    from torchrec import KeyedJaggedTensor

    parts = {k: torch.tensor(v) if k != "keys" else v for k, v in parts.items()}
    return KeyedJaggedTensor(**{"keys": KEYS, "values": torch.tensor([1, 2, 3, 4, 5, 6]), **parts})


MALFORMED = {
    "more": (dict(lengths=[2, 1, 3, 4]), "Sum of lengths must equal the number of values, but got 10 and 6"),
    "less": (dict(lengths=[2, 1, 1, 1]), "Sum of lengths must equal the number of values, but got 5 and 6"),
    "negative": (dict(lengths=[-1, 3, 2, 2]), "Lengths must not be negative, but got -1"),
    "first": (dict(offsets=[1, 2, 3, 4, 6]), "Expected first offset to be 0, but got 1 instead"),
    "last": (dict(offsets=[0, 2, 3, 4, 7]), "Sum of lengths must equal the number of values, but got 7 and 6"),
    "differ": (
        dict(lengths=[2, 1, 1, 2], offsets=[0, 1, 3, 4, 6]), "offsets is not equal to the cumulative sum of lengths"
    ),
    "keys": (dict(keys=["liked", "history", "liked"], lengths=[1] * 6), "keys must be unique"),
    "uneven": (dict(lengths=[3, 2, 1]), "lengths size must be divisible by keys size, but got 3 and 2"),
}  # fmt: skip


def train_on_malformed(parts: dict[str, Any], ahead: bool, device: str = "cpu") -> tuple[str, bool]:
    """The error on each rank for a malformed batch on rank 1; and whether a valid batch trains afterwards."""
    import freescale

    model = compiled(device)
    made = _malformed(**parts) if dist.get_rank() == 1 else batch(0)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        for features in freescale.LookaheadLoader([made], model) if ahead else [made]:
            model(features.to(torch.device(device)))
    good = model(batch(1).to(torch.device(device)))  # the ranks are still in sync
    return str(caught.value), bool(good.isfinite())


# ---- of a model that makes its KeyedJaggedTensor itself -----------------------------------------------------


class FromTensors(nn.Module):
    """The batch has ids and lengths without their relation."""

    def __init__(self, pooled: bool) -> None:
        super().__init__()
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig

        size = {"num_embeddings": ROWS, "embedding_dim": 8, "name": "liked", "feature_names": ["liked"]}
        self.pooled = pooled
        pools, sequences = EmbeddingBagCollection, EmbeddingCollection
        self.table = pools([EmbeddingBagConfig(**size)]) if pooled else sequences([EmbeddingConfig(**size)])

    def forward(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        from torchrec import KeyedJaggedTensor

        found = self.table(
            KeyedJaggedTensor(
                keys=["liked"], values=tensors["liked"], lengths=tensors["n"], weights=tensors.get("weights")
            )
        )
        if self.pooled:
            return found.values().tanh().sum()
        history = found["liked"]
        return torch.segment_reduce(history.values(), "sum", lengths=history.lengths(), unsafe=True).tanh().sum()


TENSORS = {
    "far more": (dict(n=[1, 2, 300000]), "Sum of lengths must equal the number of values, but got 300003 and 6"),
    "negative": (dict(n=[-1, 5, 2]), "Lengths must not be negative, but got -1"),
    "weights": (dict(n=[1, 2, 3], weights=[0.5] * 4), "4 weights for 6 ids"),
}


def train_on_tensors(case: str, pooled: bool, ahead: bool, codegen: str) -> list[Any]:
    """Losses of valid batches, and each rank's error for the second to last batch, which is invalid on rank 1."""
    import freescale

    torch.manual_seed(0)
    model = trec.shard(FromTensors(pooled), {"liked": "row_wise"}, "sgd")
    run = torch.compile(model, backend="freescale", fullgraph=True, options={**OPTIONS, "codegen": codegen})

    def make(step: int, **wrong: Any) -> dict[str, torch.Tensor]:
        good = {"n": [1, 2, 3]} | ({"weights": [0.5] * 6} if case == "weights" else {})
        ids = torch.arange(6) + step + dist.get_rank()
        return {"liked": ids, **{name: torch.tensor(x) for name, x in {**good, **wrong}.items()}}

    batches = [make(0), make(1), make(2, **(TENSORS[case][0] if dist.get_rank() == 1 else {})), make(3)]
    seen: list[Any] = []
    with pytest.raises((ValueError, RuntimeError)) as caught:
        for batch in freescale.LookaheadLoader(batches, run) if ahead else batches:
            loss = run(batch)
            loss.backward()
            seen.append(float(loss.detach()))
    return [*seen, str(caught.value), float(run(make(4)).detach())]  # the ranks are still in sync
