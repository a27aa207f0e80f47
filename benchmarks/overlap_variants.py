"""The variants that benchmarks/overlap.py compares: model, batches, training loops, and the clock that all share.

All variants live in one process, each with a model of its own, and take turns.

Exposed time has one definition for all of them, and needs no hook in any: the time that the training thread was
blocked, which is wall time less its CPU time less the time that it waited for its core (Linux keeps that in schedstat).
On the CPU, autograd runs in the same thread. What gloo's or the planner's threads take from the core is thus compute,
not exposed; what the training thread waits for the interpreter lock while the planner holds it is exposed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import collisions  # noqa: E402
import fidelity_asleep as asleep  # noqa: E402
import freescale  # noqa: E402
import netlab  # noqa: E402
from freescale import config  # noqa: E402
from hstu import HSTU, segment_sum  # noqa: E402
from synthetic import Batch  # noqa: E402

CPU = torch.device("cpu")
WARM_UP, TAIL = 2, 1  # steps at the start and the end of a block that do not count: there, look-ahead has no neighbour


# ---- time ------------------------------------------------------------------------------------------------------------


class Moment(NamedTuple):
    """Readings of the training thread; all but the last in seconds."""

    wall: float
    on_cpu: float
    queued: float  # ready, but another thread had the core
    process: float  # CPU time of all threads
    sent: int  # bytes

    @staticmethod
    def now() -> Moment:
        _, queued, _ = Path("/proc/thread-self/schedstat").read_text().split()
        process = time.process_time()
        return Moment(time.perf_counter(), time.thread_time(), int(queued) / 1e9, process, netlab.sent_bytes())


@dataclass
class Step:
    step_ms: float
    exposed_ms: float
    cpu_ms: float
    queued_ms: float
    process_ms: float
    sent: float
    meter_ms: float | None = None  # what freescale's own meter calls exposed
    waits: dict[str, float] = field(default_factory=dict)  # the same by what was waited for

    @staticmethod
    def between(a: Moment, b: Moment) -> Step:
        wall, cpu, queued, process = ((y - x) * 1e3 for x, y in zip(a[:4], b[:4], strict=True))
        return Step(wall, max(wall - cpu - queued, 0.0), cpu, queued, process, b.sent - a.sent)


# ---- model and batches -----------------------------------------------------------------------------------------------


class Recommender(HSTU):
    """The example's model without the action feature, whose test for presence TorchRec's pipeline cannot trace."""

    def logits(self, features: Any) -> torch.Tensor:
        embedded = self.embeddings(features)
        history, candidate = embedded[self.history], embedded[self.candidate]
        x, offsets = history.values(), history.offsets().to(torch.int64)
        for block in self.blocks:
            x = block(x, offsets)
        pooled = segment_sum(x, offsets) / history.lengths().clamp(min=1).unsqueeze(1)
        return (self.head(pooled) * candidate.values()).sum(dim=1)


class LossAndOutput(Recommender):
    """As TorchRec's pipeline wants it: the loss, and something else."""

    def forward(self, batch: Any) -> Any:
        loss = super().forward(batch)
        return loss, loss.detach()


