"""`LookaheadLoader`: plans the exchange of the next batch while this one trains, and hands batches over in order.

A background thread (planner.py) takes batches from the user's loader, exchanges their ids with the other ranks', over a
connection of its own, finds the rows that two consecutive batches share, and makes the tensors that the two steps need.
It does one batch for each one that the loop takes, so all ranks do as many. If batches are to be balanced, samples move
between the ranks first (batch_balancer.py).

What is pending between two steps is in loop_state.py, every use of the model in model_hooks.py.
"""

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
from freescale.compat import compiled_modules, distributed
from freescale.runtime.balance.sample_cost import FittedCost
from freescale.runtime.lookahead.exception_in_flight import describe_end_of_process, describe_exception
from freescale.runtime.lookahead.loop_coordinator import coordinator_of
from freescale.runtime.lookahead.loop_state import LoopState
from freescale.runtime.lookahead.model_tables import compiled_parts, exchanges_of
from freescale.runtime.lookahead.planned_batch import PlannedBatch
from freescale.runtime.lookahead.planner import Planner
from freescale.runtime.lookahead.pooled_bytes import PooledBytes
from freescale.runtime.meter import METER, FinishedStep, record_averages
from freescale.runtime.recording import RecordedStats, Recorder, recorder
from freescale.runtime.samples.batch_balancer import BalanceOptions, BatchBalancer, SampleInfo
from freescale.runtime.samples.restore_outputs import restore_outputs

log = logging.getLogger(__name__)

_STATS_KEPT = 10_000
_HOST_BOUND = 0.2  # a larger share of the steps is reported


