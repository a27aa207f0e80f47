"""Other sizes of tiles for the kernels of examples/hstu_triton.py: hstu_attention.py --sweep."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

import graph_timing
from hstu_attention_work import Inputs, compile_only, equal_length_works, launched_by
from separate_process import Failed, results

KERNELS = ("forward", "backward_keys", "backward_queries", "backward_bias")
Job = tuple[str, dict[str, int]]
LENGTHS = {"2048": [2048] * 8, "8192": [8192] * 4}


def variants() -> Iterator[Job]:
    """Kernel and block."""

    def block(queries: int, keys: int, warps: int, stages: int, near: int, registers: int = 0) -> dict[str, int]:
        sides = {"QUERIES": queries, "KEYS": keys, "NEAR_STAGES": near, "num_warps": warps, "num_stages": stages}
        return sides | ({"maxnreg": registers} if registers else {})

    for queries, keys, warps in ((128, 64, 4), (128, 64, 8), (128, 128, 8), (64, 64, 4), (128, 32, 4)):
        for stages, near in ((2, 2), (3, 2), (3, 1), (4, 3)):
            yield "forward", block(queries, keys, warps, stages, near)
    for registers in (0, 128, 168):
        for queries, keys, warps in ((32, 64, 4), (64, 64, 4), (32, 128, 8), (64, 128, 8)):
            for stages, near in ((2, 2), (3, 2), (3, 3)):
                yield "backward_keys", block(queries, keys, warps, stages, near, registers)
        for queries, keys, warps in ((64, 64, 4), (64, 32, 4), (128, 64, 8), (128, 32, 8)):
            for stages, near in ((2, 2), (3, 2), (3, 3)):
                yield "backward_queries", block(queries, keys, warps, stages, near, registers)
    for grain, warps in ((64, 4), (64, 8), (128, 8)):
        for stages in (1, 2, 3):
            for registers in (0, 168, 128):
                sides = {"GRAIN": grain, "num_warps": warps, "num_stages": stages}
                yield "backward_bias", sides | ({"maxnreg": registers} if registers else {})


def defaults() -> dict[str, dict[str, int]]:
    import hstu_triton

    return dict(zip(KERNELS, hstu_triton.HALF, strict=True))


class OneKernel:
    """Runs one kernel alone and returns what it made, less the last bias: that has parts from two kernels."""

    def __init__(self, inputs: Any, tiles: torch.Tensor, kernel: str, block: dict[str, int]) -> None:
        import hstu_triton

        self.kernel, self.block = kernel, block
        rows = inputs.qkv if kernel == "forward" else (*inputs.qkv, inputs.grad)
        self.call = hstu_triton._Call(tuple(rows), tiles, inputs.bias, inputs.alpha)
        self.outs = [inputs.grad.new_empty(inputs.grad.shape) for _ in range(2)]
        self.bias = torch.empty_like(inputs.bias)
        self.no_far = torch.zeros(inputs.bias.shape[0], device=inputs.bias.device)

    def __call__(self) -> list[torch.Tensor]:
        if self.kernel == "forward":
            self.call.forward(self.outs[0], self.block)
            return self.outs[:1]
        if self.kernel == "backward_keys":
            self.call.backward_keys(self.outs[0], self.outs[1], self.block)
            return self.outs
        if self.kernel == "backward_queries":
            self.call.backward_queries(self.outs[0], self.block, max(self.block["QUERIES"], 64))
            return self.outs[:1]
        self.call.backward_bias(self.no_far, self.bias, self.block)
        return [self.bias[:, :-1]]


# ---- compiling, in many processes ----------------------------------------------------------------------------------


EQUAL_LENGTH: list[Job] = [("equal forward", {}), ("equal backward", {})]


def _compile(job: Job) -> tuple[Job, str]:
    """The job, and why not."""
    try:
        with launched_by(compile_only):
            if job in EQUAL_LENGTH:
                equal_length_works(1, 2048)[job[0].removeprefix("equal ")]()
            else:
                inputs = Inputs([200])
                OneKernel(inputs, inputs.tiles, *job)()
    except Exception as e:
        return job, f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
    return job, ""


def compile_all(jobs: list[Job], seconds: float) -> list[Job]:
    """Those that were compiled in time, in this order; the others are named."""
    end, done = time.monotonic() + seconds, list[Job]()
    processes = max(min((os.cpu_count() or 2) - 2, len(jobs)), 1)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:  # which ends its processes
        coming = pool.imap_unordered(_compile, jobs, chunksize=1)
        for _ in jobs:
            try:
                job, why = coming.next(timeout=max(end - time.monotonic(), 0.01))
            except multiprocessing.TimeoutError:
                break
            if why:
                print(f"does not compile: {job}: {why}")
            else:
                done.append(job)
    return [job for job in jobs if job in done]


# ---- measuring, in one ---------------------------------------------------------------------------------------------


@cache
def _inputs(name: str) -> Inputs:
    torch.manual_seed(0)
    return Inputs(LENGTHS[name])


@cache
def _right(kernel: str) -> list[torch.Tensor]:
    inputs = _inputs("2048")
    return [x.float() for x in OneKernel(inputs, inputs.tiles, kernel, defaults()[kernel])()]


def _measure(job: Job) -> dict[str, Any]:
    kernel, block = job
    made = {name: OneKernel(_inputs(name), _inputs(name).tiles, kernel, block) for name in LENGTHS}
    off = max(float((a.float() - b).norm() / b.norm()) for a, b in zip(made["2048"](), _right(kernel), strict=True))
    # Launched: to capture a graph takes longer than to measure it.
    ms = graph_timing.medians({name: graph_timing.Launched(work, 4) for name, work in made.items()}, 3)
    return {"kernel": kernel, **ms, "off": off, "default": block == defaults()[kernel], "block": block}


def sweep(seconds: float) -> dict[str, list[dict[str, Any]]]:
    """The times of all that could be compiled and measured in that time, by kernel, the fastest first."""
    end = time.monotonic() + seconds
    first: list[Job] = list(defaults().items())
    rest = [job for job in variants() if job not in first]
    random.Random(0).shuffle(rest)  # so that those which are left out are of every kind
    compiled = compile_all([*first, *rest], 0.6 * seconds)
    found: dict[str, list[dict[str, Any]]] = {kernel: [] for kernel in KERNELS}
    failed, measured = [], 0
    for job, got in results(_measure, compiled, end - time.monotonic()):
        measured += 1
        if isinstance(got, Failed):
            failed.append(f"{job[0]} {job[1]}: {got.why}")
        else:
            found[job[0]].append(got)
    tried = f"{len(compiled)} compiled and {measured} measured in {seconds:.0f} s"
    print(f"\n{len(first) + len(rest)} sizes of tiles, {tried}")
    for line in failed:
        print(f"failed: {line}")
    for kernel, rows in found.items():
        best = {name: min((r[name] for r in rows), default=1.0) for name in LENGTHS}
        rows.sort(key=lambda r: sum(r[name] / best[name] for name in LENGTHS))
        _show(kernel, rows)
    return found


def _show(kernel: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{kernel:18} {'2048':>8} {'8192':>8} {'off':>8}")
    for r in [*rows[:8], *(r for r in rows[8:] if r["default"])]:
        words = " ".join(f"{k}={v}" for k, v in r["block"].items()) + (" (default)" if r["default"] else "")
        print(f"{'':18} {r['2048']:>8.4f} {r['8192']:>8.4f} {r['off']:>8.1e} {words}")
