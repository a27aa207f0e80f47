"""What a sample costs: from its lengths, by a formula that is fitted to measured times, or by a user's own function.

A cost is any callable `cost(*lengths) -> array` with one number per sample; its unit does not matter. `costs_of` calls
one and names what is wrong with the answer. Nothing here communicates: ranks gather the *costs* of their samples, so
that all balance the same numbers, and gather sums and times, so that all fit the same rows.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from freescale.runtime.balance.integer_problem import BalanceError

log = logging.getLogger(__name__)


class Cost(Protocol):
    """Costs of samples from their lengths: one array of lengths for each field, in the order of the fields."""

    def __call__(self, *lengths: np.ndarray) -> np.ndarray: ...


@dataclass(frozen=True)
class LengthCost:
    """a * L + b * L**2, where L is the sum of a sample's lengths (its sequence and its candidates).

    As it is made, both terms are equal at 2048: linear layers and attention of a model some 500 wide.
    """

    a: float = 1.0
    b: float = 1.0 / 2048

    def __call__(self, *lengths: np.ndarray) -> np.ndarray:
        length = total_length(*lengths)
        return self.a * length + self.b * length * length


def total_length(*lengths: np.ndarray) -> np.ndarray:
    return np.sum([np.asarray(x, np.float64) for x in lengths], axis=0)


def costs_of(cost: Callable[..., Any], lengths: Mapping[str, Any], what: str = "cost") -> np.ndarray:
    """The cost of each sample; an error names the field, or the function and the sample, that is wrong."""
    fields = {name: _checked_lengths(name, values) for name, values in lengths.items()}
    if not fields:
        raise BalanceError(f"freescale: the {what} of a sample needs the lengths of at least one field; found none")
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
            f"found the shape {values.shape}"
        )
    wrong = np.flatnonzero(~((values >= 0) & (values < np.inf)))
    if len(wrong):
        first = int(wrong[0])
        its_lengths = ", ".join(f"{field!r} {fields[field][first]}" for field in fields)
        raise BalanceError(
            f"freescale: the {what} function {name} must return finite numbers that are not negative; sample {first} "
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


_HUBER_THRESHOLD = 1.345  # residuals beyond so many standard deviations count less
_MAX_ITERATIONS = 20
_PRIOR_NOISE, _PRIOR_NOISE_ROWS = 0.05, 8  # of a measured time, as a share of it; and how many rows that counts for


class FittedCost:
    """a * L + b * L**2, with a and b from measured times of all ranks; before there are any, from the prior.

    The time of a rank is modelled as c + a * sum(L) + b * sum(L**2), nothing negative, over the last `window` steps, by
    least squares with Huber's weights: a step with a hiccup counts little. The prior knows how a and b compare, not how
    fast the machine is; it counts as much as one rank's one step whose shares of the time are known to `prior_spread`.
    """

    def __init__(self, prior: LengthCost | None = None, *, window: int = 64, prior_spread: float = 0.5) -> None:
        if window < 1 or not prior_spread > 0:
            raise BalanceError(
                f"freescale: a fit wants a window of at least 1 step and a prior_spread above 0; "
                f"found {window} and {prior_spread}"
            )
        self.prior, self.prior_spread = prior or LengthCost(), prior_spread
        self.rows: deque[tuple[np.ndarray, np.ndarray]] = deque(maxlen=window)
        self.current, self.constant, self.noise, self.steps = self.prior, 0.0, float("nan"), 0

    def __call__(self, *lengths: np.ndarray) -> np.ndarray:
        return self.current(*lengths)

    @staticmethod
    def features(*lengths: np.ndarray) -> np.ndarray:
        """What a rank must tell of its batch: sum(L), sum(L**2)."""
        length = total_length(*lengths)
        return np.array([length.sum(), (length * length).sum()])

    def observe(self, features: Any, seconds: Any) -> None:
        """One step: features[rank] and compute time of every rank. A rank that computed nothing (0 s) is left out."""
        x, y = np.asarray(features, np.float64), np.asarray(seconds, np.float64)
        if x.ndim != 2 or x.shape[1] != 2 or y.shape != (len(x),):
            raise BalanceError(
                f"freescale: a fit wants features of shape (ranks, 2) and one time per rank, "
                f"found {x.shape} and {y.shape}"
            )
        for name, values in (("features", x), ("seconds", y)):
            wrong = np.argwhere(~((values >= 0) & (values < np.inf)))
            if len(wrong):
                first = tuple(wrong[0])
                raise BalanceError(
                    f"freescale: {name} of a step must be finite and not negative; rank {first[0]} has {values[first]}"
                )
        used = (y > 0) & (x[:, 0] > 0)
        if not used.any():
            return
        self.rows.append((x[used], y[used]))
        self.steps += 1
        self._fit()

    def stats(self) -> dict[str, float]:
        """The fit as it stands, for logs and statistics. `equal_at`: length at which both terms cost the same."""
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
        return {"rows": rows, "steps": self.steps, "prior": (self.prior.a, self.prior.b)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.prior, self.steps = LengthCost(*state["prior"]), int(state["steps"])
        self.rows.clear()
        self.rows.extend((np.array(x), np.array(y)) for x, y in state["rows"])
        self.current, self.constant, self.noise = self.prior, 0.0, float("nan")
        if self.rows:
            self._fit()

    def _fit(self) -> None:
        x, y = (np.concatenate(part) for part in zip(*self.rows, strict=True))
        scale_x, scale_y = x.mean(0), float(y.mean())
        terms = np.column_stack((np.ones(len(y)), x / scale_x))
        expected = np.array([0.0, self.prior.a * scale_x[0], self.prior.b * scale_x[1]])
        total = expected.sum()
        expected = expected / total if total else np.array([1.0, 0.0, 0.0])
        shares, self.noise = robust_fit(terms, y / scale_y, expected, self.prior_spread)
        self.constant = float(shares[0] * scale_y)
        a, b = (shares[1:] * scale_y / scale_x).tolist()
        if a + b > 0:  # else the time does not depend on lengths at all, and any order of samples is as good
            self.current = LengthCost(a, b)
        log.debug(
            "cost of a sample after %d steps: %.3g * L + %.3g * L**2 seconds, %.3g per step, noise %.2g%%",
            self.steps, a, b, self.constant, 100 * self.noise,
        )  # fmt: skip


def robust_fit(terms: np.ndarray, y: np.ndarray, prior: np.ndarray, spread: float) -> tuple[np.ndarray, float]:
    """Coefficients, none negative, of the columns of `terms`, and the deviation of a row (robust, in units of y).

    Iteratively reweighted least squares. `prior` is what they are before there are rows, known to `spread`.
    """
    coefficients, noise = prior, 1.0
    for _ in range(_MAX_ITERATIONS):
        residuals = y - terms @ coefficients
        deviation = 1.4826 * float(np.median(np.abs(residuals)))
        noise = (  # few rows can all lie on the line
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
    """Minimise x.gram.x / 2 - right.x over x >= 0, exactly: the best of all choices of coefficients that are not 0."""
    if (best := np.linalg.solve(gram, right)).min() >= 0:
        return best
    best, best_value = np.zeros(len(right)), 0.0
    for chosen in range(1, 1 << len(right)):
        index = np.array([i for i in range(len(right)) if chosen >> i & 1])
        x = np.zeros(len(right))
        x[index] = np.linalg.solve(gram[np.ix_(index, index)], right[index])
        value = float(x @ gram @ x / 2 - right @ x)
        if (x >= 0).all() and value < best_value:
            best, best_value = x, value
    return best
