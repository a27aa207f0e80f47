"""Plans: who sends which row to whom, in which order duplicates are summed. Pure functions on CPU tensors.

Every row that this exchange serves has a *key*: owners one after the other, each owner's rows in their order.
So sorting keys groups them by owner, and a key minus its owner's first key is the row in the owner's shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Shard:
    """Consecutive rows of one table on one rank."""

    table: int
    first: int  # first row of the table that it holds
    rows: int
    owner: int
    base: int  # where it begins in the owner's storage


class OwnerMap(NamedTuple):
    """Table row -> key, as three tensors. A table's rows are numbered after those of the tables before it."""

    bounds: torch.Tensor  # [shards] first row number of each shard, ascending
    shifts: torch.Tensor  # [shards] what to add to a row number of that shard to get its key
    starts: torch.Tensor  # [world + 1] first key of each owner


def owner_map(shards: Sequence[Shard], table_rows: Sequence[int], world: int) -> OwnerMap:
    held = [0] * world
    for s in shards:
        held[s.owner] = max(held[s.owner], s.base + s.rows)
    starts = [0]
    for h in held:
        starts.append(starts[-1] + h)
    firsts = table_firsts(table_rows)
    live = sorted((firsts[s.table] + s.first, s) for s in shards if s.rows > 0)
    bounds = [at for at, _ in live]
    shifts = [starts[s.owner] + s.base - at for at, s in live]
    covered = sum(s.rows for _, s in live)
    if covered != sum(table_rows):
        raise ValueError(f"the shards hold {covered} rows, the tables have {sum(table_rows)}")
    return OwnerMap(*(torch.tensor(x, dtype=torch.int64) for x in (bounds, shifts, starts)))


def table_firsts(table_rows: Sequence[int]) -> list[int]:
    firsts = [0]
    for n in table_rows[:-1]:
        firsts.append(firsts[-1] + n)
    return firsts


class Groups(NamedTuple):
    """Equal values brought together, each group in its original order (duplicates are summed in it)."""

    values: torch.Tensor  # [u] distinct, ascending
    order: torch.Tensor  # [n] positions, group after group
    ends: torch.Tensor  # [u] where each group ends in `order`; it begins where the one before it ends


def group(values: torch.Tensor) -> Groups:
    ordered, order = torch.sort(values, stable=True)
    unique, counts = torch.unique_consecutive(ordered, return_counts=True)
    return Groups(unique, order, counts.cumsum(0))


def sizes_of(ends: torch.Tensor) -> torch.Tensor:
    return ends.diff(prepend=ends.new_zeros(1))


def inverse_of(groups: Groups) -> torch.Tensor:
    """For each position, the group that it belongs to."""
    sizes = sizes_of(groups.ends)
    inverse = torch.empty_like(groups.order)
    inverse[groups.order] = torch.repeat_interleave(torch.arange(sizes.shape[0]), sizes)
    return inverse


def keys_of(numbers: torch.Tensor, owners: OwnerMap) -> torch.Tensor:
    shard = torch.searchsorted(owners.bounds, numbers, right=True) - 1
    return numbers + owners.shifts[shard]


def counts_per_owner(keys: torch.Tensor, owners: OwnerMap) -> torch.Tensor:
    """How many of the ascending `keys` belong to each owner."""
    return torch.searchsorted(keys, owners.starts).diff()


def first_outside(ids: Sequence[torch.Tensor], sizes: Sequence[int]) -> tuple[int, int] | None:
    """(feature, id) of the first id that its table does not have, or None."""
    for feature, (values, size) in enumerate(zip(ids, sizes, strict=True)):
        bad = (values < 0) | (values >= size)
        if bool(bad.any()):
            return feature, int(values[bad][0])
    return None
