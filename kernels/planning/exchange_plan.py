"""Plans: who sends which row to whom, in which order duplicates are summed. Pure functions on CPU tensors.

Every row that this exchange serves has a *key*: owners one after the other, each owner's rows in their order.
So sorting keys groups them by owner, and a key minus its owner's first key is the row in the owner's shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
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


INT32_MAX = torch.iinfo(torch.int32).max


class Groups(NamedTuple):
    """Equal values brought together, each group in its original order (duplicates are summed in it)."""

    values: torch.Tensor  # [u] distinct, ascending
    order: torch.Tensor  # [n] positions, group after group
    ends: torch.Tensor  # [u] where each group ends in `order`; it begins where the one before it ends


def group(values: torch.Tensor) -> Groups:
    """Values are not negative. The groups' are int64, whatever `values` are."""
    if values.dtype == torch.int64 and values.numpy().max(initial=0) <= INT32_MAX:
        values = values.int()  # half the bytes to sort
    ordered, order = torch.sort(values, stable=True)
    x = ordered.numpy()
    last = np.ones(x.shape[0], dtype=bool)  # of its group
    np.not_equal(x[1:], x[:-1], out=last[:-1])
    ends = np.flatnonzero(last) + 1
    return Groups(_tensor(x[ends - 1].astype(np.int64)), order, _tensor(ends))


def _tensor(array: np.ndarray) -> torch.Tensor:
    # An empty array may have stride 0, and a compiled graph would tell that from stride 1.
    return torch.from_numpy(array) if array.size else torch.empty(0, dtype=torch.int64)


def sizes_of(ends: torch.Tensor) -> torch.Tensor:
    sizes = ends.clone()
    sizes[1:] -= ends[:-1]
    return sizes


def inverse_of(groups: Groups) -> torch.Tensor:
    """For each position, the group that it belongs to."""
    sizes = sizes_of(groups.ends).numpy()
    of = torch.from_numpy(np.repeat(np.arange(sizes.shape[0]), sizes))
    return torch.empty_like(groups.order).scatter_(0, groups.order, of)


def keys_of(numbers: torch.Tensor, owners: OwnerMap) -> torch.Tensor:
    """The keys of ascending row numbers."""
    firsts = torch.searchsorted(numbers, owners.bounds).numpy()  # of each shard among `numbers`
    return numbers + torch.from_numpy(np.repeat(owners.shifts.numpy(), np.diff(firsts, append=numbers.shape[0])))


def group_by_key(numbers: torch.Tensor, owners: OwnerMap) -> Groups:
    """Row numbers, grouped by their keys. Only distinct numbers are mapped; then whole groups are put in order."""
    by_number = group(numbers)
    keys = keys_of(by_number.values, owners)
    if bool(((owners.bounds + owners.shifts).diff() > 0).all()):  # a greater number has a greater key
        return by_number._replace(values=keys)
    keys, at = torch.sort(keys)
    sizes = sizes_of(by_number.ends)[at]
    ends = sizes.cumsum(0)
    moved = np.repeat((by_number.ends[at] - ends).numpy(), sizes.numpy())
    return Groups(keys, by_number.order.index_select(0, torch.from_numpy(moved + np.arange(moved.shape[0]))), ends)


def counts_per_owner(keys: torch.Tensor, owners: OwnerMap) -> torch.Tensor:
    """How many of the ascending `keys` belong to each owner."""
    return torch.searchsorted(keys, owners.starts).diff()


def first_outside(ids: Sequence[torch.Tensor], sizes: Sequence[int]) -> tuple[int, int] | None:
    """(feature, id) of the first id that its table does not have, or None."""
    for feature, (values, size) in enumerate(zip(ids, sizes, strict=True)):
        if values.shape[0] == 0:
            continue
        least, most = torch.stack(torch.aminmax(values)).tolist()
        if least < 0 or most >= size:
            return feature, int(values[(values < 0) | (values >= size)][0])
    return None


# ---- look-ahead: which rows can travel when --------------------------------------------------------------------


class Requests(NamedTuple):
    """One batch's exchange before it is known which rows collide."""

    mine: Groups  # the keys that this rank needs, grouped by owner
    recv_counts: torch.Tensor  # [world] how many of them each owner has
    rows: torch.Tensor  # rows of this rank that others need, by requester, each requester's ascending
    send_counts: torch.Tensor  # [world] how many each requester needs


class Chunk(NamedTuple):
    """A part of an exchange, seen from both ends. Rows travel one way, their gradients the other."""

    index: torch.Tensor  # type: ignore[assignment]  # requester: which of its unique keys (ascending), by owner
    recv_counts: torch.Tensor  # [world] requester: rows from each owner
    rows: torch.Tensor  # owner: rows for each requester
    send_counts: torch.Tensor  # [world] owner: rows for each requester


class Split(NamedTuple):
    """The rows that were chosen, and the others."""

    chosen: Chunk
    others: Chunk


def split(requests: Requests, wanted: torch.Tensor, held: torch.Tensor) -> Split:
    """Two chunks: `wanted` marks the requester's unique keys, `held` the owner's rows; both say the same."""

    def chunk(w: torch.Tensor, h: torch.Tensor) -> Chunk:
        index, at = _where(w), _where(h)
        return Chunk(
            index,
            _counts_within(index, requests.recv_counts),
            requests.rows.index_select(0, at),
            _counts_within(at, requests.send_counts),
        )

    return Split(chunk(wanted, held), chunk(~wanted, ~held))


def _where(marks: torch.Tensor) -> torch.Tensor:
    return _tensor(np.flatnonzero(marks.numpy()))


def _counts_within(places: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """How many of the ascending `places` are in each of consecutive parts with `counts` places."""
    return sizes_of(torch.searchsorted(places, counts.cumsum(0)))


def shared(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of `x` are among `y`, and which of `y` among `x`. None is negative."""
    a, b = x.numpy(), y.numpy()
    top = max(a.max(initial=0), b.max(initial=0))
    if top > 64 * (a.shape[0] + b.shape[0]):  # few of many: number them densely, so that the table below stays small
        return shared(*inverse_of(group(torch.cat([x, y]))).split([a.shape[0], b.shape[0]]))
    table = np.zeros(top + 1, dtype=np.uint8)
    table[a] = 1
    in_x = table[b]
    table[b] = 2 * in_x
    return torch.from_numpy(table[a] == 2), torch.from_numpy(in_x.astype(bool))


def merged_inverse(inverse: torch.Tensor, chunks: Sequence[Chunk]) -> torch.Tensor:
    """Position -> place in the concatenation of the chunks' rows."""
    places = torch.cat([c.index for c in chunks])
    merged = torch.empty_like(places).scatter_(0, places, torch.arange(places.shape[0]))
    return merged.index_select(0, inverse)
