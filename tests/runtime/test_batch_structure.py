"""What batches are made of, in words, and where the ids of a feature are."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import trec
from freescale.runtime import batch_structure
from loops import Training, data
from ranks import HAS_TORCHREC, run_ranks

Pair = namedtuple("Pair", "item rest")


@dataclass
class Record:
    item: Any
    more: Any = None


def ids(n: int = 3, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.arange(n, dtype=dtype)


BATCHES = {
    "a tensor": lambda n: ids(n),
    "a dict": lambda n: {"item": ids(n), "label": torch.ones(n)},
    "another order": lambda n: {"label": torch.ones(n), "item": ids(n)},
    "another key": lambda n: {"item": ids(n), "labels": torch.ones(n)},
    "another type": lambda n: {"item": ids(n), "label": ids(n)},
    "more dimensions": lambda n: {"item": ids(n), "label": torch.ones(n, 2)},
    "a dict of another kind": lambda n: OrderedDict(item=ids(n), label=torch.ones(n)),
    "inside one another": lambda n: {"x": [ids(n), {"item": ids(n), "user": ids(n)}], "y": (ids(n),)},
    "words beside": lambda n: {"item": ids(n), "words": ["w"] * n, "numbers": tuple(range(n))},
    "a number": lambda n: {"item": ids(n), "count": n},
    "a word": lambda n: {"item": ids(n), "count": "many"},
    "none": lambda n: {"item": ids(n), "count": None},
    "nothing inside": lambda n: {"item": ids(n), "count": {"a": None} if n % 2 else []},
    "one of a tensor": lambda n: {"item": ids(n), "count": torch.tensor(n)},
    "a record": lambda n: Record(ids(n), {"user": ids(n)}),
    "named": lambda n: Pair(ids(n), [torch.ones(n)]),
    "two tensors": lambda n: [ids(n), ids(n)],
    "three tensors": lambda n: [ids(n), ids(n), ids(n)],
    "nothing": lambda n: [],
}


def test_structures_are_told_apart():
    alike = {"a number", "a word", "none", "nothing inside"}
    for name, make in BATCHES.items():
        words, found = batch_structure.describe_structure(make(4)), list(batch_structure.leaves(make(4)))
        assert words == batch_structure.describe_structure(make(5)), name
        for other, make_other in BATCHES.items():
            equal = batch_structure.describe_structure(make_other(3)) == words
            assert equal == (name == other or {name, other} <= alike), (name, other)
        assert [id(x) for x in found] == [id(x) for x in found_again(make, found)], name


def test_what_holds_no_tensors_may_change():
    alike = [BATCHES[name](3) for name in ("a number", "a word", "none", "nothing inside")]
    assert len({batch_structure.describe_structure(batch) for batch in alike}) == 1
    assert batch_structure.describe_structure(BATCHES["one of a tensor"](3)) != batch_structure.describe_structure(alike[0])


class KeyedJaggedTensor:
    """What freescale uses of TorchRec's here."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)

    def keys(self) -> list[str]:
        return self.names

    def values(self) -> torch.Tensor:
        return torch.arange(len(self.names)) + 10

    def lengths(self) -> torch.Tensor:
        return torch.ones(len(self.names), dtype=torch.int64)

    def offsets_or_none(self) -> None:
        return None

    length_per_key = None


def test_a_label_with_the_name_of_a_feature():
    kjt = KeyedJaggedTensor("item", "user")
    batch = {"features": kjt, "item": ids(4), "labels": {"user": ids(3).view(3, 1)}, "shop": ids(2)}
    assert batch_structure.id_holders(batch, ["item", "user", "shop"]) == [kjt, batch["shop"]]
    found, counts = batch_structure.feature_ids_and_counts(batch, ["item", "user", "shop"])
    assert [found[n].tolist() for n in ("item", "user", "shop")] == [[10], [11], [0, 1]] and counts == {"item": 1, "user": 1}
    with pytest.raises(ValueError, match="'user' is in the batch twice, with different ids"):
        batch_structure.feature_ids_and_counts({"one": kjt, "other": KeyedJaggedTensor("user")}, ["user"])


def test_equal_copies_of_a_feature():
    one, other = KeyedJaggedTensor("item", "user"), KeyedJaggedTensor("item", "shop")
    found, counts = batch_structure.feature_ids_and_counts({"one": one, "other": other}, ["item", "user"])
    assert [found[n].tolist() for n in ("item", "user")] == [[10], [11]] and counts == {"item": 1, "user": 1, "shop": 1}
    assert batch_structure.feature_ids_and_counts({"x": {"item": ids()}, "y": {"item": ids()}}, ["item"])[0]["item"].tolist() == [0, 1, 2]


