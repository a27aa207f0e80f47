"""A loop that an exception leaves on one rank, wherever the other is: both end within seconds, and say why."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import sys
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import trec
from freescale.compat import distributed
from freescale.compat.exception_in_flight import describe_exception
from freescale.runtime.lookahead import session, thread
from listening import listen
from loops import Training, data
from ranks import HAS_TORCHREC, run_ranks

# ---- what closes a generator -------------------------------------------------------------------------------------


class Loop:
    """What closed it: the exception in words, or nothing."""

    def __init__(self) -> None:
        self.left_by: list[str] = []

    def __iter__(self) -> Any:
        handled_before = id(sys.exc_info()[1])
        try:
            yield from range(3)
        except GeneratorExit as closed:
            self.left_by.append(describe_exception(sys._getframe().f_back, closed, handled_before))
            raise


def bar(batches: Any) -> Any:
    seen = 0
    for batch in batches:
        yield batch
        seen += 1


def closing_bar(batches: Any) -> Any:
    with contextlib.nullcontext():
        for batch in batches:
            try:
                yield batch
            finally:
                str(batch)


def fails() -> None:
    raise ZeroDivisionError("on purpose")


def left_by_exception(begin: Any) -> None:
    for _ in begin():
        fails()


def left_by_assertion(begin: Any) -> None:
    with contextlib.suppress(ZeroDivisionError):
        fails()
    for batch in begin():
        assert batch == 1, "on purpose"


def left_in_with(begin: Any) -> None:
    for _ in begin():
        with contextlib.nullcontext():
            fails()


def left_through_with(begin: Any) -> None:
    with contextlib.nullcontext():
        for _ in begin():
            fails()


def left_in_try(begin: Any) -> None:
    for _ in begin():
        try:
            fails()
        finally:
            str(begin)


def left_through_try(begin: Any) -> None:
    try:
        for _ in begin():
            fails()
    finally:
        str(begin)


def raised_again(begin: Any) -> None:
    for _ in begin():
        try:
            fails()
        except ZeroDivisionError:
            raise


def raised_again_around(begin: Any) -> None:
    try:
        for _ in begin():
            fails()
    except ZeroDivisionError:
        raise


def raised_from(begin: Any) -> None:
    for _ in begin():
        try:
            fails()
        except ZeroDivisionError as error:
            raise RuntimeError("raise ZeroDivision") from error


def caught_around(begin: Any) -> None:
    try:
        for _ in begin():
            fails()
    except ZeroDivisionError:
        pass


def left_in_suppress(begin: Any) -> None:
    for _ in begin():
        with contextlib.suppress(KeyError):
            fails()


def closed_by_handler(begin: Any) -> None:
    iterator = iter(begin())
    try:
        for _ in iterator:
            fails()
    except ZeroDivisionError:
        iterator.close() if hasattr(iterator, "close") else None
        del iterator


LEFT_BY_EXCEPTION = (
    left_in_with, left_through_with, left_in_try, left_through_try, raised_again, raised_again_around, raised_from,
    caught_around, left_in_suppress, closed_by_handler,
)  # fmt: skip


def broken_in_handler(begin: Any) -> None:
    for _ in begin():
        try:
            fails()
        except ZeroDivisionError:
            break


def returned_in_handler(begin: Any) -> None:
    for _ in begin():
        try:
            fails()
        except ZeroDivisionError:
            return


def broken_in_with(begin: Any) -> None:
    for _ in begin():
        with contextlib.suppress(ZeroDivisionError):
            fails()
        with contextlib.nullcontext():
            break


def broken_in_try(begin: Any) -> None:
    kept = []
    for _ in begin():
        try:
            try:
                fails()
            except ZeroDivisionError:
                raise
        except ZeroDivisionError as error:
            kept.append(error)
            break
        finally:
            str(begin)


def begun_in_handler(begin: Any) -> None:
    try:
        fails()
    except ZeroDivisionError:
        for _ in begin():
            break


LEFT_WITHOUT = (broken_in_handler, returned_in_handler, broken_in_with, broken_in_try, begun_in_handler)


def left_by_break(begin: Any) -> None:
    kept = []
    for _ in begin():
        try:
            fails()
        except ZeroDivisionError as error:
            kept.append(error)
        break


def left_by_return(begin: Any) -> Any:
    for batch in begin():
        return batch


def closed(begin: Any) -> None:
    with contextlib.suppress(ZeroDivisionError):
        fails()
    iterator = iter(begin())
    next(iterator)
    del iterator
    next(iter(begin()))


@pytest.fixture
def few_objects() -> Any:
    """For the garbage collector to look through: those of torch are not of interest."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("around", (iter, enumerate, bar, closing_bar), ids=lambda f: f.__name__)
