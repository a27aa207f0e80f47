"""What can be wrong with the lengths of a KeyedJaggedTensor, in TorchRec's words where it has some. On the CPU.

TorchRec looks at the first batch of a collection that pools. Here every batch is looked at, since what is wrong with
one would be read past the end of its values.
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
    kind: int  # as numbers, to be told to other ranks
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
    """`keys`, `values`: how many there are. `lengths`: of all keys, in one row."""
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
