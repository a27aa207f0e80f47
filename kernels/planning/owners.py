"""Which rank owns which row of an exchange's tables. Every row has a *key*, numbered owner by owner, in the order of
each owner's rows. So sorted keys are grouped by owner, and a key minus its owner's first is the row in the shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Shard:
    """Consecutive rows of one table on one rank."""

    table: int
    first: int  # first row of the table in this shard
    rows: int
    owner: int
    base: int  # start in the owner's storage


class OwnerMap(NamedTuple):
    """Table row -> key, as three tensors. Row numbers continue from one table to the next."""

    bounds: torch.Tensor  # [shards] first row number of each shard, ascending
    shifts: torch.Tensor  # [shards] key minus row number
    starts: torch.Tensor  # [world + 1] first key of each owner, then the number of keys


class ExchangeTables(NamedTuple):
    """The tables of an exchange: for each feature, the row number of its table's row 0, and its table's row count."""

    first_rows: Sequence[int]
    table_sizes: Sequence[int]
    owners: OwnerMap


def require_covered(shards: Sequence[Shard], table_rows: Sequence[int], tables: Mapping[int, str]) -> None:
    """Raise unless every row of every table is in exactly one shard. `tables`: descriptions for errors."""
    ends = [0] * len(table_rows)  # covered so far
    whole = [Shard(table, rows, 0, 0, 0) for table, rows in enumerate(table_rows)]  # sentinels after the last row
    for s in sorted((*(s for s in shards if s.rows > 0), *whole), key=lambda s: (s.table, s.first, s.rows)):
        end = ends[s.table]
        if s.first == end and end + s.rows <= table_rows[s.table]:
            ends[s.table] += s.rows
            continue
        where = tables.get(s.table, f"table {s.table}")
        fault = f"no shard holds row {end}" if s.first > end else f"two shards hold row {s.first}"
        if s.first + s.rows > table_rows[s.table]:
            fault = f"one ends with row {s.first + s.rows - 1}"
        raise ValueError(f"freescale: the shards do not cover {where}: {fault}")


def owner_map(
    shards: Sequence[Shard], table_rows: Sequence[int], world: int, tables: Mapping[int, str] = MappingProxyType({})
) -> OwnerMap:
    require_covered(shards, table_rows, tables)
    rows_of_owner = [0] * world
    for s in shards:
        rows_of_owner[s.owner] = max(rows_of_owner[s.owner], s.base + s.rows)
    starts = [0]
    for n in rows_of_owner:
        starts.append(starts[-1] + n)
    first_row_of_table = first_row_of_each_table(table_rows)
    nonempty = sorted((first_row_of_table[s.table] + s.first, s) for s in shards if s.rows > 0)
    bounds = [first_row for first_row, _ in nonempty]
    shifts = [starts[s.owner] + s.base - first_row for first_row, s in nonempty]
    return OwnerMap(*(torch.tensor(x, dtype=torch.int64) for x in (bounds, shifts, starts)))


def first_row_of_each_table(table_rows: Sequence[int]) -> list[int]:
    first_rows = [0]
    for n in table_rows[:-1]:
        first_rows.append(first_rows[-1] + n)
    return first_rows


class InvalidId(NamedTuple):
    """The first id outside its table."""

    feature: int
    id: int


def first_invalid_id(ids: Sequence[torch.Tensor], sizes: Sequence[int]) -> InvalidId | None:
    for feature, (values, size) in enumerate(zip(ids, sizes, strict=True)):
        if values.shape[0] == 0:
            continue
        smallest, largest = torch.stack(torch.aminmax(values)).tolist()
        if smallest < 0 or largest >= size:
            return InvalidId(feature, int(values[(values < 0) | (values >= size)][0]))
    return None
