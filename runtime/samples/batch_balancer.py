"""Balance the batches of one loop between ranks, in a LookaheadLoader's thread, before a batch is planned. The ranks
gather the costs of their samples, and times of earlier steps, to which the cost function is fitted; all compute the
same assignment, and exchange samples. split_batch.py defines what a batch consists of."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
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
from freescale.runtime.samples.shared_fields import SharedFields
from freescale.runtime.samples.split_batch import SplitBatch

log = logging.getLogger(__name__)

# A batch is planned no earlier than the backward pass three steps before it, so the step four before it has ended on
# every rank. (A GPU may lag further: then its times are not known yet, and are sent with a later batch.)
_MEASURED_AFTER = 4
_MOST_TIMES = 4  # max steps whose times are sent with one batch: more than one, to catch up
_LOG_FIT_EVERY = 100  # batches


@dataclass(frozen=True)
class BalanceOptions:
    """How a LookaheadLoader balances; must be the same on all ranks.

    method       `default`, `zigzag`, `lpt`, `kk`, `none` (only measures), or `variable`: ranks get different numbers of
                 samples, and the loss must use `loader.loss_weights`
    cost         cost(*lengths) -> one number per sample. None: a FittedCost, fitted to the measured times of all ranks
    lengths      lengths(batch) -> an array or a dict of arrays, one number per sample, as input of `cost`. None: the
                 number of ids per sample of each feature that the model looks up
    counts       samples per rank. None: as many as the rank loaded
    shared       fields that are not per sample (e.g. class weights) and stay on their rank, by path in the batch:
                 "weights", "loss.weights". Other tensors [samples, ...] that differ between ranks are split by sample.
                 A tensor that is identical on all ranks in three batches is treated as shared; no sample moves until
                 this is decided
    per_sample   fields that are split by sample even if identical on all ranks
    memory       memory(*lengths) -> bytes per sample; requires `memory_cap`, the limit per rank
    alpha        for `variable`: balances costs ** alpha
    """

    method: str = "default"
    cost: Callable[..., Any] | None = None
    lengths: Callable[[Any], Any] | None = None
    counts: Sequence[int] | None = None
    memory: Callable[..., Any] | None = None
    memory_cap: float | None = None
    alpha: float = 1.0
    shared: Sequence[str] = ()
    per_sample: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.method not in solver.METHODS:
            raise BalanceError(
                f"freescale: balance method must be one of {', '.join(solver.METHODS)}; found {self.method!r}"
            )
        for name in ("shared", "per_sample"):
            if isinstance(getattr(self, name), str):
                raise BalanceError(f"freescale: {name} must be a list of names; found {getattr(self, name)!r}")
        if (self.memory is None) != (self.memory_cap is None):
            raise BalanceError("freescale: balancing requires both memory and memory_cap, or neither")

    def shared_settings(self) -> str:
        """Text of the settings that must be the same on all ranks."""
        counts = None if self.counts is None else [int(c) for c in self.counts]
        fields = f"shared {list(self.shared)}, per_sample {list(self.per_sample)}"
        return f"method {self.method}, counts {counts}, memory_cap {self.memory_cap}, alpha {self.alpha}, {fields}"


class SampleInfo(NamedTuple):
    """Samples of a balanced batch. `origin` [samples, 2]: each sample's rank and position before balancing."""

    origin: torch.Tensor
    loss_weights: torch.Tensor


class _LocalBatch(NamedTuple):
    """The batch that this rank loaded. `measures`: cost, bytes, length and memory of each sample, and the features that
    its cost is fitted to."""

    number: int
    batch: Any
    split: SplitBatch
    measures: np.ndarray
    digests: list[float]  # from SharedFields
    text: str  # must be the same on all ranks


