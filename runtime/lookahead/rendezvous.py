"""Rendezvous of all ranks before a step, before pending gradients are applied, and at the end of a loop: each states
what it is about to do, so no rank starts an exchange that others will not join."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from enum import IntEnum
from typing import NamedTuple

import torch.distributed as dist

from freescale.compat import distributed
from freescale.kernels.planning import rank_mesh
from freescale.kernels.transports import launch_record
from freescale.runtime.agreement import first_reason
from freescale.views.records import RENDEZVOUS

_SECONDS_OF_WAIT = 0.5  # for a launch; after that, this rank asks whether one has left

# Which batch reached the model: its number, or
UNKNOWN_BATCH, FOREIGN_BATCH, CHANGED_BATCH = -1, -2, -3
BESIDE_UPDATE = 2  # of RankStatus.written


class Action(IntEnum):
    TRAIN, EVALUATE, FLUSH, CLOSE = range(4)


_IN_WORDS = ("trains", "evaluates", "reads the tables", "leaves its loop")  # by Action


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
    written: int  # has something other than an update written to its tables since the last step began? BESIDE_UPDATE:
    # while late gradients were applied on a stream of their own, which the write did not wait for


class RankSync:
    """Gathers the ranks' status: log2(ranks) messages over sockets if all are the same, else over a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._mesh = rank_mesh.open_mesh(group, rank_mesh.peers_to_compare(group.rank(), group.size()))

    def gather(self, own: RankStatus, seconds: float) -> list[RankStatus]:
        """Raises if a rank does not arrive within `seconds`. Then the ranks cannot be compared any more."""
        try:
            with launch_record.record_host_wait(RENDEZVOUS):
                return self._gather(own, seconds)
        except Exception:
            # The other ranks fail at once instead of waiting for this one.
            if self._mesh is not None:
                self._mesh.give_up()
                self._mesh.hang_up()
            distributed.hang_up(self._group)
            raise

    def _gather(self, own: RankStatus, seconds: float) -> list[RankStatus]:
        if self._mesh is not None and self._mesh.all_same(own, seconds):
            return [own] * self._group.size()
        gathered = distributed.gather_ints(own, self._group, timedelta(seconds=seconds))
        return [RankStatus(*status) for status in gathered]


class LeftRank(NamedTuple):
    """Where a rank left a loop, as it posts it in the store. A rank that is further behind compares as less."""

    launched: int  # launches in the loop
    without_exception: bool
    ordered: int  # batches that its planning thread was ordered to plan
    why: str


class RankExits:
    """Posts in the store which rank left a loop furthest behind, because other ranks may wait for it."""

    def __init__(self, key: str, rank: int) -> None:
        self._key, self._rank, self._launched_before = key, rank, launch_record.launched
        self.agreed = False  # all ranks have agreed on the end of the loop

    def post(self, batch: int, ordered: int, exception: str) -> str:
        """This rank leaves the loop and makes no further launch in it, unless all ranks agree on one. Returns why."""
        why = f"rank {self._rank} left its loop at batch {batch}{exception and f': {exception}'}"
        own = LeftRank(launch_record.launched - self._launched_before, not exception, ordered, why)
        mine = json.dumps(own)
        found = first_reason(self._key, mine)
        while found != mine and own[:2] < LeftRank(*json.loads(found))[:2]:
            found = first_reason(self._key, mine, instead_of=found)
        return why

    def _posted(self) -> LeftRank | None:
        posted = first_reason(self._key)
        return LeftRank(*json.loads(posted)) if posted else None

    def why_left(self) -> str:
        """Why a rank left the loop: by an exception, or before a launch that this rank has made; "" if none did."""
        left, launched = self._posted(), launch_record.launched - self._launched_before
        return "" if left is None or (left.without_exception and left.launched >= launched) else left.why

    def why_unplanned(self, batch: int) -> str:
        """Why the batch will never be planned by all ranks; "" if it may be."""
        left = None if self.agreed else self._posted()
        return "" if left is None or left.ordered > batch else left.why

    def release_wait(self) -> None:
        """End this rank's wait for a launch if a rank has left without making it. In another thread; never raises."""
        work = launch_record.awaited
        if work is None or self.agreed or time.perf_counter() - work.record.wait_began <= _SECONDS_OF_WAIT:
            return
        if (left := self._posted()) is not None and work.number - self._launched_before > left.launched:
            distributed.hang_up(work.group)


def all_fine(statuses: list[RankStatus]) -> bool:
    """All ranks report the same, and no action is needed: the fast path."""
    first = statuses[0]
    all_same = statuses.count(first) == len(statuses)
    return all_same and first.incomplete < 0 and not first.planning_failed and not first.written


def why_over(statuses: list[RankStatus]) -> str:
    """Why no rank can go on with the loop: gradients are lost, or would be applied out of order. "" if all can."""
    if ranks := [rank for rank, s in enumerate(statuses) if s.incomplete >= 0]:
        return (
            f"{_list_ranks(ranks)}: the backward pass of step {statuses[ranks[0]].incomplete} has applied some of its "
            "gradients to the tables and lost the others: something in it raised (a gradient hook?), or it was asked "
            "for the gradients of some tensors only (torch.autograd.grad, backward(inputs=...)), or a backward pass of "
            "another step ran in between. Under a LookaheadLoader, call loss.backward(); this loop is over"
        )
    pending = max(s.pending for s in statuses)
    if ranks := [rank for rank, s in enumerate(statuses) if s.written and (pending >= 0 or s.written == BESIDE_UPDATE)]:
        step = f"step {pending}" if pending >= 0 else "an earlier step"
        return (
            f"{_list_ranks(ranks)}: something other than training wrote to a table before the gradients of {step} "
            "were applied, which must come first. Call model.state_dict() on every rank before such a write "
            "(it applies them), or use LookaheadLoader(overlap=False); this loop is over"
        )
    return ""


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
        return f"{_IN_WORDS[s.action]} {place}" + (f", {gradients} pending" if pending_differs else "")

    ranks_by_place: dict[str, list[int]] = {}
    for rank, s in enumerate(statuses):
        ranks_by_place.setdefault(describe(s), []).append(rank)
    places = "; ".join(f"{_list_ranks(ranks)}: {place}" for place, ranks in ranks_by_place.items())
    return f"ranks are out of step: {places}"


def _list_ranks(ranks: list[int]) -> str:
    return f"rank {', '.join(map(str, ranks[:8]))}{' and others' if len(ranks) > 8 else ''}"
