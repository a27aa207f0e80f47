"""A backward pass that updates a table in part: never in silence.

Some gradients are applied inside the backward pass, the late ones are handed to the next step when it ends. Whoever
stops it in between, or asks autograd for some tensors' gradients only, hears of it at the next use, on every rank.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from loops import Training, compare, data, threads
from ranks import run_ranks

INCOMPLETE = "{}: the backward pass of step 3 has applied some of its gradients to the tables and lost the others"
LOST = r"gradients of step 3 for table item were not applied: \d+ rows that this rank computed, \d+ rows that it owns"


def only_some(t: Training, batch: Any) -> None:
    torch.autograd.grad(t.run(batch), list(t.model.parameters()))


def only_inputs(t: Training, batch: Any) -> None:
    t.run(batch).backward(inputs=list(t.model.parameters()))


def hook_raises(t: Training, batch: Any, ranks: tuple[int, ...] = (0, 1)) -> None:
    def refuse(_: torch.Tensor) -> None:
        if dist.get_rank() in ranks:
            raise ValueError("a gradient that the user does not like")

    handles = [p.register_post_accumulate_grad_hook(refuse) for p in t.model.parameters()]
    try:
        t.run(batch).backward()
    except ValueError:
        pass
    for handle in handles:
        handle.remove()


def hook_raises_on_rank_0(t: Training, batch: Any) -> None:
    hook_raises(t, batch, (0,))


def hook_raises_on_rank_1(t: Training, batch: Any) -> None:
    hook_raises(t, batch, (1,))


RANKS = {only_some: "rank 0, 1", only_inputs: "rank 0, 1", hook_raises: "rank 0, 1"}
RANKS |= {hook_raises_on_rank_0: "rank 0", hook_raises_on_rank_1: "rank 1"}


class Slow(queue.SimpleQueue):
    """The planning thread of one rank is behind the other's, also when the loop ends."""

    def get(self, *args: Any, **kwargs: Any) -> Any:
        found = super().get(*args, **kwargs)
        time.sleep(0.05 * dist.get_rank() * (threading.current_thread() is not threading.main_thread()))
        return found


def incomplete(interrupt: Any) -> tuple[Training, Any]:
    """A loop whose last step had an incomplete backward pass."""
    t = Training(True)
    loop = iter(t.loader(data(9)))
    with mock.patch("queue.SimpleQueue", Slow):
        t.step(next(loop))
    for _ in range(2):
        t.step(next(loop))
    interrupt(t, next(loop))
    return t, loop


def left(t: Training, loop: Any, interrupt: Any) -> None:
    """Python may say nothing of what is raised while it closes a generator, so the next use says it again."""
    for use in (loop.close, t.model.state_dict):
        with pytest.raises(RuntimeError, match=f"{LOST} .*{INCOMPLETE.format(RANKS[interrupt])}"):
            use()
    t.model.state_dict()


def next_step(interrupt: Any) -> None:
    t, loop = incomplete(interrupt)
    batch = next(loop)
    for _ in range(2):  # the loop is over: it says so every time
        with pytest.raises(RuntimeError, match=INCOMPLETE.format(RANKS[interrupt])):
            t.step(batch)
    left(t, loop, interrupt)


def state_dict(interrupt: Any) -> None:
    t, loop = incomplete(interrupt)
    with pytest.raises(RuntimeError, match=INCOMPLETE.format(RANKS[interrupt])):
        t.model.state_dict()
    left(t, loop, interrupt)


def end_of_the_loop(interrupt: Any) -> None:
    left(*incomplete(interrupt), interrupt)


def the_last_step(interrupt: Any) -> None:
    """It has no late gradients: nothing is left for later, so nothing can be lost."""

    def loop(t: Training) -> None:
        for i, batch in enumerate(t.loader(data(4))):
            interrupt(t, batch) if i == 3 else t.step(batch)

    compare(loop)


def _cases() -> dict[str, str]:
    said = {}
    for interrupt in RANKS:
        for case in (next_step, state_dict, end_of_the_loop, the_last_step):
            name = f"{interrupt.__name__}, {case.__name__}"
            try:
                case(interrupt)
                assert threads() == []
                said[name] = "good"
            except BaseException:  # noqa: BLE001
                said[name] = traceback.format_exc()
                return said  # the ranks may be at different places
    return said


def test_an_incomplete_backward_is_an_error_on_every_rank():
    for rank, said in enumerate(run_ranks(_cases, 2)):
        wrong = {name: words for name, words in said.items() if words != "good"}
        assert not wrong, f"rank {rank}:\n" + "\n".join(f"{name}: {words}" for name, words in wrong.items())


def _differing() -> None:
    """One rank believes that nothing is pending. No loop is known that leads there; so it is made to."""
    t = Training(True)
    loader = t.loader(data(9))
    loop = iter(loader)
    with mock.patch("queue.SimpleQueue", Slow):
        t.step(next(loop))
    for _ in range(3):
        t.step(next(loop))
    if dist.get_rank() == 1:
        loop_state = loader._session.loops[-1]
        loop_state._previous = [None] * len(loop_state._previous)
    words = "gradients of step 3 pending; rank 1: leaves its loop after batch 3, no gradients pending"
    for use in (loop.close, t.model.state_dict):
        with pytest.raises(RuntimeError, match=words):
            use()
    t.model.state_dict()
    assert threads() == []


def test_ranks_that_differ_at_the_end_all_say_so_and_their_threads_end():
    run_ranks(_differing, 2)
