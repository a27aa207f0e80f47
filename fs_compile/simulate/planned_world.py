"""Plans of all ranks of a world, in one process: the planning functions of the package, without the network.

What each rank would ask of the others, and what these would answer, is handed over in memory. Only some owners' rows
are planned (workload.py says which); the counts of a rank are then scaled to all of its ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from freescale.kernels.planning import exchange_plan
from freescale.kernels.planning.exchange_plan import OwnerMap, OwnRequests, Requests
from freescale.simulate.workload import Batch, spans


@dataclass(frozen=True)
class Counts:
    """Of one batch on every rank, [ranks] each; rows and values of all owners."""

    values: np.ndarray  # looked up
    unique: np.ndarray  # rows
    urgent: np.ndarray  # rows that the batch before has, too
    urgent_values: np.ndarray  # values of these
    urgent_gradients: np.ndarray  # rows that the batch after has, too
    urgent_gradient_values: np.ndarray
    owner_spread: float  # the busiest of the planned owners over their mean, in rows


class PlannedWorld:
    """Plans batch after batch. `owners`: of the rows of how many owners there are ids."""

    def __init__(self, ranks: int, owners: int, rows: int) -> None:
        self.ranks, self.owners = ranks, owners
        block = -(-rows // ranks)
        cuts = [min(r * block, rows) for r in range(ranks + 1)]
        shards = [exchange_plan.Shard(0, cuts[r], cuts[r + 1] - cuts[r], r, 0) for r in range(ranks)]
        self._map: OwnerMap = exchange_plan.owner_map(shards, [rows], ranks)
        self._rows = rows
        self._before: list[Requests] | None = None
        self._half: dict[str, np.ndarray] | None = None  # what is known of the batch before
        self._factors: list[np.ndarray] = []  # of batches that are not complete: ids of each rank over its planned ones
        self._spread = 1.0

    def plan(self, batch: Batch, order: np.ndarray, per_rank: np.ndarray) -> Counts | None:
        """`order`: samples rank by rank, `per_rank` of them each. Returns the batch before, which is complete now."""
        ids = batch.ids[spans((np.cumsum(batch.counts) - batch.counts)[order], batch.counts[order])]
        sizes = _per_rank(batch.counts[order], per_rank)
        after = self._requests(np.split(ids, np.cumsum(sizes)[:-1]))
        before, self._before = self._before, after
        complete, half = None, {"values": sizes, "unique": _sizes(r.needed.values for r in after)}
        self._factors.append(_per_rank(batch.values[order], per_rank) / np.maximum(sizes, 1))
        if before is None:
            half |= {"urgent": half["unique"], "urgent_values": sizes}
        else:
            told = self._messages(before, after)
            planned = [_urgent(*of_rank) for of_rank in zip(told, before, after, strict=True)]
            names = ("urgent_gradients", "urgent_gradient_values", "urgent", "urgent_values")
            found = dict(zip(names, np.array(planned).T, strict=True))
            assert self._half is not None
            complete = self._scaled({**self._half, **{n: found[n] for n in names[:2]}})
            half |= {n: found[n] for n in names[2:]}
        self._half = half
        owned = _sizes(r.rows for r in after[: self.owners])
        self._spread = float(owned.max() / max(owned.mean(), 1e-9))
        return complete

    def last(self) -> Counts:
        """The batch that came last: no gradients are late."""
        assert self._half is not None
        half = self._half
        return self._scaled({**half, "urgent_gradients": half["unique"], "urgent_gradient_values": half["values"]})

    def _scaled(self, counts: dict[str, np.ndarray]) -> Counts:
        factor = self._factors.pop(0)
        return Counts(**{name: found * factor for name, found in counts.items()}, owner_spread=self._spread)

    # -- what the ranks tell each other ----------------------------------------------------------------------------

    def _requests(self, ids: Sequence[np.ndarray]) -> list[Requests]:
        """Each rank finds its unique rows and tells the owners."""
        own: list[OwnRequests] = []
        for mine in ids:
            found = exchange_plan.own_requests([torch.from_numpy(mine)], [0], [self._rows], self._map)
            assert isinstance(found, OwnRequests)
            own.append(found)
        counts = np.stack([o.recv_counts.numpy() for o in own])  # [requester, owner]
        rows = _handed_over([o.rows.numpy() for o in own], counts[:, : self.owners])
        nothing = torch.empty(0, dtype=torch.int64)
        rows += [nothing.numpy()] * (self.ranks - self.owners)
        send = torch.from_numpy(np.ascontiguousarray(counts.T))
        return [
            Requests(o.needed, o.recv_counts, torch.from_numpy(rows[r]), send[r], o.inverse) for r, o in enumerate(own)
        ]

    def _messages(self, before: list[Requests], after: list[Requests]) -> list[np.ndarray]:
        """Each owner finds the rows that both batches need, and tells the requesters: what each rank is told."""
        found = [exchange_plan.collide(b, a) for b, a in zip(before[: self.owners], after[: self.owners], strict=True)]
        counts = np.stack(
            [b.send_counts.numpy() + a.send_counts.numpy() for b, a in zip(before, after, strict=True)][: self.owners]
        )
        return _handed_over([c.message.numpy() for c in found], counts)


def _urgent(message: np.ndarray, before: Requests, after: Requests) -> list[int]:
    """Of one rank: urgent gradients of `before` and urgent rows of `after`; rows, and values of each."""
    found: list[int] = []
    masks = exchange_plan.urgent_keys(torch.from_numpy(message), before, after)
    for requests, mask in zip((before, after), masks, strict=True):
        values_of_each = np.diff(requests.needed.ends.numpy(), prepend=0)
        found += [int(mask.sum()), int(values_of_each[mask].sum())]
    return found


def _handed_over(sent: Sequence[np.ndarray], counts: np.ndarray) -> list[np.ndarray]:
    """An all-to-all: `sent[i]` holds counts[i, j] entries for each j, in order; what each j gets, by i."""
    receivers = counts.shape[1]
    everything = np.concatenate(sent)
    first = (np.cumsum([len(s) for s in sent]) - [len(s) for s in sent])[:, None]
    starts = first + np.cumsum(counts, 1) - counts
    ordered = everything[spans(starts.T.ravel(), counts.T.ravel())]
    ends = np.cumsum(counts.sum(0))
    return [ordered[ends[j] - counts[:, j].sum() : ends[j]] for j in range(receivers)]


def _per_rank(of_samples: np.ndarray, per_rank: np.ndarray) -> np.ndarray:
    rank = np.repeat(np.arange(len(per_rank)), per_rank)
    return np.bincount(rank, of_samples, minlength=len(per_rank)).astype(np.int64)


def _sizes(arrays: Iterator[torch.Tensor]) -> np.ndarray:
    return np.array([a.shape[0] for a in arrays])
