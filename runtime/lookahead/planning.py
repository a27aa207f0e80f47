"""Plans one batch after another: load, balance, request the rows from their owners, plan the step.

Before any collective, the ranks exchange whether loading succeeded, so that all go on or all stop.

Each call that releases the GIL can delay the training thread when it takes the GIL again. So there are few calls and
few collectives.
"""

from __future__ import annotations

import copy
import logging
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from freescale.compat import distributed
from freescale.kernels.planning import row_requests
from freescale.kernels.planning.native_plan import BatchPlan
from freescale.runtime import batch_structure
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


class EndOfPlanning(Exception):
    """Every rank stops here: all loaders have ended (`error` is None), or the loop is to raise `error`."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


@dataclass
class _Loaded:
    """A batch of this rank, or why there is none."""

    status: int = _OK
    error: BaseException | None = None
    batch: Any = None
    leaves: list[Any] = field(default_factory=list)  # tensors and KeyedJaggedTensors of the batch
    ids: list[list[torch.Tensor]] = field(default_factory=list)  # per exchange and feature
    value_counts: dict[str, int] = field(default_factory=dict)  # of the keys of its KeyedJaggedTensors
    count_tensor: torch.Tensor | None = None  # the same; None without keys
    for_balancer: list[int] = field(default_factory=lambda: _NOTHING_TO_BALANCE)
    loader_state: Any = None
    moved: batch_structure.BatchEvent | None = None  # after what was copied to the device
    block: PlanBlock | None = None  # for its plans
    began: float = 0.0  # when the loader was called, by time.perf_counter()
    ended: float = 0.0  # when it returned


@dataclass
class PlannedBatch:
    """A batch and its plans, from the planning thread to the loop. Once it is in the queue, the planning thread does
    not touch it again, nor its `next`."""

    number: int
    batch: Any
    rows: PlanBlock  # also holds tensors of the batch
    value_counts: dict[str, int]  # of the keys of its KeyedJaggedTensors
    count_tensor: torch.Tensor | None  # the same; None without keys
    loader_state: Any = None  # of the loader after this batch and before the next; or the error of asking for it
    moved: batch_structure.BatchEvent | None = None  # after what the planning thread copied to the device
    loaded: tuple[float, float] = (0.0, 0.0)  # begin and end of loading, by time.perf_counter()
    whole: bool = False  # its plans depend on no other batch
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
        if self.gradients is None:
            return  # complete already
        self._plan_rows(exchanges)
        if self.next is not None:
            self.next._plan_rows(exchanges)
        self.gradients.upload()
        for i, (plan, planned) in enumerate(zip(self.plans, self.gradients.exchanges, strict=True)):
            if self.whole:
                arrays = self.gradients.arrays(planned.gradients[: step_plan.ARRAYS_OF_ALL_GRADIENTS])
                step_plan.plan_all_gradients(plan, arrays, planned.gradient_counts)
                continue
            step_plan.plan_gradients(plan, self.gradients.arrays(planned.gradients), planned.gradient_counts)
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
    """The batches of one loop."""

    def __init__(
        self,
        loader: Iterable[Any],
        exchanges: list[Exchange],
        group: dist.ProcessGroup,
        strict: bool,
        balancer: BatchBalancer | None,
        plan: BatchPlan,
        times: RankTimes,
    ) -> None:
        self.loader, self.exchanges, self.group, self.strict = loader, exchanges, group, strict
        self.balancer, self._plan, self._times = balancer, plan, times
        self.number = 0  # of the batch that is being loaded or planned
        self.busy_since: float | None = None  # with work that must end within the group's timeout
        self._batches: Iterator[Any] | None = None
        self._structure: Any = None  # of the last batch, fast to compare
        self._structure_in_words: str | None = None  # of every batch
        self._id_places: list[int] | None = None  # in a batch's leaves: places_of_features
        self._previous: PlannedBatch | None = None  # its gradients are not planned yet
        self._features = list(dict.fromkeys(f for x in exchanges for f in x.features))
        self._device = exchanges[0].anchor.device
        self._pinned = PinnedMemory(self._device) if self._device.type != "cpu" else None
        self._room = 0  # elements, enough for every plan so far

    def advance(self) -> PlannedBatch | None:
        """Plan one more batch. Returns the previous one, whose plans are complete now (None for the first); where plans
        are whole, the batch itself. Raises EndOfPlanning on every rank at the same batch."""
        if self.number == 0:
            self._require_same_options()
        loaded = self._load()
        if self.balancer is not None:
            self._balance(self.balancer, loaded, self._gather_for_balancer(loaded))
        self._prepare_block(loaded)
        self._request_rows(loaded)
        if self.number == 0:
            self._compare_samples(loaded)
        planned = self._plan_batch(loaded)
        complete: PlannedBatch | None = planned
        if not self._plan.whole:
            complete, self._previous = self._previous, planned
        self.number, self.busy_since = self.number + 1, None
        return complete

    def finish(self) -> PlannedBatch | None:
        """The last batch: all its gradients are urgent, and no rows are prefetched for a next one."""
        if self._previous is None:
            return None
        block = PlanBlock(self._plan.needed_for_last, self._pinned)
        block.fill(self._plan.plan_last)
        self._previous.gradients = block
        return self._previous

    # -- stages --------------------------------------------------------------------------------------------------

    def _load(self) -> _Loaded:
        loaded = _Loaded(began=time.perf_counter())
        try:
            try:
                if self._batches is None:
                    self._batches = iter(self.loader)
                loaded.batch = next(self._batches)
            finally:
                loaded.ended = time.perf_counter()
            if hasattr(self.loader, "state_dict"):
                try:
                    loaded.loader_state = copy.deepcopy(self.loader.state_dict())
                except Exception as error:  # noqa: BLE001  (raised by `state_dict`)
                    loaded.loader_state = error
            self._require_same_structure(loaded)
            if self._id_places is None:  # it holds KeyedJaggedTensors
                torchrec_support.require_plannable(self.number, loaded.batch, self._features, self.exchanges)
            if self.balancer is None:
                self._find_ids(loaded)
            else:
                loaded.for_balancer = self.balancer.prepare(self.number, loaded.batch)
        except StopIteration:
            loaded.status = _ENDED
        except BaseException as error:  # noqa: BLE001  (the other ranks must know)
            loaded.status, loaded.error = _FAILED, error
        return loaded

    def _balance(self, balancer: BatchBalancer, loaded: _Loaded, from_all_ranks: list[list[int]]) -> None:
        """Put the balanced batch and its ids in place."""
        try:
            loaded.batch = balancer.balance(from_all_ranks)
            loaded.leaves = list(batch_structure.leaves(loaded.batch))
        except BalanceError as error:  # on every rank; any other error may be between its collectives
            loaded.status, loaded.error = _FAILED, error
        else:
            try:
                self._find_ids(loaded)
            except BaseException as error:  # noqa: BLE001  (the other ranks must know)
                loaded.status, loaded.error = _FAILED, error

    def _prepare_block(self, loaded: _Loaded) -> None:
        """Allocate memory for the plans, as much as was enough so far, and for the tensors of the batch."""
        if loaded.status != _OK:
            return
        try:
            counts = [] if loaded.count_tensor is None else [loaded.count_tensor]
            tensors = packable_tensors([*loaded.leaves, *counts], self._device)
            loaded.block = PlanBlock(self._room, self._pinned, tensors)
            if len(tensors) - len(counts) < len(loaded.leaves):
                loaded.batch, loaded.moved = move_others(loaded.batch, self._device)
        except BaseException as error:  # noqa: BLE001  (the other ranks must know)
            loaded.status, loaded.error = _FAILED, error

    def _request_rows(self, loaded: _Loaded) -> None:
        """Send the ids to their owners, once every rank goes on. If the memory suffices, the rows are planned, too."""
        self.busy_since = time.monotonic()
        ids = None if loaded.status != _OK else [t for of_exchange in loaded.ids for t in of_exchange]
        room = None if loaded.block is None else loaded.block.room
        headers = self._plan.request(loaded.status, ids, room, tell=self._times.tell())
        self._times.hear(self._plan.told)
        if headers is None:
            return
        self._require_all_go_on(headers.statuses, loaded.error)
        try:
            row_requests.require_valid_ids(headers, [x.name for x in self.exchanges])
        except row_requests.IdOutsideTable as error:  # on every rank
            raise EndOfPlanning(error) from None

    def _plan_batch(self, loaded: _Loaded) -> PlannedBatch:
        """Plan the rows of this batch and the gradients of the previous one."""
        block, needed = loaded.block, self._plan.needed
        assert block is not None
        self._room = max(self._room, needed)
        if needed > block.room.elements:
            block.make_room(needed)
        block.fill(self._plan.plan)
        planned = PlannedBatch(
            self.number, loaded.batch, block, loaded.value_counts, loaded.count_tensor, loaded.loader_state,
            loaded.moved, (loaded.began, loaded.ended), self._plan.whole,
        )  # fmt: skip
        if self._plan.whole:
            planned.gradients = block
        elif self._previous is not None:
            self._previous.next, self._previous.gradients = planned, block
        return planned

    # -- what all ranks agree on -----------------------------------------------------------------------------------

    def _require_same_options(self) -> None:
        self.busy_since = time.monotonic()
        own = [self.balancer is not None, not self._plan.whole]
        of_ranks = zip(*distributed.gather_ints(own, self.group), strict=True)
        self.busy_since = None
        for name, verb, values in zip(("balance", "overlap"), ("balance", "overlap steps"), of_ranks, strict=True):
            if len(set(values)) > 1:
                raise EndOfPlanning(
                    ValueError(
                        f"freescale: some ranks {verb} and others do not; give every LookaheadLoader the same `{name}`"
                    )
                )

    def _compare_samples(self, loaded: _Loaded) -> None:
        """Warn if every rank has the same samples, as where a sampler that something used to add is missing."""
        ids = [t for of_exchange in loaded.ids for t in of_exchange if t.numel()]
        digest = 0
        for t in ids:
            digest = zlib.crc32(t.contiguous().numpy().tobytes(), digest)
        of_ranks = {d for (d,) in distributed.gather_ints([digest], self.group)}
        if ids and len(of_ranks) == 1 and self.group.size() > 1 and self.group.rank() == 0:
            log.warning(
                "freescale: all ranks loaded the same ids in their first batch. If each is to have samples of its own, "
                "the DataLoader needs a DistributedSampler; Lightning adds one only to a DataLoader that is not wrapped"
            )

    def _gather_for_balancer(self, loaded: _Loaded) -> list[list[int]]:
        """What each rank sends to the balancers. Raises EndOfPlanning unless every rank goes on."""
        self.busy_since = time.monotonic()
        gathered = distributed.gather_ints([loaded.status, *loaded.for_balancer], self.group)
        self.busy_since = time.monotonic()
        self._require_all_go_on([s for s, *_ in gathered], loaded.error)
        return [rest for _, *rest in gathered]

    def _require_all_go_on(self, statuses: list[int], error: BaseException | None) -> None:
        """Raises EndOfPlanning if a rank's loader has ended or failed."""
        if _FAILED in statuses:
            raise EndOfPlanning(self._failure(statuses, error))
        if set(statuses) == {_ENDED}:
            raise EndOfPlanning(None)
        if _ENDED in statuses:
            message = (
                f"freescale: the loader of rank {statuses.index(_ENDED)} ended after {self.number} batches, others "
                "have more; all ranks stop here"
            )
            if self.strict:
                raise EndOfPlanning(RuntimeError(message))
            log.warning(message)
            raise EndOfPlanning(None)

    def _failure(self, statuses: list[int], error: BaseException | None) -> BaseException:
        """The failed rank raises its own error; the others name that rank, the batch and the error."""
        errors: list[Any] = [None] * len(statuses)
        dist.all_gather_object(errors, None if error is None else f"{type(error).__name__}: {error}", self.group)
        rank = statuses.index(_FAILED)
        if error is not None:
            return error
        return RuntimeError(f"freescale: rank {rank} failed while it loaded batch {self.number}: {errors[rank]}")

    # -- this rank's batch ---------------------------------------------------------------------------------------

    def _find_ids(self, loaded: _Loaded) -> None:
        if self._id_places is None:
            by_feature, loaded.value_counts = batch_structure.feature_ids_and_counts(loaded.batch, self._features)
            if loaded.value_counts:
                loaded.count_tensor = torch.tensor(list(loaded.value_counts.values()))
        else:
            on_host = batch_structure.to_host([loaded.leaves[place] for place in self._id_places])
            by_feature = dict(zip(self._features, on_host, strict=True))
        loaded.ids = [[by_feature[f] for f in x.features] for x in self.exchanges]

    def _require_same_structure(self, loaded: _Loaded) -> None:
        structure = batch_structure.summarize_structure(loaded.batch, loaded.leaves)
        if structure == self._structure:
            return
        in_words, before = batch_structure.describe_structure(loaded.batch), self._structure_in_words
        if before is not None and in_words != before:
            raise ValueError(f"freescale: batch {self.number} is {in_words}; the batches before it were {before}")
        self._structure, self._structure_in_words = structure, in_words
        self._id_places = batch_structure.places_of_features(loaded.batch, self._features)
