"""Plans: who sends which row to whom, in which order duplicates are summed. Pure functions on CPU tensors.

Every row that this exchange serves has a *key*: owners one after the other, each owner's rows in their order.
So sorting keys groups them by owner, and a key minus its owner's first key is the row in the owner's shard.

What is written here in torch and NumPy is the definition. Where C code can be built, that groups ids (native_plan.py),
and plans whole batches (native_batch.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from freescale.kernels.planning import native_plan


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


class ExchangeTables(NamedTuple):
    """The tables of an exchange: for each feature the row number of its table's row 0, and its table's rows."""

    first_rows: Sequence[int]
    table_sizes: Sequence[int]
    owners: OwnerMap


def require_covered(shards: Sequence[Shard], table_rows: Sequence[int], tables: Mapping[int, str]) -> None:
    """Every row of every table is in one shard. `tables`: in words, for errors."""
    ends = [0] * len(table_rows)  # of what is covered
    whole = [Shard(table, rows, 0, 0, 0) for table, rows in enumerate(table_rows)]  # nothing, behind the last row
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
    """`tables`: in words, for errors."""
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
    """The row number of each table's row 0."""
    first_rows = [0]
    for n in table_rows[:-1]:
        first_rows.append(first_rows[-1] + n)
    return first_rows


INT32_MAX = torch.iinfo(torch.int32).max


class Deduplicated(NamedTuple):
    """Distinct values, and the positions of each: a segment of `order`, ascending (duplicates are summed that way)."""

    values: torch.Tensor  # [u] distinct, ascending
    order: torch.Tensor  # [n] positions, segment after segment
    ends: torch.Tensor  # [u] where each segment ends in `order`; it begins where the one before it ends


def deduplicate(values: torch.Tensor) -> Deduplicated:
    """`values` must not be negative. The result is int64, whatever they are."""
    if native_plan.library() is not None:
        return Deduplicated(*native_plan.deduplicate(values))
    if values.dtype == torch.int64 and values.numpy().max(initial=0) <= INT32_MAX:
        values = values.int()  # half the bytes to sort
    ordered, order = torch.sort(values, stable=True)
    x = ordered.numpy()
    last = np.ones(x.shape[0], dtype=bool)  # of its segment
    np.not_equal(x[1:], x[:-1], out=last[:-1])
    ends = np.flatnonzero(last) + 1
    return Deduplicated(native_plan.tensor(x[ends - 1].astype(np.int64)), order, native_plan.tensor(ends))


def segment_sizes(ends: torch.Tensor) -> torch.Tensor:
    sizes = ends.clone()
    sizes[1:] -= ends[:-1]
    return sizes


def inverse_index(unique: Deduplicated) -> torch.Tensor:
    """For each position, which of the distinct values it has."""
    sizes = segment_sizes(unique.ends).numpy()
    segment = torch.from_numpy(np.repeat(np.arange(sizes.shape[0]), sizes))
    return torch.empty_like(unique.order).scatter_(0, unique.order, segment)


def keys_of(numbers: torch.Tensor, owners: OwnerMap) -> torch.Tensor:
    """The keys of ascending row numbers."""
    begins = torch.searchsorted(numbers, owners.bounds).numpy()  # of each shard among `numbers`
    return numbers + torch.from_numpy(np.repeat(owners.shifts.numpy(), np.diff(begins, append=numbers.shape[0])))


def deduplicate_by_key(numbers: torch.Tensor, owners: OwnerMap) -> Deduplicated:
    """The distinct keys of row numbers. Only distinct numbers are mapped; then whole segments are put in order."""
    by_number = deduplicate(numbers)
    keys = keys_of(by_number.values, owners)
    if bool(((owners.bounds + owners.shifts).diff() > 0).all()):  # a greater number has a greater key
        return by_number._replace(values=keys)
    keys, by_key = torch.sort(keys)
    sizes = segment_sizes(by_number.ends)[by_key]
    ends = sizes.cumsum(0)
    shift = np.repeat((by_number.ends[by_key] - ends).numpy(), sizes.numpy())
    order = by_number.order.index_select(0, torch.from_numpy(shift + np.arange(shift.shape[0])))
    return Deduplicated(keys, order, ends)


