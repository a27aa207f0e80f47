"""What one rank of benchmarks/world_size.py does: train a small model over a LookaheadLoader, and say what it cost."""

from __future__ import annotations

import os
import sys
import time
import traceback
import warnings
from collections import defaultdict
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

ROWS, DIM, STEPS, WARM_UP = 1_000_000, 16, 40, 5
IDS, FEW_IDS = 40_000, 4_000  # of a rank's batch: 128 samples of about 300, and what mostly shows the cost per rank


class Spent:
    """Wall time and this thread's CPU time in some functions, call by call."""

    def __init__(self) -> None:
        self.calls: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def watch(self, owner: Any, name: str, label: str) -> Any:
        fn = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return fn(*args, **kwargs)
            finally:
                self.calls[label].append((time.perf_counter() - wall, time.thread_time() - cpu))

        return mock.patch.object(owner, name, timed)

    def total(self, label: str) -> tuple[float, float]:
        return tuple(map(sum, zip(*self.calls[label], strict=True)))  # type: ignore[return-value]

    def median(self, label: str) -> tuple[float, float]:
        """Of a step, without the first ones."""
        times = list(zip(*self.calls[label][WARM_UP:], strict=True))
        return tuple(sorted(t)[len(t) // 2] for t in times)  # type: ignore[return-value]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        import freescale

        self.table = freescale.ShardedEmbedding(ROWS, DIM, name="item")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids).square().sum()


def own_bytes() -> int:
    """Memory of this process that it shares with nobody."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Private_")) * 1024


def batches(ids: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [{"item": torch.randint(0, ROWS, (ids,), generator=generator)} for _ in range(STEPS)]


def train(model: Model, ids: int) -> Spent:
    import freescale
    from freescale.runtime import agreement
    from freescale.runtime.lookahead.planning import BatchPlanning
    from freescale.runtime.lookahead.rendezvous import RankSync

    data, spent = batches(ids), Spent()
    dist.barrier()
    with (
        spent.watch(freescale.LookaheadLoader, "__init__", "start-up"),
        spent.watch(agreement, "agree", "agreement"),
        spent.watch(RankSync, "_gather", "meeting"),
        spent.watch(BatchPlanning, "_request_rows", "requests"),
        spent.watch(BatchPlanning, "_plan_batch", "plans"),
    ):
        for batch in freescale.LookaheadLoader(data, model):
            model(batch["item"]).backward()
    return spent


def measure() -> dict[str, Any]:
    model = Model()
    model.compile(backend="freescale", options={"codegen": "eager", "timeout": 600.0})
    memory = own_bytes()
    spent = train(model, IDS)
    found: dict[str, Any] = {"memory": own_bytes() - memory}
    for label in ("start-up", "agreement"):
        found[label], found[f"{label} cpu"] = spent.total(label)
    for label in ("meeting", "requests", "plans"):
        found[label], found[f"{label} cpu"] = spent.median(label)
    few = train(model, FEW_IDS)
    for label in ("requests", "plans"):
        found[f"{label}, few ids"], found[f"{label}, few ids cpu"] = few.median(label)
    return found


def rank_main(rank: int, world: int, store: str, pipe: Any) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (torch's warnings, once per rank)
    try:
        host, _, port = store.partition(":")
        began = time.perf_counter(), time.process_time()
        dist.init_process_group(
            "gloo", init_method=f"tcp://{host}:{port}", rank=rank, world_size=world, timeout=timedelta(seconds=300)
        )
        dist.barrier()
        joined = time.perf_counter() - began[0], time.process_time() - began[1]
        found = measure()
        found["torch's group"], found["torch's group cpu"] = joined
        pipe.send(found)
        dist.barrier()
    except BaseException:  # noqa: BLE001
        pipe.send(traceback.format_exc())
    finally:
        pipe.close()
        os._exit(0)
