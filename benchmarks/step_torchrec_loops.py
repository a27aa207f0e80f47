"""The variants that benchmarks/step_torchrec.py compares, and a loop of each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from step_torchrec_model import Batch, Size, dense_parameters, dense_part, embedding_collection, sharded, turn_of

GROUP_SECONDS = 120
WARM_UP, TAIL = 4, 2  # steps of a turn that do not count: there, a pipeline fills and empties


@dataclass(frozen=True)
class Variant:
    name: str
    loop: str  # dense, eager, sparsedist, pec; freescale: plain, ahead
    transport: str = "auto"
    overlap: bool = True
    balance: bool = False
    dense: str = "off"  # allreduce: in the graph, without DDP
    alone: bool = False  # freescale compiles the embedding collection, Inductor the dense part
    passes: str = "all"

    @property
    def is_freescale(self) -> bool:
        return self.loop in ("plain", "ahead")

    @property
    def kind(self) -> tuple[Any, ...]:
        """Of the model; variants of one kind share it."""
        if not self.is_freescale:
            return self.loop, "", "off", False, ""
        return "freescale", self.transport, self.dense, self.alone, self.passes


VARIANTS = {
    v.name: v
    for v in (
        Variant("dense", "dense"),
        Variant("eager", "eager"),
        Variant("sparsedist", "sparsedist"),
        Variant("pec", "pec"),
        Variant("plain", "plain"),
        Variant("default", "ahead"),
        Variant("default-c10d", "ahead", "c10d"),
        Variant("no-overlap", "ahead", overlap=False),
        Variant("no-overlap-c10d", "ahead", "c10d", overlap=False),
        Variant("collection", "ahead", alone=True),
        Variant("collection-c10d", "ahead", "c10d", alone=True),
        Variant("collection-inline", "ahead", alone=True, passes="-move_background"),
        Variant("allreduce", "ahead", dense="allreduce"),
        Variant("balance", "ahead", balance=True),
        Variant("balance-c10d", "ahead", "c10d", balance=True),
    )
}


@dataclass
class Task:
    """What the program asks of its ranks."""

    device: str
    link: str
    sizes: list[Size]
    turns: dict[str, tuple[int, int]]  # by size: steps of a turn, turns
    variants: list[str]
    codegen: str
    check: Size | None  # a size in float32, in which variants are compared with eager TorchRec


class Trained:
    """A DistributedModelParallel of one of the kinds, and its optimizer. Variants of one kind share it."""

    def __init__(self, kind: tuple[Any, ...], size: Size, rank: Rank) -> None:
        loop, transport, dense, alone, passes = kind
        ours, backend = loop == "freescale", "inductor" if rank.task.codegen == "inductor" else "eager"
        compiled_dense = "" if ours and not alone or loop == "uncompiled" else backend
        self.model = sharded(size, rank.device, compiled_dense, ddp=dense == "off", pec=loop == "pec")
        self.optimizer = sgd(dense_parameters(self.model), rank.device)
        if ours:
            options = {"transport": transport, "dense": dense, "codegen": rank.task.codegen, "passes": passes}
            options["strict"] = True
            (embedding_collection(self.model) if alone else self.model).compile(backend="freescale", options=options)
        self.pipeline: Any = None
        self.own_bytes = 0


class Rank:
    def __init__(self, task: Task) -> None:
        self.task, self.device = task, torch.device(task.device)
        self.on_gpu = self.device.type == "cuda"
        self.books = dist.new_group(backend="gloo", timeout=timedelta(seconds=GROUP_SECONDS))

    def gather(self, value: Any) -> list[Any]:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, value, group=self.books)
        return everyone

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()
        dist.barrier(self.books)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.on_gpu else 0

    def moment(self) -> Any:
        """Now, on the compute stream."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, began: Any, ended: Any) -> float:
        """After `synchronize`."""
        return began.elapsed_time(ended) if self.on_gpu else (ended - began) * 1e3


def sgd(parameters: Any, device: torch.device) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, foreach=device.type == "cuda")


# ---- the loops -------------------------------------------------------------------------------------------------------


