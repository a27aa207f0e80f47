"""The cost of a sample as a function of its lengths: a formula fitted to measured times, or a user's function: any
callable `cost(*lengths) -> array` with one number per sample, in any unit. Nothing here communicates: ranks gather
costs, sums and times, so that all solve the same problem and fit the same data."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from freescale.runtime.balance.integer_problem import BalanceError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LengthCost:
    """a * L + b * L**2, where L is the sum of a sample's lengths (its sequence and its candidates). With the defaults,
    both terms are equal at length 2048: linear layers and attention of a model about 500 wide."""

    a: float = 1.0
    b: float = 1.0 / 2048

    def __call__(self, *lengths: np.ndarray) -> np.ndarray:
        length = total_length(*lengths)
        return self.a * length + self.b * length * length


@dataclass(frozen=True)
class FeatureCost:
    """The weighted sum of a sample's features, as fitted by `FittedCost`."""

    weights: tuple[float, ...]
    features: Callable[..., Any]

    def __call__(self, *lengths: np.ndarray) -> np.ndarray:
        return np.asarray(self.weights) @ self.checked_features(*lengths)

    def checked_features(self, *lengths: np.ndarray) -> np.ndarray:
        """[features, samples]; validated."""
        found, samples = np.asarray(self.features(*lengths), np.float64), len(lengths[0])
        if found.shape != (len(self.weights), samples):
            raise BalanceError(
                f"freescale: the features of {samples} samples must have shape ({len(self.weights)}, {samples}), "
                f"one row per weight of the prior; found {found.shape}"
            )
        wrong = np.argwhere(~((found >= 0) & (found < np.inf)))
        if len(wrong):
            row, sample = wrong[0]
            raise BalanceError(
                f"freescale: features of a sample must be finite and not negative; "
                f"feature {row} of sample {sample} is {found[row, sample]}"
            )
        return found


def total_length(*lengths: np.ndarray) -> np.ndarray:
    return np.sum([np.asarray(x, np.float64) for x in lengths], axis=0)


def costs_of(cost: Callable[..., Any], lengths: Mapping[str, Any], what: str = "cost") -> np.ndarray:
    """The cost of each sample. Errors name the invalid field, or the function and the sample."""
    fields = {name: _checked_lengths(name, values) for name, values in lengths.items()}
    if not fields:
        raise BalanceError(f"freescale: the {what} of a sample requires the lengths of at least one field; found none")
    sizes = {name: len(values) for name, values in fields.items()}
    samples = next(iter(sizes.values()))
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name!r} {size}" for name, size in sizes.items())
        raise BalanceError(f"freescale: the features of a batch must have equally many samples; found {listed}")
    name = getattr(cost, "__name__", type(cost).__name__)
    returned = cost(*fields.values())
    try:
        values = np.asarray(returned, np.float64)
    except (TypeError, ValueError):
        raise BalanceError(
            f"freescale: the {what} function {name} must return numbers, found {type(returned).__name__}"
        ) from None
    if values.shape != (samples,):
        raise BalanceError(
            f"freescale: the {what} function {name} must return one number for each of the {samples} samples, "
            f"found shape {values.shape}"
        )
    wrong = np.flatnonzero(~((values >= 0) & (values < np.inf)))
    if len(wrong):
        first = int(wrong[0])
        its_lengths = ", ".join(f"{field!r} {fields[field][first]}" for field in fields)
        raise BalanceError(
            f"freescale: the {what} function {name} must return finite, non-negative numbers; sample {first} "
            f"(lengths: {its_lengths}) has {values[first]}, {len(wrong)} of {samples} are wrong"
        )
    return values


def _checked_lengths(name: str, values: Any) -> np.ndarray:
    lengths = np.asarray(values)
    if lengths.ndim != 1 or (len(lengths) and lengths.dtype.kind not in "iuf"):
        raise BalanceError(
            f"freescale: the lengths of feature {name!r} must be numbers in 1 dimension, "
            f"found {lengths.dtype} in {lengths.ndim}"
        )
    wrong = np.flatnonzero(~((lengths >= 0) & np.isfinite(lengths)))
    if len(wrong):
        raise BalanceError(
            f"freescale: the lengths of feature {name!r} must be finite and not negative; "
            f"sample {wrong[0]} has {lengths[wrong[0]]}"
        )
    return lengths


_HUBER_THRESHOLD = 1.345  # in standard deviations; larger residuals get less weight
_MAX_ITERATIONS = 20
_MAX_FEATURES = 8  # all subsets are tried
# A fit holds the GIL for milliseconds, more with more ranks. From step _REFIT_FROM on, fit every _REFIT_EVERY steps.
_REFIT_FROM, _REFIT_EVERY = 16, 8
_PRIOR_NOISE, _PRIOR_NOISE_ROWS = 0.05, 8  # rel. noise of a measured time; rows that this prior counts as


