"""What batches are made of: in words, in a form that is quick to compare, and where the ids of a feature are."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from freescale.runtime import batch_structure

Pair = namedtuple("Pair", "item rest")


@dataclass
class Record:
    item: Any
    more: Any = None


def ids(n: int = 3, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.arange(n, dtype=dtype)


def summarized(batch: Any) -> tuple[Any, list[Any]]:
    found: list[Any] = []
    return batch_structure.summarize_structure(batch, found), found


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
    "a record": lambda n: Record(ids(n), {"user": ids(n)}),
    "named": lambda n: Pair(ids(n), [torch.ones(n)]),
    "two tensors": lambda n: [ids(n), ids(n)],
    "three tensors": lambda n: [ids(n), ids(n), ids(n)],
    "nothing": lambda n: [],
}


def test_summaries_are_equal_where_words_are():
    for name, make in BATCHES.items():
        summary, found = summarized(make(4))
        assert summary == summarized(make(5))[0], name
        assert [id(x) for x in found] == [id(x) for x in found_again(make, found)], name
        for other, make_other in BATCHES.items():
            words = [batch_structure.describe_structure(m(3)) for m in (make, make_other)]
            assert (summarized(make_other(3))[0] == summary) == (words[0] == words[1]), (name, other)


def found_again(make: Any, found: list[Any]) -> list[Any]:
    """`leaves` of the batch that `found` was found in."""
    remade = iter(found)

    def put_in(x: Any) -> Any:
        return next(remade) if isinstance(x, torch.Tensor) else batch_structure.map_children(x, put_in)

    return list(batch_structure.leaves(put_in(make(4))))


@pytest.mark.parametrize(
    "batch, wanted",
    [
        ({"item": ids(), "label": torch.ones(3), "user": ids(4)}, ["user", "item"]),
        ({"x": [torch.ones(2), {"item": ids()}], "user": ids(5, torch.int32)}, ["item", "user"]),
        (Record(ids(), {"user": ids(2)}), ["item", "user"]),
        (Pair(ids(), [torch.ones(3)]), ["item"]),
        ({"0": torch.ones(2), "rest": [ids(2), ids(7)]}, ["1"]),
    ],
)
def test_places_of_features(batch, wanted):
    places = batch_structure.places_of_features(batch, wanted)
    leaves = list(batch_structure.leaves(batch))
    expected = batch_structure.feature_ids(batch, wanted)
    assert places is not None and [leaves[p].data_ptr() for p in places] == [expected[w].data_ptr() for w in wanted]


def test_a_tensor_that_is_there_twice():
    """It is the place that counts, not the tensor: in the next batch they are two."""
    twice = ids()
    batch, following = {"copy": twice, "item": twice}, {"copy": ids(1), "item": ids(2)}
    (place,) = batch_structure.places_of_features(batch, ["item"])
    assert list(batch_structure.leaves(following))[place].shape[0] == 2


@pytest.mark.parametrize(
    "batch, words",
    [
        ({"item": ids().view(1, 3)}, "1 dimension"),
        ({"item": torch.ones(3)}, "no feature 'item'"),
        ({"x": {"item": ids()}, "y": {"item": ids()}}, "twice"),
        ({"x": {"item": ids()}, "y": {"item": ids().view(1, 3)}}, "twice"),
    ],
)
def test_no_places_where_the_batch_is_refused(batch, words):
    assert batch_structure.places_of_features(batch, ["item"]) is None
    with pytest.raises(ValueError, match=words):
        batch_structure.feature_ids(batch, ["item"])


@pytest.mark.thorough  # loading TorchRec takes seconds
def test_keyed_jagged_tensors():
    KeyedJaggedTensor = pytest.importorskip("torchrec").KeyedJaggedTensor

    def kjt(*keys: str) -> Any:
        return KeyedJaggedTensor.from_lengths_sync(list(keys), ids(len(keys)), torch.ones(len(keys), dtype=torch.int64))

    batch = {"kjt": kjt("item", "user"), "other": ids()}
    assert batch_structure.places_of_features(batch, ["other"]) is None
    assert summarized(batch)[0] == summarized({"kjt": kjt("item", "user"), "other": ids(7)})[0]
    assert summarized(batch)[0] != summarized({"kjt": kjt("user", "item"), "other": ids()})[0]
    assert [id(x) for x in summarized(batch)[1]] == [id(batch["kjt"]), id(batch["other"])]
