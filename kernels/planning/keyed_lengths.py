"""Checks of a KeyedJaggedTensor's lengths, with TorchRec's error messages where it has them. On the CPU.

TorchRec checks only the first batch, for pooled collections. Here every batch is checked, since a malformed one would
be read past the end of its values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

_SENTENCES = (
    "",
    "Sum of lengths must equal the number of values, but got {} and {}",
    "Lengths must not be negative, but got {}",
    "Expected first offset to be 0, but got {} instead",
    "offsets is not equal to the cumulative sum of lengths",
    "keys must be unique",
    "lengths size must be divisible by keys size, but got {} and {}",
)
NONE, SUM, NEGATIVE, FIRST_OFFSET, OFFSETS, KEYS, UNEVEN = range(len(_SENTENCES))


class Fault(NamedTuple):
    kind: int  # numbers, since they are sent to other ranks
    found: int = 0
    wanted: int = 0

    def describe(self) -> str:
        return f"malformed KeyedJaggedTensor: {_SENTENCES[self.kind].format(self.found, self.wanted)}"


NO_FAULT = Fault(NONE)


def are_unique(keys: Sequence[str]) -> bool:
    return len(set(keys)) == len(keys)


def find_fault(
    keys: int, unique_keys: bool, lengths: torch.Tensor, offsets: torch.Tensor | None, values: int
) -> Fault:
    """`keys`, `values`: their counts. `lengths`: of all keys, in one row."""
    if not unique_keys:
        return Fault(KEYS)
    if lengths.numel() % keys:
        return Fault(UNEVEN, lengths.numel(), keys)
    if offsets is not None and offsets.numel() and (first := int(offsets[0])) != 0:
        return Fault(FIRST_OFFSET, first)
    if (total := int(lengths.sum())) != values:
        return Fault(SUM, total, values)
    if lengths.numel() and (least := int(lengths.min())) < 0:
        return Fault(NEGATIVE, least)
    if offsets is not None and not torch.equal(lengths.long().cumsum(0), offsets[1:].long()):
        return Fault(OFFSETS)
    return NO_FAULT
