"""Costs of samples: the formula, its fit to measured times, a user's own function, and what is wrong with one."""

from __future__ import annotations

import json
import logging
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.runtime.balance import sample_cost
from freescale.runtime.balance.integer_problem import BalanceError
from freescale.runtime.balance.sample_cost import FittedCost, LengthCost, costs_of, robust_fit
from freescale.runtime.balance.solver import balance

SEQUENCE, CANDIDATES = np.array([10, 0, 3]), np.array([2, 0, 1])


def measured(random, ranks, batch, a, b, constant, noise=0.0, hiccups=0.0):
    """Features and times of one step on all ranks."""
    lengths = np.minimum(random.lognormal(np.log(1000), 1, (ranks, batch)), 21_000)
    features = np.array([FittedCost.features(x) for x in lengths])
    seconds = (constant + features @ [a, b]) * (1 + noise * random.standard_normal(ranks))
    return features, seconds * np.where(random.random(ranks) < hiccups, random.uniform(2, 10, ranks), 1)


def predicted(fit: FittedCost, features: np.ndarray) -> np.ndarray:
    return fit.constant + features @ [fit.current.a, fit.current.b]


def test_formula_uses_the_sum_of_the_lengths():
    cost = LengthCost(2.0, 0.5)
    assert cost(SEQUENCE, CANDIDATES).tolist() == [2 * 12 + 0.5 * 144, 0, 2 * 4 + 0.5 * 16]
    assert costs_of(cost, {"sequence": SEQUENCE, "candidates": CANDIDATES}).tolist() == [96, 0, 16]
    assert costs_of(cost, {"sequence": []}).shape == (0,)
    assert FittedCost.features(SEQUENCE, CANDIDATES).tolist() == [16, 160]


def test_without_measurements_the_prior_stands():
    fit = FittedCost(LengthCost(3.0, 0.25))
    assert (fit(SEQUENCE) == LengthCost(3.0, 0.25)(SEQUENCE)).all()
    assert fit.stats()["steps"] == 0 and fit.stats()["equal_at"] == 12
    fit.observe(np.zeros((2, 2)), np.zeros(2))  # nobody computed anything
    assert fit.stats()["steps"] == 0


@pytest.mark.parametrize("equal_at", [500.0, 2048.0, 20_000.0])
def test_fit_finds_what_made_the_times(equal_at):
    random, fit, a = np.random.default_rng(0), FittedCost(), 1e-7
    for _ in range(30):
        features, seconds = measured(random, 8, 32, a, a / equal_at, 2e-3)
        fit.observe(features, seconds)
    assert fit.current.a == pytest.approx(a, rel=1e-2) and fit.current.b == pytest.approx(a / equal_at, rel=1e-2)
    assert fit.constant == pytest.approx(2e-3, rel=0.05)
    np.testing.assert_allclose(predicted(fit, features), seconds, rtol=1e-2)


def test_hiccups_count_little():
    """One time in ten is 2 to 10 times too long. Plain least squares is far off, this is not."""
    random, fit, rows = np.random.default_rng(1), FittedCost(window=40), []
    for _ in range(40):
        rows.append(measured(random, 8, 32, 1e-7, 1e-7 / 2048, 2e-3, 0.02, 0.1))
        fit.observe(*rows[-1])
    x, y = (np.concatenate(part) for part in zip(*rows, strict=True))
    plain = np.linalg.lstsq(np.column_stack((np.ones(len(y)), x)), y, rcond=None)[0]
    assert fit.stats()["equal_at"] == pytest.approx(2048, rel=0.15)
    assert abs(plain[1] / plain[2] - 2048) > 0.3 * 2048 or abs(plain[1] - 1e-7) > 0.3e-7
    assert fit.noise < 0.05


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_first_steps_are_sane(ranks, steps, seed):
    """Whatever few and noisy times say, costs are finite, not negative, and a longer sample does not cost less."""
    random, fit = np.random.default_rng(seed), FittedCost()
    for _ in range(steps):
        fit.observe(*measured(random, ranks, 4, 1e-7, 1e-11, 1e-3, 0.1, 0.3))
        costs = costs_of(fit, {"sequence": np.array([0, 1, 10, 21_000])})
        assert costs[0] == 0 and (np.diff(costs) >= 0).all() and costs[-1] > 0