def found_again(make: Any, found: list[Any]) -> list[Any]:
    """`leaves` of the batch that `found` was found in."""
    remade = iter(found)

    def put_in(x: Any) -> Any:
        return next(remade) if isinstance(x, torch.Tensor) else batch_structure.map_children(x, put_in)

    return list(batch_structure.leaves(put_in(make(4))))


@pytest.mark.parametrize(
    "batch, at",
    [
        ({"item": ids(), "label": torch.ones(3), "user": ids(4)}, {"user": lambda b: b["user"], "item": lambda b: b["item"]}),
        (
            {"x": [torch.ones(2), {"item": ids()}], "user": ids(5, torch.int32)},
            {"item": lambda b: b["x"][1]["item"], "user": lambda b: b["user"]},
        ),
        (Record(ids(), {"user": ids(2)}), {"item": lambda b: b.item, "user": lambda b: b.more["user"]}),
        (Pair(ids(), [torch.ones(3)]), {"item": lambda b: b.item}),
        ({"0": torch.ones(2), "rest": [ids(2), ids(7)]}, {"1": lambda b: b["rest"][1]}),
    ],
)
def test_ids_of_features(batch, at):
    found, counts = batch_structure.feature_ids_and_counts(batch, list(at))
    assert counts == {} and {name: id(x) for name, x in found.items()} == {name: id(get(batch)) for name, get in at.items()}


@pytest.mark.parametrize(
    "batch, words",
    [
        ({"item": ids().view(1, 3)}, "1 dimension"),
        ({"item": torch.ones(3)}, "no feature 'item'"),
        ({"x": {"item": ids()}, "y": {"item": ids() + 1}}, "twice, with different ids"),
        ({"x": {"item": ids()}, "y": {"item": ids().view(1, 3)}}, "1 dimension"),
    ],
)
def test_where_the_batch_is_refused(batch, words):
    with pytest.raises(ValueError, match=words):
        batch_structure.feature_ids_and_counts(batch, ["item"])


@pytest.mark.thorough  # loading TorchRec takes seconds
def test_keyed_jagged_tensors():
    KeyedJaggedTensor = pytest.importorskip("torchrec").KeyedJaggedTensor

    def kjt(*keys: str) -> Any:
        return KeyedJaggedTensor.from_lengths_sync(list(keys), ids(len(keys)), torch.ones(len(keys), dtype=torch.int64))

    batch = {"kjt": kjt("item", "user"), "other": ids()}
    words = [batch_structure.describe_structure({"kjt": kjt(*keys), "other": ids(7)}) for keys in (("item", "user"), ("user", "item"))]
    assert words[0] == batch_structure.describe_structure(batch) != words[1]
    assert [id(x) for x in batch_structure.leaves(batch)] == [id(batch["kjt"]), id(batch["other"])]


def _word_or_none() -> bool:
    """Of a batch on its way through a loop."""
    trainings = [Training(wrapped) for wrapped in (False, True)]
    for t in trainings:
        batches = [{**batch, "note": None if i % 3 else "a word"} for i, batch in enumerate(data(7))]
        notes = []
        for batch in t.loader(batches):
            notes.append(batch.pop("note"))
            t.step(batch)
        assert notes == ["a word", None, None, "a word", None, None, "a word"]
    return trainings[0].losses == trainings[1].losses


def test_a_word_or_none_beside_the_tensors():
    assert run_ranks(_word_or_none, 2) == [True, True]


def _label_named_as_a_feature() -> bool:
    import torch.distributed as dist

    import freescale

    losses: list[list[float]] = []
    for wrapped in (False, True):
        model = trec.build("row_wise", "sgd", small=True)
        model.compile(backend="freescale", options={"codegen": "eager"})
        made = [trec.batch(step, dist.get_rank(), none=False) for step in range(3)]
        batches: Any = [{"features": kjt, "weight": weight, "user": torch.arange(5)} for kjt, weight in made]
        losses.append([])
        for batch in freescale.LookaheadLoader(batches, model) if wrapped else batches:
            loss = model(batch["features"], batch["weight"])
            loss.backward()
            losses[-1].append(float(loss.detach()))
    return losses[0] == losses[1]


@pytest.mark.thorough
@pytest.mark.skipif(not HAS_TORCHREC, reason="torchrec or fbgemm_gpu is not installed")
def test_a_label_with_the_name_of_a_feature_of_torchrec():
    assert run_ranks(_label_named_as_a_feature, 2) == [True, True]
