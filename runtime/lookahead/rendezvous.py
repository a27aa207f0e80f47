"""Rendezvous of all ranks before a step, before pending gradients are applied, and at the end of a loop.

Each rank states what it is about to do, in one small gather over connections of its own. So no rank starts an exchange
that others will not join: a rank that leaves its loop or has a wrong batch is an error on every rank instead of a hang.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from enum import IntEnum
from typing import NamedTuple

import torch.distributed as dist

from freescale.compat import distributed
from freescale.kernels.planning import rank_mesh
from freescale.kernels.transports import launch_record
from freescale.runtime.agreement import first_reason
from freescale.runtime.lookahead.step import CHANGED_BATCH, UNKNOWN_BATCH, Loop
from freescale.views.records import RENDEZVOUS

log = logging.getLogger(__name__)

_SECONDS_OF_WAIT = 0.5  # for a launch; after that, this rank asks whether one has left


class Action(IntEnum):
    """What a rank is about to do."""

    TRAIN = 0
    EVALUATE = 1
    FLUSH = 2
    CLOSE = 3


_IN_WORDS = {
    Action.TRAIN: "trains",
    Action.EVALUATE: "evaluates",
    Action.FLUSH: "reads the tables",
    Action.CLOSE: "leaves its loop",
}


class RankStatus(NamedTuple):
    """Where a rank is in its loop, as gathered integers."""

    action: int
    loop: int  # its number among all loops over these tables
    batch: int  # yielded last, -1 before the first
    used: int  # has it been through the model?
    pending: int  # the step whose gradients are pending, or -1
    incomplete: int  # the step whose backward pass lost gradients, or -1
    received: int  # the batch that reached the model: its number, or UNKNOWN_BATCH, FOREIGN_BATCH, CHANGED_BATCH
    planning_failed: int  # has planning failed on this rank?
    ordered: int  # batches that its planning thread was ordered to plan
    written: int  # has something other than an update written to its tables since the last step began?


class LeftRank(NamedTuple):
    """Where a rank left a loop, as it posts it in the store. A rank that is further behind compares as less."""

    launched: int  # launches in the loop
    without_exception: bool
    ordered: int  # batches that its planning thread was ordered to plan
    why: str


class RankSync:
    """Compares the ranks' status. If all are the same, this takes log2(ranks) messages over sockets; if not, a gather
    over a group of its own."""

    def __init__(
        self, group: dist.ProcessGroup, new_group: Callable[[], dist.ProcessGroup], timeout: timedelta
    ) -> None:
        """`group`: any group of all ranks; `new_group`: makes another. Collective."""
        self._world, self._rank, self._seconds = group.size(), group.rank(), timeout.total_seconds()
        self._key = f"left/{group.group_name}"  # in the store, of the loops of these tables
        self._group: dist.ProcessGroup | None = None
        self._mesh: rank_mesh.RankMesh | None = None
        if self._world > 1:
            self._group = new_group()
            self._mesh = rank_mesh.open_mesh(self._group, rank_mesh.peers_to_compare(group.rank(), self._world))
        self.failure: str | None = None  # why the ranks cannot be compared any more

    @contextlib.contextmanager
    def waiting_at_most(self, seconds: float) -> Iterator[None]:
        before, self._seconds = self._seconds, min(self._seconds, seconds)
        try:
            yield
        finally:
            self._seconds = before

    def post_left(self, loop: Loop, exception: str) -> str:
        """This rank leaves the loop and makes no further launch in it, unless all ranks agree on one. Returns where and
        why it left. The store keeps the rank that is furthest behind."""
        why = f"rank {self._rank} left its loop at batch {loop.batch_number}{exception and f': {exception}'}"
        own = LeftRank(loop.launched(), not exception, loop.batches_ordered, why)
        key, mine = f"{self._key}/{loop.number}", json.dumps(own)
        found = first_reason(key, mine) if self._world > 1 else mine
        while found != mine and own[:2] < LeftRank(*json.loads(found))[:2]:
            found = first_reason(key, mine, instead_of=found)
        return why

    def _left(self, loop: Loop) -> LeftRank | None:
        posted = first_reason(f"{self._key}/{loop.number}") if self._world > 1 else ""
        return LeftRank(*json.loads(posted)) if posted else None

    def why_left(self, loop: Loop) -> str:
        """Why a rank left the loop: by an exception, or before a launch that this rank has made; "" if none did."""
        left = self._left(loop)
        return "" if left is None or (left.without_exception and left.launched >= loop.launched()) else left.why

    def why_unplanned(self, loop: Loop, number: int) -> str:
        """Why batch `number` will never be planned by all ranks; "" if it may be."""
        left = None if loop.closed else self._left(loop)
        return "" if left is None or left.ordered > number else left.why

    def release_wait(self, loop: Loop) -> None:
        """End this rank's wait for a launch if a rank has left the loop without making it. Called in another thread;
        never raises."""
        work = launch_record.awaited
        if work is None or loop.closed:
            return
        if time.perf_counter() - work.record.wait_began > _SECONDS_OF_WAIT and (left := self._left(loop)) is not None:
            if loop.launched(work.number) > left.launched:
                distributed.hang_up(work.group)

    def synchronize(self, loop: Loop, action: Action, received: int = UNKNOWN_BATCH) -> list[RankStatus]:
        """Returns if this rank may do `action`, else raises. Applies pending gradients if some rank needs that. Every
        rank calls this at the same place, with its innermost loop."""
        while True:
            statuses = self._compare(loop, self._status(loop, action, received))
            if self._may_go_on(loop, action, statuses):
                return statuses
            # Another rank wanted only the flush (state_dict on one rank). It is done; now this rank's own action.

    def _may_go_on(self, loop: Loop, action: Action, statuses: list[RankStatus]) -> bool:
        """Raises if this rank may not do `action`; False if it is to synchronize again."""
        if action == Action.TRAIN and _all_fine(statuses):
            loop.batches_behind = 0
            return True
        actions = {s.action for s in statuses}
        same_place = len({(s.loop, s.pending) for s in statuses}) == 1
        planning_failed = any(s.planning_failed for s in statuses)
        loop.batches_behind = max(s.ordered for s in statuses) - loop.batches_ordered
        loop.planning_group_failed |= planning_failed
        if Action.CLOSE in actions:
            loop.closed = True
            if not same_place:
                loop.fail(describe_difference(statuses), known_to_all=True)
        _raise_if_incomplete(loop, statuses)
        written = [rank for rank, s in enumerate(statuses) if s.written]
        loop.early_rows_outdated = bool(written)
        if written and any(s.pending >= 0 for s in statuses):
            _refuse_order(loop, written, statuses)
        if same_place and actions & {Action.FLUSH, Action.CLOSE}:
            loop.apply_pending()
        if not same_place or (len(actions) > 1 and Action.FLUSH not in actions):
            if action == Action.CLOSE and same_place:
                log.warning("freescale: %s", describe_difference(statuses))
                return True
            if same_place and planning_failed:
                assert loop.thread is not None
                raise RuntimeError(f"freescale: {loop.thread.why_failed()}")
            why = self.why_left(loop) if Action.CLOSE in actions else ""
            raise RuntimeError(f"freescale: {describe_difference(statuses)}{why and f' ({why})'}")
        return action == Action.FLUSH or Action.FLUSH not in actions

    def _status(self, loop: Loop, action: Action, received: int) -> RankStatus:
        """Where this rank is. Raises if its loop has ended or failed."""
        if loop.closed:
            raise RuntimeError("freescale: this LookaheadLoader's loop has ended: ranks were out of step")
        if loop.failure is None and not dist.is_initialized():
            loop.fail("the process group is gone")
        if loop.failure is not None:
            raise RuntimeError(f"freescale: {loop.failure}")
        return RankStatus(
            action=action,
            loop=loop.number,
            batch=loop.batch_number,
            used=loop.current is not None and loop.current.used,
            pending=loop.pending,
            incomplete=loop.incomplete,
            received=received,
            planning_failed=loop.planning_failed,
            ordered=loop.batches_ordered,
            written=loop.tables_written,
        )

    def _compare(self, loop: Loop, own: RankStatus) -> list[RankStatus]:
        try:
            with launch_record.record_host_wait(RENDEZVOUS):
                said = self._gather(own)
        except Exception as error:
            self._disconnect()
            loop.fail(f"the other ranks did not arrive within {self._seconds:g} s, or have exited: {error}")
            self.failure = loop.failure
            raise RuntimeError(f"freescale: {self.failure}") from error
        # In most steps all ranks say the same, and one object serves for all of them.
        first = RankStatus(*said[0])
        return [first if s is said[0] or s == said[0] else RankStatus(*s) for s in said]

    def _gather(self, own: RankStatus) -> list[list[int]]:
        if self._world == 1:
            return [list(own)]
        if self._mesh is not None and self._mesh.all_same(own, self._seconds):
            return [list(own)] * self._world
        assert self._group is not None
        return distributed.gather_ints(own, self._group, timedelta(seconds=self._seconds))

    def _disconnect(self) -> None:
        """The other ranks fail at once instead of waiting for this one."""
        if self._mesh is not None:
            self._mesh.give_up()
            self._mesh.hang_up()
        if self._group is not None:
            distributed.hang_up(self._group)


def _all_fine(statuses: list[RankStatus]) -> bool:
    """All ranks say the same, and no action is needed: the fast path."""
    first = statuses[0]
    all_same = all(s is first for s in statuses)
    return all_same and first.incomplete < 0 and not first.planning_failed and not first.written


def _raise_if_incomplete(loop: Loop, statuses: list[RankStatus]) -> None:
    ranks = [rank for rank, s in enumerate(statuses) if s.incomplete >= 0]
    if not ranks:
        return
    _end_everywhere(
        loop,
        f"{_list_ranks(ranks)}: the backward pass of step {statuses[ranks[0]].incomplete} has applied some of its "
        "gradients to the tables and lost the others: something in it raised (a gradient hook?), or it was asked for "
        "the gradients of some tensors only (torch.autograd.grad, backward(inputs=...)), or a backward pass of another "
        "step ran in between. Under a LookaheadLoader, call loss.backward(); this loop is over",
    )


def _refuse_order(loop: Loop, written: list[int], statuses: list[RankStatus]) -> None:
    pending = max(s.pending for s in statuses)
    _end_everywhere(
        loop,
        f"{_list_ranks(written)}: something other than training wrote to a table before the gradients of step "
        f"{pending} were applied, which must come first. Call model.state_dict() on every rank before such a write "
        "(it applies them), or use LookaheadLoader(overlap=False); this loop is over",
    )


def _end_everywhere(loop: Loop, reason: str) -> None:
    loop.fail(reason, known_to_all=True)
    raise RuntimeError(f"freescale: {reason}")


def require_expected_batch(statuses: list[RankStatus]) -> None:
    """Every rank must be about to train on the batch that its loader yielded last, the same on all ranks."""
    first = statuses[0]
    for rank, s in enumerate(statuses):
        if (rank and s is first) or (s.batch >= 0 and not s.used and s.received in (s.batch, UNKNOWN_BATCH)):
            continue
        if s.batch < 0 or s.used:
            expected = f"batch {s.batch + 1}, which has not been taken from the loader yet"
        else:
            expected = f"batch {s.batch}, which the loader yielded last"
        if s.received == CHANGED_BATCH:
            raise RuntimeError(
                f"freescale: rank {rank}: the ids or lengths of batch {s.batch} were changed in place after the "
                "LookaheadLoader had planned them. Change them in the loader that it wraps, or in a copy"
            )
        if s.received < 0:
            received = "a batch that is not from the loader"
        else:
            received = f"batch {s.received} again" if s.received == s.batch else f"batch {s.received}, out of order"
        raise RuntimeError(
            f"freescale: rank {rank}: the model expected {expected}; it received {received}. Pass each batch of a "
            "LookaheadLoader to the model once, in order; evaluate other batches under torch.no_grad()"
        )
    if any(s is not first and s.batch != first.batch for s in statuses):
        raise RuntimeError(f"freescale: {describe_difference(statuses)}")


def describe_difference(statuses: list[RankStatus]) -> str:
    pending_differs = len({s.pending for s in statuses}) > 1

    def describe(s: RankStatus) -> str:
        place = "before its first batch" if s.batch < 0 else f"{'after' if s.used else 'at'} batch {s.batch}"
        gradients = "no gradients" if s.pending < 0 else f"gradients of step {s.pending}"
        return f"{_IN_WORDS[Action(s.action)]} {place}" + (f", {gradients} pending" if pending_differs else "")

    ranks_by_place: dict[str, list[int]] = {}
    for rank, s in enumerate(statuses):
        ranks_by_place.setdefault(describe(s), []).append(rank)
    places = "; ".join(f"{_list_ranks(ranks)}: {place}" for place, ranks in ranks_by_place.items())
    return f"ranks are out of step: {places}"


def _list_ranks(ranks: list[int]) -> str:
    return f"rank {', '.join(map(str, ranks[:8]))}{' and others' if len(ranks) > 8 else ''}"
