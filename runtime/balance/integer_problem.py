"""The problem that the balancer solves, in whole numbers, made from what a user gives; bad input is named here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Ints = np.ndarray  # of int64

ROOM = 62  # bits of a sample's key: its cost and its number
_BYTES = 2.0**53


class BalanceError(ValueError):
    """Costs, counts, sizes or memory that cannot be balanced, and why."""


@dataclass(frozen=True)
class Problem:
    """Samples and ranks in whole numbers. `sizes` are bytes to move, `home` the rank that has a sample now."""

    costs: Ints
    counts: Ints  # samples of each rank
    home: Ints
    sizes: Ints
    memory: Ints | None
    cap: int  # bytes of memory a rank may hold; of no meaning without `memory`
    bits: int  # that hold the number of a sample

    @property
    def ranks(self) -> int:
        return len(self.counts)

    def target(self) -> int:
        """No assignment has a smaller largest load: the mean, and the longest sample with the shortest company."""
        if not len(self.costs):
            return 0
        mean, longest = -(-int(self.costs.sum()) // self.ranks), int(self.costs.max())
        if 2 * longest < mean:
            return mean
        company = int(self.counts[self.counts > 0].min()) - 1
        shortest = np.sort(self.costs)[:company]
        return max(mean, longest + int(shortest.sum()))


def number_bits(samples: int, ranks: int) -> int:
    return max(samples, ranks, 2).bit_length()


def whole_costs(costs: np.ndarray, bits: int) -> Ints:
    """Costs as whole numbers whose sum has at most 62 - `bits` bits: the costs themselves where they are whole."""
    room = ROOM - bits
    largest = float(costs.max(initial=0.0))
    if largest * len(costs) < 2.0**room and (costs == np.rint(costs)).all():
        return costs.astype(np.int64)
    exponent = int(np.frexp(largest)[1])
    first = np.rint(np.ldexp(costs, room - bits - exponent)).astype(np.int64)  # at most room bits in all
    more = max(0, room - 1 - int(first.sum()).bit_length())
    return np.rint(np.ldexp(costs, room - bits - exponent + min(more, bits))).astype(np.int64)


def make_problem(
    given: np.ndarray, ranks: int, counts: Any, home: Any, sizes: Any, memory: Any, memory_cap: float | None
) -> Problem:
    samples = len(given)
    if isinstance(ranks, bool) or not isinstance(ranks, (int, np.integer)) or ranks < 1:
        raise BalanceError(f"freescale: balance wants a whole number of ranks, at least 1; found {ranks!r}")
    even = np.full(ranks, samples // ranks) + (np.arange(ranks) < samples % ranks)
    at = None if home is None else checked_whole("home", home, samples, int(ranks) - 1)
    if counts is not None:
        wanted = checked_whole("counts", counts, int(ranks), None)
        if int(wanted.sum()) != samples:
            raise BalanceError(
                f"freescale: counts {shortened(wanted)} add up to {int(wanted.sum())}, but there are {samples} samples"
            )
    else:
        have = even if at is None else np.bincount(at, minlength=ranks)
        wanted = have if np.ptp(have) <= 1 else even  # as equal as can be, without moving what need not move
    if at is None:
        at = np.repeat(np.arange(ranks), wanted)
    if (memory is None) != (memory_cap is None):
        raise BalanceError("freescale: balance wants both memory and memory_cap, or neither")
    cap = 0
    if memory_cap is not None:
        if not (np.isfinite(memory_cap) and memory_cap >= 0):
            raise BalanceError(
                f"freescale: the memory cap must be a finite number of bytes, at least 0; found {memory_cap}"
            )
        cap = int(memory_cap)
    bits = number_bits(samples, int(ranks))
    size = np.ones(samples, np.int64) if sizes is None else _bytes("sizes", sizes, samples)
    held = None if memory is None else _bytes("memory", memory, samples)
    return Problem(whole_costs(given, bits), wanted, at, size, held, cap, bits)


def checked_numbers(name: str, values: Any, samples: int | None) -> np.ndarray:
    """One finite number, not negative, for each sample."""
    try:
        found = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as e:
        raise BalanceError(f"freescale: {name} must be numbers, found {type(values).__name__}: {e}") from None
    if found.ndim != 1:
        raise BalanceError(f"freescale: {name} must have 1 dimension, found {found.ndim}")
    if samples is not None and len(found) != samples:
        raise BalanceError(
            f"freescale: {name} must have one number for each of the {samples} samples, found {len(found)}"
        )
    wrong = np.flatnonzero(~((found >= 0) & (found < np.inf)))
    if len(wrong):
        raise BalanceError(
            f"freescale: {name} must be finite and not negative; sample {wrong[0]} has {found[wrong[0]]} "
            f"({len(wrong)} of {len(found)} are wrong)"
        )
    return found


def _bytes(name: str, values: Any, samples: int) -> np.ndarray:
    found = np.ceil(checked_numbers(name, values, samples))
    if float(found.sum()) >= _BYTES:
        raise BalanceError(f"freescale: {name} are bytes; together {found.sum():.3g} are more than can be counted")
    return found.astype(np.int64)


def checked_whole(name: str, values: Any, length: int, largest: int | None) -> np.ndarray:
    """Whole numbers, not negative."""
    found = np.asarray(values)
    if found.ndim != 1 or len(found) != length:
        raise BalanceError(
            f"freescale: {name} must have {length} numbers in 1 dimension, found the shape {found.shape}"
        )
    if length and found.dtype.kind not in "iu":
        raise BalanceError(f"freescale: {name} must be whole numbers, found {found.dtype}")
    whole = found.astype(np.int64)
    if length and (whole.min() < 0 or (largest is not None and whole.max() > largest)):
        limit = "at least 0" if largest is None else f"between 0 and {largest}"
        raise BalanceError(
            f"freescale: {name} must be {limit}; found {whole.min() if whole.min() < 0 else whole.max()}"
        )
    return whole


def shortened(values: np.ndarray) -> str:
    return str(values.tolist()) if len(values) <= 8 else f"[{', '.join(map(str, values[:6]))}, ... {values[-1]}]"