def test_an_exception_is_told_from_break(around, few_objects):
    loop = Loop()

    def begin() -> Any:
        return around(loop)

    for leave in (left_by_break, left_by_return, closed, *LEFT_WITHOUT):
        leave(begin)
    try:
        fails()
    except ZeroDivisionError:
        left_by_break(begin)
    assert set(loop.left_by) == {""}
    for leave, words in ((left_by_exception, "in fails: raise ZeroDivision"), (left_by_assertion, "assert batch == 1")):
        with contextlib.suppress(ZeroDivisionError, AssertionError):
            leave(begin)
        assert words in loop.left_by[-1]
    for leave in LEFT_BY_EXCEPTION:
        with contextlib.suppress(ZeroDivisionError, RuntimeError):
            leave(begin)
        assert "raise ZeroDivision" in loop.left_by.pop(), leave.__name__


def test_the_exception_that_ends_the_process_is_named(monkeypatch):
    monkeypatch.delattr(sys, "last_value", raising=False)
    assert describe_exception(None) == "its process ends"
    with pytest.raises(ZeroDivisionError) as caught:
        fails()
    monkeypatch.setattr(sys, "last_value", caught.value, raising=False)
    assert re.match("its process ends: ZeroDivisionError: on purpose .*in fails: raise Zero", describe_exception(None))


# ---- ranks -------------------------------------------------------------------------------------------------------


def _one_raises(where: str) -> tuple[str, str]:
    """Rank 1 raises at batch 3. What each rank gets, and what it logs. The group's time-out is beyond the test's."""
    logged = listen()
    t = Training(True)
    try:
        for i, batch in enumerate(t.loader(data(9, 60))):
            raises = i == 3 and dist.get_rank() == 1
            assert not (raises and where == "before forward"), "the loss is bad"
            loss = t.run(batch)
            assert not (raises and where == "before backward"), "the loss is bad"
            if raises and where == "interrupted":
                signal.signal(signal.SIGINT, signal.default_int_handler)
                os.kill(os.getpid(), signal.SIGINT)  # the loss is bad
                time.sleep(60)  # the loss is bad
            loss.backward()
            assert not (raises and where == "after backward"), "the loss is bad"
            if where == "after backward":
                dist.all_reduce(torch.ones(1))  # of the user's own
    except (Exception, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}", "\n".join(logged)
    return "no error", ""


LEFT = "rank 1 left its loop at batch 3: .*the loss is bad"


def _check(found: list[tuple[str, str]]) -> None:
    (peer, peer_logs), (raised, logs) = found
    assert raised.startswith(("AssertionError: the loss is bad", "KeyboardInterrupt"))
    assert re.search(LEFT, peer + peer_logs), (peer, peer_logs)
    assert "no gradients are lost" not in logs + peer_logs


def test_before_backward_the_other_rank_hears_why_in_its_backward_pass():
    found = run_ranks(_one_raises, 2, "before backward", timeout=90, group_timeout=600)
    _check(found)
    assert re.match(f"RuntimeError: freescale: {LEFT}", found[0][0])


@pytest.mark.thorough
@pytest.mark.parametrize("where", ("before forward", "before backward", "after backward", "interrupted"))
def test_wherever_the_other_rank_waits(where):
    found = run_ranks(_one_raises, 2, where, timeout=90, group_timeout=600)
    _check(found)
    lost = "gradients of step 3 for table item.* were not applied"
    assert all(bool(re.search(lost, logs)) == (where == "after backward") for _, logs in found)