def counts_per_owner(keys: torch.Tensor, owners: OwnerMap) -> torch.Tensor:
    """How many of the ascending `keys` belong to each owner."""
    return torch.searchsorted(keys, owners.starts).diff()


def first_invalid_id(ids: Sequence[torch.Tensor], sizes: Sequence[int]) -> tuple[int, int] | None:
    """(feature, id) of the first id that its table does not have, or None."""
    for feature, (values, size) in enumerate(zip(ids, sizes, strict=True)):
        if values.shape[0] == 0:
            continue
        smallest, largest = torch.stack(torch.aminmax(values)).tolist()
        if smallest < 0 or largest >= size:
            return feature, int(values[(values < 0) | (values >= size)][0])
    return None


class OwnRequests(NamedTuple):
    """What this rank needs in a batch, before any other rank knows of it."""

    needed: Deduplicated  # keys, ascending, so owner after owner
    inverse: torch.Tensor  # position -> which of the keys
    rows: torch.Tensor  # of each key, the row at its owner
    recv_counts: torch.Tensor  # [world] how many of the keys each owner has


class InvalidId(NamedTuple):
    """The first id that its table does not have."""

    feature: int
    id: int


def own_requests(
    ids: Sequence[torch.Tensor], first_rows: Sequence[int], table_sizes: Sequence[int], owners: OwnerMap
) -> OwnRequests | InvalidId:
    """`first_rows`: the row number of each feature's table's row 0."""
    if native_plan.library() is not None:
        result = native_plan.own_requests(ids, native_plan.RowOwners(first_rows, table_sizes, *owners))
        if len(result) == 2:
            return InvalidId(*result)
        keys, order, ends, inverse, rows, counts = result
        return OwnRequests(Deduplicated(keys, order, ends), inverse, rows, counts)
    invalid = first_invalid_id(ids, table_sizes)
    if invalid is not None:
        return InvalidId(*invalid)
    numbers = torch.cat([i.long() + first for i, first in zip(ids, first_rows, strict=True)])
    needed = deduplicate_by_key(numbers, owners)
    counts = counts_per_owner(needed.values, owners)
    rows = needed.values - torch.repeat_interleave(owners.starts[:-1], counts)
    return OwnRequests(needed, inverse_index(needed), rows, counts)


# ---- look-ahead: which rows can travel when --------------------------------------------------------------------


class Requests(NamedTuple):
    """One batch's exchange before it is known which rows collide."""

    needed: Deduplicated  # the keys that this rank needs; ascending, so owner after owner
    recv_counts: torch.Tensor  # [world] how many of them each owner has
    rows: torch.Tensor  # rows of this rank that others need, by requester, each requester's ascending
    send_counts: torch.Tensor  # [world] how many each requester needs
    inverse: torch.Tensor  # position -> which of the needed keys


class Chunk(NamedTuple):
    """A part of an exchange, seen from both ends. Rows travel one way, their gradients the other."""

    index: torch.Tensor  # type: ignore[assignment]  # requester: which of its unique keys (ascending), by owner
    recv_counts: torch.Tensor  # [world] requester: rows from each owner
    rows: torch.Tensor  # owner: rows for each requester
    send_counts: torch.Tensor  # [world] owner: rows for each requester


class Split(NamedTuple):
    """The rows that the neighbouring batch needs too, and the rest: early rows, or late gradients."""

    urgent: Chunk
    rest: Chunk


def split_requests(requests: Requests, urgent_keys: torch.Tensor, urgent_rows: torch.Tensor) -> Split:
    """Two chunks, by masks of the requester's unique keys and of the owner's rows, which mark the same rows."""
    def chunk(key_mask: torch.Tensor, row_mask: torch.Tensor) -> Chunk:
        index, kept = _indices(key_mask), _indices(row_mask)
        return Chunk(
            index,
            _counts_within(index, requests.recv_counts),
            requests.rows.index_select(0, kept),
            _counts_within(kept, requests.send_counts),
        )

    return Split(chunk(urgent_keys, urgent_rows), chunk(~urgent_keys, ~urgent_rows))


def _indices(mask: torch.Tensor) -> torch.Tensor:
    return native_plan.tensor(np.flatnonzero(mask.numpy()))


