"""What ranks report to each other about a batch before planning it, and the errors that follow. On the CPU. TorchRec
checks a KeyedJaggedTensor only in the first batch; here every one is checked, with its messages where it has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from freescale.kernels.ops import table_registry
from freescale.kernels.planning import rank_mesh
from freescale.kernels.planning.owners import InvalidId

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


_FIRST = 3  # offset in a header of the first exchange's numbers
_INVALID_ID, _NO_LIBRARY = -1, -2  # instead of the kind of a Fault


class IdOutsideTable(IndexError):
    """An id outside its table. Raised on every rank at the same point."""


class MalformedKeyedJaggedTensor(ValueError):
    """Raised on every rank at the same point."""


class Headers(NamedTuple):
    """What all ranks reported to this one about a batch."""

    statuses: list[int]  # per rank: a number chosen by the caller
    invalid_ids: list[tuple[int, InvalidId] | None]  # per exchange: rank, and its first invalid id
    told: np.ndarray  # [ranks, 2]: two numbers chosen by the caller


def header_width(exchanges: int) -> int:
    """Status; two numbers of the caller; per exchange the number of rows, and feature and value of an invalid id (or
    -1)."""
    return _FIRST + 3 * exchanges


def told(received: np.ndarray) -> np.ndarray:
    return received[:, 1:_FIRST].copy()


def read_headers(received: np.ndarray, exchanges: int) -> Headers:
    invalid: list[tuple[int, InvalidId] | None] = []
    for i in range(exchanges):
        of_exchange = received[:, _FIRST + 3 * i : _FIRST + 3 * i + 3]
        rank = int(np.argmax(of_exchange[:, 1] >= 0))
        _, feature, value = of_exchange[rank].tolist()
        invalid.append((rank, InvalidId(feature, value)) if feature >= 0 else None)
    return Headers(received[:, 0].tolist(), invalid, told(received))


def tell_missing_library(group: dist.ProcessGroup) -> None:
    """Send this to ranks that plan a batch of one exchange, instead of the header that C would send."""
    world = group.size()
    sent = torch.full((world, header_width(1)), _NO_LIBRARY).view(torch.uint8)
    rank_mesh.all_to_all_cpu(torch.empty_like(sent), sent, [1] * world, [1] * world, group)


def require_valid_ids(headers: Headers, tables: Sequence[str]) -> None:
    for table, invalid in zip(tables, headers.invalid_ids, strict=True):
        if invalid is not None:
            _raise(invalid[0], _INVALID_ID, *invalid[1], table)


def require_fine(headers: Headers, table: str) -> None:
    """require_valid_ids for one exchange whose status is the kind of a Fault, with the Fault's numbers in `told`."""
    problems = [(kind, *numbers) for kind, numbers in zip(headers.statuses, headers.told.tolist(), strict=True)]
    if headers.invalid_ids[0] is not None:
        rank, invalid = headers.invalid_ids[0]
        problems[rank] = (_INVALID_ID, *invalid)
    _raise_first(problems, table)


def compare_invalid_ids(
    invalid: tuple[int, int] | None, table: str, group: dist.ProcessGroup, fault: Fault = NO_FAULT
) -> None:
    """Raise on every rank if any rank has an invalid (feature, id) or a fault; for a lookup that requests nothing."""
    own = fault if fault.kind or invalid is None else (_INVALID_ID, *invalid)
    _raise_first(_from_all(own, group), table)


def compare_weights(weights: int, ids: int, features: str, group: dist.ProcessGroup) -> None:
    for rank, (n_weights, n_ids) in enumerate(_from_all((weights, ids), group)):
        if n_weights != n_ids:
            said = f"{n_weights} weights for {n_ids} ids of the features of {features}"
            raise ValueError(f"freescale: rank {rank}: {said}")


def _from_all(numbers: Sequence[int], group: dist.ProcessGroup) -> list[list[int]]:
    world = group.size()
    sent = torch.tensor([[*numbers]] * world)
    received = torch.empty_like(sent)
    rank_mesh.all_to_all_cpu(received, sent, [1] * world, [1] * world, group)
    return received.tolist()


def _raise_first(problems: Iterable[Sequence[int]], table: str) -> None:
    for rank, (kind, found, wanted) in enumerate(problems):
        if kind:
            _raise(rank, kind, found, wanted, table)


def _raise(rank: int, kind: int, found: int, wanted: int, table: str) -> None:
    """`found`, `wanted`: the numbers of a Fault, or the feature and value of an invalid id."""
    if kind == _NO_LIBRARY:
        remedy = f"run `python -m freescale doctor` on rank {rank}"
        raise RuntimeError(f"freescale: rank {rank} cannot plan batches, because its C library is missing: {remedy}")
    if kind == _INVALID_ID:
        where = table_registry.get_table(table).describe(found)
        raise IdOutsideTable(f"freescale: rank {rank}: id {wanted} is outside {where}")
    raise MalformedKeyedJaggedTensor(f"freescale: rank {rank}: {table}: {Fault(kind, found, wanted).describe()}")
