"""A discrete-event simulation of ranks that run the same program: compute, launches and waits.

Within a process group, transfers on a full-duplex link are FIFO; groups with pending transfers share it equally. A
transfer arrives `latency` after every rank has sent its part and the rank's own link has received its data. A waiting
rank counts as straggler time until the last rank has launched the transfer, and as exposed time after that. So compute
+ exposed + straggler is the step time on every rank.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


class Compute(NamedTuple):
    """Shares of a rank's compute in a step: of the part proportional to tokens, and to squared tokens."""

    per_token: float
    per_square: float


@dataclass(frozen=True)
class Launch:
    what: str
    of: int = 0  # batch: 0 this step's, 1 the next, -1 the previous


@dataclass(frozen=True)
class Wait:
    what: str
    of: int = 0


Program = Sequence[Compute | Launch | Wait]


@dataclass(frozen=True)
class Transfer:
    """One kind of transfer: seconds that it occupies each link, [batches, ranks]."""

    group: str
    out: np.ndarray
    into: np.ndarray
    latency: float = 0.0
    tax: float = 0.0  # slowdown of compute while one is in flight


@dataclass
class Times:
    compute: np.ndarray
    exposed: np.ndarray
    straggler: np.ndarray
    end: np.ndarray  # of each step

    def step(self) -> np.ndarray:
        return np.diff(self.end, axis=0, prepend=0.0)


class _Port:
    """One direction of a rank's link: a queue per group."""

    __slots__ = ("queues", "since", "version")

    def __init__(self) -> None:
        self.queues: dict[str, deque[list]] = {}  # only nonempty ones; entries: [seconds left, flight]
        self.since, self.version = 0.0, 0

    def advance(self, now: float) -> None:
        if self.queues:
            served = (now - self.since) / len(self.queues)
            for queue in self.queues.values():
                queue[0][0] -= served
        self.since = now

    def next_group(self) -> tuple[str, float]:
        """The group whose first entry finishes first, and in how many seconds."""
        if len(self.queues) == 1:
            ((group, queue),) = self.queues.items()
            return group, max(queue[0][0], 0.0)
        group = min(self.queues, key=lambda g: self.queues[g][0][0])
        return group, max(self.queues[group][0][0], 0.0) * len(self.queues)


class _Flight:
    __slots__ = ("kind", "unsent", "last", "taken_in", "ready", "waiting")

    def __init__(self, kind: Transfer, ranks: int) -> None:
        self.kind = kind
        self.unsent, self.last = ranks, -1.0  # ranks that have not sent; launch time of the last one
        self.taken_in, self.ready = [False] * ranks, [False] * ranks
        self.waiting: dict[int, float] = {}  # rank: start of its wait


_COMPUTED, _PORT, _READY = range(3)


