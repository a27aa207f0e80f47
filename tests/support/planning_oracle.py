"""The oracle of the C planner (kernels/native/batch_plan.c): plans whole batches in NumPy and torch, on any CPU group.

First pure functions on CPU tensors of one exchange, then communication, then all exchanges of a batch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from freescale.kernels.planning import rank_mesh, row_requests
from freescale.kernels.planning.native_plan import (
    ALIGNMENT,
    GRADIENT_ARRAYS,
    NOTHING,
    ROWS_ARRAYS,
    ExchangeCounts,
    Extent,
    Planned,
    PlannedExchange,
    Room,
    Told,
    tensor,
)
from freescale.kernels.planning.owners import ExchangeTables, InvalidId, OwnerMap, first_invalid_id

INT32_MAX = torch.iinfo(torch.int32).max


class Deduplicated(NamedTuple):
    """Distinct values, and the positions of each: a segment of `order`, ascending (the order of summing duplicates)."""

    values: torch.Tensor  # [u] distinct, ascending
    order: torch.Tensor  # [n] positions, segment after segment
    ends: torch.Tensor  # [u] end of each segment in `order`; it starts at the previous one's end


def deduplicate(values: torch.Tensor) -> Deduplicated:
    """`values` must not be negative. The result is int64 for any type of values."""
    if values.dtype == torch.int64 and values.numpy().max(initial=0) <= INT32_MAX:
        values = values.int()  # half the bytes to sort
    ordered, order = torch.sort(values, stable=True)
    x = ordered.numpy()
    last = np.ones(x.shape[0], dtype=bool)  # of its segment
    np.not_equal(x[1:], x[:-1], out=last[:-1])
    ends = np.flatnonzero(last) + 1
    return Deduplicated(tensor(x[ends - 1].astype(np.int64)), order, tensor(ends))


def segment_sizes(ends: torch.Tensor) -> torch.Tensor:
    sizes = ends.clone()
    sizes[1:] -= ends[:-1]
    return sizes


def inverse_index(unique: Deduplicated) -> torch.Tensor:
    """Index of the distinct value at each position."""
    sizes = segment_sizes(unique.ends).numpy()
    segment = torch.from_numpy(np.repeat(np.arange(sizes.shape[0]), sizes))
    return torch.empty_like(unique.order).scatter_(0, unique.order, segment)


def keys_of(numbers: torch.Tensor, owners: OwnerMap) -> torch.Tensor:
    """The keys of ascending row numbers."""
    begins = torch.searchsorted(numbers, owners.bounds).numpy()  # of each shard among `numbers`
    return numbers + torch.from_numpy(np.repeat(owners.shifts.numpy(), np.diff(begins, append=numbers.shape[0])))


def deduplicate_by_key(numbers: torch.Tensor, owners: OwnerMap) -> Deduplicated:
    """The distinct keys of row numbers. Only distinct numbers are mapped; then whole segments are sorted."""
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


class OwnRequests(NamedTuple):
    """What this rank needs in a batch, before communication."""

    needed: Deduplicated  # keys, ascending, so ordered by owner
    inverse: torch.Tensor  # position -> index of its key
    rows: torch.Tensor  # the owner's row for each key
    recv_counts: torch.Tensor  # [world] how many of the keys each owner has


def own_requests(
    ids: Sequence[torch.Tensor], first_rows: Sequence[int], table_sizes: Sequence[int], owners: OwnerMap
) -> OwnRequests | InvalidId:
    """`first_rows`: the row number of each feature's table's row 0."""
    invalid = first_invalid_id(ids, table_sizes)
    if invalid is not None:
        return invalid
    numbers = torch.cat([i.long() + first for i, first in zip(ids, first_rows, strict=True)])
    needed = deduplicate_by_key(numbers, owners)
    counts = counts_per_owner(needed.values, owners)
    rows = needed.values - torch.repeat_interleave(owners.starts[:-1], counts)
    return OwnRequests(needed, inverse_index(needed), rows, counts)


# ---- look-ahead: which rows can be sent when --------------------------------------------------------------------


class Requests(NamedTuple):
    """One batch's exchange before collisions are known."""

    needed: Deduplicated  # keys that this rank needs; ascending, so ordered by owner
    recv_counts: torch.Tensor  # [world] how many of them each owner has
    rows: torch.Tensor  # rows of this rank that others need, by requester, each requester's ascending
    send_counts: torch.Tensor  # [world] how many each requester needs
    inverse: torch.Tensor  # position -> index of its needed key


