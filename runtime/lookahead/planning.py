"""Plans one batch after another: load, balance, request the rows from their owners, plan the step. Before any
collective, the ranks exchange whether loading succeeded, so that all go on or all stop. Each call that releases the GIL
can delay the training thread when it takes the GIL again, so there are few calls and few collectives."""

from __future__ import annotations

import copy
import logging
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from freescale.compat import distributed
from freescale.kernels.planning import rank_mesh, row_requests
from freescale.kernels.planning.native_plan import BatchPlan
from freescale.kernels.planning.owners import ExchangeTables, OwnerMap
from freescale.runtime import batch_structure
from freescale.runtime.agreement import first_reason
from freescale.runtime.balance.integer_problem import BalanceError
from freescale.runtime.meter import RankTimes
from freescale.runtime.samples.batch_balancer import BatchBalancer
from freescale.runtime.tables import step_plan, torchrec_support
from freescale.runtime.tables.plan_block import PinnedMemory, PlanBlock, move_others, packable_tensors
from freescale.runtime.tables.step_plan import StepPlan
from freescale.runtime.tables.table_exchange import Exchange

log = logging.getLogger(__name__)

_OK, _ENDED, _FAILED = range(3)  # how loading went
_NOTHING_TO_BALANCE = [-1, 0]  # instead of what a BatchBalancer sends to the other ranks


class PlanningConnection:
    """What the planning threads of all ranks communicate over: a gloo group, and sockets that C uses without the GIL.
    Serves one loop at a time. Collective."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.timeout = group, distributed.timeout_of(group).total_seconds()
        # Of an earlier loop, whose loader was still loading at its end:
        self.unfinished: weakref.ref[threading.Thread] | None = None
        self._mesh = rank_mesh.open_mesh(group)

    def new_plan(self, exchanges: list[Exchange], whole: bool = False) -> BatchPlan:
        tables = [
            ExchangeTables(x.row_offsets, x.table_sizes, OwnerMap(x.bounds, x.shifts, x.starts)) for x in exchanges
        ]
        mesh = self._mesh if self._mesh is not None else rank_mesh.GroupMesh(self.group)
        return BatchPlan(mesh, tables, self.timeout, whole)

    def first_reason(self, reason: str) -> str:
        """Why planning has ended: `reason`, unless a rank has posted another one before."""
        return first_reason(f"planning/{self.group.group_name}", reason)

    def close(self, reason: str) -> str:
        """Pending and later operations of the other ranks fail at once. Returns the first reason."""
        first = self.first_reason(reason)
        distributed.hang_up(self.group)
        if self._mesh is not None:
            self._mesh.hang_up()
        return first


class EndOfPlanning(Exception):
    """Every rank stops here: all loaders have ended (`error` is None), or the loop is to raise `error`."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


@dataclass
class PlannedBatch:
    """A batch and its plans. The planning thread fills it in, until it is in the queue to the loop."""

    number: int
    whole: bool = False  # its plans depend on no other batch
    batch: Any = None
    loaded: tuple[float, float] = (0.0, 0.0)  # begin and end of loading, by time.perf_counter()
    loader_state: Any = None  # of the loader after this batch and before the next; or the error of asking for it
    value_counts: dict[str, int] = field(default_factory=dict)  # of the keys of its KeyedJaggedTensors
    count_tensor: torch.Tensor | None = None  # the same; None without keys
    rows: PlanBlock = field(init=False)  # also holds tensors of the batch
    moved: batch_structure.BatchEvent | None = None  # after what the planning thread copied to the device
    # Set when the next batch is known:
    next: PlannedBatch | None = None  # None: this is the last
    gradients: PlanBlock | None = None
    # On the device, one per exchange; empty until the rows are planned there:
    plans: list[StepPlan] = field(default_factory=list)

    @property
    def used(self) -> bool:
        return any(plan.used for plan in self.plans)

    def complete(self, exchanges: list[Exchange]) -> None:
        """Build its step plans, and the rows of the next batch's. In the training thread, before it is yielded."""
        assert self.gradients is not None
        self._plan_rows(exchanges)
        if self.next is not None:
            self.next._plan_rows(exchanges)
        self.gradients.upload()
        for i, (plan, planned) in enumerate(zip(self.plans, self.gradients.exchanges, strict=True)):
            extents = planned.gradients[: step_plan.ARRAYS_OF_ALL_GRADIENTS] if self.whole else planned.gradients
            step_plan.plan_gradients(plan, self.gradients.arrays(extents), planned.gradient_counts)
            if not self.whole:
                plan.last = self.next is None
                plan.next = step_plan.plan_without_rows(plan) if self.next is None else self.next.plans[i]
        self.next = self.gradients = None  # otherwise each batch would keep all later ones alive

    def _plan_rows(self, exchanges: list[Exchange]) -> None:
        if self.plans:
            return
        if self.moved is not None:
            self.moved.wait()
        self.rows.upload()
        self.batch, counts = self.rows.unpack((self.batch, self.count_tensor))
        sequences = {f for x in exchanges for f in x.sequences}
        values = step_plan.count_values(self.value_counts, counts, sequences)
        for x, planned in zip(exchanges, self.rows.exchanges, strict=True):
            arrays = self.rows.arrays(planned.rows)
            counts, entries = planned.row_counts, planned.urgent_entries
            self.plans.append(step_plan.plan_rows(self.number, arrays, values, counts, entries, x.anchor, self.whole))