def _raises_and_stays() -> str:
    """No row travels between the ranks, so rank 0 waits where batch 5 is planned; rank 1 is still there."""
    rank, t = dist.get_rank(), Training(True)
    batches = [{"item": torch.tensor([20 * rank + i, 20 * rank]), "pick": torch.tensor([0])} for i in range(9)]
    try:
        for i, batch in enumerate(t.loader(batches)):
            loss = t.run(batch)
            assert i < 3 or rank == 0, "the loss is bad"
            loss.backward()
    except Exception as error:
        distributed.default_store().set(f"ended/{rank}", "")
        distributed.default_store().wait(["ended/0", "ended/1"])
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_the_other_rank_hears_why_where_it_waits_for_a_batch():
    peer, raised = run_ranks(_raises_and_stays, 2, timeout=90, group_timeout=600)
    assert raised.startswith("AssertionError: the loss is bad")
    assert re.match(f"RuntimeError: freescale: .*{LEFT}", peer)


def _raises_in_one_of_the_last_steps_and_stays(at: int) -> tuple[str, float]:
    """Nothing is left to plan. Rank 0 waits for a launch, and rank 1, which will not make it, is still there."""
    rank, t, seen = dist.get_rank(), Training(True), []

    def train() -> None:
        for i, batch in enumerate(t.loader(data(4, 60))):
            loss = t.run(batch)
            seen.append(time.monotonic())
            assert i < at or rank == 0, "the loss is bad"
            loss.backward()

    found = _error_of(train, seen)
    distributed.default_store().set(f"ended/{rank}", "")
    distributed.default_store().wait(["ended/0", "ended/1"])
    return found


@pytest.mark.parametrize("at", (pytest.param(2, marks=pytest.mark.thorough), 3))
def test_the_other_rank_hears_why_in_the_last_steps_too(at):
    found = run_ranks(_raises_in_one_of_the_last_steps_and_stays, 2, at, timeout=90, group_timeout=600)
    (peer, peer_seconds), (raised, seconds) = found
    assert raised.startswith("AssertionError: the loss is bad")
    assert re.match(f"RuntimeError: freescale: rank 1 left its loop at batch {at}: .*the loss is bad", peer)
    assert peer_seconds < 20 and seconds < 20


class Fetcher:
    """Keeps the iterator, as Lightning's does."""

    def __init__(self, loader: Any) -> None:
        self.iterator: Any = iter(loader)

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return next(self.iterator)


def _with_context(loader: Any, body: Any) -> None:
    for batch in loader:
        with torch.autocast("cpu", enabled=False):
            body(batch)


def _raised_from(loader: Any, body: Any) -> None:
    for batch in loader:
        try:
            body(batch)
        except AssertionError as error:
            raise ValueError("the loss is bad") from error


def _by_next(loader: Any, body: Any) -> None:
    iterator = iter(loader)
    while True:
        body(next(iterator))


_KEPT: list[Fetcher] = []


def _kept(loader: Any, body: Any) -> None:
    _KEPT.append(Fetcher(loader))
    for batch in _KEPT[0]:
        body(batch)


def _kept_until_teardown(loader: Any, body: Any) -> None:
    try:
        _kept(loader, body)
    except Exception:
        _KEPT.clear()
        raise


def _broken_off(loader: Any, body: Any) -> None:
    with contextlib.suppress(AssertionError):
        for batch in loader:
            try:
                body(batch)
            except AssertionError:
                break
    raise AssertionError("the loss is bad")


WAYS = {f.__name__: f for f in (_with_context, _raised_from, _by_next, _kept, _kept_until_teardown, _broken_off)}


def _one_raises_so(way: str) -> tuple[str, float]:
    """Rank 1 raises at batch 3 between forward and backward. What each rank gets, and how long after."""
    t, seen = Training(True), []

    def body(batch: Any) -> None:
        loss = t.run(batch)
        seen.append(time.monotonic())
        assert len(seen) < 4 or dist.get_rank() == 0, "the loss is bad"
        loss.backward()

    return _error_of(lambda: WAYS[way](t.loader(data(9, 60)), body), seen)


