"""A loader with a state: the LookaheadLoader's is that behind the last batch, though the loader is ahead of it."""

from __future__ import annotations

import copy
from typing import Any, Protocol, runtime_checkable

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from loops import Training, batch_of, data
from shared_ranks import Outcomes, run_together


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
            with pytest.raises(RuntimeError, match="load_state_dict of a LookaheadLoader that is being iterated"):
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
    return True


def test_a_loader_with_a_state_goes_on_behind_the_last_batch(checked):
    assert checked.of("goes on") == [True, True]


class Forwards:
    """A wrapper of a user's: it has the methods, whatever is inside."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Any:
        return iter(self.loader)

    def state_dict(self) -> Any:
        return self.loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.loader.load_state_dict(state)


@runtime_checkable
class HasState(Protocol):
    """As Lightning asks (from Python 3.12 on, without the object's __getattr__)."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


def _passes_for_its_loader() -> bool:
    t = Training(True)
    plain, stateful, forwards = t.loader(data(3)), t.loader(Stateful(3)), t.loader(Forwards(data(3)))
    assert [isinstance(x, HasState) for x in (plain, stateful, forwards)] == [False, True, True]
    with pytest.raises(AttributeError, match="the loader has no state_dict; it is a list"):
        plain.state_dict()
    with pytest.raises(AttributeError, match="'list' object has no attribute 'sampler'"):
        _ = plain.sampler
    for batch in forwards:  # nobody asks for a state
        t.step(batch)
        with pytest.raises(AttributeError, match="'list' object has no attribute 'state_dict'"):
            forwards.state_dict()
    assert len(t.losses) == 3

    nested = t.loader(t.loader(data(3)))
    assert not hasattr(nested, "state_dict") and isinstance(t.loader(t.loader(Stateful(3))), HasState)

    dataset = [{**batch, "number": i} for i, batch in enumerate(data(8))]
    sampler = DistributedSampler(dataset, shuffle=True)
    inside = DataLoader(dataset, batch_size=1, sampler=sampler, collate_fn=lambda samples: samples[0])
    loader = t.loader(inside)
    assert (loader.dataset, loader.sampler, loader.batch_size, len(loader)) == (dataset, sampler, 1, 4)
    order = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        order.append([batch["number"] for batch in loader])
        assert order[-1] == list(sampler)
    assert order[0] != order[1]
    loader.worker_init_fn = len  # Lightning sets it
    assert inside.worker_init_fn is len and "worker_init_fn" not in vars(loader)
    loader.strict = False  # the wrapper's own
    assert not hasattr(inside, "strict") and not loader.strict
    return copy.copy(loader).dataset is dataset


def test_attributes_and_state_are_the_loaders(checked):
    assert checked.of("passes for its loader") == [True, True]


def _nested_and_copied() -> bool:
    t, plain = Training(True), Training(False)
    for batch in data(6):
        plain.step(batch)
    for batch in t.loader(t.loader(data(2))):
        t.step(batch)
    stateful = t.loader(t.loader(t.loader(Stateful(6))))
    stateful.load_state_dict({"given": 2})
    for batch in stateful:
        t.step(batch)
        assert stateful.state_dict() == {"given": len(t.losses)}
    assert t.losses == plain.losses and torch.equal(t.model.table.weight, plain.model.table.weight)
    with pytest.raises(ValueError, match="around another one replaces it, so both must have the same model"):
        t.loader(t.loader(data(2), balance=True))

    forwards = t.loader(Forwards(data(3)))
    for batch in forwards:
        assert not isinstance(forwards, HasState) and not hasattr(forwards, "state_dict")
        t.step(batch)
    assert not hasattr(forwards, "state_dict")  # a checkpoint at the end of an epoch
    with pytest.raises(AttributeError, match="the loader has no state_dict; it is a Forwards: 'list' object has no"):
        forwards.state_dict()
    forwards.loader.loader = Stateful(3)  # now it has one
    for batch in forwards:
        assert isinstance(forwards, HasState) and forwards.state_dict()["given"] > 0
        t.step(batch)

    copied = copy.copy(stateful)
    copied.loader = Stateful(6)
    copied.load_state_dict({"given": 5})
    assert copied.state_dict() == {"given": 5} and stateful.state_dict() == {"given": 0}
    return True


def test_nested_loaders_and_copies_have_the_state_of_their_loader(checked):
    assert checked.of("nested and copied") == [True, True]


@pytest.fixture(scope="module")
def checked() -> Outcomes:
    checks = {"goes on": _goes_on, "passes for its loader": _passes_for_its_loader, "nested and copied": _nested_and_copied}
    return run_together(checks, 2)
