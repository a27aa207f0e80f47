"""What one rank of benchmarks/step_torchrec.py does: build each variant, train them in turns, measure."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from step_torchrec_loops import GROUP_SECONDS, TAIL, VARIANTS, WARM_UP, DenseAlone, Loop, Rank, Task, Trained, Variant
from step_torchrec_model import Batch, Size, batches, dense_parameters, local_shards, turn_of

FITTED_AFTER = 80  # with balance: by then it knows what a sample costs
CHECKED = 8  # steps after which variants are compared with eager TorchRec


@dataclass
class Turn:
    """One loop over the batches; milliseconds per step."""

    ms: float
    transient_bytes: int = 0  # the most that was allocated, beyond what was when the turn began
    meter: dict[str, float] = field(default_factory=dict)
    straggling: dict[str, float] = field(default_factory=dict)


# ---- turns -----------------------------------------------------------------------------------------------------------


def take_turn(loop: Loop, distinct: list[Batch], steps: int) -> Turn:
    rank, ours = loop.rank, loop.variant.is_freescale
    if ours:
        import freescale

        freescale.meter.clear()
    rank.synchronize()
    before = rank.allocated()
    if rank.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    moments = []
    for number, _ in enumerate(loop.steps(turn_of(distinct, WARM_UP, steps, TAIL))):
        if number in (WARM_UP - 1, WARM_UP + steps - 1):
            moments.append(rank.moment())
    rank.synchronize()
    turn = Turn(rank.milliseconds(*moments) / steps)
    if rank.on_gpu:
        turn.transient_bytes = torch.cuda.max_memory_allocated() - before
    if loop.trained is not None:
        loop.trained.optimizer.zero_grad(set_to_none=True)
    if ours and (metered := freescale.meter.steps()[WARM_UP : WARM_UP + steps]):
        parts = [k for k, v in metered[0].items() if isinstance(v, float)]
        turn.meter = {k: float(np.mean([s[k] for s in metered])) * 1e3 for k in parts}
    if ours and loop.variant.balance:
        known = [s for s in loop.loader.balance_stats()[-steps:] if s["measured"] is not None]
        names = ("predicted_before", "predicted_after", "measured")
        turn.straggling = {n: float(np.mean([s[n] for s in known])) for n in names} if known else {}
    return turn


def measure_size(size: Size, rank: Rank, say: Callable[..., None]) -> dict[str, Any]:
    """Every variant, in turns."""
    steps, turns = rank.task.turns[size.name]
    distinct = batches(size, steps, rank.on_gpu)
    variants = [VARIANTS[name] for name in rank.task.variants if size.jagged or not VARIANTS[name].balance]
    say("at", "dense", size.name)
    dense = DenseAlone(size, rank, distinct)
    straggling = dense.straggling(steps)
    kinds: dict[tuple[Any, ...], Trained] = {}
    loops: dict[str, Loop] = {}
    seconds = {}
    for v in variants:
        say("at", v.name, size.name)
        began, before = time.perf_counter(), rank.allocated()
        trained = None
        if v.loop != "dense":
            trained = kinds.get(v.kind) or kinds.setdefault(v.kind, Trained(v.kind, size, rank))
        loops[v.name] = Loop(v, trained, dense, rank)
        take_turn(loops[v.name], distinct[: WARM_UP + 1], 1)  # compiles
        gc.collect()
        if trained is not None:
            trained.own_bytes = trained.own_bytes or rank.allocated() - before
        for _ in range(-(-FITTED_AFTER // (steps + WARM_UP)) if v.balance else 1):
            take_turn(loops[v.name], distinct, steps)
        seconds[v.name] = time.perf_counter() - began
    taken: dict[str, list[Turn]] = {v.name: [] for v in variants}
    for number in range(turns):
        for v in variants[number % len(variants) :] + variants[: number % len(variants)]:
            say("at", v.name, size.name)
            taken[v.name].append(take_turn(loops[v.name], distinct, steps))
    rows = []
    for v in variants:
        own = 0 if (trained := loops[v.name].trained) is None else trained.own_bytes
        rows.append(row(v, rank.gather((taken[v.name], own)), seconds[v.name]))
    found = {"size": size.name, "link": rank.task.link, "ranks": dist.get_world_size(), **straggling, "rows": rows}
    return found | {name: getattr(size, name) for name in ("samples", "length", "cap", "dim", "layers")}


def row(variant: Variant, ranks: list[tuple[list[Turn], int]], seconds: float) -> dict[str, Any]:
    """Of all ranks' turns. Memory: of the rank that needs the most."""
    slowest = [max(turns) for turns in zip(*([t.ms for t in turns] for turns, _ in ranks), strict=True)]
    low, middle, high = np.percentile(slowest, [25, 50, 75])
    found: dict[str, Any] = {"variant": variant.name, "ms": float(middle), "quartiles": [float(low), float(high)]}
    peaks = [own + max(t.transient_bytes for t in turns) for turns, own in ranks]
    found |= {"peak_bytes": max(peaks) or None, "start_seconds": seconds}
    everyone = [t for turns, _ in ranks for t in turns]
    if metered := [t.meter for t in everyone if t.meter]:
        found["meter_ms"] = {k: float(np.mean([m[k] for m in metered])) for k in metered[0]}
        if len(ranks) > 1:  # ranks straggle, or wait for others that do, by turns
            found["meter_ms_of_ranks"] = [
                {k: float(np.mean([t.meter[k] for t in turns])) for k in metered[0]} for turns, _ in ranks
            ]
    if straggling := [t.straggling for t in everyone if t.straggling]:
        found["straggling"] = {k: float(np.mean([s[k] for s in straggling])) for k in straggling[0]}
    return found


