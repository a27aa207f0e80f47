"""`LookaheadLoader`: prefetches the exchange of the next batch while the current one trains. A planning thread
(thread.py) takes batches from the user's loader, one for each that the loop takes, balances them (batch_balancer.py)
and plans them (planning.py). State between two steps is in step.py; hooks.py sees every use of the model."""

from __future__ import annotations

import atexit
import copy
import logging
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from freescale import config
from freescale.compat import distributed, nn_modules
from freescale.compat.exception_in_flight import describe_end_of_process, describe_exception
from freescale.runtime.balance.sample_cost import FittedCost
from freescale.runtime.lookahead.hooks import compiled_parts, exchanges_of, hooks_of
from freescale.runtime.lookahead.planning import BatchPlanning, PlannedBatch, PlanningConnection
from freescale.runtime.lookahead.step import Loop
from freescale.runtime.meter import METER, FinishedStep, record_averages
from freescale.runtime.recording import RecordedStats, Recorder, recorder
from freescale.runtime.samples.batch_balancer import BalanceOptions, BatchBalancer, SampleInfo
from freescale.runtime.samples.split_batch import restore_outputs
from freescale.runtime.tables.fbgemm import PooledBytes

log = logging.getLogger(__name__)

_STATS_KEPT = 10_000
_HOST_BOUND = 0.2  # a larger share of the steps is reported