def _counts_within(indices: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """How many of the ascending `indices` are in each of consecutive parts of `counts` elements."""
    return segment_sizes(torch.searchsorted(indices, counts.cumsum(0)))


def intersection_masks(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of `x` are among `y`, and which of `y` among `x`. None is negative."""
    a, b = x.numpy(), y.numpy()
    largest = max(a.max(initial=0), b.max(initial=0))
    if largest > 64 * (a.shape[0] + b.shape[0]):  # few of many: number them densely, so that `table` stays small
        dense = inverse_index(deduplicate(torch.cat([x, y])))
        return intersection_masks(*dense.split([a.shape[0], b.shape[0]]))
    table = np.zeros(largest + 1, dtype=np.uint8)
    table[a] = 1
    in_x = table[b]
    table[b] = 2 * in_x
    return torch.from_numpy(table[a] == 2), torch.from_numpy(in_x.astype(bool))


def merged_inverse(inverse: torch.Tensor, early: Chunk, urgent: Chunk) -> torch.Tensor:
    """Position -> place in (early rows, urgent rows)."""
    places = torch.cat([early.index, urgent.index])
    merged = torch.empty_like(places).scatter_(0, places, torch.arange(places.shape[0]))
    return merged.index_select(0, inverse)


def entries_of(unique: Deduplicated, indices: torch.Tensor) -> int:
    """How many positions have one of these distinct values."""
    return int(segment_sizes(unique.ends)[indices].sum())


class RowsPlan(NamedTuple):
    """What a step needs to know to get its rows."""

    split: Split
    inverse: torch.Tensor  # position -> place in (early rows, urgent rows)
    urgent_entries: int  # positions with urgent rows


class GradientsPlan(NamedTuple):
    """What a step needs to know to send its gradients, and the owner to apply them."""

    split: Split
    urgent_update: Deduplicated  # the owner's rows in urgent gradients
    late_update: Deduplicated


def plan_rows(requests: Requests, split: Split) -> RowsPlan:
    inverse = merged_inverse(requests.inverse, split.rest, split.urgent)
    return RowsPlan(split, inverse, entries_of(requests.needed, split.urgent.index))


def plan_gradients(split: Split) -> GradientsPlan:
    return GradientsPlan(split, deduplicate(split.urgent.rows), deduplicate(split.rest.rows))


class Collision(NamedTuple):
    """What an owner finds: which of its rows two consecutive batches share."""

    before: torch.Tensor  # mask of the rows that are requested in the batch before
    after: torch.Tensor
    message: torch.Tensor  # to each requester: a byte per row of `after`, then a byte per row of `before`


def collide(before: Requests, after: Requests) -> Collision:
    mask_before, mask_after = intersection_masks(before.rows, after.rows)
    first = _first_part(after.send_counts, before.send_counts)
    message = np.empty(first.shape[0], dtype=np.uint8)
    message[first], message[~first] = mask_after, mask_before
    return Collision(mask_before, mask_after, torch.from_numpy(message))


def split_batches(
    message: torch.Tensor, collision: Collision, before: Requests, after: Requests
) -> tuple[GradientsPlan, RowsPlan]:
    """Plan the gradients of `before` and the rows of `after`, from what the owners told this rank."""
    keys_before, keys_after = map(torch.from_numpy, urgent_keys(message, before, after))
    gradients = plan_gradients(split_requests(before, keys_before, collision.before))
    return gradients, plan_rows(after, split_requests(after, keys_after, collision.after))


def urgent_keys(message: torch.Tensor, before: Requests, after: Requests) -> tuple[np.ndarray, np.ndarray]:
    """Which of a requester's unique keys both batches need, in the one before and in the one after."""
    first_part, flags = _first_part(after.recv_counts, before.recv_counts), message.numpy().astype(bool)
    return flags[~first_part], flags[first_part]


def _first_part(first_counts: torch.Tensor, second_counts: torch.Tensor) -> np.ndarray:
    """Which entries of a message per peer (first part, second part) belong to the first part."""
    parts = torch.stack([first_counts, second_counts], 1).view(-1).numpy()
    return np.repeat(np.tile([True, False], first_counts.shape[0]), parts)


def all_urgent(requests: Requests) -> Split:
    """Every row is urgent."""
    wanted, held = requests.needed.values, requests.rows
    everything = (torch.ones_like(x, dtype=torch.bool) for x in (wanted, held))
    return split_requests(requests, *everything)
