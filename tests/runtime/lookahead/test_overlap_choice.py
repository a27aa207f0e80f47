"""Whether steps overlap or are kept apart is decided by what takes less time. (The same numbers: test_without_overlap.)"""

from __future__ import annotations

import random
from typing import Any

import pytest

from freescale.runtime.lookahead.overlap_choice import BLOCK, BLOCKS, DECIDED_AFTER, EVERY, WARM_UP, OverlapChoice
from freescale.runtime.meter import FinishedStep


class DeviceTime:
    """Of a step on a device that is three steps behind the host."""

    host_is_at = 0

    def __init__(self, number: int, seconds: float) -> None:
        self._number, self.seconds = number, seconds

    def read(self) -> bool:
        return self._number + 3 <= DeviceTime.host_is_at


def train(choice: OverlapChoice, batches: int, seconds: Any, on_device: bool = False) -> list[bool]:
    """Which batches are kept apart. Planning is two batches ahead; `seconds(number, apart)` of a step."""
    apart: list[bool] = []
    for number in range(batches):
        DeviceTime.host_is_at = number
        while len(apart) < number + 2:
            apart.append(choice.keep_apart())
        if apart[number] == apart[number + 1]:
            took = seconds(number, apart[number])
            step = FinishedStep(number, 99.0, [], DeviceTime(number, took)) if on_device else FinishedStep(number, took, [])
            choice.step_finished(apart[number], step)
    return apart


TRIAL = range(WARM_UP, WARM_UP + BLOCKS * BLOCK)


@pytest.mark.parametrize("on_device", (False, True))
@pytest.mark.parametrize("apart_takes, kept_apart", [(0.8, True), (0.98, True), (0.995, True), (1.005, False), (1.2, False)])
def test_the_faster_way_is_kept(apart_takes, kept_apart, on_device):
    noise = random.Random(0)

    def seconds(number: int, apart: bool) -> float:
        compiling = 50.0 if number < 4 else 0.0
        return (apart_takes if apart else 1.0) * noise.uniform(0.999, 1.001) + compiling + (number % 13 == 0) * 7

    choice = OverlapChoice()
    apart = train(choice, DECIDED_AFTER + 100, seconds, on_device)
    assert not any(apart[: TRIAL.start]) and sum(apart[i] for i in TRIAL) == len(TRIAL) // 2
    assert not any(apart[TRIAL.stop : DECIDED_AFTER - 1]) and set(apart[DECIDED_AFTER:]) == {kept_apart}
    assert choice.overlap == (not kept_apart)


@pytest.mark.parametrize("apart_takes", (0.93, 1.07))
def test_hosts_that_are_slow_for_a_while(apart_takes):
    """Steps that take a fifth longer for seven steps on end, as on a host that others use, too."""
    right = 0
    for seed in range(60):
        noise, slow = random.Random(seed), [0.0]

        def seconds(number: int, apart: bool, noise=noise, slow=slow) -> float:
            slow[0] = 0.2 - slow[0] if noise.random() < 0.15 else slow[0]
            return (apart_takes if apart else 1.0) * (1 + slow[0]) * noise.gauss(1.0, 0.05)

        choice = OverlapChoice()
        train(choice, DECIDED_AFTER, seconds, on_device=True)
        right += choice.overlap == (apart_takes > 1)
    assert right >= 55


def test_it_is_tried_again():
    """What is right at the beginning need not be right later."""
    choice, change = OverlapChoice(), DECIDED_AFTER + EVERY // 2
    apart = train(choice, DECIDED_AFTER + EVERY + DECIDED_AFTER, lambda n, apart: 1.0 + 0.3 * (apart == (n > change)))
    assert set(apart[DECIDED_AFTER : DECIDED_AFTER + 100]) == {True} and set(apart[-10:]) == {False}
    assert sum(a != b for a, b in zip(apart, apart[1:], strict=False)) < 4 * BLOCKS  # two trials, no more


def test_nothing_is_decided_on_a_few_steps():
    choice = OverlapChoice()
    for _ in range(DECIDED_AFTER + 10):
        choice.keep_apart()  # batches that nobody trains on
    assert choice.overlap
