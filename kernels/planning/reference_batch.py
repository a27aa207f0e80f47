"""Planning of whole batches in Python, over any CPU group: the definition, and what does it where C cannot."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist

from freescale.kernels.planning import exchange_plan, row_requests
from freescale.kernels.planning.batch_plan import (
    ALIGNMENT,
    GRADIENT_ARRAYS,
    NOBODY,
    NOTHING,
    ROWS_ARRAYS,
    ExchangeCounts,
    Extent,
    Extents,
    Planned,
    PlannedExchange,
    Room,
    Told,
)
from freescale.kernels.planning.exchange_plan import ExchangeTables, GradientsPlan, OwnRequests, Requests, RowsPlan


class ReferenceBatchPlan:
    """batch_plan.BatchPlan of some exchanges."""

    def __init__(self, group: dist.ProcessGroup, tables: Sequence[ExchangeTables], whole: bool = False) -> None:
        self._group, self._tables, self.whole = group, tables, whole
        self._world = tables[0].owners.starts.shape[0] - 1
        self._ids: list[list[torch.Tensor]] = []  # of the batch that is planned, by exchange and feature
        self._own: list[OwnRequests | exchange_plan.InvalidId] = []
        self._send_counts: list[torch.Tensor] = []
        self._before: list[Requests] | None = None
        self.apart = False
        self.told = np.empty((0, 2), dtype=np.int64)

    def request(
        self, status: int, ids: Sequence[torch.Tensor] | None, room: Room | None = None, apart: bool = False,
        tell: Told = NOTHING,
    ) -> row_requests.Headers | None:  # fmt: skip
        features = iter(() if ids is None else ids)
        self._ids = [[] if ids is None else [next(features) for _ in t.first_rows] for t in self._tables]
        pairs = () if ids is None else zip(self._ids, self._tables, strict=True)
        self._own = [exchange_plan.own_requests(of_exchange, *tables) for of_exchange, tables in pairs]
        tables = len(self._tables), self._world
        headers = row_requests.exchange_headers(status, self._own, *tables, self._group, apart, tell)
        self._send_counts, self.apart, self.told = headers.send_counts, headers.apart, headers.told
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
            requests.append(row_requests.send_requests(own, send_counts, self._group))
        for i, after in enumerate(requests):
            gradients = None
            if self._before is None:
                rows = exchange_plan.plan_rows(after, exchange_plan.all_urgent(after))
                if self.whole:
                    gradients = exchange_plan.plan_gradients(rows.split)
            elif self.apart:
                rows = exchange_plan.plan_rows(after, exchange_plan.all_urgent(after))
                gradients = exchange_plan.plan_gradients(exchange_plan.all_urgent(self._before[i]))
            else:
                gradients, rows = row_requests.split_colliding(self._before[i], after, self._group)
            planned.append(writer.write(torch.cat([t.long() for t in self._ids[i]]), after, rows, gradients))
            if self.apart and self._before is not None:
                for counts in (planned[-1].row_counts, planned[-1].gradient_counts):
                    counts.other_recv.fill_(NOBODY)
                    counts.other_send.fill_(NOBODY)
        self._before = None if self.whole else requests
        return writer.used, lambda: planned

    def plan_last(self, room: Room) -> Planned:
        writer = _Writer(room.address, self.needed_for_last)
        splits = [exchange_plan.all_urgent(r) for r in self._before or ()]
        planned = [writer.write(None, None, None, exchange_plan.plan_gradients(split)) for split in splits]
        return writer.used, lambda: planned

    def _requested(self) -> Iterator[OwnRequests]:
        for own in self._own:
            assert isinstance(own, OwnRequests)
            yield own


_GAPS = ALIGNMENT * len(ROWS_ARRAYS + GRADIENT_ARRAYS)  # at most, of an exchange


class _Writer:
    """Puts arrays into memory one after the other."""

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
        return PlannedExchange(Extents.of(of_rows), row_counts, entries, Extents.of(of_gradients), gradient_counts)

    def _place(self, array: torch.Tensor) -> Extent:
        extent = Extent(self.used, array.shape[0])
        self._memory[self.used : self.used + extent.size] = array.numpy()
        self.used += -(-extent.size // ALIGNMENT) * ALIGNMENT
        return extent


def _counts(split: exchange_plan.Split) -> ExchangeCounts:
    urgent, others = split
    return ExchangeCounts(urgent.recv_counts, urgent.send_counts, others.recv_counts, others.send_counts)
