"""Milliseconds of work on a GPU without its launches: from CUDA graphs, or from a queue that is filled before."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from gpu_machine import quartiles

Name = TypeVar("Name", bound=Hashable)


class Replayed:
    """`work`, `times` in a row, from a CUDA graph.

    A graph has addresses only. So the work is kept here, and with it every tensor that it reads or writes; what it
    allocates itself lies in the graph's own memory.
    """

    def __init__(self, work: Callable[[], Any], times: int) -> None:
        self.work, self.times = work, times
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())  # which may not have finished the inputs yet
        with torch.cuda.stream(aside):
            for _ in range(3):
                work()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=aside):
            for _ in range(times):
                self.last = work()  # keeps its memory, so that what a replay wrote can be read

    def milliseconds(self) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.graph.replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / self.times


class Launched:
    """`work`, `times` in a row, launched while the GPU is kept waiting."""

    WAIT_CYCLES = 1_000_000  # for each time; about half a millisecond, longer than its launches take

    def __init__(self, work: Callable[[], Any], times: int) -> None:
        self.work, self.times = work, times
        for _ in range(3):
            work()
        torch.cuda.synchronize()

    def milliseconds(self) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(self.WAIT_CYCLES * self.times)
        start.record()
        for _ in range(self.times):
            self.work()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / self.times


def prepare(work: Callable[[], Any], times: int = 10, graphs: bool = True) -> Replayed | Launched:
    """From a graph, unless that is not wanted or the work cannot be captured."""
    if graphs:
        try:
            return Replayed(work, times)
        except RuntimeError as e:
            torch.cuda.synchronize()  # raises if it is not the capture that failed
            print(f"not from a graph: {str(e).splitlines()[0]}")
    return Launched(work, times)


def medians(works: dict[Name, Replayed | Launched], turns: int) -> dict[Name, float]:
    """Milliseconds of each, all measured in turns; the first turn does not count."""
    found: dict[Name, list[float]] = {name: [] for name in works}
    for _ in range(turns + 1):
        for name, work in works.items():
            found[name].append(work.milliseconds())
    return {name: quartiles(values[1:])[0] for name, values in found.items()}
