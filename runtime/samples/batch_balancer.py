"""Balance the batches of one loop between the ranks: what a LookaheadLoader's thread does before it plans a batch.

The ranks gather what their samples cost, all find the same assignment, and the samples travel. With the costs travels
how long a step before took, which fits the cost function to this machine. What a batch is made of is in split_batch.py.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from freescale.compat import distributed
from freescale.runtime import batch_structure, meter
from freescale.runtime.balance import solver
from freescale.runtime.balance.integer_problem import BalanceError
from freescale.runtime.balance.sample_cost import FittedCost, costs_of, total_length
from freescale.runtime.samples import sample_columns, split_batch
from freescale.runtime.samples.sample_columns import Column

log = logging.getLogger(__name__)

METHODS = tuple(m for m in solver.METHODS if m != "local")
# A batch is planned when the loop takes the one two before it, so the step four before it has ended on every rank.
_KNOWN = 4
_LOGGED = 100  # batches from one logged fit to the next


@dataclass(frozen=True)
class BalanceOptions:
    """How a LookaheadLoader balances; the same on all ranks.

    method       `default`, `zigzag`, `lpt`, `kk`, `none` (measures only), or `variable`, where the ranks get different
                 numbers of samples and the loss must use `loader.loss_weights`
    cost         cost(*lengths) -> one number per sample. None: a FittedCost, fitted to the measured times of all ranks
    lengths      lengths(batch) -> an array, or a dict of arrays, with one number per sample, for `cost`. None: how many
                 ids each sample has of each feature that the model looks up
    counts       samples that each rank is to get. None: as many as it brought
    memory       memory(*lengths) -> bytes of each sample, and `memory_cap`, what a rank has for them
    alpha        for `variable`: costs ** alpha is balanced
    """

    method: str = "default"
    cost: Callable[..., Any] | None = None
    lengths: Callable[[Any], Any] | None = None
    counts: Sequence[int] | None = None
    memory: Callable[..., Any] | None = None
    memory_cap: float | None = None
    alpha: float = 1.0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise BalanceError(
                f"freescale: a LookaheadLoader balances by one of {', '.join(METHODS)}; found {self.method!r}"
            )
        if (self.memory is None) != (self.memory_cap is None):
            raise BalanceError("freescale: balancing wants both memory and memory_cap, or neither")

    def said(self) -> str:
        """What all ranks must have alike."""
        counts = None if self.counts is None else [int(c) for c in self.counts]
        return f"method {self.method}, counts {counts}, memory_cap {self.memory_cap}, alpha {self.alpha}"


class Moved(NamedTuple):
    """What became of a batch: `origin` [samples, 2] is the rank and the position that each sample had."""

    origin: torch.Tensor
    loss_weights: torch.Tensor


class _Share(NamedTuple):
    """This rank's part of the batch that is being balanced. `numbers`: cost, bytes, length, memory of each sample."""

    number: int
    batch: Any
    cut: split_batch.Cut
    numbers: np.ndarray
    text: str


