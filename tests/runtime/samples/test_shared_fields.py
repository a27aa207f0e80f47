"""Tensors that look as if they were per sample: which are cut by sample, and that no guess is wrong in silence."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from freescale.runtime.balance.integer_problem import BalanceError
from freescale.runtime.samples import shared_fields, split_batch
from freescale.runtime.samples.shared_fields import SharedFields


def decide(fields: list[SharedFields], number: int, batches: list[dict[str, Any]]) -> bool:
    """What the ranks with these batches find; all the same."""
    splits = [split_batch.split(b) for b in batches]
    digests = np.array([f.digests(s) for f, s in zip(fields, splits, strict=True)])
    (found,) = {f.may_move(number, s, digests) for f, s in zip(fields, splits, strict=True)}
    return found


def ids(rank: int, step: int) -> dict[str, torch.Tensor]:
    return {"item": torch.arange(6) + 10 * rank + step, "item_lengths": torch.tensor([1, 2, 0, 1, 1, 1])}


def test_what_is_the_same_everywhere_is_shared_when_that_is_no_chance():
    fields, weights = [SharedFields(["item"]) for _ in range(2)], torch.arange(6.0)
    found = []
    for step in range(5):
        # The labels of the first batch happen to be the same; the flags always are, and all alike.
        labels = [torch.arange(6) % (2 + rank * (step > 0)) for rank in range(2)]
        same = {"weights": weights.clone(), "names": list("abcdef"), "flags": torch.ones(6, 2, dtype=torch.bool)}
        found.append(decide(fields, step, [{**ids(r, step), "label": labels[r], **same} for r in range(2)]))
    assert found == [False, False, True, True, True]
    assert [n for n in ("item", "label", "weights", "names", "flags") if fields[0].is_shared(n)] == ["weights", "names"]
    changed = [{**ids(r, 9), "label": labels[r], **same, "weights": weights + r} for r in range(2)]
    with pytest.raises(BalanceError, match="'weights' was the same on every rank .* differs in batch 9"):
        decide(fields, 9, changed)


def test_batches_that_are_the_same_on_all_ranks_say_nothing():
    fields = [SharedFields([]) for _ in range(2)]
    batch = {**ids(0, 0), "label": torch.arange(6)}
    assert [decide(fields, step, [batch, batch]) for step in range(5)] == [False] * 5  # and none of them wants to move
    assert decide(fields, 5, [batch, {**ids(1, 0), "label": torch.arange(6) + 1}])


def test_features_and_what_the_user_names_are_cut():
    fields = [SharedFields(["user", "rank"]) for _ in range(2)]
    for step in range(5):
        assert decide(fields, step, [{**ids(r, step), "user": torch.arange(6), "rank": torch.arange(6)} for r in range(2)])


@pytest.mark.parametrize("rows", (torch.zeros(0, 3), torch.zeros(4, 0), torch.ones(1), torch.full((5, 2), 7).bfloat16()))
def test_rows_that_are_alike(rows):
    (column,) = split_batch.split({"x": rows}).columns
    assert shared_fields._rows_are_alike(column)
    (other,) = split_batch.split({"x": torch.arange(3)}).columns
    assert not shared_fields._rows_are_alike(other)


def test_it_is_said_once(caplog):
    shared_fields._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="freescale"):
        for _ in range(2):
            fields = [SharedFields([], says=True) for _ in range(2)]
            for step in range(4):
                decide(fields, step, [{**ids(r, step), "label": torch.arange(6) + r, "w": torch.arange(6)} for r in range(2)])
    said = [r.getMessage() for r in caplog.records]
    assert ["'label'; override with BalanceOptions(shared" in said[0], "'w'; override with BalanceOptions(per_sample" in said[1]] == [True] * 2
    assert len(said) == 2


def test_fields_that_the_user_names_stay_as_they_are():
    batch = {**ids(0, 0), "loss": {"weights": torch.arange(4.0), "label": torch.arange(6)}, "mask": torch.zeros(6)}
    with pytest.raises(BalanceError, match=r"'loss.weights' has 4.* in BalanceOptions\(shared"):
        split_batch.split(batch)
    split = split_batch.split(batch, ["loss.weights", "mask"])
    assert [c.name for c in split.columns] == ["item", "loss.label"]
    assert split.rebuild(split.columns)["loss"]["weights"] is batch["loss"]["weights"]
    assert [c.name for c in split_batch.split({**batch, "loss": torch.arange(6)}, ["item", "item_lengths"]).columns] == ["loss", "mask"]
    with pytest.raises(BalanceError, match="no field 'weights', which BalanceOptions"):
        split_batch.split(batch, ["weights"])