class Loop:
    """Trains one variant: `steps` yields the loss of each step, over the batches that it is given."""

    def __init__(self, variant: Variant, trained: Trained | None, dense: DenseAlone, rank: Rank) -> None:
        self.variant, self.trained, self.dense, self.rank = variant, trained, dense, rank
        self.loader: Any = None  # kept from turn to turn, with what it has learned of the samples' costs

    def steps(self, data: Iterator[Batch]) -> Iterator[torch.Tensor]:
        if self.variant.loop == "dense":
            return (self.dense.step(batch, self.dense.averaged) for batch in data)
        if self.variant.loop in ("sparsedist", "pec"):
            return self._pipeline(data)
        return self._plain_loop(self._loader(data) if self.variant.loop == "ahead" else data)

    def _loader(self, data: Iterator[Batch]) -> Any:
        import freescale

        if self.loader is None:
            self.loader = freescale.LookaheadLoader(
                data, self.trained.model, balance=self.variant.balance, overlap=self.variant.overlap
            )
        self.loader.loader = data
        return self.loader

    def _plain_loop(self, data: Any) -> Iterator[torch.Tensor]:
        model, optimizer = self.trained.model, self.trained.optimizer
        for batch in data:
            batch = batch.to(self.rank.device, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            loss, output = model(batch)
            loss.backward()
            optimizer.step()
            yield output

    def _pipeline(self, data: Iterator[Batch]) -> Iterator[torch.Tensor]:
        trained = self.trained
        if trained.pipeline is None:
            trained.pipeline = pipeline_class(self.variant.loop)(
                trained.model, trained.optimizer, self.rank.device, execute_all_batches=True
            )
        while True:
            try:
                output = trained.pipeline.progress(data)
            except StopIteration:
                return
            yield output


def pipeline_class(name: str) -> Any:
    if name == "pec":
        from torchrec.distributed.train_pipeline.pec_train_pipeline import TrainPipelinePEC

        return TrainPipelinePEC
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    return TrainPipelineSparseDist


def why_not(variant: Variant, device: str) -> str:
    """Why a variant cannot run here; empty if it can."""
    if variant.loop != "pec":
        return ""
    try:
        pipeline_class("pec")
    except ImportError:
        return "this TorchRec has no TrainPipelinePEC (1.9 has)"
    return "" if device == "cuda" else "TrainPipelinePEC needs CUDA"


class DenseAlone:
    """The dense part on rows that are there already: the limit of a step. In DDP as in the model, and on its own."""

    def __init__(self, size: Size, rank: Rank, distinct: list[Batch]) -> None:
        self.rank, self.distinct = rank, distinct
        positions = max(b.features.values().shape[0] for b in distinct)
        self.rows = torch.randn(positions, size.dim, device=rank.device)
        backend = "inductor" if rank.task.codegen == "inductor" else "eager"
        self.own, inside = dense_part(size, rank.device), dense_part(size, rank.device)
        for dense in (self.own, inside):
            dense.compile(dynamic=size.jagged, backend=backend)
        self.averaged = torch.nn.parallel.DistributedDataParallel(inside, gradient_as_bucket_view=True)
        self.optimizers = {m: sgd(m.parameters(), rank.device) for m in (self.own, self.averaged)}

    def step(self, batch: Batch, dense: torch.nn.Module) -> torch.Tensor:
        batch = batch.to(self.rank.device, non_blocking=True)
        lengths = batch.features.lengths()
        rows = self.rows[: batch.features.values().shape[0]].detach().requires_grad_()
        self.optimizers[dense].zero_grad(set_to_none=True)
        loss = dense(rows, lengths, batch.labels)
        loss.backward()
        self.optimizers[dense].step()
        return loss.detach()

    def straggling(self, steps: int) -> dict[str, float]:
        """Without DDP, every step of every rank by itself: what the slowest rank takes, and what the mean one does."""
        mine = []
        for batch in turn_of(self.distinct, WARM_UP, steps, 0):
            if self.rank.on_gpu:
                torch.cuda.synchronize()
            began = time.perf_counter()
            self.step(batch, self.own)
            if self.rank.on_gpu:
                torch.cuda.synchronize()
            mine.append((time.perf_counter() - began) * 1e3)
        ranks = np.array(self.rank.gather(mine[WARM_UP:]))
        return {"slowest_rank_ms": float(ranks.max(0).mean()), "mean_rank_ms": float(ranks.mean())}