class Balancer:
    """Balances the batches of one loop, in the loader's thread. `stats` and the fit outlive it."""

    def __init__(
        self,
        options: BalanceOptions,
        cost: Callable[..., Any],
        features: Sequence[str],
        group: dist.ProcessGroup,
        stats: deque[dict[str, Any]],
    ) -> None:
        self.options, self.cost, self.features, self.group, self.stats = options, cost, features, group, stats
        self._share: _Share | None = None
        # by the number of the batch, until it is handed out
        self._moved: dict[int, tuple[Moved, batch_structure.BatchEvent]] = {}
        self._ended: dict[int, meter.FinishedStep | None] = {}  # steps of this rank that nobody has heard of
        self._open: dict[int, tuple[dict[str, Any], np.ndarray]] = {}  # steps whose times are not known
        self._told = False

    # -- the user's thread ---------------------------------------------------------------------------------------

    def take(self, number: int, ended: meter.FinishedStep | None) -> Moved:
        """Batch `number` goes to the user, whose streams wait for it; the step before it, if it trained, took as long
        as `ended` says."""
        self._ended[number - 1] = ended
        moved, ready = self._moved.pop(number)
        ready.wait()
        return moved

    # -- the loader's thread -------------------------------------------------------------------------------------

    def read(self, number: int, batch: Any) -> list[int]:
        """Look at this rank's batch; an error says what is wrong with it. Returns what the other ranks must hear."""
        self._share = None
        cut = split_batch.cut(batch)
        lengths = self._lengths(batch, cut)
        rows = [self._numbers(self.cost, "cost", lengths, cut.samples), sample_columns.sizes(cut.columns, cut.samples)]
        rows.append(total_length(*lengths.values()))
        if self.options.memory is not None:
            rows.append(self._numbers(self.options.memory, "memory", lengths, cut.samples))
        text = f"{self.options.said()}; {cut.schema()}"
        self._share = _Share(number, batch, cut, np.stack(rows).astype(np.float64), text)
        return [cut.samples, int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")]

    def move(self, heard: Sequence[Sequence[int]]) -> Any:
        """The batch that this rank trains on. `heard`: what `read` returned on each rank."""
        share, began = self._share, time.perf_counter()
        assert share is not None
        self._must_agree([digest for _, digest in heard], share.text)
        brought = np.array([samples for samples, _ in heard])
        numbers, times = self._gather(share, brought)
        self._observe(share.number - _KNOWN, times)
        home = np.repeat(np.arange(len(brought)), brought)
        found = self._solve(numbers, home, brought)
        me = self.group.rank()
        mine = found.samples_of(me)
        position = np.arange(len(home)) - (np.cumsum(brought) - brought)[home]
        origin = np.stack([home[mine], position[mine]], 1)
        weights = torch.from_numpy(found.loss_weights[mine]).to(torch.get_default_dtype())
        batch = share.batch
        if (found.rank != home).any():  # the same on every rank
            arriving = np.bincount(home[mine], minlength=len(brought))
            batch = share.cut.build(
                sample_columns.exchange(share.cut.columns, found.rank[home == me], arriving, self.group)
            )
        self._moved[share.number] = Moved(torch.from_numpy(origin), weights), batch_structure.BatchEvent(batch)
        self._note(share.number, found, home, numbers[2], began)
        return batch

    def _lengths(self, batch: Any, cut: split_batch.Cut) -> dict[str, Any]:
        if self.options.lengths is not None:
            given = self.options.lengths(batch)
            fields = dict(given) if isinstance(given, Mapping) else {"lengths": given}
        else:
            fields = dict(split_batch.lengths_of(cut, self.features))
            if missing := [f for f in self.features if f not in fields]:
                raise BalanceError(
                    f"freescale: the batch has no feature {', '.join(map(repr, missing))}, which the model looks up; "
                    f"found {batch_structure.describe_structure(batch)}"
                )
        for name, values in fields.items():
            if len(values) != cut.samples:
                raise BalanceError(
                    f"freescale: the lengths of feature {name!r} must be one for each of the {cut.samples} samples; "
                    f"found {len(values)}"
                )
        return fields

    @staticmethod
    def _numbers(cost: Callable[..., Any], what: str, lengths: dict[str, Any], samples: int) -> np.ndarray:
        return costs_of(cost, lengths, what) if samples else np.zeros(0)

    def _must_agree(self, digests: Sequence[int], text: str) -> None:
        if len(set(digests)) == 1:
            return
        texts: list[Any] = [None] * len(digests)
        dist.all_gather_object(texts, text, self.group)
        rank = next(i for i, d in enumerate(digests) if d != digests[0])
        ours, theirs = texts[0].split("; "), texts[rank].split("; ")
        pairs = [(a, b) for a, b in zip(ours, theirs, strict=False) if a != b] or [(texts[0], texts[rank])]
        raise BalanceError(
            "freescale: samples can move only between batches of the same structure on all ranks; "
            f"rank 0 has {pairs[0][0]!r}, rank {rank} has {pairs[0][1]!r}"
        )

    def _gather(self, share: _Share, brought: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of the samples of all ranks, and the (seconds, compute) of a step of each rank; NaN if not known.

        One all-gather, padded to the most samples.
        """
        times = [float("nan")] * 2
        if (ended := self._ended.pop(share.number - _KNOWN, None)) is not None:
            summary = meter.summary(*ended)
            times = [summary["seconds"], summary["compute"]]
        rows, most = len(share.numbers), int(brought.max())
        message = np.zeros(2 + rows * most)
        message[:2] = times
        message[2:].reshape(rows, most)[:, : share.cut.samples] = share.numbers
        heard = [torch.empty(len(message), dtype=torch.float64) for _ in brought]
        dist.all_gather(heard, torch.from_numpy(message), group=self.group)
        said = [h.numpy() for h in heard]
        parts = [s[2:].reshape(rows, most)[:, :n] for s, n in zip(said, brought, strict=True)]
        return np.concatenate(parts, 1), np.stack([s[:2] for s in said])

    def _solve(self, numbers: np.ndarray, home: np.ndarray, brought: np.ndarray) -> solver.Balanced:
        o = self.options
        return solver.balance(
            numbers[0],
            len(brought),
            brought if o.counts is None and o.method != "variable" else o.counts,
            o.method,
            home=home,
            sizes=numbers[1],
            memory=numbers[3] if o.memory is not None else None,
            memory_cap=o.memory_cap,
            alpha=o.alpha,
        )

    # -- what is known of it -------------------------------------------------------------------------------------

    def _observe(self, number: int, times: np.ndarray) -> None:
        entry, features = self._open.pop(number, (None, None))
        if entry is None or not np.isfinite(times).all():
            return
        seconds, compute = times.T
        entry["measured"] = float((compute.max() - compute).mean() / seconds.mean())
        if isinstance(self.cost, FittedCost) and number > 0:  # the first step compiles
            self.cost.observe(features, np.maximum(compute, 0.0))

    def _note(self, number: int, found: solver.Balanced, home: np.ndarray, lengths: np.ndarray, began: float) -> None:
        fit = self.cost if isinstance(self.cost, FittedCost) else None
        constant, mean = 0.0 if fit is None else fit.constant, float(found.loads.mean())
        entry = {
            "step": number,
            "method": found.method,
            "predicted_before": _share_of_step(found.before, mean, constant),
            "predicted_after": _share_of_step(found.straggler, mean, constant),
            "bound": _share_of_step(found.bound, mean, constant),
            "measured": None,
            "moved_samples": int((found.rank != home).sum()),
            "moved_bytes": found.moved_bytes,
            "oversized": len(found.oversized),
            "seconds": time.perf_counter() - began,
            "fit": None if fit is None else fit.stats(),
        }
        self.stats.append(entry)
        ranks = len(found.counts)
        features = [np.bincount(found.rank, weights=w, minlength=ranks) for w in (lengths, lengths * lengths)]
        self._open[number] = entry, np.stack(features, 1)
        if len(found.oversized) and not self._told:
            self._told = True
            log.info(
                "batch %d: %d samples cost more than the mean load of a rank; no assignment can balance these",
                number, len(found.oversized),
            )  # fmt: skip
        if fit is not None and number % _LOGGED == 0:
            log.info("balancing at batch %d: cost of a sample %s", number, entry["fit"])


def _share_of_step(straggler: float, mean: float, constant: float) -> float:
    """A straggler share of the loads as a share of the step, which also has a part that no length changes."""
    largest = mean / (1 - straggler)
    return (largest - mean) / (largest + constant) if largest else 0.0


def send_home(outputs: Any, origin: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Outputs per sample, as a batch of any structure, back at the rank and in the order that the samples came from."""
    cut, failure = None, None
    try:
        cut = split_batch.cut(outputs)
        if cut.samples != len(origin):
            raise BalanceError(
                f"freescale: restore wants one output for each of the {len(origin)} samples of the last batch; "
                f"found {cut.samples}"
            )
    except Exception as error:  # noqa: BLE001  (the other ranks must hear of it)
        cut, failure = None, error
    rank, position = origin.numpy().T if len(origin) else np.zeros((2, 0), np.int64)
    leaving = np.bincount(rank, minlength=group.size())
    text = str(failure) if cut is None else cut.schema()
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    said = distributed.gather_ints([int(cut is not None), digest, *leaving.tolist()], group)
    if len({(good, d) for good, d, *_ in said}) > 1 or cut is None:
        _refuse(said, text, failure, group)
    assert cut is not None
    arriving = np.array([s[2 + group.rank()] for s in said])
    place = Column("position", ("position",), None, (torch.from_numpy(position.copy()),), cut.samples)
    *came, places = sample_columns.exchange([*cut.columns, place], rank, arriving, group)
    return cut.build(sample_columns.select(came, np.argsort(places.rows[0].numpy(), kind="stable")))


def _refuse(said: list[list[int]], text: str, failure: Exception | None, group: dist.ProcessGroup) -> None:
    """Every rank raises: its own error, or what another one has."""
    texts: list[Any] = [None] * len(said)
    dist.all_gather_object(texts, text, group)
    if failure is not None:
        raise failure
    failed = next((i for i, s in enumerate(said) if not s[0]), None)
    if failed is not None:
        raise RuntimeError(f"freescale: restore failed on rank {failed}: {texts[failed]}")
    other = next(i for i, t in enumerate(texts) if t != texts[0])
    raise BalanceError(
        "freescale: restore wants outputs of the same structure on all ranks; "
        f"rank 0 has {texts[0]!r}, rank {other} has {texts[other]!r}"
    )