def build(args: argparse.Namespace, shape: collisions.Shape, kind: type[Recommender]) -> Any:
    """One row-wise table with fused Adagrad. The dense part is not averaged over ranks unless --ddp says so, so that
    the embedding exchange is alone on the wire."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingCollection, EmbeddingConfig
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints

    torch.manual_seed(0)
    table = EmbeddingConfig(
        name="item", num_embeddings=shape.table_rows, embedding_dim=args.dim, feature_names=["history", "candidate"]
    )
    embeddings = EmbeddingCollection(tables=[table], device=CPU)
    model = kind(embeddings, args.dim, args.heads, args.blocks, max_distance=128, normalizer=shape.samples)
    if getattr(args, "asleep_ms", 0):
        model.blocks = torch.nn.ModuleList(asleep.Block(args.asleep_ms / 1e3 / args.blocks) for _ in range(args.blocks))
    sharder = EmbeddingCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05, "eps": 1e-8}
    )
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device="cpu"),
        constraints={"item": ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])},
    )
    plan = planner.collective_plan(model, [sharder], dist.group.WORLD)
    return DistributedModelParallel(
        model, device=CPU, plan=plan, sharders=[sharder], init_data_parallel=args.ddp
    )


class Batches:
    """The batches of one collision rate, the same for every variant."""

    def __init__(self, shape: collisions.Shape, collision: float, count: int) -> None:
        world = dist.get_world_size()
        everyone = []
        for t, rows in enumerate(collisions.unique_rows(shape, world, collision, count, seed=1)):
            everyone.append(np.stack([collisions.values_of(rows[r], shape, 1000 * t + r) for r in range(world)]))
        self.shape = shape
        self.measured = collisions.measure(everyone, block=-(-shape.table_rows // world))
        self.ids = [torch.from_numpy(ids[dist.get_rank()]) for ids in everyone]
        self.labels = torch.arange(shape.samples).remainder(2).float()

    def fresh(self, count: int | None = None) -> list[Batch]:
        """New objects each time: a KeyedJaggedTensor keeps what was once computed of it."""
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        s = self.shape
        lengths = torch.tensor([s.length] * s.samples + [1] * s.samples)
        keys = ["history", "candidate"]
        return [
            Batch(KeyedJaggedTensor(keys=keys, values=ids.clone(), lengths=lengths.clone()), self.labels.clone())
            for ids in self.ids[:count]
        ]


# ---- variants --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    name: str
    passes: str | None = None  # None: not compiled
    look_ahead: bool = False
    pipeline: bool = False


# Dense gradients have a benchmark of their own (dense_allreduce.py).
PASS_NAMES = tuple(name for name in config.PASS_NAMES if name != "bucket_gradients")


def variants(pass_names: tuple[str, ...] = PASS_NAMES) -> list[Variant]:
    """From TorchRec alone to everything; between plain Inductor and everything, one more pass each time."""
    found = [Variant("eager"), Variant("pipeline", pipeline=True), Variant("inductor", "none")]
    for n in range(1, len(pass_names)):
        found.append(Variant(pass_names[n - 1], ",".join(pass_names[:n]), look_ahead=True))
    return [*found, Variant("freescale", "all", look_ahead=True)]


class Trainee:
    """A variant with its model. `loop` trains a list of batches, one more each time it is asked."""

    def __init__(self, variant: Variant, args: argparse.Namespace, shape: collisions.Shape) -> None:
        self.variant = variant
        model = build(args, shape, LossAndOutput if variant.pipeline else Recommender)
        dense = [p for p in model.parameters() if not hasattr(p, "_in_backward_optimizers")]
        self.optimizer = torch.optim.Adam(dense, lr=1e-3)
        self.loop: Callable[[list[Batch]], Iterator[None]]
        if variant.pipeline:
            from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

            self.pipeline = TrainPipelineSparseDist(model, _OptimizerAlone(self.optimizer), CPU)
            self.loop = self._pipelined
        elif variant.passes is None:
            self.model, self.loop = model, self._plain
        else:
            options = {"passes": variant.passes, "codegen": args.codegen}
            self.model = torch.compile(model, backend="freescale", options=options)
            self.loop = self._looking_ahead if variant.look_ahead else self._plain

    def _plain(self, batches: list[Batch]) -> Iterator[None]:
        for batch in batches:
            self._train(batch)
            yield

    def _looking_ahead(self, batches: list[Batch]) -> Iterator[None]:
        for batch in freescale.LookaheadLoader(batches, self.model):
            self._train(batch)
            yield

    def _pipelined(self, batches: list[Batch]) -> Iterator[None]:
        source = iter(batches)
        for _ in batches:
            self.pipeline.progress(source)
            yield

    def _train(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        self.model(batch).backward()
        self.optimizer.step()

    def block(self, batches: list[Batch]) -> list[Step]:
        """Train `batches`; the steps that count."""
        freescale.meter.clear()
        dist.barrier()
        moments = [Moment.now()]
        for _ in self.loop(batches):
            moments.append(Moment.now())
        steps = [Step.between(a, b) for a, b in zip(moments[:-1], moments[1:], strict=True)]
        if self.variant.look_ahead:  # the loader marks the meter's steps
            for seen in freescale.meter.steps():
                steps[seen["step"]].meter_ms = seen["exposed"] * 1e3
                steps[seen["step"]].waits = {name: s * 1e3 for name, s in seen["waits"].items()}
        return steps[WARM_UP : len(steps) - TAIL]


class _OptimizerAlone:
    """TorchRec's pipeline calls the two methods of an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.zero_grad, self.step = optimizer.zero_grad, optimizer.step
