"""What one rank of benchmarks/overlap.py does: train the same batches in every variant, and say where the time went.

Started by overlap.py, once per rank. All variants live in one process, each with a model of its own, and take turns.

Exposed time has one definition for all of them, and needs no hook in any: the time that the training thread was
blocked, which is wall time less its CPU time less the time that it waited for its core (Linux keeps that in schedstat).
On the CPU, autograd runs in the same thread. What gloo's or the planner's threads take from the core is thus compute,
not exposed; what the training thread waits for the interpreter lock while the planner holds it is exposed.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import collisions  # noqa: E402
import freescale  # noqa: E402
import netlab  # noqa: E402
from freescale import config, driver  # noqa: E402
from hstu import HSTU, segment_sum  # noqa: E402
from synthetic import Batch  # noqa: E402

CPU = torch.device("cpu")
OWN = "own exchange/compute 2"
WARM_UP, TAIL = 2, 1  # steps at the start and the end of a block that do not count: there, look-ahead has no neighbour


# ---- time ------------------------------------------------------------------------------------------------------------


class Moment(NamedTuple):
    """Readings of the training thread; all but the last in seconds."""

    wall: float
    on_cpu: float
    queued: float  # ready, but another thread had the core
    sent: int  # bytes

    @staticmethod
    def now() -> Moment:
        _, queued, _ = Path("/proc/thread-self/schedstat").read_text().split()
        return Moment(time.perf_counter(), time.thread_time(), int(queued) / 1e9, netlab.sent_bytes())


@dataclass
class Step:
    step_ms: float
    exposed_ms: float
    cpu_ms: float
    sent: float
    meter_ms: float | None = None  # what freescale's own meter calls exposed
    waits: dict[str, float] = field(default_factory=dict)  # the same by what was waited for

    @staticmethod
    def between(a: Moment, b: Moment) -> Step:
        wall = b.wall - a.wall
        blocked = wall - (b.on_cpu - a.on_cpu) - (b.queued - a.queued)
        return Step(wall * 1e3, max(blocked, 0.0) * 1e3, (b.on_cpu - a.on_cpu) * 1e3, b.sent - a.sent)


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


def variants(pass_names: tuple[str, ...] = config.PASS_NAMES) -> list[Variant]:
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


# ---- what is measured ------------------------------------------------------------------------------------------------


@dataclass
class Compiled:
    seconds: float  # first step less a later one
    pass_seconds: float


def get_ready(variant: Variant, args: argparse.Namespace, shape: collisions.Shape) -> tuple[Trainee, Compiled] | str:
    """The variant after its first steps, on every rank; or why it does not run."""
    batches = Batches(shape, 0.12, WARM_UP + TAIL + 1)
    passes_before, failure, trainee, seconds = driver.REPORT.seconds, "", None, [0.0]
    try:
        trainee = Trainee(variant, args, shape)
        moments = [time.perf_counter()]
        for _ in trainee.loop(batches.fresh()):
            moments.append(time.perf_counter())
        seconds = list(np.diff(moments))
    except Exception as error:  # noqa: BLE001  (only TorchRec's pipeline may fail; see below)
        if not variant.pipeline:
            raise
        failure = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    failures: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    if any(failures) or trainee is None:
        return next(f for f in failures if f)
    return trainee, Compiled(seconds[0] - min(seconds[1:]), driver.REPORT.seconds - passes_before)


def get_all_ready(
    names: list[str], args: argparse.Namespace, shape: collisions.Shape
) -> tuple[dict[str, Trainee], dict[str, Compiled], dict[str, str]]:
    ready, compiled, left_out = {}, {}, {}
    # The complete one is compiled first, with cold caches, so that its time of compilation is all its own.
    for variant in sorted((v for v in variants() if v.name in names), key=lambda v: v.passes != "all"):
        made = get_ready(variant, args, shape)
        if isinstance(made, str):
            left_out[variant.name] = made
            say(f"{variant.name} does not run here: {made}")
            continue
        ready[variant.name], took = made
        if variant.passes is not None:
            compiled[variant.name] = took
            say(f"{variant.name}: compiled in {took.seconds:.1f} s, of which passes {took.pass_seconds * 1e3:.0f} ms")
    return {name: ready[name] for name in names if name in ready}, compiled, left_out


def measure_blocks(
    trainees: dict[str, Trainee], of: dict[float, Batches], link: str, rounds: int
) -> list[dict[str, Any]]:
    """Every variant at every collision rate, in turns; a row for each, of the steps of all ranks and rounds."""
    steps: dict[tuple[str, float], list[Step]] = {(name, c): [] for name in trainees for c in of}
    for _ in range(rounds):
        for collision, batches in of.items():
            for name, trainee in trainees.items():
                steps[name, collision] += trainee.block(batches.fresh())
            say(
                f"{link}, collision {batches.measured.collision:.0%}: "
                + ", ".join(f"{n} {np.median([s.step_ms for s in steps[n, collision]]):.0f} ms" for n in trainees)
            )
    return [row(name, link, of[c], s) for (name, c), s in steps.items()]


def row(name: str, link: str, batches: Batches, steps: list[Step]) -> dict[str, Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, steps)
    everyone = [s for mine in gathered for s in mine]
    step, exposed = [s.step_ms for s in everyone], [s.exposed_ms for s in everyone]
    compute = [s.step_ms - s.exposed_ms for s in everyone]
    metered = [s.meter_ms for s in everyone if s.meter_ms is not None]
    return {
        "variant": name,
        "collision": batches.measured.collision,
        "link": link,
        "step_ms": float(np.median(step)),
        "compute_ms": float(np.median(compute)),
        "exposed_ms": float(np.median(exposed)),
        "bytes": float(np.mean([s.sent for s in everyone])),
        "step_ms_iqr": spread(step),
        "compute_ms_iqr": spread(compute),
        "exposed_ms_iqr": spread(exposed),
        "cpu_ms": float(np.median([s.cpu_ms for s in everyone])),
        "meter_ms": float(np.median(metered)) if metered else None,
        "waits_ms": {name: float(np.median([s.waits.get(name, 0.0) for s in everyone])) for name in everyone[0].waits},
        "steps": len(everyone),
    }


def spread(values: list[float]) -> float:
    """Between the quartiles."""
    return float(np.subtract(*np.percentile(values, [75, 25])))


def say(words: str) -> None:
    if dist.get_rank() == 0:
        print(f"  {words}", file=sys.stderr, flush=True)


def agreed(value: float) -> float:
    """Rank 0's."""
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def check_of_exposed(rate: float, size: int) -> dict[str, Any]:
    """What this file calls exposed, where it is known: an all-to-all of `size` bytes to the other ranks together."""
    world = dist.get_world_size()
    x = torch.zeros(size // 4 // (world - 1) * world)
    out, steps, resent = torch.empty_like(x), [], netlab.resent_segments()
    for _ in range(7):
        dist.barrier()
        before = Moment.now()
        dist.all_to_all_single(out, x)
        steps.append(Step.between(before, Moment.now()))
    each = [s.exposed_ms for s in steps]
    return {
        "bytes": size,
        "bytes_over_rate_ms": size * 8e3 / rate,
        "exposed_ms": float(np.median(each[2:])),
        "exposed_ms_each": each,
        "resent_segments": netlab.resent_segments() - resent,
    }


def shape_link(link: str, rate: float | None, size: float) -> list[dict[str, Any]]:
    """Set the speed of this rank's link, and check it."""
    if rate is None:
        return []
    netlab.set_rate(rate, burst=int(min(netlab.BURST, max(size // 100, 2 * 9000))))
    check = {"link": link, **check_of_exposed(rate, int(size / 2))}
    say(
        f"link {link}: {rate / 1e6:.1f} Mbit/s; an all-to-all of {check['bytes'] / 1e6:.2f} MB, which is "
        f"{check['bytes_over_rate_ms']:.1f} ms, blocked the training thread for {check['exposed_ms']:.1f} ms"
    )
    return [check]


def section_train(args: argparse.Namespace, shape: collisions.Shape) -> dict[str, Any]:
    trainees, compiled, left_out = get_all_ready(args.variants, args, shape)
    per_block = WARM_UP + args.steps + TAIL
    of = {c: Batches(shape, c, per_block) for c in args.collisions}
    middle = of[min(of, key=lambda c: abs(c - 0.12))]
    (free,) = measure_blocks({"eager": trainees["eager"]}, {0.12: middle}, "unshaped", 1)
    row_bytes = args.dim * 4
    size = 2 * middle.measured.all_values * row_bytes  # rows and gradients
    compute = agreed(free["cpu_ms"])  # not disturbed by what else runs on the machine
    links: dict[str, float | None] = {"loopback": None}
    if netlab.in_lab():
        links = {f"exchange/compute {ratio:g}": size * 8e3 / (ratio * compute) for ratio in args.ratios}
    rows, checks = [free], []
    for link, rate in links.items():
        checks += shape_link(link, rate, size)
        rows += measure_blocks(trainees, of, link, args.rounds)
    if netlab.in_lab() and "freescale" in trainees:
        # The links above are chosen by what eager TorchRec sends. One more, by what freescale itself sends.
        own = agreed(np.mean([r["bytes"] for r in rows if r["variant"] == "freescale"]))
        links[OWN] = own * 8e3 / (2 * compute)
        checks += shape_link(OWN, links[OWN], size)
        rows += measure_blocks({"freescale": trainees["freescale"]}, {0.12: middle}, OWN, args.rounds)
    return {
        "rows": rows,
        "links_bits_per_second": links,
        "eager_exchange_bytes": size,
        "row_bytes": row_bytes,
        "compute_ms": compute,
        "collisions": [asdict(b.measured) for b in of.values()],
        "compiled": {name: asdict(c) for name, c in compiled.items()},
        "left_out": left_out,
        "check_of_exposed": checks,
    }


def section_single(args: argparse.Namespace, shape: collisions.Shape) -> dict[str, Any]:
    """One rank: everything against plain Inductor, in turns."""
    trainees, compiled, _ = get_all_ready(["inductor", "freescale"], args, shape)
    batches = Batches(shape, 0.12, WARM_UP + args.steps + TAIL)
    ratios, seen = [], {name: list[float]() for name in trainees}
    for n in range(args.rounds):
        order = list(trainees) if n % 2 == 0 else list(reversed(trainees))
        for name in order:
            steps = [s.step_ms for s in trainees[name].block(batches.fresh())]
            seen[name] += steps
        both = [np.median(seen[name][-args.steps :]) for name in ("freescale", "inductor")]
        ratios.append(float(both[0] / both[1]))
        say(f"one rank, round {n + 1}: freescale {both[0]:.1f} ms, inductor {both[1]:.1f} ms, ratio {ratios[-1]:.4f}")
    return {
        "single_rank_ratio": float(np.median(seen["freescale"]) / np.median(seen["inductor"])),
        "single_rank_ratios": ratios,
        "step_ms": {name: float(np.median(s)) for name, s in seen.items()},
        "compiled": {name: asdict(c) for name, c in compiled.items()},
    }


SECTIONS = {"train": section_train, "single": section_single}


def main() -> None:
    args = argparse.Namespace(**json.loads(sys.argv[1]))
    warnings.filterwarnings("ignore")
    for name in ("torchrec", "torch._dynamo", "torch.fx"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # the variants share their code
    dist.init_process_group("gloo")
    shape = collisions.Shape(args.samples, args.length, args.table_rows)
    found = SECTIONS[args.section](args, shape)
    if dist.get_rank() == 0:
        Path(args.out).write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # loaded libraries have threads that do not like the usual way out


if __name__ == "__main__":
    main()