def test_one_row_is_explained_in_the_proportions_of_the_prior():
    fit = FittedCost(LengthCost(1.0, 1 / 1000))
    fit.observe([[4000.0, 5e6]], [0.9])
    assert predicted(fit, np.array([4000.0, 5e6])) == pytest.approx(0.9, rel=1e-2)
    assert fit.stats()["equal_at"] == pytest.approx(1000, rel=0.02)


def test_times_that_do_not_depend_on_lengths_leave_the_cost_usable():
    fit = FittedCost()
    for seed in range(5):
        features, _ = measured(np.random.default_rng(seed), 4, 8, 1e-7, 0, 0)
        fit.observe(features, np.full(4, 0.01))
    assert fit.constant == pytest.approx(0.01, rel=0.1)
    assert costs_of(fit, {"sequence": SEQUENCE}).max() > 0


def test_old_steps_are_forgotten():
    random, fit = np.random.default_rng(0), FittedCost(window=10)
    for equal_at in (300.0, 10_000.0):
        for _ in range(12):
            fit.observe(*measured(random, 8, 32, 1e-7, 1e-7 / equal_at, 0, 0.01))
        assert fit.stats()["equal_at"] == pytest.approx(equal_at, rel=0.25)


def test_fit_survives_a_checkpoint(caplog):
    random, fit, twin = np.random.default_rng(0), FittedCost(LengthCost(5, 6)), FittedCost()
    with caplog.at_level(logging.DEBUG):
        fit.observe(*measured(random, 4, 8, 1e-7, 1e-11, 1e-3, 0.05))
    assert "after 1 steps" in caplog.text and "* L**2" in caplog.text
    twin.load_state_dict(json.loads(json.dumps(fit.state_dict())))
    more = measured(random, 4, 8, 1e-7, 1e-11, 1e-3, 0.05)
    for f in (fit, twin):
        f.observe(*more)
    assert fit.stats() == twin.stats() and fit.stats()["steps"] == 2


def test_later_steps_are_fitted_together_and_a_checkpoint_in_between_changes_nothing():
    random, fit, twin = np.random.default_rng(0), FittedCost(), FittedCost()
    with mock.patch.object(sample_cost, "robust_fit", wraps=robust_fit) as fitted:
        for _ in range(60):
            fit.observe(*measured(random, 4, 8, 1e-7, 1e-11, 1e-3, 0.05))
        assert fitted.call_count == 15 + 6  # steps 1 to 15; 16, 24, ..., 56
        twin.load_state_dict(json.loads(json.dumps(fit.state_dict())))
        assert fitted.call_count == 15 + 6 and twin.stats() == fit.stats()
    for _ in range(9):
        more = measured(random, 4, 8, 1e-7, 1e-11, 1e-3, 0.05)
        for f in (fit, twin):
            f.observe(*more)
        assert fit.stats() == twin.stats()


def test_a_checkpoint_of_before_the_fit_was_kept_is_fitted():
    random, fit, twin = np.random.default_rng(0), FittedCost(), FittedCost()
    for _ in range(3):
        fit.observe(*measured(random, 4, 8, 1e-7, 1e-11, 1e-3, 0.05))
    state = fit.state_dict()
    del state["fit"]
    twin.load_state_dict(state)
    assert twin.stats() == fit.stats()


def test_robust_fit_keeps_coefficients_above_zero():
    """The best free line through these points falls; the best allowed one is flat."""
    x = np.arange(10.0)
    found, _ = robust_fit(np.column_stack((np.ones(10), x)), 5 - 0.3 * x, np.array([1.0, 1.0]), 100.0)
    assert found[1] == 0 and found[0] == pytest.approx(np.mean(5 - 0.3 * x), rel=0.05)


