"""A forward pass that fails behind the late gradients of the step before: all ranks know that these are applied."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from loops import DIM, Training, compare
from ranks import run_ranks


class InOrder(Training):
    """Without passes: late gradients are applied before what fails."""

    compiled: dict[tuple[type, bool], Any] = {}
    options = {"passes": "none"}


def late_rows_of_one_rank(t: Training) -> None:
    """Gradients of rows 1 and 2, or 20 and 21, are late: one rank owns them, the other none."""
    batches = [{"item": torch.tensor(ids), "pick": torch.tensor([0])} for ids in ([1, 2], [20, 21], [5, 6], [1, 20])]
    for i, batch in enumerate(t.loader(batches)):
        if i in (1, 2):
            with pytest.raises(IndexError):
                t.run({**batch, "pick": torch.tensor([DIM])})
        if i != 1:
            t.step(batch)


def _one_rank_owns_them() -> None:
    compare(late_rows_of_one_rank, InOrder)


def test_ranks_agree_on_what_is_applied():
    run_ranks(_one_rank_owns_them, 2)
