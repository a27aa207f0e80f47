"""`FREESCALE_RECORD=DIR`: one file per rank, with one JSON line per event, for `python -m freescale report DIR`.

    start     run, rank, world, versions, device; the first line
    graph     what was found and what each pass did, or why not; also for graphs loaded from torch's caches;
              `compilation`: which forward and backward graph belong together
    step      an entry of freescale.meter.steps() without what follows from its launches, its start time, and launches:
              [label, launched, wait began, wait ended, bytes, exposed, flight], times as integers in units of 0.1
              microseconds from the step's start (floats take several times longer to serialize)
    plan      an entry of LookaheadLoader.stats()
    balance   an entry of LookaheadLoader.balance_stats()
    end       the process exited normally; the last line

A separate thread writes once a second. If the file cannot be written, the recording stops with a warning.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import platform
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from freescale.compat import distributed
from freescale.runtime import meter
from freescale.views.records import BETWEEN_STEPS

log = logging.getLogger(__name__)

_WRITE_EVERY = 1.0  # seconds
_PAUSE = 2e-4  # seconds after each line, so that the training thread can take the GIL
_TICKS = 1e7  # per second
_UNMEASURED = 64  # max balance entries that wait for measured times
_recorders: dict[str, Recorder] = {}


def recorder(folder: str) -> Recorder | None:
    """This process's recorder for the folder; None if recording is off."""
    if not folder:
        return None
    if folder not in _recorders:
        _recorders[folder] = Recorder(folder)
    return _recorders[folder]


class Recorder:
    """Appends to one file. Its methods only queue, and are thread-safe."""

    def __init__(self, folder: str) -> None:
        in_world = dist.is_initialized()
        self.rank, world = (dist.get_rank(), dist.get_world_size()) if in_world else (0, 1)
        self.run = _run_name(in_world)
        self.path = Path(folder) / f"{self.run}-rank{self.rank:05d}.jsonl"
        self._queue: deque[tuple[str, Any]] = deque()
        self._steps: deque[meter.FinishedStep] = deque()  # the device may not have their times yet
        self._balance: deque[dict[str, Any]] = deque()
        self._zero = time.time() - time.perf_counter()  # offset from perf_counter to time
        self._writing, self._failed = threading.Lock(), False
        self.add("start", _about(self.run, self.rank, world))
        meter.METER.listen(self._add_step)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.flush(last=False)
        except OSError as error:
            self._give_up(error)
        threading.Thread(target=self._write_regularly, name="freescale-record", daemon=True).start()
        atexit.register(self._end)

    def add(self, kind: str, entry: dict[str, Any]) -> None:
        self._queue.append((kind, entry))

    def add_balance(self, entry: dict[str, Any]) -> None:
        """Queue an entry until its step is measured, which the balancer fills in later."""
        self._balance.append(entry)

    def _add_step(self, step: meter.FinishedStep) -> None:
        self._steps.append(step)

    def flush(self, last: bool = True) -> None:
        """Write what is known. `last`: also entries whose times are incomplete."""
        with self._writing:
            if self._failed:
                return
            while self._steps and (last or meter.is_known(self._steps[0])):
                self._queue.append(("step", self._step_entry(self._steps.popleft())))
            known = len(self._balance) if last else max(len(self._balance) - _UNMEASURED, 0)
            while self._balance and (known > 0 or self._balance[0]["measured"] is not None):
                known -= 1
                self._queue.append(("balance", self._balance.popleft()))
            lines = []
            while self._queue:
                kind, entry = self._queue.popleft()
                lines.append(json.dumps({"kind": kind, **entry}, default=str) + "\n")
                if not last:
                    time.sleep(_PAUSE)
            if lines:
                with self.path.open("a") as file:
                    file.write("".join(lines))

    def _end(self) -> None:
        self.flush()
        self.add("end", {"at": time.time()})
        self.flush()

    def _write_regularly(self) -> None:
        while not self._failed:
            time.sleep(_WRITE_EVERY)
            try:
                self.flush(last=False)
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._failed = True
        self._queue, self._steps, self._balance = deque(maxlen=0), deque(maxlen=0), deque(maxlen=0)  # keep nothing
        words = "FREESCALE_RECORD: rank %d cannot write %s (%s); it continues without recording"
        log.warning(words, self.rank, self.path, error)

    def _step_entry(self, step: meter.FinishedStep) -> dict[str, Any]:
        began = step.began
        launches = [
            [
                r.label, round((r.launched - began) * _TICKS), round((r.wait_began - began) * _TICKS),
                round((r.wait_ended - began) * _TICKS), r.bytes, round(r.exposed_seconds() * _TICKS),
                round(r.flight_seconds() * _TICKS),
            ]
            for r in step.records
        ]  # fmt: skip
        entry = meter.summary(step)
        waits, _, _ = (entry.pop(name) for name in ("waits", "bytes", "flight"))
        if step.on_device is not None:  # host waits count in part
            entry["waits"] = {label: waits[label] for label in BETWEEN_STEPS if label in waits}
        return {**entry, "at": began + self._zero, "launches": launches}


class RecordedStats(deque[dict[str, Any]]):
    """The statistics of a balancer, also sent to the recorder."""

    to: Recorder | None = None

    def append(self, entry: dict[str, Any]) -> None:
        super().append(entry)
        if self.to is not None:
            self.to.add_balance(entry)


def _run_name(in_world: bool) -> str:
    """The same on every rank: the first rank to reach the store names the run."""
    mine = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    if in_world:
        with contextlib.suppress(Exception):  # without a store, each rank is its own run
            return str(distributed.default_store().compare_set("freescale/run", "", mine).decode())
    return mine


def _about(run: str, rank: int, world: int) -> dict[str, Any]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu"
    return {
        "run": run, "rank": rank, "world": world, "at": time.time(), "host": platform.node(), "device": device,
        "freescale": getattr(sys.modules["freescale"], "__version__", ""), "torch": torch.__version__,
    }  # fmt: skip
