"""What one rank of benchmarks/step_gpu.py does: build every variant, train them in turns, say where the time went."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import step_gpu_profile
from step_gpu_model import batches
from step_gpu_variants import DENSE, GROUP_SECONDS, SAME_BITS, VARIANTS, Task, Trainee, Variant, World

WARM_UP, TAIL = 3, 1  # steps at the start and the end of a block that do not count: there, look-ahead has no neighbour
# Balance: by then it knows what a sample costs, and cuBLAS has met the sizes of the batches, which change with that. In
# the first call with a new size it may wait until the device has done all that it was given.
FITTED_AFTER = 80
AHEAD = 2  # steps that the host may be ahead of the device: then no launch waits for a full queue
PHASES = ("next", "forward", "backward", "optimizer")
STRAGGLING = ("predicted_before", "predicted_after", "measured")  # shares of a step


@dataclass
class Block:
    """One loop over the batches. Everything in milliseconds, of the steps that count."""

    step: list[float] = field(default_factory=list)
    host: dict[str, list[float]] = field(default_factory=dict)
    exposed: list[float] = field(default_factory=list)
    waits: dict[str, list[float]] = field(default_factory=dict)
    meeting: list[float] = field(default_factory=list)  # of the training thread, whether the device waited or not
    bits: Any = None  # losses of all steps, digest of the table
    colliding: float | None = None
    balance: list[tuple[float, float, float]] = field(default_factory=list)  # of a step, in STRAGGLING


class Clock:
    """Moments on the compute stream; on the CPU, moments."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.moments: list[Any] = []

    def mark(self) -> None:
        if self.on_gpu:
            self.moments.append(torch.cuda.Event(enable_timing=True))
            self.moments[-1].record()
        else:
            self.moments.append(time.perf_counter())

    def wait_for(self, number: int) -> None:
        if self.on_gpu and number >= 0:
            self.moments[number].synchronize()

    def milliseconds(self) -> list[float]:
        pairs = zip(self.moments[:-1], self.moments[1:], strict=True)
        return [a.elapsed_time(b) if self.on_gpu else (b - a) * 1e3 for a, b in pairs]


# ---- blocks ----------------------------------------------------------------------------------------------------------


def train(trainee: Trainee, data: Any, watch: step_gpu_profile.DeviceProfile | None = None) -> Block:
    """One loop over the batches, from the same start every time."""
    import freescale

    world = trainee.world
    world.reset()
    fused = {"fused": True} if world.device.type == "cuda" else {}
    optimizer = torch.optim.Adam(world.dense.parameters(), lr=1e-3, **fused)
    freescale.meter.clear()
    clock, host, losses, meetings = Clock(world.device), [], [], []
    stop_listening = freescale.meter.listen(lambda step: meetings.append(meeting_ms_of(step)))
    world.synchronize()
    dist.barrier(world.books)
    clock.mark()
    loop, number = trainee.loop(data), 0
    while True:
        begin = time.perf_counter()
        batch = next(loop, None)
        if batch is None:
            break
        taken = time.perf_counter()
        if watch is not None and number >= WARM_UP:
            watch.step_begins(number - WARM_UP)
        optimizer.zero_grad()
        loss = trainee.loss(batch)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        optimizer.step()
        clock.mark()
        host.append(np.diff([begin, taken, forward, backward, time.perf_counter()]) * 1e3)
        losses.append(loss.detach())
        clock.wait_for(number + 1 - AHEAD)
        number += 1
    world.synchronize()
    stop_listening()
    block = as_block(trainee, clock, np.array(host), losses)
    block.meeting = meetings[WARM_UP : len(losses) - TAIL]
    return block


def meeting_ms_of(step: Any) -> float:
    from freescale.views.records import RENDEZVOUS

    return sum(r.wait_ended - r.wait_began for r in step.records if r.label == RENDEZVOUS) * 1e3


def as_block(trainee: Trainee, clock: Clock, host: np.ndarray, losses: list[torch.Tensor]) -> Block:
    import freescale

    counted = slice(WARM_UP, len(losses) - TAIL)
    block = Block(step=clock.milliseconds()[counted])
    block.host = {name: host[counted, i].tolist() for i, name in enumerate(PHASES)}
    if trainee.variant is not DENSE:
        block.bits = torch.stack(losses).tolist(), trainee.world.storage.digest()
    if trainee.variant.transport:
        steps = freescale.meter.steps()[counted]
        block.exposed = [s["exposed"] * 1e3 for s in steps]
        for name in dict.fromkeys(name for s in steps for name in s["waits"]):
            block.waits[name] = [s["waits"].get(name, 0.0) * 1e3 for s in steps]
    if trainee.variant.balance:
        stats = trainee.loader.balance_stats()[WARM_UP:]
        block.balance = [tuple(s[name] for name in STRAGGLING) for s in stats if s["measured"] is not None]
    if trainee.variant.look_ahead and trainee.variant.overlap:
        last = len(losses) - TAIL
        stats = [s for s in trainee.loader.stats() if WARM_UP <= s["step"] < last and s["exchange"].startswith("item")]
        block.colliding = sum(s["colliding_rows"] for s in stats) / max(sum(s["unique_rows"] for s in stats), 1)
    return block