class BatchBalancer:
    def __init__(
        self,
        options: BalanceOptions,
        cost: Callable[..., Any],
        features: Sequence[str],
        group: dist.ProcessGroup,
        stats: deque[dict[str, Any]],
    ) -> None:
        self.options, self.cost, self.features, self.group, self.stats = options, cost, features, group, stats
        self._local: _LocalBatch | None = None
        self._shared_fields = SharedFields([*features, *options.per_sample], says=group.rank() == 0)
        # Indexed by batch or step number.
        self._balanced: dict[int, tuple[SampleInfo, batch_structure.BatchEvent]] = {}  # until the batch is yielded
        self._step_times: dict[int, meter.FinishedStep | None] = {}  # of this rank, until sent to the others
        self._unmeasured: dict[int, tuple[dict[str, Any], np.ndarray]] = {}  # stats entries and features, in order
        self._logged_oversized = False

    # -- the user's thread ---------------------------------------------------------------------------------------

    def take(self, number: int, ended: meter.FinishedStep | None) -> SampleInfo:
        """The sample info of batch `number` when it is yielded; waits for it. `ended`: the step before, if it
        trained."""
        if number > 0:
            self._step_times[number - 1] = ended
        info, ready = self._balanced.pop(number)
        ready.wait()
        return info

    # -- the loader's thread -------------------------------------------------------------------------------------

    def prepare(self, number: int, batch: Any) -> list[int]:
        """Split this rank's batch; raises if the batch is invalid. Returns a header to send to every rank."""
        self._local = None
        split = split_batch.split(batch, self.options.shared)
        lengths = self._lengths(batch, split)
        measures = [
            self._per_sample(self.cost, "cost", lengths, split.samples),
            sample_columns.sizes(self._cut(split.columns), split.samples),
            total_length(*lengths.values()),
        ]
        if self.options.memory is not None:
            measures.append(self._per_sample(self.options.memory, "memory", lengths, split.samples))
        measures += self._features(lengths)
        text = f"{self.options.shared_settings()}; {split.schema()}"
        digests = self._shared_fields.digests(split)
        self._local = _LocalBatch(number, batch, split, np.stack(measures).astype(np.float64), digests, text)
        return [split.samples, sample_columns.digest(text)]

    def balance(self, headers: Sequence[Sequence[int]]) -> Any:
        """The batch that this rank trains on. `headers`: the results of `prepare` on all ranks."""
        local, began = self._local, time.perf_counter()
        assert local is not None
        self._check_same([digest for _, digest in headers], local.text)
        brought = np.array([samples for samples, _ in headers])  # samples per rank
        steps = [n for n in islice(self._unmeasured, _MOST_TIMES) if n <= local.number - _MEASURED_AFTER]
        measures, times, digests = self._gather(local, brought, steps)
        self._observe(steps, times)
        home = np.repeat(np.arange(len(brought)), brought)
        result = self._solve(measures, home, brought, self._shared_fields.may_move(local.number, local.split, digests))
        me = self.group.rank()
        mine = result.samples_of(me)
        position = np.arange(len(home)) - (np.cumsum(brought) - brought)[home]
        origin = np.stack([home[mine], position[mine]], 1)
        weights = torch.from_numpy(result.loss_weights[mine]).to(torch.get_default_dtype())
        batch = local.batch
        if (result.rank != home).any():  # the same on every rank
            arriving = np.bincount(home[mine], minlength=len(brought))
            cut = self._cut(local.split.columns)
            new = sample_columns.exchange(cut, result.rank[home == me], arriving, self.group)
            by_name = {c.name: c for c in (*local.split.columns, *new)}
            batch = local.split.rebuild([by_name[c.name] for c in local.split.columns])
        info = SampleInfo(torch.from_numpy(origin), weights)
        self._balanced[local.number] = info, batch_structure.BatchEvent(batch)
        given = measures[3 if self.options.memory is None else 4 :]
        features = given if len(given) else np.stack([measures[2], measures[2] * measures[2]])
        self._record(local.number, result, home, features, began)
        return batch

    def _cut(self, columns: Sequence[Column]) -> list[Column]:
        return [c for c in columns if not self._shared_fields.is_shared(c.name)]

    def _lengths(self, batch: Any, split: SplitBatch) -> dict[str, Any]:
        if self.options.lengths is not None:
            given = self.options.lengths(batch)
            fields = dict(given) if isinstance(given, Mapping) else {"lengths": given}
        else:
            fields = split.lengths(self.features)
            if missing := [f for f in self.features if f not in fields]:
                raise BalanceError(
                    f"freescale: the batch has no feature {', '.join(map(repr, missing))}, which the model looks up; "
                    f"found {batch_structure.describe_structure(batch)}"
                )
        for name, values in fields.items():
            if len(values) != split.samples:
                raise BalanceError(
                    f"freescale: the lengths of feature {name!r} must have one number for each of the {split.samples} "
                    f"samples; found {len(values)}"
                )
        return fields

    def _features(self, lengths: dict[str, Any]) -> list[np.ndarray]:
        """The features that the cost is fitted to, if other than the length."""
        arrays = [np.asarray(x) for x in lengths.values()]
        found = self.cost.sample_features(*arrays) if isinstance(self.cost, FittedCost) else None
        return [] if found is None else list(found)

    @staticmethod
    def _per_sample(cost: Callable[..., Any], what: str, lengths: dict[str, Any], samples: int) -> np.ndarray:
        return costs_of(cost, lengths, what) if samples else np.zeros(0)

    def _check_same(self, digests: Sequence[int], text: str) -> None:
        if len(set(digests)) == 1:
            return
        texts = distributed.gather_objects(text, self.group)
        rank = next(i for i, d in enumerate(digests) if d != digests[0])
        first, other = texts[0].split("; "), texts[rank].split("; ")
        differences = [(a, b) for a, b in zip(first, other, strict=False) if a != b] or [(texts[0], texts[rank])]
        raise BalanceError(
            "freescale: balancing requires batches of the same structure on all ranks; "
            f"rank 0 has {differences[0][0]!r}, rank {rank} has {differences[0][1]!r}"
        )

    def _gather(
        self, local: _LocalBatch, brought: np.ndarray, steps: list[int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The measures of all ranks' samples, `_times` of the steps, [ranks, steps, 2], and digests, in one gather."""
        rows, most, first = len(local.measures), int(brought.max()), 2 * _MOST_TIMES + len(local.digests)
        message = np.zeros(first + rows * most)
        message[2 * _MOST_TIMES : first] = local.digests
        for i, step in enumerate(steps):
            message[2 * i : 2 * i + 2] = self._times(step)
        message[first:].reshape(rows, most)[:, : local.split.samples] = local.measures
        received = [torch.empty(len(message), dtype=torch.float64) for _ in brought]
        dist.all_gather(received, torch.from_numpy(message), group=self.group)
        messages = [r.numpy() for r in received]
        measures = [m[first:].reshape(rows, most)[:, :n] for m, n in zip(messages, brought, strict=True)]
        times = [m[: 2 * len(steps)].reshape(-1, 2) for m in messages]
        return np.concatenate(measures, 1), np.stack(times), np.stack([m[2 * _MOST_TIMES : first] for m in messages])

    def _times(self, number: int) -> tuple[float, float]:
        """(seconds, compute) of a step of this rank. NaN until its GPU has the times; 0 seconds if the batch was not
        trained on, or not taken."""
        if (ended := self._step_times.get(number)) is None:
            return 0.0, 0.0
        if not meter.is_known(ended):
            return float("nan"), float("nan")
        summary = meter.summary(ended)
        return summary["seconds"], summary["compute"]

    def _solve(
        self, measures: np.ndarray, home: np.ndarray, brought: np.ndarray, may_move: bool
    ) -> solver.BalanceResult:
        o = self.options
        if not may_move:
            return solver.balance(measures[0], len(brought), brought, "none", home=home, sizes=measures[1])
        return solver.balance(
            measures[0],
            len(brought),
            brought if o.counts is None and o.method != "variable" else o.counts,
            o.method,
            home=home,
            sizes=measures[1],
            memory=measures[3] if o.memory is not None else None,
            memory_cap=o.memory_cap,
            alpha=o.alpha,
        )

    # -- statistics and the fit -------------------------------------------------------------------------------------

    def _observe(self, steps: list[int], times: np.ndarray) -> None:
        """Process times from `_gather`, up to the first step that a rank does not have times for."""
        for number, (seconds, compute) in zip(steps, times.transpose(1, 2, 0), strict=True):
            if np.isnan(seconds).any():
                break
            self._step_times.pop(number, None)
            entry, features = self._unmeasured.pop(number)
            if not seconds.all():
                continue
            entry["measured"] = float((compute.max() - compute).mean() / seconds.mean())
            if isinstance(self.cost, FittedCost) and number > 0:  # the first step includes compilation
                self.cost.observe(features, np.maximum(compute, 0.0))

    def _record(
        self, number: int, result: solver.BalanceResult, home: np.ndarray, features: np.ndarray, began: float
    ) -> None:
        fit = self.cost if isinstance(self.cost, FittedCost) else None
        constant, mean = 0.0 if fit is None else fit.constant, float(result.loads.mean())
        entry = {
            "step": number,
            "method": result.method,
            "predicted_before": _share_of_step(result.before, mean, constant),
            "predicted_after": _share_of_step(result.straggler, mean, constant),
            "bound": _share_of_step(result.bound, mean, constant),
            "measured": None,
            "moved_samples": int((result.rank != home).sum()),
            "moved_bytes": result.moved_bytes,
            "oversized": len(result.oversized),
            "seconds": time.perf_counter() - began,
            "fit": None if fit is None else fit.stats(),
        }
        self.stats.append(entry)
        ranks = len(result.counts)
        sums = [np.bincount(result.rank, weights=w, minlength=ranks) for w in features]
        self._unmeasured[number] = entry, np.stack(sums, 1)
        if len(result.oversized) and not self._logged_oversized:
            self._logged_oversized = True
            log.info(
                "batch %d: %d samples cost more than the mean load of a rank; no assignment can balance them",
                number, len(result.oversized),
            )  # fmt: skip
        if fit is not None and number % _LOG_FIT_EVERY == 0:
            log.info("balancing at batch %d: cost per sample %s", number, entry["fit"])


def _share_of_step(straggler: float, mean: float, constant: float) -> float:
    """Convert a straggler share of the loads to a share of the step, which also has a constant part."""
    largest = mean / (1 - straggler)
    return (largest - mean) / (largest + constant) if largest else 0.0


def loss_difference(loss_of: Callable[[Any], Any], batch: Any, shared: Sequence[str] = ()) -> float:
    """How much balancing changes the loss of a batch, as a share of it: rounding (about 1e-6 in float32), unless
    samples depend on the rest of their local batch (batch norm, division by the longest history).

    Call it on every rank, with equally many samples, for example as `freescale.loss_difference(model.eval(), batch)`.
    `loss_of` returns the mean loss, alone or first in a tuple. `shared`: as in BalanceOptions.
    """
    group: Any = dist.new_group(backend="gloo")
    try:
        return _loss_difference(loss_of, batch, shared, group)
    finally:
        dist.destroy_process_group(group)


def _loss_difference(loss_of: Callable[[Any], Any], batch: Any, shared: Sequence[str], group: Any) -> float:
    split, world, me = split_batch.split(batch, shared), group.size(), group.rank()
    samples = distributed.gather_objects(split.samples, group)
    if len(set(samples)) != 1:
        raise BalanceError(f"freescale: loss_difference needs equally many samples on all ranks; found {samples}")
    position = np.arange(split.samples)
    # Sample i of rank r goes to rank r + i, so every rank keeps its number of samples.
    arriving = np.array([((position + rank) % world == me).sum() for rank in range(world)])
    moved = split.rebuild(sample_columns.exchange(split.columns, (position + me) % world, arriving, group))

    def mean_loss(local: Any) -> float:
        with torch.no_grad():
            found = loss_of(local)
        loss = (found[0] if isinstance(found, tuple) else found).detach().double().cpu().reshape(1)
        dist.all_reduce(loss, group=group)
        return float(loss) / world

    before, after = mean_loss(batch), mean_loss(moved)
    return abs(after - before) / max(abs(before), 1e-30)
