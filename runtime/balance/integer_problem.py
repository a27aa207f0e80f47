"""The balancing problem in integers, built from user input. Validates the input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

IntArray = np.ndarray  # of int64

KEY_BITS = 62  # of a sample's key: cost and index
_MAX_TOTAL_BYTES = 2.0**53


class BalanceError(ValueError):
    """Costs, counts, sizes or memory that cannot be balanced, with the reason."""


@dataclass(frozen=True)
class Problem:
    """Samples and ranks in integers. `sizes`: bytes to move. `home`: current rank of each sample."""

    costs: IntArray
    counts: IntArray  # samples per rank
    home: IntArray
    sizes: IntArray
    memory: IntArray | None
    cap: int  # max bytes of memory per rank; unused without `memory`
    index_bits: int  # bits of a sample index

    @property
    def ranks(self) -> int:
        return len(self.counts)

    def load_lower_bound(self) -> int:
        """Lower bound of the largest load: the mean, or the longest sample plus the shortest others on its rank."""
        if not len(self.costs):
            return 0
        mean, longest = -(-int(self.costs.sum()) // self.ranks), int(self.costs.max())
        if 2 * longest < mean:
            return mean
        others = int(self.counts[self.counts > 0].min()) - 1
        shortest = np.sort(self.costs)[:others]
        return max(mean, longest + int(shortest.sum()))


def bits_for_index(samples: int, ranks: int) -> int:
    return max(samples, ranks, 2).bit_length()


def integer_costs(costs: np.ndarray, bits: int) -> IntArray:
    """Costs as integers whose sum has at most 62 - `bits` bits; unchanged if they are integers already."""
    cost_bits = KEY_BITS - bits
    largest = float(costs.max(initial=0.0))
    if largest * len(costs) < 2.0**cost_bits and (costs == np.rint(costs)).all():
        return costs.astype(np.int64)
    exponent = int(np.frexp(largest)[1])
    scaled = np.rint(np.ldexp(costs, cost_bits - bits - exponent)).astype(np.int64)  # sum: at most `cost_bits` bits
    unused_bits = max(0, cost_bits - 1 - int(scaled.sum()).bit_length())
    return np.rint(np.ldexp(costs, cost_bits - bits - exponent + min(unused_bits, bits))).astype(np.int64)


def make_problem(
    costs: np.ndarray, ranks: int, counts: Any, home: Any, sizes: Any, memory: Any, memory_cap: float | None
) -> Problem:
    samples = len(costs)
    if isinstance(ranks, bool) or not isinstance(ranks, (int, np.integer)) or ranks < 1:
        raise BalanceError(f"freescale: balance expects an integer number of ranks, at least 1; found {ranks!r}")
    even = np.full(ranks, samples // ranks) + (np.arange(ranks) < samples % ranks)
    home_rank = None if home is None else checked_integers("home", home, samples, int(ranks) - 1)
    if counts is not None:
        wanted = checked_integers("counts", counts, int(ranks), None)
        if int(wanted.sum()) != samples:
            raise BalanceError(
                f"freescale: counts {short_text(wanted)} add up to {int(wanted.sum())}, but there are {samples} samples"
            )
    else:
        have = even if home_rank is None else np.bincount(home_rank, minlength=ranks)
        wanted = have if np.ptp(have) <= 1 else even  # as even as possible, without unnecessary moves
    if home_rank is None:
        home_rank = np.repeat(np.arange(ranks), wanted)
    if (memory is None) != (memory_cap is None):
        raise BalanceError("freescale: balance requires both memory and memory_cap, or neither")
    cap = 0
    if memory_cap is not None:
        if not (np.isfinite(memory_cap) and memory_cap >= 0):
            raise BalanceError(
                f"freescale: the memory cap must be a finite number of bytes, at least 0; found {memory_cap}"
            )
        cap = int(memory_cap)
    bits = bits_for_index(samples, int(ranks))
    size = np.ones(samples, np.int64) if sizes is None else _checked_bytes("sizes", sizes, samples)
    held = None if memory is None else _checked_bytes("memory", memory, samples)
    return Problem(integer_costs(costs, bits), wanted, home_rank, size, held, cap, bits)


def checked_numbers(name: str, values: Any, samples: int | None) -> np.ndarray:
    try:
        numbers = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as e:
        raise BalanceError(f"freescale: {name} must be numbers, found {type(values).__name__}: {e}") from None
    if numbers.ndim != 1:
        raise BalanceError(f"freescale: {name} must have 1 dimension, found {numbers.ndim}")
    if samples is not None and len(numbers) != samples:
        raise BalanceError(
            f"freescale: {name} must have one number for each of the {samples} samples, found {len(numbers)}"
        )
    wrong = np.flatnonzero(~((numbers >= 0) & (numbers < np.inf)))
    if len(wrong):
        raise BalanceError(
            f"freescale: {name} must be finite and not negative; sample {wrong[0]} has {numbers[wrong[0]]} "
            f"({len(wrong)} of {len(numbers)} are wrong)"
        )
    return numbers


def _checked_bytes(name: str, values: Any, samples: int) -> np.ndarray:
    n_bytes = np.ceil(checked_numbers(name, values, samples))
    if float(n_bytes.sum()) >= _MAX_TOTAL_BYTES:
        raise BalanceError(f"freescale: {name} are bytes; their total {n_bytes.sum():.3g} is too large")
    return n_bytes.astype(np.int64)


def checked_integers(name: str, values: Any, length: int, largest: int | None) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or len(array) != length:
        raise BalanceError(f"freescale: {name} must have {length} numbers in 1 dimension, found shape {array.shape}")
    if length and array.dtype.kind not in "iu":
        raise BalanceError(f"freescale: {name} must be integers, found {array.dtype}")
    whole = array.astype(np.int64)
    if length and (whole.min() < 0 or (largest is not None and whole.max() > largest)):
        limit = "at least 0" if largest is None else f"between 0 and {largest}"
        raise BalanceError(
            f"freescale: {name} must be {limit}; found {whole.min() if whole.min() < 0 else whole.max()}"
        )
    return whole


def short_text(values: np.ndarray) -> str:
    return str(values.tolist()) if len(values) <= 8 else f"[{', '.join(map(str, values[:6]))}, ... {values[-1]}]"