class Chunk(NamedTuple):
    """A part of an exchange, seen from both ends. Rows go one way, their gradients the other."""

    index: torch.Tensor  # type: ignore[assignment]  # requester: which of its unique keys (ascending), by owner
    recv_counts: torch.Tensor  # [world] requester: rows from each owner
    rows: torch.Tensor  # owner: rows for each requester
    send_counts: torch.Tensor  # [world] owner: rows for each requester


class Split(NamedTuple):
    """The rows that the neighboring batch needs too, and the rest: early rows, or late gradients."""

    urgent: Chunk
    rest: Chunk


def split_requests(requests: Requests, urgent_keys: torch.Tensor, urgent_rows: torch.Tensor) -> Split:
    """Two chunks, from masks of the requester's unique keys and of the owner's rows, which mark the same rows."""
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
    return tensor(np.flatnonzero(mask.numpy()))


def _counts_within(indices: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Number of ascending `indices` within each of consecutive parts of `counts` elements."""
    return segment_sizes(torch.searchsorted(indices, counts.cumsum(0)))


def intersection_masks(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of `x` are in `y`, and which of `y` in `x`. None is negative."""
    a, b = x.numpy(), y.numpy()
    largest = max(a.max(initial=0), b.max(initial=0))
    if largest > 64 * (a.shape[0] + b.shape[0]):  # sparse: number them densely, so that `table` stays small
        dense = inverse_index(deduplicate(torch.cat([x, y])))
        return intersection_masks(*dense.split([a.shape[0], b.shape[0]]))
    table = np.zeros(largest + 1, dtype=np.uint8)
    table[a] = 1
    in_x = table[b]
    table[b] = 2 * in_x
    return torch.from_numpy(table[a] == 2), torch.from_numpy(in_x.astype(bool))


def merged_inverse(inverse: torch.Tensor, early: Chunk, urgent: Chunk) -> torch.Tensor:
    """Position -> index into (early rows, urgent rows)."""
    places = torch.cat([early.index, urgent.index])
    merged = torch.empty_like(places).scatter_(0, places, torch.arange(places.shape[0]))
    return merged.index_select(0, inverse)


def entries_of(unique: Deduplicated, indices: torch.Tensor) -> int:
    """Number of positions with these distinct values."""
    return int(segment_sizes(unique.ends)[indices].sum())


class RowsPlan(NamedTuple):
    """What a step needs to get its rows."""

    split: Split
    inverse: torch.Tensor  # position -> index into (early rows, urgent rows)
    urgent_entries: int  # positions with urgent rows


class GradientsPlan(NamedTuple):
    """What a step needs to send its gradients, and the owner to apply them."""

    split: Split
    urgent_update: Deduplicated  # the owner's rows in urgent gradients
    late_update: Deduplicated


def plan_rows(requests: Requests, split: Split) -> RowsPlan:
    inverse = merged_inverse(requests.inverse, split.rest, split.urgent)
    return RowsPlan(split, inverse, entries_of(requests.needed, split.urgent.index))


def plan_gradients(split: Split) -> GradientsPlan:
    return GradientsPlan(split, deduplicate(split.urgent.rows), deduplicate(split.rest.rows))


class Collision(NamedTuple):
    """What an owner computes: which of its rows two consecutive batches share."""

    before: torch.Tensor  # mask of the rows requested in the previous batch
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
    """Plan the gradients of `before` and the rows of `after`, from the owners' messages to this rank."""
    keys_before, keys_after = map(torch.from_numpy, urgent_keys(message, before, after))
    gradients = plan_gradients(split_requests(before, keys_before, collision.before))
    return gradients, plan_rows(after, split_requests(after, keys_after, collision.after))


def urgent_keys(message: torch.Tensor, before: Requests, after: Requests) -> tuple[np.ndarray, np.ndarray]:
    """Masks of a requester's unique keys that both batches need, in the previous and in the next one."""
    first_part, flags = _first_part(after.recv_counts, before.recv_counts), message.numpy().astype(bool)
    return flags[~first_part], flags[first_part]


def _first_part(first_counts: torch.Tensor, second_counts: torch.Tensor) -> np.ndarray:
    """Mask of a per-peer message (first part, second part): entries of the first part."""
    parts = torch.stack([first_counts, second_counts], 1).view(-1).numpy()
    return np.repeat(np.tile([True, False], first_counts.shape[0]), parts)


def all_urgent(requests: Requests) -> Split:
    """Every row is urgent."""
    wanted, held = requests.needed.values, requests.rows
    everything = (torch.ones_like(x, dtype=torch.bool) for x in (wanted, held))
    return split_requests(requests, *everything)


# ---- with the other ranks --------------------------------------------------------------------------------------


def request_rows(
    ids: Sequence[torch.Tensor],
    first_rows: Sequence[int],
    table_sizes: Sequence[int],
    owners: OwnerMap,
    group: dist.ProcessGroup,
) -> Requests:
    """Tell each owner which of its rows this rank needs."""
    own = own_requests(ids, first_rows, table_sizes, owners)
    assert isinstance(own, OwnRequests)
    _, send_counts = exchange_headers(0, [own], 1, owners.starts.shape[0] - 1, group)
    return send_requests(own, send_counts[0], group)


def exchange_headers(
    status: int,
    own: Sequence[OwnRequests | InvalidId],
    exchanges: int,
    world: int,
    group: dist.ProcessGroup,
    tell: Told = NOTHING,
) -> tuple[row_requests.Headers, list[torch.Tensor]]:
    """One small all-to-all. A rank without requests, since it stops, passes no `own`. Also returns for each exchange how
    many rows each rank requests from this one."""
    sent = np.zeros((world, row_requests.header_width(exchanges)), dtype=np.int64)
    received = np.empty_like(sent)
    sent[:, 0], sent[:, 1:3], sent[:, 4::3] = status, tell, -1
    for i, requests in enumerate(own):
        of_exchange = sent[:, 3 + 3 * i : 6 + 3 * i]
        if isinstance(requests, InvalidId):
            of_exchange[:, 1:] = requests
        else:
            of_exchange[:, 0] = requests.recv_counts.numpy()
    all_to_all(torch.from_numpy(received), torch.from_numpy(sent), [1] * world, [1] * world, group)
    counts = [torch.from_numpy(received[:, 3 + 3 * i].copy()) for i in range(exchanges)]
    return row_requests.read_headers(received, exchanges), counts


def send_requests(
    own: OwnRequests, send_counts: torch.Tensor, group: dist.ProcessGroup
) -> Requests:
    """Tell each owner which rows. `send_counts`: number of rows that each rank requests from this one."""
    send = send_counts.numpy().tolist()
    rows = torch.empty(sum(send), dtype=torch.int64)
    all_to_all(rows, own.rows, send, own.recv_counts.numpy().tolist(), group)
    return Requests(own.needed, own.recv_counts, rows, send_counts, own.inverse)


def split_colliding(
    before: Requests, after: Requests, group: dist.ProcessGroup
) -> tuple[GradientsPlan, RowsPlan]:
    """Split two consecutive batches by the rows that both need: (gradients of `before`, rows of `after`).

    Owners compute this, since different ranks may need a row in the two batches, and tell each requester in one
    exchange.
    """
    collision = collide(before, after)
    counts = ((after.recv_counts, before.recv_counts), (after.send_counts, before.send_counts))
    recv, send = ((x.numpy() + y.numpy()).tolist() for x, y in counts)
    received = torch.empty(sum(recv), dtype=torch.uint8)
    all_to_all(received, collision.message, recv, send, group)
    return split_batches(received, collision, before, after)


def all_to_all(out, x, recv, send, group) -> None:
    rank_mesh.all_to_all_cpu(out, x, recv, send, group)


# ---- all exchanges of a batch ----------------------------------------------------------------------------------


class OraclePlan:
    """As native_plan.BatchPlan."""

    def __init__(self, group: dist.ProcessGroup, tables: Sequence[ExchangeTables], whole: bool = False) -> None:
        self._group, self._tables, self.whole = group, tables, whole
        self._world = tables[0].owners.starts.shape[0] - 1
        self._ids: list[list[torch.Tensor]] = []  # of the batch being planned, by exchange and feature
        self._own: list[OwnRequests | InvalidId] = []
        self._send_counts: list[torch.Tensor] = []
        self._before: list[Requests] | None = None
        self.told: list[Told] = []

    def request(
        self, status: int, ids: Sequence[torch.Tensor] | None, room: Room | None = None, tell: Told = NOTHING
    ) -> row_requests.Headers | None:
        features = iter(() if ids is None else ids)
        self._ids = [[] if ids is None else [next(features) for _ in t.first_rows] for t in self._tables]
        pairs = () if ids is None else zip(self._ids, self._tables, strict=True)
        self._own = [own_requests(of_exchange, *tables) for of_exchange, tables in pairs]
        tables = len(self._tables), self._world
        headers, self._send_counts = exchange_headers(status, self._own, *tables, self._group, tell)
        self.told = headers.told
        return headers if any(headers.statuses) or any(headers.invalid_ids) else None

    @property
    def needed(self) -> int:
        total = 0
        for own, send_counts in zip(self._requested(), self._send_counts, strict=True):
            rows, keys = int(send_counts.sum()), own.rows.shape[0]
            total += 3 * own.inverse.shape[0] + keys + rows + (keys + 3 * rows if self.whole else 0)
        return total + self.needed_for_last + len(self._tables) * _GAPS

    @property
    def needed_for_last(self) -> int:
        keys_and_rows = ((r.needed.values.shape[0], r.rows.shape[0]) for r in self._before or ())
        return sum(keys + 3 * rows + _GAPS for keys, rows in keys_and_rows)

    def plan(self, room: Room) -> Planned:
        for copy in room.copies:
            ctypes.memmove(*copy)
        writer, requests, planned = _Writer(room.address, self.needed), [], []
        for own, send_counts in zip(self._requested(), self._send_counts, strict=True):
            requests.append(send_requests(own, send_counts, self._group))
        for i, after in enumerate(requests):
            gradients = None
            if self._before is None:
                rows = plan_rows(after, all_urgent(after))
                if self.whole:
                    gradients = plan_gradients(rows.split)
            else:
                gradients, rows = split_colliding(self._before[i], after, self._group)
            planned.append(writer.write(torch.cat([t.long() for t in self._ids[i]]), after, rows, gradients))
        self._before = None if self.whole else requests
        return writer.used, planned

    def plan_last(self, room: Room) -> Planned:
        writer = _Writer(room.address, self.needed_for_last)
        splits = [all_urgent(r) for r in self._before or ()]
        planned = [writer.write(None, None, None, plan_gradients(split)) for split in splits]
        return writer.used, planned

    def _requested(self) -> Iterator[OwnRequests]:
        for own in self._own:
            assert isinstance(own, OwnRequests)
            yield own


_GAPS = ALIGNMENT * len(ROWS_ARRAYS + GRADIENT_ARRAYS)  # upper bound per exchange


class _Writer:
    """Writes arrays into memory consecutively."""

    def __init__(self, address: int, room: int) -> None:
        self._memory = np.ctypeslib.as_array((ctypes.c_int64 * room).from_address(address))
        self.used = 0

    def write(
        self,
        ids: torch.Tensor | None,
        requests: Requests | None,
        rows: RowsPlan | None,
        gradients: GradientsPlan | None,
    ) -> PlannedExchange:
        of_rows, of_gradients = [Extent(0, 0)] * len(ROWS_ARRAYS), [Extent(0, 0)] * len(GRADIENT_ARRAYS)
        row_counts = gradient_counts = ExchangeCounts(*[torch.zeros(0, dtype=torch.int64)] * 4)
        if ids is not None and requests is not None and rows is not None:
            needed, split = requests.needed, rows.split
            arrays = [ids, rows.inverse, needed.order, needed.ends, split.rest.rows, split.urgent.rows]
            of_rows, row_counts = list(map(self._place, arrays)), _counts(split)
        if gradients is not None:
            split = gradients.split
            arrays = [split.urgent.index, *gradients.urgent_update, split.rest.index, *gradients.late_update]
            of_gradients, gradient_counts = list(map(self._place, arrays)), _counts(split)
        entries = 0 if rows is None else rows.urgent_entries
        return PlannedExchange(of_rows, row_counts, entries, of_gradients, gradient_counts)

    def _place(self, array: torch.Tensor) -> Extent:
        extent = Extent(self.used, array.shape[0])
        self._memory[self.used : self.used + extent.size] = array.numpy()
        self.used += -(-extent.size // ALIGNMENT) * ALIGNMENT
        return extent


def _counts(split: Split) -> ExchangeCounts:
    urgent, others = split
    return ExchangeCounts(urgent.recv_counts, urgent.send_counts, others.recv_counts, others.send_counts)