class FittedCost:
    """a * L + b * L**2, with a and b fitted to measured times of all ranks; the prior before there are any.

    The time of a rank is modeled as c + a * sum(L) + b * sum(L**2), with non-negative coefficients, over the last
    `window` steps, by least squares with Huber weights: outlier steps count little. The first steps are fitted
    immediately, later ones in groups of eight. The prior gives the ratio of a and b, not the machine's speed. It counts
    as much as one step of one rank whose shares of the time are known to `prior_spread`.

    features: replaces L and L**2: features(*lengths) -> [features, samples], non-negative. The cost is then their
    weighted sum, and `prior` has one weight per feature.
    """

    def __init__(
        self,
        prior: LengthCost | Sequence[float] | None = None,
        *,
        features: Callable[..., Any] | None = None,
        window: int = 64,
        prior_spread: float = 0.5,
    ) -> None:
        if window < 1 or not prior_spread > 0:
            raise BalanceError(
                f"freescale: a fit requires a window of at least 1 step and a prior_spread above 0; "
                f"found {window} and {prior_spread}"
            )
        self.of_sample, self.prior_spread = features, prior_spread
        self.prior: LengthCost | FeatureCost = self._make_prior(prior)
        self.rows: deque[tuple[np.ndarray, np.ndarray]] = deque(maxlen=window)
        self.current, self.constant, self.noise, self.steps = self.prior, 0.0, float("nan"), 0

    def _make_prior(self, prior: LengthCost | Sequence[float] | None) -> LengthCost | FeatureCost:
        if self.of_sample is None and not isinstance(prior, Sequence):
            return prior or LengthCost()
        weights = tuple(float(w) for w in prior) if isinstance(prior, Sequence) else ()
        sound = 1 <= len(weights) <= _MAX_FEATURES and all(0 <= w < np.inf for w in weights)
        if self.of_sample is None or not sound:
            raise BalanceError(
                f"freescale: fitting features requires the function `features`, and as `prior` one weight per feature: "
                f"1 to {_MAX_FEATURES} finite, non-negative numbers; found {prior!r}"
            )
        return FeatureCost(weights, self.of_sample)

    def __call__(self, *lengths: np.ndarray) -> np.ndarray:
        return self.current(*lengths)

    def sample_features(self, *lengths: np.ndarray) -> np.ndarray | None:
        """[features, samples] from the function `features`; None if the features are L and L**2."""
        return self.prior.checked_features(*lengths) if isinstance(self.prior, FeatureCost) else None

    @staticmethod
    def features(*lengths: np.ndarray) -> np.ndarray:
        """What a rank reports about its batch: sum(L), sum(L**2)."""
        length = total_length(*lengths)
        return np.array([length.sum(), (length * length).sum()])

    def observe(self, features: Any, seconds: Any) -> None:
        """Add one step: features[rank] and compute time of every rank. Skips ranks that computed nothing (0 s)."""
        x, y = np.asarray(features, np.float64), np.asarray(seconds, np.float64)
        number = len(_weights(self.prior))
        if x.ndim != 2 or x.shape[1] != number or y.shape != (len(x),):
            raise BalanceError(
                f"freescale: a fit expects features of shape (ranks, {number}) and one time per rank, "
                f"found {x.shape} and {y.shape}"
            )
        for name, values in (("features", x), ("seconds", y)):
            wrong = np.argwhere(~((values >= 0) & (values < np.inf)))
            if len(wrong):
                first = tuple(wrong[0])
                raise BalanceError(
                    f"freescale: {name} of a step must be finite and not negative; rank {first[0]} has {values[first]}"
                )
        used = (y > 0) & (x.max(1) > 0)
        if not used.any():
            return
        self.rows.append((x[used], y[used]))
        self.steps += 1
        if self.steps < _REFIT_FROM or self.steps % _REFIT_EVERY == 0:
            self._fit()

    def stats(self) -> dict[str, float]:
        """The current fit, for logs and statistics. `equal_at`: length at which both terms are equal."""
        if isinstance(self.current, FeatureCost):
            weights = {f"weight_{i}": w for i, w in enumerate(self.current.weights)}
            return {**weights, "constant": self.constant, "noise": self.noise, "steps": self.steps}
        a, b = self.current.a, self.current.b
        return {
            "a": a,
            "b": b,
            "constant": self.constant,
            "equal_at": a / b if b else float("inf"),
            "noise": self.noise,
            "steps": self.steps,
        }

    def state_dict(self) -> dict[str, Any]:
        rows = [(x.tolist(), y.tolist()) for x, y in self.rows]
        fit = {"weights": _weights(self.current), "constant": self.constant, "noise": self.noise}
        return {"rows": rows, "steps": self.steps, "prior": _weights(self.prior), "fit": fit if rows else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(prior := tuple(state["prior"])) != len(_weights(self.prior)):
            raise BalanceError(
                f"freescale: cannot load a fit of {len(prior)} features into one of {len(_weights(self.prior))}"
            )
        self.prior, self.steps = _with_weights(self.prior, prior), int(state["steps"])
        self.rows.clear()
        self.rows.extend((np.array(x), np.array(y)) for x, y in state["rows"])
        self.current, self.constant, self.noise = self.prior, 0.0, float("nan")
        if (fit := state.get("fit")) is not None:  # the fit may be older than the last rows
            self.current = _with_weights(self.prior, fit["weights"])
            self.constant, self.noise = float(fit["constant"]), float(fit["noise"])
        elif self.rows:
            self._fit()

    def _fit(self) -> None:
        x, y = (np.concatenate(part) for part in zip(*self.rows, strict=True))
        scale_x, scale_y = x.mean(0), float(y.mean())
        scale_x = np.where(scale_x > 0, scale_x, 1.0)
        terms = np.column_stack((np.ones(len(y)), x / scale_x))
        expected = np.array([0.0, *(w * scale for w, scale in zip(_weights(self.prior), scale_x, strict=True))])
        total = expected.sum()
        expected = expected / total if total else np.eye(len(expected))[0]
        shares, self.noise = robust_fit(terms, y / scale_y, expected, self.prior_spread)
        self.constant = float(shares[0] * scale_y)
        weights = (shares[1:] * scale_y / scale_x).tolist()
        if sum(weights) > 0:  # else the time does not depend on lengths, and any assignment is equally good
            self.current = _with_weights(self.prior, weights)
        names = ("L", "L**2") if isinstance(self.prior, LengthCost) else [f"feature {i}" for i in range(len(weights))]
        log.debug(
            "cost per sample after %d steps: %s seconds, %.3g per step, noise %.2g%%",
            self.steps, " + ".join(f"{w:.3g} * {name}" for w, name in zip(weights, names, strict=True)),
            self.constant, 100 * self.noise,
        )  # fmt: skip


def _weights(cost: LengthCost | FeatureCost) -> tuple[float, ...]:
    return cost.weights if isinstance(cost, FeatureCost) else (cost.a, cost.b)


def _with_weights(like: LengthCost | FeatureCost, weights: Sequence[float]) -> LengthCost | FeatureCost:
    return replace(like, weights=tuple(weights)) if isinstance(like, FeatureCost) else LengthCost(*weights)


def robust_fit(terms: np.ndarray, y: np.ndarray, prior: np.ndarray, spread: float) -> tuple[np.ndarray, float]:
    """Non-negative coefficients of the columns of `terms`, and the robust standard deviation of a row, in units of y,
    by iteratively reweighted least squares. `prior`: coefficients before there are rows, known to `spread`."""
    coefficients, noise = prior, 1.0
    for _ in range(_MAX_ITERATIONS):
        residuals = y - terms @ coefficients
        deviation = 1.4826 * float(np.median(np.abs(residuals)))
        noise = (  # few rows may fit exactly
            (len(y) * deviation**2 + _PRIOR_NOISE_ROWS * _PRIOR_NOISE**2) / (len(y) + _PRIOR_NOISE_ROWS)
        ) ** 0.5
        weights = np.minimum(1.0, _HUBER_THRESHOLD * noise / np.maximum(np.abs(residuals), 1e-300))
        strength = (noise / spread) ** 2
        gram = (terms * weights[:, None]).T @ terms + strength * np.eye(len(prior))
        new = _least_squares(gram, terms.T @ (weights * y) + strength * prior)
        if np.abs(new - coefficients).max() < 1e-6:
            return new, noise
        coefficients = new
    return coefficients, noise


def _least_squares(gram: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Minimize x.gram.x / 2 - right.x over x >= 0, exactly: the best over all subsets of nonzero coefficients."""
    if (best := np.linalg.solve(gram, right)).min() >= 0:
        return best
    best, best_value = np.zeros(len(right)), 0.0
    for index, block in _choices(len(right)):
        x = np.zeros(len(right))
        x[index] = np.linalg.solve(gram[block], right[index])
        value = float(x @ gram @ x / 2 - right @ x)
        if (x >= 0).all() and value < best_value:
            best, best_value = x, value
    return best


@cache
def _choices(n: int) -> list[tuple[np.ndarray, tuple[np.ndarray, ...]]]:
    """All nonempty subsets of n coefficients: their indices into a vector and into a matrix."""
    chosen = ([i for i in range(n) if choice >> i & 1] for choice in range(1, 1 << n))
    return [(np.array(index), np.ix_(index, index)) for index in chosen]
