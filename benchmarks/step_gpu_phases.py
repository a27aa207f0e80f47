"""Where the host's time of a step goes in benchmarks/step_gpu.py, by place: clocks around some functions, of all ranks.

A profiler (`--host-profile`) sees every function and slows each of them down; here a clock costs a microsecond, so that
places of different variants, and of different ranks, can be compared. Some of the clocks must be there when a model is
compiled, and so the whole run has them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

PLANNING = "planning thread: its own Python, CPU time"


class HostPhases:
    """Of the training thread: laps, which follow one another and add up to the step, and times inside of them."""

    def __init__(self) -> None:
        self.on = False
        self._part = ""  # of the step: forward or backward
        self._last = 0.0
        self._step: Counter[str] = Counter()
        self._steps: dict[str, list[Counter[str]]] = {}
        self._places: dict[str, None] = {}  # in the order in which they were met

    # -- in the loop ---------------------------------------------------------------------------------------------

    def step_begins(self) -> None:
        if self.on:
            self._step, self._part, self._last = Counter(), "", time.perf_counter()

    def lap(self, place: str, part: str | None = None) -> None:
        """What was done since the last lap was this. What follows belongs to `part` of the step."""
        if not self.on:
            return
        now = time.perf_counter()
        self.inside(place, now - self._last, indent="")
        self._last, self._part = now, self._part if part is None else part

    def inside(self, place: str, seconds: float, indent: str = "    ") -> None:
        name = f"{indent}{self._part}{place}"
        self._places.setdefault(name)
        self._step[name] += seconds  # type: ignore[assignment]

    def step_ended(self, variant: str) -> None:
        """One that counts."""
        if self.on:
            self._steps.setdefault(variant, []).append(self._step)

    def table(self, title: str) -> str:
        """Medians over the steps, and forget them."""
        variants, steps, self._steps = list(self._steps), self._steps, {}
        lines = [f"{title}: microseconds of a step", f"{'':56}" + "".join(f"{v:>22}" for v in variants)]
        for place in self._places:
            medians = [float(np.median([step[place] for step in steps[v]])) * 1e6 for v in variants]
            lines.append(f"{place:<56}" + "".join(f"{us:>22.0f}" for us in medians))
        return "\n".join(lines)

    # -- the clocks ----------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Before anything is compiled."""
        from torch._inductor.output_code import CompiledFxGraph

        from freescale.compat.direct_calls import DirectOps
        from freescale.kernels.transports.launch_record import RecordedWork
        from freescale.runtime.lookahead.model_hooks import ModelHooks
        from freescale.runtime.lookahead.rank_status import RankSync

        self.on = True
        self._lap_around(ModelHooks, "_before_forward", "to our hook", "our hook before the graph")
        self._lap_around(CompiledFxGraph, "__call__", "to the graph", "the graph")
        self._lap_around(ModelHooks, "_after_forward", "behind the graph", "our hook behind it")
        self._time(RankSync, "_compare", lambda *_: "meeting of the ranks")
        self._time(RecordedWork, "wait", lambda work, *_: f"wait for {work.record.label}")
        function_of = DirectOps.function_of

        def timed_function_of(ops: Any, name: str) -> Any:
            function = function_of(ops, name)
            return lambda *args: self._timed(function, lambda *_: name, *args)

        DirectOps.function_of = timed_function_of  # type: ignore[method-assign]
        self._install_in_planning()

    def _lap_around(self, owner: Any, name: str, before: str, itself: str) -> None:
        function = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.lap(before)
            try:
                return function(*args, **kwargs)
            finally:
                self.lap(itself)

        setattr(owner, name, call)

    def _time(self, owner: Any, name: str, place: Callable[..., str]) -> None:
        function = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: self._timed(function, place, *args, **kwargs))

    def _timed(self, function: Any, place: Callable[..., str], *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            self.inside(place(*args), time.perf_counter() - began)

    def _install_in_planning(self) -> None:
        """What the thread does in C, without Python's lock, does not count."""
        from freescale.kernels.planning import native_plan
        from freescale.runtime.lookahead.batch_planning import BatchPlanning

        library, advance, in_c = native_plan.library(), BatchPlanning.advance, [0.0]
        plan = library.fs_request_and_plan

        def timed_plan(*args: Any) -> Any:
            began = time.thread_time()
            answer = plan(*args)
            in_c[0] += time.thread_time() - began
            return answer

        def timed_advance(planning: BatchPlanning) -> Any:
            began, in_c[0] = time.thread_time(), 0.0
            planned = advance(planning)
            self._places.setdefault(PLANNING)
            self._step[PLANNING] += time.thread_time() - began - in_c[0]  # type: ignore[assignment]
            return planned

        library.fs_request_and_plan = timed_plan
        BatchPlanning.advance = timed_advance  # type: ignore[method-assign]


CLOCKS = HostPhases()