def profile_device(trainee: Trainee, data: list[Any]) -> dict[str, Any]:
    if trainee.world.device.type != "cuda":
        return step_gpu_profile.busy_shares([[]])
    watch = step_gpu_profile.DeviceProfile()
    train(trainee, data[: WARM_UP + step_gpu_profile.STEPS], watch)
    ranks = trainee.world.gather(watch.figures())
    shares = step_gpu_profile.busy_shares([r["busy_steps"] for r in ranks])
    return {**shares, "packing_ms": ranks[0]["packing_ms"], "idle_ms": [r["idle_ms"] for r in ranks]}


def profile_host(trainee: Trainee, data: list[Any], title: str) -> str:
    """Of rank 0. The backward pass runs in the training thread meanwhile, so that it is seen."""
    profiles = {name: step_gpu_profile.HostProfile() for name in ("training thread", "planning thread")}
    if dist.get_rank() != 0:
        train(trainee, data)
        return ""
    reader = profiles["planning thread"]
    with torch.autograd.set_multithreading_enabled(False):
        profiles["training thread"].start()
        try:
            train(trainee, step_gpu_profile.Watched(data, reader) if trainee.variant.look_ahead else data)
        finally:
            profiles["training thread"].stop()
    return step_gpu_profile.tables(title, profiles, len(data))


# ---- rows ------------------------------------------------------------------------------------------------------------


def spread(values: list[float]) -> tuple[float, list[float]]:
    low, middle, high = np.percentile(values, [25, 50, 75])
    return float(middle), [float(low), float(high)]


def row(ranks: list[list[Block]], variant: Variant) -> dict[str, Any]:
    """Of the blocks of all rounds, for each rank."""
    steps = np.array([[ms for block in blocks for ms in block.step] for blocks in ranks])
    every = [block for blocks in ranks for block in blocks]
    middle, quartiles = spread(steps.ravel().tolist())
    found: dict[str, Any] = {"variant": variant.name, "step_ms": middle, "step_ms_quartiles": quartiles}
    found["slowest_rank_ms"] = float(np.median(steps.max(0)))  # of the ranks, in each step
    found["steps"] = steps.shape[1]
    found["host_ms"] = {p: float(np.median([ms for b in every for ms in b.host[p]])) for p in PHASES}
    found["host_ms"]["sum"] = float(np.median([sum(ms) for b in every for ms in zip(*b.host.values(), strict=True)]))
    found["host_skew_ms"] = host_skew(ranks)
    if variant.transport:
        found["exposed_ms"], found["exposed_ms_quartiles"] = spread([ms for b in every for ms in b.exposed])
        names = dict.fromkeys(name for b in every for name in b.waits)
        found["waits_ms"] = {n: float(np.median([ms for b in every for ms in b.waits.get(n, [0.0])])) for n in names}
        if variant.look_ahead:
            found["meeting_ms"] = meeting(ranks)
    if variant.balance and (shares := [share for b in every for share in b.balance]):
        found["straggling"] = dict(zip(STRAGGLING, np.mean(shares, 0).tolist(), strict=True))
    if variant.look_ahead and variant.overlap:
        found["colliding_share"] = float(np.mean([b.colliding for b in every]))
    return found


def host_skew(ranks: list[list[Block]]) -> float:
    """By how much the slowest rank's host is slower than the mean one's in a step, without the rendezvous: so
    long they wait for each other if they meet in every step. (The dense part alone has no meeting.)"""
    host = [[sum(ms) for b in blocks for ms in zip(*b.host.values(), strict=True)] for blocks in ranks]
    own = np.array(host)
    if ranks[0][0].meeting:
        own -= meetings(ranks)
    return float((own.max(0) - own.mean(0)).mean())


def meetings(ranks: list[list[Block]]) -> np.ndarray:
    """[rank, step]"""
    return np.array([[ms for b in blocks for ms in b.meeting] for blocks in ranks])


def meeting(ranks: list[list[Block]]) -> dict[str, float]:
    """What the rendezvous takes of a training thread's time: with the wait for the last rank, and without it
    (of the rank that waits least: it came last). `stalled`: as far as the compute stream had nothing to do."""
    from freescale.views.records import RENDEZVOUS

    each, stalled = meetings(ranks), [ms for blocks in ranks for b in blocks for ms in b.waits.get(RENDEZVOUS, [])]
    found = {"mean": float(each.mean()), "median": float(np.median(each)), "last_rank": float(np.median(each.min(0)))}
    return found | {"stalled": sum(stalled) / each.size}


