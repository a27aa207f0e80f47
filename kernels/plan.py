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


class Groups(NamedTuple):
    """Equal values brought together, each group in its original order (duplicates are summed in it)."""

    values: torch.Tensor  # [u] distinct, ascending
    order: torch.Tensor  # [n] positions, group after group
    ends: torch.Tensor  # [u] where each group ends in `order`; it begins where the one before it ends


def group(values: torch.Tensor) -> Groups:
    """Values are not negative. One sort of packed (value, position) pairs where they fit into 63 bits."""
    x, n = values.numpy(), values.shape[0]
    bits = max(n - 1, 1).bit_length()
    if n == 0 or int(x.max()) >= 1 << (63 - bits):
        ordered, order = (t.numpy() for t in torch.sort(values, stable=True))
    else:
        packed = (x << bits) | np.arange(n)
        packed.sort()
        order, ordered = packed & ((1 << bits) - 1), packed >> bits
    last = np.ones(n, dtype=bool)  # of its group
    np.not_equal(ordered[1:], ordered[:-1], out=last[:-1])
    ends = np.flatnonzero(last) + 1
    return Groups(_tensor(ordered[ends - 1]), _tensor(order), _tensor(ends))


def _tensor(array: np.ndarray) -> torch.Tensor:
    # An empty array may have stride 0, and a compiled graph would tell that from stride 1.
    return torch.from_numpy(array) if array.size else torch.empty(0, dtype=torch.int64)


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


# ---- look-ahead: which rows can travel when --------------------------------------------------------------------


class Requests(NamedTuple):
    """One batch's exchange before it is known which rows collide."""

    mine: Groups  # the keys that this rank needs, grouped by owner
    recv_counts: torch.Tensor  # [world] how many of them each owner has
    rows: torch.Tensor  # rows of this rank that others need, by requester, each requester's ascending
    send_counts: torch.Tensor  # [world] how many each requester needs


class Chunk(NamedTuple):
    """A part of an exchange, seen from both ends. Rows travel one way, their gradients the other."""

    index: torch.Tensor  # requester: which of its unique keys (ascending), grouped by owner
    recv_counts: torch.Tensor  # [world] requester: rows from each owner
    rows: torch.Tensor  # owner: rows for each requester
    send_counts: torch.Tensor  # [world] owner: rows for each requester


class Split(NamedTuple):
    """The rows that were chosen, and the others."""

    chosen: Chunk
    others: Chunk


def split(requests: Requests, wanted: torch.Tensor, held: torch.Tensor) -> Split:
    """Two chunks: `wanted` marks the requester's unique keys, `held` the owner's rows; both say the same."""
    world = requests.recv_counts.shape[0]
    owners = torch.repeat_interleave(torch.arange(world), requests.recv_counts)
    requesters = torch.repeat_interleave(torch.arange(world), requests.send_counts)

    def chunk(w: torch.Tensor, h: torch.Tensor) -> Chunk:
        return Chunk(
            w.nonzero()[:, 0],
            torch.bincount(owners[w], minlength=world),
            requests.rows[h],
            torch.bincount(requesters[h], minlength=world),
        )

    return Split(chunk(wanted, held), chunk(~wanted, ~held))


def members(values: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """Which of `values` are in the ascending `of`."""
    if of.shape[0] == 0:
        return torch.zeros_like(values, dtype=torch.bool)
    at = torch.searchsorted(of, values).clamp_(max=of.shape[0] - 1)
    return of[at] == values


def merged_inverse(inverse: torch.Tensor, chunks: Sequence[Chunk]) -> torch.Tensor:
    """Position -> place in the concatenation of the chunks' rows."""
    place = torch.empty(sum(c.index.shape[0] for c in chunks), dtype=torch.int64)
    place[torch.cat([c.index for c in chunks])] = torch.arange(place.shape[0])
    return place[inverse]