# ---- the same numbers ------------------------------------------------------------------------------------------------


def check_size(size: Size, rank: Rank, say: Callable[..., None]) -> dict[str, float]:
    """By variant, the largest difference from eager TorchRec after some steps in float32: of a loss, as the mean of the
    ranks, since balance moves samples between them; of a table row; of a dense parameter."""
    distinct = batches(size, CHECKED, rank.on_gpu)

    def train(variant: Variant, kind: tuple[Any, ...]) -> list[torch.Tensor]:
        trained = Trained(kind, size, rank)
        loop = Loop(variant, trained, None, rank)  # type: ignore[arg-type]
        losses = torch.stack(list(loop.steps(b.fresh() for b in distinct)))
        dist.all_reduce(losses)
        return [losses / dist.get_world_size(), *local_shards(trained.model), *dense_parameters(trained.model)]

    say("at", "eager", "check")
    expected = [t.detach().clone() for t in train(VARIANTS["eager"], ("uncompiled", "", "off", False, ""))]
    found = {}
    for name in rank.task.variants:
        v = VARIANTS[name]
        if v.loop == "dense":
            continue
        say("at", name, "check")
        pairs = zip(train(v, v.kind), expected, strict=True)
        worst = max(float((a.detach() - b).abs().max()) for a, b in pairs if a.numel())
        found[name] = max(rank.gather(worst))
    return found


# ---- the process -----------------------------------------------------------------------------------------------------


def end_with(program: int) -> None:
    """A rank does not outlive the program, however that ended."""
    while os.getppid() == program:
        time.sleep(1)
    os._exit(1)


def rank_main(number: int, world: int, store: str, task: Task, pipe: Any) -> None:
    warnings.filterwarnings("ignore")
    for name in ("torchrec", "torch._dynamo", "torch.fx", "torch._inductor"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # the sizes share code
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    faulthandler.register(signal.SIGUSR1)  # the program asks where a rank is that is not done in time

    def say(*words: Any) -> None:
        pipe.send(words)

    try:
        if task.device == "cuda":
            torch.cuda.set_device(0)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if task.device == "cuda" else "gloo", init_method=f"file://{store}",
            rank=number, world_size=world, timeout=timedelta(seconds=GROUP_SECONDS),
        )  # fmt: skip
        rank = Rank(task)
        if task.check is not None:
            say("checked", check_size(task.check, rank, say))
        for size in task.sizes:
            say("size", measure_size(size, rank, say))
            torch._dynamo.reset()
            gc.collect()
        dist.barrier(rank.books)
        say("done")
    except BaseException as error:  # noqa: BLE001
        print(f"--- rank {number} of {world}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        say("failed", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    finally:
        pipe.close()
        os._exit(0)  # a rank whose peers are gone must not wait for them