def compare(blocks: dict[str, list[list[Block]]], codegen: str, exact: bool = True) -> dict[str, Any]:
    """Losses and tables of the variants against each other; `blocks[variant][rank][round]`. Not `exact`: the dense part
    itself has other bits every time."""
    first = {name: [ranks[0].bits for ranks in of] for name, of in blocks.items() if not VARIANTS[name].balance}
    compared = {
        " = ".join(names): all(first[names[0]] == first[n] for n in names)
        for same in SAME_BITS[codegen]
        if len(names := [n for n in same if n in first]) > 1
    }
    rounds = {name: all(b.bits == of[0].bits for of in blocks[name] for b in of) for name in first if name != "plain"}
    compared |= {f"{name}, every round": good for name, good in rounds.items()}
    if not exact:
        compared = {}
    ours = next((name for name in first if VARIANTS[name].transport and not VARIANTS[name].further_tables), None)
    if ours is None:
        return {"same_bits": compared, "loss_difference": {}}
    same_model = {name: of for name, of in first.items() if not VARIANTS[name].further_tables}
    losses = {name: np.array([bits[0] for bits in of]) for name, of in same_model.items()}
    difference = {name: float(np.abs(of - losses[ours]).max()) for name, of in losses.items() if name != ours}
    return {"same_bits": compared, "loss_difference": difference, "loss_difference_from": ours}


def measure_size(name: str, world: World, trainees: dict[str, Trainee], say: Any) -> dict[str, Any]:
    """Every variant in turns."""
    task = world.task
    size, exponent, steps, rounds = task.sizes[name]
    data = batches(task.shape, size, exponent, WARM_UP + steps + TAIL, world.device)
    order, blocks = list(trainees), {v: [] for v in trainees}
    for variant, trainee in trainees.items():  # memory of this size, code of its kernels
        say("at", variant)
        train(trainee, data[: WARM_UP + TAIL])
        steps_before = FITTED_AFTER if VARIANTS[variant].balance else 0
        for _ in range(-(-steps_before // len(data))):
            train(trainee, data)
    for turn in range(rounds):
        for variant in order[turn % len(order) :] + order[: turn % len(order)]:
            say("at", variant)
            blocks[variant].append(train(trainees[variant], data))
    figures, texts = {}, []
    for variant, trainee in trainees.items():
        say("at", variant)
        figures[variant] = profile_device(trainee, data)
        if task.host_profile:
            texts.append(profile_host(trainee, data, f"{name}, {dist.get_world_size()} ranks, {variant}"))
    if task.host_profile and dist.get_rank() == 0:
        step_gpu_profile.append(task.host_profile, texts)
    of_all = {v: world.gather(mine) for v, mine in blocks.items()}
    rows = [row(of_all[v], VARIANTS[v]) | figures[v] for v in trainees]
    exact = task.device == "cpu" or task.shape.dense == "hstu"  # softmax attention on a GPU adds up as it comes
    checks = compare({v: of for v, of in of_all.items() if v != "dense"}, task.codegen, exact)
    about = {"samples": size.samples, "positions": size.positions, "zipf": exponent, "rounds": rounds}
    return {"size": name, "ranks": dist.get_world_size(), **about, "rows": rows, "checks": checks}


# ---- the process -----------------------------------------------------------------------------------------------------


def environment(rank: int, world: int, device: str) -> dict[str, str]:
    """Of a rank, before anything of CUDA or NCCL starts in it: an equal share of the SMs (under MPS), and a host name
    of its own, so that NCCL takes ranks on one GPU for ranks on different hosts and connects them by sockets."""
    names = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if device == "cuda":
        names |= {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // world), "NCCL_HOSTID": f"rank{rank}"}
        names |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    return names


def end_with(program: int) -> None:
    """A rank does not outlive the program, however that ended."""
    while os.getppid() == program:
        time.sleep(1)
    os._exit(1)


def rank_main(rank: int, world_size: int, store: str, task: Task, pipe: Any) -> None:
    warnings.filterwarnings("ignore")
    for name in ("torch._dynamo", "torch.fx"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # the variants share their code

    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()

    def say(*words: Any) -> None:
        pipe.send(words)

    try:
        if task.device == "cuda":
            torch.cuda.set_device(0)
        dist.init_process_group(
            "nccl" if task.device == "cuda" else "gloo",
            init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=GROUP_SECONDS),
        )  # fmt: skip
        world, trainees = World(task), {}
        size, exponent, *_ = next(iter(task.sizes.values()))
        data = batches(task.shape, size, exponent, WARM_UP + TAIL, world.device)
        for name in task.variants:
            say("at", name)
            trainees[name] = Trainee(VARIANTS[name], world)
            began = time.perf_counter()
            train(trainees[name], data)
            say("compiled", name, time.perf_counter() - began)
        for name in task.sizes:
            say("size", measure_size(name, world, trainees, say))
        dist.barrier(world.books)
        say("done")
    except BaseException as error:  # noqa: BLE001
        text = traceback.format_exc()
        print(f"--- rank {rank} of {world_size}\n{text}", file=sys.stderr, flush=True)
        say("failed", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    finally:
        pipe.close()
        os._exit(0)  # a rank whose peers are gone must not wait for them