class Simulation:
    """`work`: seconds of compute, [steps, ranks, 2]: proportional to tokens and to squared tokens."""

    def __init__(self, program: Program, transfers: dict[str, Transfer], work: np.ndarray) -> None:
        self.program, self.transfers, self.work = list(program), transfers, work.tolist()
        self.steps, self.ranks = work.shape[:2]
        # Lists: scalar arithmetic in NumPy is several times slower.
        self._compute, self._exposed, self._straggler, self._end = (
            [[0.0] * self.ranks for _ in range(self.steps)] for _ in range(4)
        )
        self._heap: list[tuple[float, int, int, int, Any]] = []
        self._number = 0
        self._place = [(0, 0)] * self.ranks  # step, and index into the program
        self._left, self._since, self._began = ([0.0] * self.ranks for _ in range(3))  # of the running compute
        self._computing, self._version = [False] * self.ranks, [0] * self.ranks
        self._taxes: list[list[float]] = [[] for _ in range(self.ranks)]
        self._ports = [[_Port() for _ in range(self.ranks)] for _ in range(2)]
        self._flights: dict[tuple[str, int], _Flight] = {}
        self._traffic = {name: (t.out.tolist(), t.into.tolist()) for name, t in transfers.items()}

    def run(self) -> Times:
        for rank in range(self.ranks):
            self._go_on(rank, 0.0)
        while self._heap:
            now, _, kind, who, what = heapq.heappop(self._heap)
            if kind == _COMPUTED:
                if what == self._version[who]:
                    self._computed(who, now)
            elif kind == _PORT:
                direction, version = what
                if version == self._ports[direction][who].version:
                    self._port_done(direction, who, now)
            else:
                self._arrived(what, who, now)
        stuck = [r for r in range(self.ranks) if self._place[r][0] < self.steps]
        if stuck:
            step, at = self._place[stuck[0]]
            raise RuntimeError(f"rank {stuck[0]} waits forever in step {step}: {self.program[at - 1]}")
        compute, exposed, straggler = (np.array(x) for x in (self._compute, self._exposed, self._straggler))
        return Times(compute, exposed, straggler, np.array(self._end))

    def _push(self, when: float, kind: int, who: int, what: Any) -> None:
        self._number += 1
        heapq.heappush(self._heap, (when, self._number, kind, who, what))

    # -- ranks -----------------------------------------------------------------------------------------------------

    def _go_on(self, rank: int, now: float) -> None:
        """Run instructions until one takes time."""
        step, at = self._place[rank]
        while step < self.steps:
            if at == len(self.program):
                self._end[step][rank] = now
                step, at = step + 1, 0
                self._place[rank] = (step, at)
                continue
            instruction = self.program[at]
            at += 1
            self._place[rank] = (step, at)
            if isinstance(instruction, Compute):
                per_token, per_square = self.work[step][rank]
                seconds = instruction.per_token * per_token + instruction.per_square * per_square
                if seconds > 0:
                    self._left[rank], self._since[rank], self._began[rank] = seconds, now, now
                    self._computing[rank] = True
                    self._plan_end_of_compute(rank, now)
                    return
            elif isinstance(instruction, Launch):
                self._launch(rank, instruction.what, step + instruction.of, now)
            elif not self._is_ready(rank, instruction.what, step + instruction.of, now):
                return

    def _is_ready(self, rank: int, what: str, batch: int, now: float) -> bool:
        """Whether the rank can continue; if not, registers its wait."""
        flight = self._flights.get((what, batch))
        if flight is None or flight.ready[rank]:  # not launched: the first batch has no early rows
            return True
        flight.waiting[rank] = now
        return False

    def _speed(self, rank: int) -> float:
        taxes = self._taxes[rank]
        return 1.0 - max(taxes) if taxes else 1.0

    def _plan_end_of_compute(self, rank: int, now: float) -> None:
        self._version[rank] += 1
        self._push(now + self._left[rank] / self._speed(rank), _COMPUTED, rank, self._version[rank])

    def _set_taxes(self, rank: int, now: float, *, add: float = 0.0, remove: float = 0.0) -> None:
        before = self._speed(rank)
        if self._computing[rank]:
            self._left[rank] -= (now - self._since[rank]) * before
            self._since[rank] = now
        if add:
            self._taxes[rank].append(add)
        if remove:
            self._taxes[rank].remove(remove)
        if self._computing[rank] and self._speed(rank) != before:
            self._plan_end_of_compute(rank, now)

    def _computed(self, rank: int, now: float) -> None:
        self._computing[rank] = False
        self._compute[self._place[rank][0]][rank] += now - self._began[rank]
        self._go_on(rank, now)

    # -- transfers -------------------------------------------------------------------------------------------------

    def _launch(self, rank: int, what: str, batch: int, now: float) -> None:
        out, into = self._traffic[what]
        if not 0 <= batch < len(out):
            return
        flight = self._flights.get((what, batch))
        if flight is None:
            flight = self._flights[what, batch] = _Flight(self.transfers[what], self.ranks)
            for receiver in range(self.ranks):
                self._carry(1, receiver, into[batch][receiver], flight, now)
        flight.last = now
        if flight.kind.tax:
            self._set_taxes(rank, now, add=flight.kind.tax)
        self._carry(0, rank, out[batch][rank], flight, now)

    def _carry(self, direction: int, rank: int, seconds: float, flight: _Flight, now: float) -> None:
        if seconds <= 0:
            self._carried(direction, rank, flight, now)
            return
        port = self._ports[direction][rank]
        port.advance(now)
        port.queues.setdefault(flight.kind.group, deque()).append([seconds, flight])
        self._plan_port(port, direction, rank, now)

    def _plan_port(self, port: _Port, direction: int, rank: int, now: float) -> None:
        port.version += 1
        if port.queues:
            self._push(now + port.next_group()[1], _PORT, rank, (direction, port.version))

    def _port_done(self, direction: int, rank: int, now: float) -> None:
        port = self._ports[direction][rank]
        group, _ = port.next_group()
        port.advance(now)
        _, flight = port.queues[group].popleft()
        if not port.queues[group]:
            del port.queues[group]
        self._plan_port(port, direction, rank, now)
        self._carried(direction, rank, flight, now)

    def _carried(self, direction: int, rank: int, flight: _Flight, now: float) -> None:
        """A link has finished its part of a transfer."""
        if direction:
            flight.taken_in[rank] = True
            there = [rank] if not flight.unsent else []
        else:
            flight.unsent -= 1
            there = [] if flight.unsent else [r for r in range(self.ranks) if flight.taken_in[r]]
        for receiver in there:
            self._push(now + flight.kind.latency, _READY, receiver, flight)

    def _arrived(self, flight: _Flight, rank: int, now: float) -> None:
        flight.ready[rank] = True
        if flight.kind.tax:
            self._set_taxes(rank, now, remove=flight.kind.tax)
        since = flight.waiting.pop(rank, None)
        if since is None:
            return
        step = self._place[rank][0]
        all_launched = min(max(flight.last, since), now)
        self._straggler[step][rank] += all_launched - since
        self._exposed[step][rank] += now - all_launched
        self._go_on(rank, now)