def test_fitted_cost_balances_what_was_measured():
    """Times made by L**2: after some steps, balancing by the fit leaves almost no idle time, by length alone a lot."""
    random, fit = np.random.default_rng(3), FittedCost()
    for _ in range(20):
        fit.observe(*measured(random, 8, 64, 0, 1e-11, 1e-4, 0.02))
    lengths = np.minimum(random.lognormal(np.log(1000), 0.8, 8 * 64), 21_000)
    idle = []
    for costs in (costs_of(fit, {"sequence": lengths}), lengths):
        true = np.bincount(balance(costs, 8).rank, lengths**2)
        idle.append(1 - true.mean() / true.max())
    assert idle[0] < 0.02 and idle[1] > 5 * idle[0]


def test_own_function():
    def attention_only(sequence, candidates):
        return sequence * candidates

    assert costs_of(attention_only, {"sequence": SEQUENCE, "candidates": CANDIDATES}).tolist() == [20, 0, 3]


def broken(value):
    def mine(sequence):
        out = np.ones(len(sequence))
        out[1] = value
        return out

    return mine


@pytest.mark.parametrize(
    ("cost", "lengths", "words"),
    [
        (broken(np.nan), {"s": [5, 6, 7]}, "cost function mine .* sample 1 .*'s' 6.* has nan, 1 of 3"),
        (broken(np.inf), {"s": [5, 6, 7]}, "sample 1 .* has inf"),
        (broken(-1.0), {"s": [5, 6, 7]}, "sample 1 .* has -1.0"),
        (lambda s: s[:2], {"s": [5, 6, 7]}, r"one number for each of the 3 samples, found shape \(2,\)"),
        (lambda s: 1.0, {"s": [5, 6, 7]}, r"found shape \(\)"),
        (lambda s: ["a", "b", "c"], {"s": [5, 6, 7]}, "must return numbers, found list"),
        (LengthCost(), {"s": [5, 6, 7], "c": [1]}, "equally many samples; found 's' 3, 'c' 1"),
        (LengthCost(), {"s": [5, -6]}, "feature 's' must be finite and not negative; sample 1 has -6"),
        (LengthCost(), {"s": [5.0, np.nan]}, "feature 's' .* sample 1 has nan"),
        (LengthCost(), {"s": [[1]]}, "feature 's' must be numbers in 1 dimension, found int64 in 2"),
        (LengthCost(), {"s": ["a"]}, "feature 's' must be numbers"),
        (LengthCost(), {}, "at least one field"),
        (LengthCost(a=-1.0), {"s": [5]}, "cost function LengthCost .* sample 0"),
    ],
)
def test_wrong_costs_are_named(cost, lengths, words):
    with pytest.raises(BalanceError, match="^freescale: .*" + words):
        costs_of(cost, lengths)


@pytest.mark.parametrize(
    ("features", "seconds", "words"),
    [
        ([[1.0, 1.0]], [1.0, 2.0], r"found \(1, 2\) and \(2,\)"),
        ([1.0, 1.0], [1.0], r"shape \(ranks, 2\)"),
        ([[1.0, np.nan]], [1.0], "features of a step .* rank 0 has nan"),
        ([[1.0, 1.0], [1.0, 1.0]], [1.0, -2.0], "seconds of a step .* rank 1 has -2.0"),
        ([[1.0, 1.0]], [np.inf], "seconds of a step .* rank 0 has inf"),
    ],
)
def test_wrong_measurements_are_named_and_change_nothing(features, seconds, words):
    fit = FittedCost()
    with pytest.raises(BalanceError, match="^freescale: .*" + words):
        fit.observe(features, seconds)
    assert fit.stats()["steps"] == 0 and fit.current == LengthCost()
    with pytest.raises(BalanceError, match="window"):
        FittedCost(window=0)


def halves(length):
    """Features of a model that cuts a sample in two: its length and the squares of its halves."""
    length = np.asarray(length, np.float64)
    return np.stack([length, 2 * (length / 2) ** 2 + 0.0])