class BatchPlanning:
    def __init__(
        self,
        loader: Iterable[Any],
        exchanges: list[Exchange],
        connection: PlanningConnection,
        strict: bool,
        balancer: BatchBalancer | None,
        overlap: bool = True,
    ) -> None:
        self.loader, self.exchanges, self.connection, self.strict = loader, exchanges, connection, strict
        self.balancer, self.group = balancer, connection.group
        self._whole = not overlap
        self._plan: BatchPlan  # made in the planning thread, whose errors reach all ranks
        self.times = RankTimes(self.group.size())
        self.number = 0  # of the batch that is being loaded or planned
        self.busy_since: float | None = None  # with work that must end within the group's timeout
        self._batches: Iterator[Any] | None = None
        self._status = _OK  # of that batch on this rank
        self._error: BaseException | None = None
        self._structure: str | None = None  # of every batch
        self._previous: PlannedBatch | None = None  # its gradients are not planned yet
        self._features = list(dict.fromkeys(f for x in exchanges for f in x.features))
        self._device = exchanges[0].anchor.device
        self._pinned = PinnedMemory(self._device) if self._device.type != "cpu" else None
        self._room = 0  # elements, enough for every plan so far

    def advance(self) -> PlannedBatch | None:
        """Plan one more batch. Returns the one whose plans are complete now: the previous (None for the first); where
        plans are whole, the batch itself. Raises EndOfPlanning on every rank at the same batch."""
        if self.number == 0:
            self._plan = self.connection.new_plan(self.exchanges, self._whole)
            self._require_same_options()
        planned = PlannedBatch(self.number, self._whole)
        self._status, self._error = _OK, None
        for_balancer = self._attempt(self._load, planned)
        if self.balancer is not None:
            self._balance(self.balancer, planned, for_balancer or _NOTHING_TO_BALANCE)
        ids = self._attempt(self._prepare, planned)
        self._request_rows(planned, ids)
        if self.number == 0:
            self._compare_samples(ids)
        complete = self._plan_batch(planned)
        self.number, self.busy_since = self.number + 1, None
        return complete

    def finish(self) -> PlannedBatch | None:
        """The last batch: all its gradients are urgent, and no rows are prefetched for a next one."""
        if self._previous is not None:
            self._previous.gradients = PlanBlock(self._plan.needed_for_last, self._pinned)
            self._previous.gradients.fill(self._plan.plan_last)
        return self._previous

    # -- stages --------------------------------------------------------------------------------------------------

    def _attempt(self, stage: Callable[[PlannedBatch], Any], planned: PlannedBatch) -> Any:
        """Run a stage, unless an earlier one failed or the loader ended; the next collective reports why."""
        if self._status == _OK:
            try:
                return stage(planned)
            except BaseException as error:  # noqa: BLE001  (the other ranks must know)
                self._status, self._error = _FAILED, error
        return None

    def _load(self, planned: PlannedBatch) -> list[int] | None:
        """Take a batch from the loader. Returns what to send to the balancers of the other ranks."""
        began = time.perf_counter()
        if self._batches is None:
            self._batches = iter(self.loader)
        try:
            planned.batch = next(self._batches)
        except StopIteration:
            self._status = _ENDED
            return None
        planned.loaded = began, time.perf_counter()
        if hasattr(self.loader, "state_dict"):
            try:
                planned.loader_state = copy.deepcopy(self.loader.state_dict())
            except Exception as error:  # noqa: BLE001  (raised by `state_dict`)
                planned.loader_state = error
        self._require_same_structure(planned.batch)
        leaves = list(batch_structure.leaves(planned.batch))
        torchrec_support.require_plannable(self.number, leaves, self.exchanges)
        return None if self.balancer is None else self.balancer.prepare(self.number, planned.batch)

    def _balance(self, balancer: BatchBalancer, planned: PlannedBatch, own: list[int]) -> None:
        self.busy_since = time.monotonic()
        gathered = distributed.gather_ints([self._status, *own], self.group)
        self.busy_since = time.monotonic()
        self._require_all_go_on([status for status, *_ in gathered])
        try:
            planned.batch = balancer.balance([rest for _, *rest in gathered])
        except BalanceError as error:  # on every rank; any other error may be between its collectives
            self._status, self._error = _FAILED, error

    def _prepare(self, planned: PlannedBatch) -> list[torch.Tensor]:
        """Find the ids of all features. Allocate memory for the plans, as much as was enough so far, and for the
        batch."""
        leaves = list(batch_structure.leaves(planned.batch))
        counts = []
        by_feature, planned.value_counts = batch_structure.feature_ids_and_counts(planned.batch, self._features)
        if planned.value_counts:
            planned.count_tensor = torch.tensor(list(planned.value_counts.values()))
            counts = [planned.count_tensor]
        tensors = packable_tensors([*leaves, *counts], self._device)
        planned.rows = PlanBlock(self._room, self._pinned, tensors)
        if len(tensors) - len(counts) < len(leaves):
            planned.batch, planned.moved = move_others(planned.batch, self._device)
        return [by_feature[f] for x in self.exchanges for f in x.features]

    def _request_rows(self, planned: PlannedBatch, ids: list[torch.Tensor] | None) -> None:
        """Send the ids to their owners, once every rank goes on. If the memory suffices, the rows are planned, too."""
        self.busy_since = time.monotonic()
        room = None if ids is None else planned.rows.room
        headers = self._plan.request(self._status, ids, room, tell=self.times.tell())
        self.times.hear(self._plan.told)
        if headers is None:
            return
        self._require_all_go_on(headers.statuses)
        try:
            row_requests.require_valid_ids(headers, [x.name for x in self.exchanges])
        except row_requests.IdOutsideTable as error:  # on every rank
            raise EndOfPlanning(error) from None

    def _plan_batch(self, planned: PlannedBatch) -> PlannedBatch | None:
        """Plan the rows of this batch and the gradients of the previous one. Returns the batch that is complete now."""
        block, needed = planned.rows, self._plan.needed
        self._room = max(self._room, needed)
        if needed > block.room.elements:
            block.make_room(needed)
        block.fill(self._plan.plan)
        if self._whole:
            planned.gradients = block
            return planned
        previous, self._previous = self._previous, planned
        if previous is not None:
            previous.next, previous.gradients = planned, block
        return previous

    # -- what all ranks agree on -----------------------------------------------------------------------------------

    def _require_same_options(self) -> None:
        self.busy_since = time.monotonic()
        own = [self.balancer is not None, not self._whole]
        of_ranks = zip(*distributed.gather_ints(own, self.group), strict=True)
        self.busy_since = None
        for name, verb, values in zip(("balance", "overlap"), ("balance", "overlap steps"), of_ranks, strict=True):
            if len(set(values)) > 1:
                raise EndOfPlanning(
                    ValueError(
                        f"freescale: some ranks {verb} and others do not; give every LookaheadLoader the same `{name}`"
                    )
                )

    def _compare_samples(self, ids: list[torch.Tensor]) -> None:
        """Warn if every rank has the same samples, as where a sampler that something used to add is missing."""
        ids, digest = [t for t in ids if t.numel()], 0
        for t in ids:
            digest = zlib.crc32(t.contiguous().numpy().tobytes(), digest)
        of_ranks = {d for (d,) in distributed.gather_ints([digest], self.group)}
        if ids and len(of_ranks) == 1 and self.group.size() > 1 and self.group.rank() == 0:
            log.warning(
                "freescale: all ranks loaded the same ids in their first batch. If each is to have samples of its own, "
                "the DataLoader needs a DistributedSampler; Lightning adds one only to a DataLoader that is not wrapped"
            )

    def _require_all_go_on(self, statuses: list[int]) -> None:
        if _FAILED in statuses:
            raise EndOfPlanning(self._failure(statuses))
        if _ENDED not in statuses:
            return
        if len(set(statuses)) > 1:
            message = (
                f"freescale: the loader of rank {statuses.index(_ENDED)} ended after {self.number} batches, others "
                "have more; all ranks stop here"
            )
            if self.strict:
                raise EndOfPlanning(RuntimeError(message))
            log.warning(message)
        raise EndOfPlanning(None)

    def _failure(self, statuses: list[int]) -> BaseException:
        """The failed rank raises its own error; the others name that rank, the batch and the error."""
        own = None if self._error is None else f"{type(self._error).__name__}: {self._error}"
        errors = distributed.gather_objects(own, self.group)
        rank = statuses.index(_FAILED)
        if self._error is not None:
            return self._error
        return RuntimeError(f"freescale: rank {rank} failed while it loaded batch {self.number}: {errors[rank]}")

    def _require_same_structure(self, batch: Any) -> None:
        structure, before = batch_structure.describe_structure(batch), self._structure
        if before is not None and structure != before:
            raise ValueError(f"freescale: batch {self.number} is {structure}; the batches before it were {before}")
        self._structure = structure