class LookaheadLoader:
    """Wrap any iterable of batches and loop over this instead; the rest of the loop stays as it is.

        model.compile(backend="freescale")
        for batch in freescale.LookaheadLoader(loader, model):
            loss = model(batch); loss.backward(); optimizer.step()

    loader     any iterable of batches: tensors, KeyedJaggedTensors, or dicts, lists, tuples, dataclasses of them, of
               one structure (what holds no tensors may change). A feature that the model looks up is a key of a
               KeyedJaggedTensor, or else the dict key or field name of an integer tensor. Batches are handed out in
               order, on the model's device; they are loaded up to two steps ahead of the next one, so the loader must
               not write into a batch that it has given away. If it has a state (`state_dict`, `load_state_dict`), it is
               asked for that at every batch, and these methods of the wrapper tell the state behind the batch that was
               handed out last, and load one; else there are none. What else the loader has (`sampler`, `dataset`,
               `batch_size`, ...) is read and set through the wrapper. Around another LookaheadLoader, this one plans in
               its place
    model      compiled: by model.compile(backend="freescale"), by torch.compile (what it returned), or in parts: not
               compiled itself, with compiled modules in it, as DistributedModelParallel around a compiled model. What
               a step calls is the compiled part, through the model or not; if there are several, it is the model
    strict     loaders of different length on different ranks are an error instead of a warning; None: as the model was
               compiled (its option "strict", else FREESCALE_STRICT)
    balance    True, or BalanceOptions: before a batch is planned, samples move between the ranks so that all have the
               same work, each as many samples as before. Parts of a batch are cut by sample: KeyedJaggedTensors,
               tensors [samples, ...], 1-D tensors `x` beside `x_lengths` or `x_offsets`, lists of one object per
               sample. With as many samples on every rank, averaged loss and gradients are those of the same global
               batch. `origin` says where the samples come from; `restore` sends outputs per sample back there. What
               a sample costs is fitted to the times of all ranks (`cost`, see FittedCost), or given in BalanceOptions
    overlap    True, the default: rows and gradients that a step does not wait for travel during the previous or the
               next step. That takes twice as many launches. False: batches are loaded and planned ahead, but all rows
               and gradients of a step travel in that step, in graphs for that alone; worth trying where the meter
               reports short steps as host-bound (rank 0 logs it). The numbers are the same

    The numbers are those of the loop without the wrapper. What a step leaves for the next one is applied before
    anything else sees the tables: at the end of the loop, on `break`, when an exception leaves it, before
    `state_dict()`, and before a forward pass of another batch under torch.no_grad(), plain or from a second
    LookaheadLoader. A batch may be left out (`continue`). All ranks loop alike; where they do not, every rank gets an
    error that says who did what.

    What Python cannot raise where it happens (at `break` it prints it), the next use of the model raises.
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
                    f"freescale: table {x.name} is sharded over a part of the ranks; a LookaheadLoader plans for "
                    "tables that are sharded over all of them"
                )
        self._coordinator = coordinator_of(self.exchanges, self._settings.link_gbps)
        self._stats: deque[dict[str, Any]] = deque(maxlen=_STATS_KEPT)
        self._pooled_bytes = PooledBytes()
        if not isinstance(balance, (bool, BalanceOptions)):
            raise TypeError(f"freescale: balance must be True, False or BalanceOptions, found {type(balance).__name__}")
        self._balance = BalanceOptions() if balance is True else balance or None
        # What a sample costs; if it is fitted, the fit goes on from loop to loop.
        self.cost = None if self._balance is None else self._balance.cost or FittedCost()
        self._balance_stats = RecordedStats(maxlen=_STATS_KEPT)
        self._moved: SampleInfo | None = None  # of the batch that was handed out last
        self._recorder: Recorder | None = None
        self._looping = self._reported = False
        self._loader_state: Any = None  # of the loader behind that batch, or its error; None: the loader's own is right
        self.loader: Any = self._unwrapped(loader)  # last: from here on __setattr__ knows what is the loader's
        self._offer_state()

    def _unwrapped(self, loader: Any) -> Any:
        """What is inside of a LookaheadLoader around which this one is put (by a framework, say)."""
        if not isinstance(loader, LookaheadLoader):
            return loader
        if loader.exchanges != self.exchanges or loader._balance != self._balance:
            raise ValueError(
                "freescale: a LookaheadLoader around another one plans in its place, so both must have the same model "
                "and the same `balance`; wrap the loader that is inside once"
            )
        return loader.loader

    def __setstate__(self, state: dict[str, Any]) -> None:  # of copy.copy: methods of the original are none of its own
        vars(self).update(state)
        self._offer_state()

    def _offer_state(self) -> None:
        """`state_dict` and `load_state_dict` where the loader has them: who looks for them must find the methods on the
        object (from Python 3.12 on, isinstance of a protocol does not ask __getattr__), or nothing."""
        for name in ("state_dict", "load_state_dict"):
            vars(self).pop(name, None)
            if hasattr(self.loader, name) and not (name == "state_dict" and self._lacks_state):
                vars(self)[name] = getattr(self, f"_{name}")

    @property
    def _lacks_state(self) -> bool:
        """Its `state_dict` is that of a wrapper around a loader without one. (This shows at the first batch.)"""
        return isinstance(self._loader_state, (AttributeError, NotImplementedError))

    def __getattr__(self, name: str) -> Any:
        """`sampler`, `dataset`, `batch_size` and whatever else the loader has."""
        loader = self.__dict__.get("loader")
        if name in ("state_dict", "load_state_dict"):  # who looks for them must not find the loader's: it is ahead
            error = self.__dict__.get("_loader_state")
            why = f": {error}" if isinstance(error, Exception) else ""
            raise AttributeError(f"freescale: the loader has no {name}; it is a {type(loader).__name__}{why}")
        if name.startswith("_") or loader is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """What only the loader has (`worker_init_fn`, `epoch`) is set there."""
        own = name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        if own or not hasattr(self.__dict__.get("loader"), name):
            super().__setattr__(name, value)
        else:
            setattr(self.loader, name, value)

    def __len__(self) -> int:
        return len(self.loader)

    def _state_dict(self) -> Any:
        """The loader's state behind the batch that was handed out last. (The loader itself is ahead of it.)"""
        if isinstance(self._loader_state, Exception):  # the loader's own, when it was asked at that batch
            raise self._loader_state
        return self.loader.state_dict() if self._loader_state is None else copy.deepcopy(self._loader_state)

    def _load_state_dict(self, state: Any) -> None:
        """The next loop goes on there."""
        if self._looping:
            raise RuntimeError("freescale: load_state_dict of a LookaheadLoader whose loop is on; leave the loop first")
        self.loader.load_state_dict(state)
        self._loader_state = None
        self._offer_state()

    def stats(self) -> list[dict[str, Any]]:
        """What this rank's exchanges were, one entry per step and exchange of the last loop (its last 10,000).

        step, exchange            number of the batch, name of the exchange
        values                    ids looked up
        unique_rows               different rows among them
        colliding_rows            of those, urgent ones: used by some rank in the batch before, or steps do not overlap
        bytes_urgent, bytes_early         rows that the forward pass waits for, rows that came during the step before
        bytes_back_urgent, bytes_late     gradients sent at the end of the step, gradients sent during the next one
        bytes_urgent_per_value    what would be urgent if values were split without bringing duplicates together
        bytes_if_pooled           of pooled features: what the forward pass would bring if their owners pooled
        """
        return [dict(s) for s in self._stats]

    def balance_stats(self) -> list[dict[str, Any]]:
        """How the batches were balanced, one entry per step of the last loop (its last 10,000), the same on all ranks.

        step                      number of the batch
        method                    what made the assignment
        predicted_before, predicted_after   share of the step in which the average rank waits for the slowest, by the
                                  cost of the samples, as the ranks brought them and as they train on them
        bound                     the least that any assignment could reach
        measured                  the same share as it was measured; None for steps whose times no later batch brought
        moved_samples, moved_bytes          what went from one rank to another, of all ranks
        oversized                 samples that cost more than the mean load of a rank
        seconds                   that the loader's thread of this rank took for it
        fit                       the cost function at that step; None if it is not fitted
        """
        return [dict(s) for s in self._balance_stats.copy()]  # the loader's thread goes on adding to it

    @property
    def origin(self) -> torch.Tensor:
        """[samples, 2]: the rank and the position that each sample of the last batch had before it was balanced."""
        return self._last_moved().origin

    @property
    def loss_weights(self) -> torch.Tensor:
        """One for each sample of the last batch. If each rank averages loss * weight over its samples, and the results
        are averaged over the ranks, that is the mean over all samples. All 1 where all ranks have equally many."""
        return self._last_moved().loss_weights.to(self.exchanges[0].anchor.device)

    def restore(self, outputs: Any) -> Any:
        """Outputs per sample of the last batch, sent to where its samples come from and put in the order there.

        Tensors [samples, ...] (without their gradients), lists, or whatever else a batch can be made of. Every rank
        calls this at the same place.
        """
        group = self._coordinator.restore_group()
        return restore_outputs(outputs, self._last_moved().origin, group)

    def _last_moved(self) -> SampleInfo:
        if self._moved is None:
            why = "no batch has been handed out" if self._balance else "the loader does not balance (balance=True)"
            raise RuntimeError(f"freescale: where samples come from is not known: {why}")
        return self._moved

    def __iter__(self) -> Iterator[Any]:
        self._stats.clear()
        self._balance_stats.clear()
        self._recorder = self._balance_stats.to = recorder(self._settings.record)
        loop, defer_errors = self._coordinator.open_loop(self.model, self._parts, self.exchanges), False
        self._looping, handled_before = True, id(sys.exc_info()[1])
        exception: str | None = None

        def close() -> None:
            why = describe_end_of_process() if exception is None else exception
            self._coordinator.close_loop(loop, defer_errors, why)

        stop_recording: Callable[[], None] | None = None
        planner: Planner | None = None
        # At exit, a loop that is still open somewhere is closed while threads can still run.
        atexit.register(close)
        try:
            connection = self._coordinator.stack.planning_connection(len(self._coordinator.stack.loops))
            balancer = self._balancer(connection.group)
            settings = self.strict, self._settings.timeout, balancer, self.overlap
            planner = Planner(self.loader, self.exchanges, connection, *settings)
            loop.stop_planning, loop.batches_ordered = planner.stop, lambda: planner.ordered
            self._coordinator.stack.watch(loop, planner)
            loop.planning_failed, loop.why_planning_failed = lambda: planner.failed, planner.why_failed
            names, device = [x.name for x in self.exchanges], self.exchanges[0].anchor.device
            stop_recording = record_averages(self.model, names, device)
            while True:
                finished = METER.mark(device=device)
                planned = None
                try:
                    planned = planner.take()
                finally:
                    if planned is None:  # the end, or an error
                        METER.discard()
                if planned is None:
                    break
                METER.name_step(planned.number)
                self._coordinator.stack.require_innermost(loop)
                planner.times.ended(planned.number - 1, finished)
                batch = self._hand_out(loop, planned, balancer, finished)
                planner.plan_another()
                yield batch
            exception = ""
            self._loader_state = self._loader_state if self._lacks_state else None
        except GeneratorExit as closed:  # `break`, or an exception in the loop
            defer_errors, exception = True, describe_exception(sys._getframe().f_back, closed, handled_before)
            raise
        except BaseException as error:
            known_to_all = planner is None or planner.error is error
            exception = "" if known_to_all else type(error).__name__
            raise
        finally:
            self._looping = False
            METER.pause()
            self._report_if_host_bound()
            if stop_recording is not None:
                stop_recording()
            atexit.unregister(close)
            close()

    def _report_if_host_bound(self) -> None:
        if self.overlap and not self._reported and (share := METER.host_bound_share()) > _HOST_BOUND:
            self._reported = True
            if dist.get_rank() == 0:
                log.info(
                    "the GPU had no work for %.0f%% of the last steps because of the host; "
                    "LookaheadLoader(overlap=False) launches half as much and may be faster for steps this short",
                    100 * share,
                )

    def _balancer(self, group: dist.ProcessGroup) -> BatchBalancer | None:
        if self._balance is None or self.cost is None:
            return None
        features = list(dict.fromkeys(f for x in self.exchanges for f in x.features))
        return BatchBalancer(self._balance, self.cost, features, group, self._balance_stats)

    def _hand_out(
        self, loop: LoopState, planned: PlannedBatch, balancer: BatchBalancer | None, finished: FinishedStep | None
    ) -> Any:
        before = loop.current if loop.current is not None and loop.current.used else None
        loop.hand_out(planned)
        lacked_state, self._loader_state = self._lacks_state, planned.loader_state
        if self._lacks_state != lacked_state:
            self._offer_state()
        if balancer is not None:
            self._moved = balancer.take(planned.number, None if before is None else finished)
        for exchange, plan in zip(self.exchanges, planned.plans, strict=True):
            pooled = self._pooled_bytes.count(exchange, plan, planned.batch)
            self._stats.append({"step": planned.number, "exchange": exchange.name, **plan.stats, **pooled})
            if self._recorder is not None:
                self._recorder.add("plan", self._stats[-1])
        return planned.batch


def _settings_of(model: torch.nn.Module) -> config.Config:
    """As the model is compiled. Options that are wrong are the backend's to refuse, so that every rank hears of it."""
    try:
        return config.load(compiled_modules.options_of(model))
    except config.ConfigError:
        return config.load()