def test_a_fit_to_features_of_a_sample():
    """Times made of them: the fit finds their weights, costs samples by them and goes on from a checkpoint."""
    random, fit = np.random.default_rng(0), FittedCost((1.0, 1 / 1000), features=halves)
    assert fit(SEQUENCE).tolist() == (np.array([1.0, 1 / 1000]) @ halves(SEQUENCE)).tolist()
    for _ in range(30):
        lengths = random.lognormal(np.log(1000), 1, (8, 32))
        features = np.array([fit.sample_features(x).sum(1) for x in lengths])
        fit.observe(features, 2e-3 + features @ [1e-7, 3e-10])
    assert fit.current.weights == pytest.approx((1e-7, 3e-10), rel=1e-2) and fit.constant == pytest.approx(2e-3, rel=0.05)
    assert fit.stats().keys() == {"weight_0", "weight_1", "constant", "noise", "steps"}
    np.testing.assert_allclose(fit(lengths[0]), np.array(fit.current.weights) @ halves(lengths[0]))
    twin = FittedCost((5.0, 6.0), features=halves)
    twin.load_state_dict(json.loads(json.dumps(fit.state_dict())))
    assert twin.stats() == fit.stats()
    with pytest.raises(BalanceError, match="cannot load a fit of 2 features into one of 3"):
        FittedCost((1, 2, 3), features=halves).load_state_dict(fit.state_dict())


def test_features_that_are_l_and_its_square_are_the_default():
    """Bit for bit."""
    random, plain = np.random.default_rng(2), FittedCost()
    fit = FittedCost((1.0, 1 / 2048), features=lambda x: np.stack([x, x * x]))
    for _ in range(5):
        row = measured(random, 4, 8, 1e-7, 1e-11, 1e-3, 0.05)
        plain.observe(*row), fit.observe(*row)
    assert fit.current.weights == (plain.current.a, plain.current.b) and fit.constant == plain.constant
    assert plain.sample_features(SEQUENCE) is None


def test_a_cost_that_knows_the_mask_balances_better():
    random, fit, plain = np.random.default_rng(4), FittedCost((1.0, 1e-3), features=halves_of_the_old), FittedCost()
    for _ in range(30):
        lengths = np.minimum(random.lognormal(np.log(1000), 1, (8, 64)), 6000)
        seconds = np.array([halves_of_the_old(x)[1].sum() for x in lengths]) * 1e-9 + 1e-4
        fit.observe(np.array([halves_of_the_old(x).sum(1) for x in lengths]), seconds)
        plain.observe(np.array([FittedCost.features(x) for x in lengths]), seconds)
    lengths = np.minimum(random.lognormal(np.log(1000), 1, 512), 6000)
    idle = []
    for cost in (fit, plain):
        found = balance(cost(lengths), 8)
        loads = np.bincount(found.rank, weights=halves_of_the_old(lengths)[1], minlength=8)
        idle.append(1 - loads.mean() / loads.max())
    assert idle[0] < 0.01 < idle[1]


def halves_of_the_old(length):
    """Only what is more than 1500 costs anything, by its square."""
    return np.stack([length, np.maximum(length - 1500, 0) ** 2])


@pytest.mark.parametrize(
    "prior, features, sentence",
    (
        (None, halves, "as `prior` one weight per feature: 1 to 8 finite, .* found None"),
        (LengthCost(), halves, "found LengthCost"),
        ((1.0, 2.0), None, "requires the function `features`"),
        ((1.0, -2.0), halves, "non-negative numbers; found"),
        ((1.0,) * 9, halves, "1 to 8 finite, non-negative numbers"),
    ),
)
def test_a_wrong_prior_of_features(prior, features, sentence):
    with pytest.raises(BalanceError, match=sentence):
        FittedCost(prior, features=features)


def test_wrong_features():
    with pytest.raises(BalanceError, match=r"features of 3 samples must have shape \(3, 3\).* found \(2, 3\)"):
        FittedCost((1, 1, 1), features=halves)(SEQUENCE)
    with pytest.raises(BalanceError, match="feature 0 of sample 1 is -1"):
        FittedCost((1.0,), features=lambda x: np.array([[1.0, -1.0, 0.0]]))(SEQUENCE)
