"""Jobs on a GPU in a process of their own, so that one which breaks its CUDA context loses nothing but itself.

After an illegal memory access every further call of the process fails. The jobs of a list run one after another in one
process; where one has broken it, the rest go on in a new one.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch


@dataclass
class Failed:
    why: str


def results(
    function: Callable[[Any], Any], jobs: Sequence[Any], seconds: float = float("inf")
) -> Iterator[tuple[Any, Any]]:
    """(job, what the function returned, or Failed) of each, until the time is over: what is left then does not come."""
    end, jobs = time.monotonic() + seconds, list(jobs)
    context = multiprocessing.get_context("spawn")
    while jobs and time.monotonic() < end:
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(function, jobs, theirs), daemon=True)
        process.start()
        theirs.close()
        try:
            while jobs and _has_answer(mine, end):
                try:
                    answer, goes_on = mine.recv()
                except EOFError:
                    process.join()
                    answer, goes_on = Failed(f"its process ended with {process.exitcode}"), False
                yield jobs.pop(0), answer
                if not goes_on:
                    break
        finally:
            process.kill()
            process.join()
            mine.close()


def _has_answer(pipe: Connection, end: float) -> bool:
    """Waits for it, or until the time is over."""
    while (left := end - time.monotonic()) > 0:
        if pipe.poll(min(left, 60.0)):
            return True
    return False


def _serve(function: Callable[[Any], Any], jobs: Sequence[Any], pipe: Connection) -> None:
    for job in jobs:
        answer: Any
        try:
            answer = function(job)
        except Exception as e:
            answer = Failed(f"{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else ''}")
        goes_on = _device_works()
        pipe.send((answer, goes_on))
        if not goes_on:
            return


def _device_works() -> bool:
    """False for ever after an illegal access, and the like."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
