"""The part of benchmarks/contention.py with a second rank: NCCL's own kernels beside the work.

Two processes on the one GPU. NCCL takes them for ranks of two hosts (NCCL_HOSTID) and connects them by sockets on
loopback. The first one computes; the second one only takes part in the all-to-all. They run under MPS: without it they
would take turns on the whole GPU, which would cost the work half of its speed whatever NCCL does, so then nothing is
measured.

How to read it. The kernels of *both* ranks hold SMs of this GPU, where a rank with a GPU to itself has only its own
beside the work: with n blocks per rank (read from a trace), what is measured is the cost of 2n. That is why the
emulation stands next to it with 2n blocks, and why `own` is printed: the speed kept if each of the two kernels costs
half of the loss. And sockets are slow: a kernel of NCCL's holds its SMs for as long as the link takes, so rows are
beside transfers of the same *time*, not of the same bytes. On a fast link the same kernels move more memory meanwhile,
which costs more, for a shorter time. The emulation is measured at the bytes per second of NCCL and at those of
`staged`.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from contention_beside import (
    CHUNK,
    Beside,
    Transfer,
    compare,
    pair_of_events,
    show,
    transfer_alone,
    workloads,
    worst_kept,
)
from freescale.kernels.transports import staged
from gpu_machine import mps

NCCL = "NCCL, both ranks"
NBYTES, FIRST = 1 << 30, 16 << 20  # of staged; of NCCL until its rate is known
GROUP_SECONDS, SECONDS = 60, 200
THEIRS = 7  # what the second rank sends


class BesideNccl(Beside):
    """The second rank is told what to send, and sends as much back."""

    def __init__(self, transport: Any, group: dist.ProcessGroup, tell: Any) -> None:
        super().__init__(transport, NBYTES)
        self.group, self.tell = group, tell
        self.nccl_bytes, self.nccl_rate = FIRST, 0.0

    def nccl(self) -> Transfer:
        start, end = pair_of_events()
        n = self.nccl_bytes
        self.tell.send(n)
        with torch.cuda.stream(self.stream):
            start.record()
            dist.all_to_all_single(self.to.view(-1)[:n], self.data.view(-1)[:n], [0, n], [0, n], group=self.group)
            end.record()
        return Transfer(start, end, n)

    def go(self, what: str) -> Transfer | None:
        if what == NCCL:
            return self.nccl()
        if what.startswith("copies as NCCL"):
            return self.copy_kernel(int(what.split()[-1]), self.nccl_bytes, self.nccl_rate)
        return super().go(what)

    def settle(self) -> None:
        """As many bytes over NCCL as take the time of `staged`'s."""
        self.nccl()
        torch.cuda.synchronize()
        assert bool((self.to.view(-1)[:FIRST] == THEIRS).all()), "the all-to-all did not bring the other rank's bytes"
        rate = transfer_alone(self, NCCL) * 1e9
        self.nccl_bytes = max(1, min(int(rate * NBYTES / self.rate), NBYTES) // CHUNK) * CHUNK
        self.nccl_rate = transfer_alone(self, NCCL) * 1e9


def blocks_of(run: Callable[[], Any], name: str) -> int | None:
    """Of the kernel with `name` in its own; None where the profiler does not see it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return most_blocks(json.loads(path.read_text())["traceEvents"], name)


def most_blocks(events: list[dict[str, Any]], name: str) -> int | None:
    found = [e["args"]["grid"][0] for e in events if e.get("cat") == "kernel" and name in e["name"].lower()]
    return max(found, default=None)


# ---- the two ranks ---------------------------------------------------------------------------------------------------


def meet(rank: int, store: str) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """A group of the first rank alone, and both ranks over NCCL."""
    seconds = timedelta(seconds=GROUP_SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=seconds)
    return dist.new_group([0], timeout=seconds), dist.new_group([0, 1], backend="nccl", timeout=seconds)


def compute(store: str, tell: Any, quick: bool) -> dict[str, Any]:
    works = workloads()  # captures graphs, before NCCL has a thread that looks at events meanwhile
    alone, group = meet(0, store)
    transport = staged.open_transport(alone)
    beside = BesideNccl(transport, group, tell)
    beside.staged()
    rates = {"staged": transfer_alone(beside, "staged")}
    beside.rate = rates["staged"] * 1e9
    beside.settle()
    rates[NCCL] = beside.nccl_rate / 1e9
    blocks = blocks_of(beside.nccl, "nccl")
    copies = [] if blocks is None else [f"copies as NCCL, blocks: {2 * blocks}", f"copy kernel, blocks: {2 * blocks}"]
    for name in copies:
        rates[name] = transfer_alone(beside, name)
    rows = compare(works, beside, 5 if quick else 15, ["alone", NCCL, *copies, "staged"], rates)
    tell.send(0)
    transport.close()
    return {"blocks_per_rank": blocks, "bytes": beside.nccl_bytes, "alone_gb_per_s": rates, "rows": rows}


def take_part(store: str, told: Any) -> None:
    _, group = meet(1, store)
    data = torch.full((NBYTES,), THEIRS, dtype=torch.uint8, device="cuda")
    to = torch.empty_like(data)
    while n := told.recv():
        dist.all_to_all_single(to[:n], data[:n], [n, 0], [n, 0], group=group)
        torch.cuda.synchronize()


def rank_main(rank: int, store: str, other: Any, say: Any, quick: bool) -> None:
    torch.cuda.set_device(0)
    try:
        if rank == 0:
            say.send(compute(store, other, quick))
        else:
            take_part(store, other)
    except BaseException as error:  # noqa: BLE001
        traceback.print_exc()
        say.send({"failed": f"rank {rank}: {type(error).__name__}: {error}"})
    finally:
        time.sleep(1)  # a thread of NCCL's may still be sending what the other rank waits for
        os._exit(0)


# ---- the program's side ----------------------------------------------------------------------------------------------


def measure(quick: bool) -> dict[str, Any]:
    """Rows and headlines; or `failed`, or `not_measured`, and why."""
    with mps() as under_mps:
        if not under_mps:
            print("\nNCCL: not measured, since there is no MPS and two processes that take turns show nothing")
            return {"not_measured": "no MPS"}
        found = run_both(quick)
    if "failed" in found:
        return found
    blocks = found["blocks_per_rank"]
    print(
        f"\nUnder MPS, beside NCCL's all-to-all with a second rank over sockets: {blocks or 'unknown'} blocks per "
        f"rank, the kernels of both ranks on this GPU; {found['alone_gb_per_s'][NCCL]:.2f} GB/s alone"
    )
    show(found["rows"])
    for row in found["rows"]:
        if row["beside"] == NCCL:
            row["kept_own"] = own(row["kept"])
            print(f"  own kernel alone, if each costs half: {row['work']:48} {row['kept_own']:.1%}")
    names = {"attention": "attention, HSTU fused", "sdpa": "softmax attention"}
    kept = {name: worst_kept(found["rows"], work, NCCL) for name, work in names.items()}
    found["headlines"] = {f"{name}_kept_beside_nccl_both_ranks": value for name, value in kept.items()}
    found["headlines"] |= {f"{name}_kept_beside_nccl_own": own(value) for name, value in kept.items()}
    return found


def own(kept: float) -> float:
    """The speed kept beside one of two kernels that each cost half of what is lost."""
    return 2 * kept / (1 + kept)


def run_both(quick: bool) -> dict[str, Any]:
    context = mp.get_context("spawn")
    told, tell = context.Pipe(duplex=False)
    pipes, processes = [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank, other in enumerate((tell, told)):
            heard, say = context.Pipe(duplex=False)
            arguments = (rank, f"{folder}/store", other, say, quick)
            environment = {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
            with mock.patch.dict(os.environ, environment):
                processes.append(context.Process(target=rank_main, args=arguments, daemon=True))
                processes[-1].start()
            say.close()
            pipes.append(heard)
        tell.close()
        told.close()
        try:
            # The second rank says nothing, unless it failed; if it ends first without a word, the first one fails.
            return first_word(pipes, time.monotonic() + SECONDS)
        finally:
            for p in processes:
                p.kill()
                p.join(10)


def first_word(pipes: list[Any], end: float) -> dict[str, Any]:
    while pipes:
        ready = wait_for_any(pipes, timeout=max(0.0, end - time.monotonic()))
        if not ready:
            return {"failed": f"not done in {SECONDS} seconds"}
        for pipe in ready:
            try:
                word: dict[str, Any] = pipe.recv()
                return word
            except EOFError:
                pipes.remove(pipe)
    return {"failed": "both ranks ended without a word"}