def _error_of(train: Any, seen: list[float]) -> tuple[str, float]:
    """What it raises, how long after the last step began; then what it has kept goes."""
    try:
        train()
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
    if dist.get_rank() == 1 and _KEPT:
        words += " ... and then it is dropped"
        _KEPT.clear()
    return words, time.monotonic() - seen[-1]


@pytest.mark.parametrize("way", [
    way if way in ("_with_context", "_kept") else pytest.param(way, marks=pytest.mark.thorough) for way in WAYS
])  # fmt: skip
def test_however_rank_1_loops_both_end_within_seconds(way):
    _check_both(run_ranks(_one_raises_so, 2, way, timeout=90, group_timeout=600), way)


def _check_both(found: list[tuple[str, float]], way: str) -> None:
    (peer, peer_seconds), (raised, seconds) = found
    # What keeps the iterator has nothing to do with the exception when it goes.
    why = "" if way in ("_by_next", "_kept", "_broken_off") else ": .*the loss is bad"
    assert re.match(f"RuntimeError: freescale: rank 1 left its loop at batch 3{why}.*waited for urgent gradients", peer)
    assert re.match("(Assertion|Value)Error: the loss is bad", raised)
    assert peer_seconds < 20 and seconds < 20


def _one_raises_in_torchrec() -> tuple[str, float]:
    import freescale

    model = trec.build("row_wise", "sgd", small=True)
    run = torch.compile(model, backend="freescale", options={"codegen": "eager", "strict": True})
    seen: list[float] = []

    def body(batch: Any) -> None:
        loss = run(*batch)
        seen.append(time.monotonic())
        assert len(seen) < 4 or dist.get_rank() == 0, "the loss is bad"
        loss.backward()

    batches = [trec.batch(step, dist.get_rank(), none=False) for step in (0, 1, 2, 5, 6)]
    return _error_of(lambda: _with_context(freescale.LookaheadLoader(batches, run), body), seen)


@pytest.mark.skipif(not HAS_TORCHREC, reason="no TorchRec")
@pytest.mark.thorough
def test_torchrec_between_forward_and_backward():
    _check_both(run_ranks(_one_raises_in_torchrec, 2, timeout=120, group_timeout=600), "")


def _one_leaves_and_the_other_skips() -> tuple[str, float]:
    """Rank 0 trains on nothing more, so it waits for a batch that rank 1 never plans. Nothing is lost."""
    t, plain, seen = Training(True), Training(False), [0.0]
    for batch in data(3):
        plain.step(batch)

    def train() -> None:
        for i, batch in enumerate(t.loader(data(20))):
            seen[0] = time.monotonic()
            if i < 3:
                t.step(batch)
            elif dist.get_rank() == 1:
                break
        raise AssertionError("the end")

    found = _error_of(train, seen)
    assert t.losses == plain.losses and torch.equal(t.model.table.weight, plain.model.table.weight)
    return found


def test_the_other_rank_does_not_wait_for_a_batch_that_is_not_planned():
    (peer, peer_seconds), (left, seconds) = run_ranks(
        _one_leaves_and_the_other_skips, 2, timeout=90, group_timeout=600
    )
    assert re.match("RuntimeError: freescale: rank 1 left its loop at batch 3; batch 6 cannot be planned without it", peer)
    assert left == "AssertionError: the end" and peer_seconds < 20 and seconds < 20


def _one_is_slow() -> bool:
    """All leave at the same batch, one long after the other: what is pending is applied, by `break` however late."""
    rank, plain = dist.get_rank(), Training(False)
    for batch in data(4):
        plain.step(batch)
    for slow_before in (True, False):
        t = Training(True)
        with mock.patch.object(session, "_SECONDS_AFTER_EXCEPTION", 0.5), mock.patch.object(thread, "_IDLE_SECONDS", 0.1):
            for i, batch in enumerate(t.loader(data(9))):
                if i == 3 and rank == 1 and slow_before:
                    time.sleep(1.5)
                t.step(batch)
                if i == 3:
                    time.sleep(0 if slow_before else 1.5 * rank)
                    break
        assert t.losses == plain.losses and torch.equal(t.model.table.weight, plain.model.table.weight)
    return True


def test_a_slow_rank_at_the_same_place_is_waited_for():
    assert run_ranks(_one_is_slow, 2) == [True, True]