class LookaheadLoader:
    """Wrap any iterable of batches and iterate over the wrapper; the rest of the loop stays as it is.

        model.compile(backend="freescale")
        for batch in freescale.LookaheadLoader(loader, model):
            loss = model(batch); loss.backward(); optimizer.step()

    loader     any iterable of batches: tensors, KeyedJaggedTensors, or dicts, lists, tuples, dataclasses of them, all
               of one structure (values without tensors may change). A feature that the model looks up is a key of a
               KeyedJaggedTensor, or the dict key or field name of an integer tensor. Batches are yielded in order, on
               the model's device. They are loaded up to two steps ahead, so the loader must not write to a batch that
               it has returned. `state_dict` and `load_state_dict`, if the loader has them, are of the state after the
               batch yielded last. Other attributes (`sampler`, `dataset`, ...) are read and set through the wrapper.
               Around another LookaheadLoader, this one replaces it
    model      compiled: by model.compile(backend="freescale"), by torch.compile (its return value), or in parts: a
               module with compiled modules in it, such as DistributedModelParallel around a compiled model. A step is a
               call of the compiled part, through the model or directly; with several parts, a call of the model
    strict     loaders of different length on different ranks are an error instead of a warning; None: the model's
               option "strict", else FREESCALE_STRICT
    balance    True, or BalanceOptions: before a batch is planned, samples move between the ranks so that all ranks have
               equal work. Each rank keeps its number of samples; if all have the same, averaged losses and gradients
               are those of the same global batch. KeyedJaggedTensors, tensors [samples, ...], 1-D tensors `x` with
               `x_lengths` or `x_offsets` and lists of one object per sample are split. `origin` tells where samples
               come from; `restore` sends outputs back there. The cost of a sample is fitted to the measured times of
               all ranks (`cost`, see FittedCost), or given in BalanceOptions
    overlap    True, the default: rows and gradients that a step does not wait for travel during the previous or the
               next step, in twice as many launches. False: batches are still loaded and planned ahead, but all rows and
               gradients of a step travel in that step. Try it if rank 0 logs that steps are host-bound

    Training is the same as without the wrapper. What one step leaves for the next is applied before anything else reads
    the tables: at the end of the loop, on `break`, when an exception leaves it, before `state_dict()`, and before a
    forward pass of another batch, under torch.no_grad() or from a second LookaheadLoader. A batch may be skipped
    (`continue`). All ranks must loop alike; otherwise every rank raises an error that names what each rank did. An
    error that Python cannot raise where it happens (on `break` it prints it) is raised by the next use of the model.
    """
    def __init__(
        self,
        loader: Iterable[Any],
        model: torch.nn.Module,
        *,
        strict: bool | None = None,
        balance: bool | BalanceOptions = False,
        overlap: bool | None = True,
    ) -> None:
        self._parts = compiled_parts(model)
        self.model = model
        self._settings = _settings_of(self._parts[0])
        self.strict = self._settings.strict if strict is None else strict
        if overlap is None:
            warnings.warn("freescale: LookaheadLoader(overlap=None) is deprecated and means True", stacklevel=2)
        elif not isinstance(overlap, bool):
            raise TypeError(f"freescale: overlap must be True or False, found {type(overlap).__name__}")
        self.overlap = overlap is not False
        self.exchanges = list(dict.fromkeys(x for part in self._parts for x in exchanges_of(part)))
        for x in self.exchanges:
            if distributed.group_by_name(x.group_name).size() != dist.get_world_size():
                raise ValueError(
                    f"freescale: table {x.name} is sharded over a subset of the ranks; a LookaheadLoader supports "
                    "tables that are sharded over all of them"
                )
        self._hooks = hooks_of(self.exchanges, self._settings.link_gbps)
        self._session = self._hooks.session
        self._stats: deque[dict[str, Any]] = deque(maxlen=_STATS_KEPT)
        self._pooled_bytes = PooledBytes()
        if not isinstance(balance, (bool, BalanceOptions)):
            raise TypeError(f"freescale: balance must be True, False or BalanceOptions, found {type(balance).__name__}")
        self._balance = BalanceOptions() if balance is True else balance or None
        # A fit goes on from loop to loop.
        self.cost = None if self._balance is None else self._balance.cost or FittedCost()
        self._balance_stats = RecordedStats(maxlen=_STATS_KEPT)
        self._moved: SampleInfo | None = None  # of the batch yielded last
        self._recorder: Recorder | None = None
        self._looping = self._reported = False
        self._loader_state: Any = None  # of the loader after that batch, or its error; None: the loader's own is right
        self.loader: Any = self._unwrapped(loader)  # last: from here on __setattr__ sets the loader's attributes
        self._offer_state()

    def _unwrapped(self, loader: Any) -> Any:
        """The loader inside, if `loader` is a LookaheadLoader itself (a framework may have wrapped it)."""
        if not isinstance(loader, LookaheadLoader):
            return loader
        if loader.exchanges != self.exchanges or loader._balance != self._balance:
            raise ValueError(
                "freescale: a LookaheadLoader around another one replaces it, so both must have the same model "
                "and the same `balance`; wrap the loader that is inside once"
            )
        return loader.loader

    def __setstate__(self, state: dict[str, Any]) -> None:  # of copy.copy: the methods must be bound to the copy
        vars(self).update(state)
        self._offer_state()

    def _offer_state(self) -> None:
        """From Python 3.12 on, isinstance of a protocol does not call __getattr__, so they must be attributes."""
        for name in ("state_dict", "load_state_dict"):
            vars(self).pop(name, None)
            if hasattr(self.loader, name) and not (name == "state_dict" and self._lacks_state):
                vars(self)[name] = getattr(self, f"_{name}")

    @property
    def _lacks_state(self) -> bool:
        """Its `state_dict` belongs to a wrapper around a loader without one. (The first batch shows this.)"""
        return isinstance(self._loader_state, (AttributeError, NotImplementedError))

    def __getattr__(self, name: str) -> Any:
        """`sampler`, `dataset`, `batch_size` and other attributes of the loader."""
        loader = self.__dict__.get("loader")
        if name in ("state_dict", "load_state_dict"):  # not the loader's: it is ahead
            error = self.__dict__.get("_loader_state")
            why = f": {error}" if isinstance(error, Exception) else ""
            raise AttributeError(f"freescale: the loader has no {name}; it is a {type(loader).__name__}{why}")
        if name.startswith("_") or loader is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Attributes that only the loader has (`worker_init_fn`, `epoch`) are set there."""
        own = name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        if own or not hasattr(self.__dict__.get("loader"), name):
            super().__setattr__(name, value)
        else:
            setattr(self.loader, name, value)

    def __len__(self) -> int:
        return len(self.loader)

    def _state_dict(self) -> Any:
        """The loader's state after the batch yielded last. (The loader itself is ahead.)"""
        if isinstance(self._loader_state, Exception):  # raised by the loader after that batch
            raise self._loader_state
        return self.loader.state_dict() if self._loader_state is None else copy.deepcopy(self._loader_state)

    def _load_state_dict(self, state: Any) -> None:
        """The next loop starts there."""
        if self._looping:
            raise RuntimeError(
                "freescale: load_state_dict of a LookaheadLoader that is being iterated; leave the loop first"
            )
        self.loader.load_state_dict(state)
        self._loader_state = None
        self._offer_state()

    def stats(self) -> list[dict[str, Any]]:
        """This rank's exchanges: one entry per step and exchange of the last loop (its last 10,000).

        step, exchange            number of the batch, name of the exchange
        values                    ids looked up
        unique_rows               distinct rows among them
        colliding_rows            urgent rows: used by some rank in the previous batch, or steps do not overlap
        bytes_urgent, bytes_early         rows that the forward pass waits for, rows prefetched in the previous step
        bytes_back_urgent, bytes_late     gradients sent at the end of the step, gradients sent during the next one
        bytes_urgent_per_value    what would be urgent if ids were split without deduplication
        bytes_if_pooled           pooled features only: what the forward pass would receive if the owners pooled
        """
        return [dict(s) for s in self._stats]

    def balance_stats(self) -> list[dict[str, Any]]:
        """How batches were balanced: one entry per step of the last loop (its last 10,000), the same on all ranks.

        step                      number of the batch
        method                    what made the assignment
        predicted_before, predicted_after   share of the step in which the average rank waits for the slowest, by the
                                  cost of the samples, before and after balancing
        bound                     the least that any assignment can reach
        measured                  the same share as measured; None if no later batch carried the times of the step
        moved_samples, moved_bytes          what moved between ranks, summed over all ranks
        oversized                 samples that cost more than the mean load per rank
        seconds                   time that this rank's planning thread spent on it
        fit                       the cost function at that step; None if it is not fitted
        """
        return [dict(s) for s in self._balance_stats.copy()]  # the planning thread may append to it

    @property
    def origin(self) -> torch.Tensor:
        """[samples, 2]: the rank and the position of each sample of the last batch before balancing."""
        return self._last_moved().origin

    @property
    def loss_weights(self) -> torch.Tensor:
        """One weight per sample of the last batch: if each rank averages loss * weight over its samples, and the ranks'
        results are averaged, the result is the mean over all samples. All 1 if the ranks have equally many."""
        return self._last_moved().loss_weights.to(self.exchanges[0].anchor.device)

    def restore(self, outputs: Any) -> Any:
        """Outputs per sample of the last batch, sent back to the ranks and positions their samples come from: tensors
        [samples, ...] (without their gradients), lists, or any other structure that a batch may have. Collective."""
        return restore_outputs(outputs, self._last_moved().origin, self._session.restore_group())

    def _last_moved(self) -> SampleInfo:
        if self._moved is None:
            why = "no batch has been yielded" if self._balance else "the loader does not balance (balance=True)"
            raise RuntimeError(f"freescale: the origin of samples is unknown: {why}")
        return self._moved

    def __iter__(self) -> Iterator[Any]:
        self._stats.clear()
        self._balance_stats.clear()
        self._recorder = self._balance_stats.to = recorder(self._settings.record)
        self._hooks.raise_deferred()
        loop = self._session.open(self.exchanges, self._new_planning, self._settings.timeout)
        thread, planning, defer_errors = loop.thread, loop.thread.planning, False
        self._looping, handled_before = True, id(sys.exc_info()[1])
        exception: str | None = None

        def close() -> None:
            why = describe_end_of_process() if exception is None else exception
            self._hooks.close_loop(loop, defer_errors, why)

        stop_recording: Callable[[], None] | None = None
        atexit.register(close)  # an open loop is closed while threads can still run
        try:
            self._hooks.install(self.model, self._parts)
            names, device = [x.name for x in self.exchanges], self.exchanges[0].anchor.device
            stop_recording = record_averages(self.model, names, device)
            while True:
                finished = METER.mark(loop.batch_number + 1, device)
                planned = None
                try:
                    planned = thread.take()
                finally:
                    if planned is None:  # the end, or an error
                        METER.discard()
                if planned is None:
                    break
                self._session.require_innermost(loop)
                planning.times.ended(planned.number - 1, finished)
                batch = self._next_batch(loop, planned, finished)
                thread.plan_another()
                yield batch
            exception = ""
            self._loader_state = self._loader_state if self._lacks_state else None
        except GeneratorExit as closed:  # `break`, or an exception in the loop
            defer_errors, exception = True, describe_exception(sys._getframe().f_back, closed, handled_before)
            raise
        except BaseException as error:
            exception = "" if thread.error is error else type(error).__name__  # "": known to all ranks
            raise
        finally:
            self._looping = False
            METER.pause()
            self._report_if_host_bound()
            if stop_recording is not None:
                stop_recording()
            atexit.unregister(close)
            close()

    def _new_planning(self, connection: PlanningConnection) -> BatchPlanning:
        balancer = None
        if self._balance is not None and self.cost is not None:
            features = list(dict.fromkeys(f for x in self.exchanges for f in x.features))
            balancer = BatchBalancer(self._balance, self.cost, features, connection.group, self._balance_stats)
        return BatchPlanning(self.loader, self.exchanges, connection, self.strict, balancer, self.overlap)

    def _report_if_host_bound(self) -> None:
        if self.overlap and not self._reported and (share := METER.host_bound_share()) > _HOST_BOUND:
            self._reported = True
            if dist.get_rank() == 0:
                log.info(
                    "the GPU was idle for %.0f%% of the last steps because of the host; "
                    "LookaheadLoader(overlap=False) launches half as much and may be faster for steps this short",
                    100 * share,
                )

    def _next_batch(self, loop: Loop, planned: PlannedBatch, finished: FinishedStep | None) -> Any:
        trained = loop.used
        loop.take(planned)
        lacked_state, self._loader_state = self._lacks_state, planned.loader_state
        if self._lacks_state != lacked_state:
            self._offer_state()
        if (balancer := loop.thread.planning.balancer) is not None:
            self._moved = balancer.take(planned.number, finished if trained else None)
        for exchange, plan in zip(self.exchanges, planned.plans, strict=True):
            pooled = self._pooled_bytes.count(exchange, plan, planned.batch)
            self._stats.append({"step": planned.number, "exchange": exchange.name, **plan.stats, **pooled})
            if self._recorder is not None:
                self._recorder.add("plan", self._stats[-1])
        return planned.batch


def _settings_of(model: torch.nn.Module) -> config.Config:
    """As the model was compiled. Wrong options are left to the backend, which reports them on every rank."""
    try:
        return config.load(nn_modules.options_of(model))
    except config.ConfigError:
        return config.load()
