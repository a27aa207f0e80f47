"""A loader with a state: the LookaheadLoader's is that behind the last batch, though the loader is ahead of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from loops import Training, batch_of, data
from ranks import run_ranks


class Stateful:
    """A loader that can stop and go on; `state_dict` returns its live state, as a careless one would."""

    def __init__(self, steps: int) -> None:
        self.steps, self.state = steps, {"given": 0}

    def __iter__(self) -> Any:
        while self.state["given"] < self.steps:
            self.state["given"] += 1
            yield batch_of(self.state["given"] - 1)
        self.state["given"] = 0  # the next epoch

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = dict(state)


def _goes_on() -> bool:
    whole = Training(False)
    for batch in data(9):
        whole.step(batch)
    for stop in range(1, 10):
        t = Training(True)
        loader = t.loader(Stateful(9))
        assert loader.state_dict() == {"given": 0}
        for batch in loader:
            t.step(batch)
            assert loader.state_dict() == {"given": len(t.losses)}
            with pytest.raises(RuntimeError, match="load_state_dict of a LookaheadLoader whose loop is on"):
                loader.load_state_dict({"given": 0})
            if len(t.losses) == stop:
                break
        state = loader.state_dict()
        fresh = t.loader(Stateful(9))
        fresh.load_state_dict(state)
        assert fresh.state_dict() == state == {"given": stop}
        for batch in fresh:
            t.step(batch)
        assert fresh.state_dict() == {"given": 0}
        assert t.losses == whole.losses and torch.equal(t.model.table.weight, whole.model.table.weight), stop
    with pytest.raises(TypeError, match="the loader has no state_dict; it is a list"):
        Training(True).loader(data(3)).state_dict()
    return True


def test_a_loader_with_a_state_goes_on_behind_the_last_batch():
    assert run_ranks(_goes_on, 2) == [True, True]
