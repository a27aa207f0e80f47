"""The variants that benchmarks/step_gpu.py compares. All live in the same ranks, on one table and one dense part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from step_gpu_model import PlainExchange, Planned, Shape, Size, Storage, dense_part

GROUP_SECONDS = 60


@dataclass(frozen=True)
class Variant:
    name: str
    transport: str = ""  # of freescale; none: not freescale
    passes: str = "all"
    look_ahead: bool = False
    balance: bool = False
    compress: str = ""  # as FREESCALE_COMPRESS
    overlap: bool = True  # of a LookaheadLoader
    further_tables: int = 0  # beside the one that all have
    synchronizes: bool = True  # ranks synchronize before a step, as they do in freescale


DENSE, PLAIN = Variant("dense"), Variant("plain")
VARIANTS = {
    v.name: v
    for v in (
        DENSE,
        PLAIN,
        Variant("capture", "c10d", "none"),
        Variant("c10d", "c10d"),
        Variant("c10d-ahead", "c10d", look_ahead=True),
        Variant("c10d-planned", "c10d", look_ahead=True, overlap=False),
        Variant("c10d-ahead-balance", "c10d", look_ahead=True, balance=True),
        Variant("staged", "staged"),
        Variant("staged-ahead", "staged", look_ahead=True),
        Variant("staged-planned", "staged", look_ahead=True, overlap=False),
        Variant("staged-ahead-balance", "staged", look_ahead=True, balance=True),
        Variant("c10d-ahead-tables", "c10d", look_ahead=True, further_tables=2),
        Variant("staged-ahead-tables", "staged", look_ahead=True, further_tables=2),
        Variant("staged-planned-tables", "staged", look_ahead=True, overlap=False, further_tables=2),
        Variant("c10d-planned-unmet", "c10d", look_ahead=True, overlap=False, synchronizes=False),
        Variant("staged-planned-unmet", "staged", look_ahead=True, overlap=False, synchronizes=False),
        Variant("staged-ahead-lossy", "staged", "all,compress_exchange", True, compress="rows:0.2,which=all"),
    )
}
# Of each group, all must have the same bits: the same graphs, carried by something else. Inductor fuses other graphs
# differently, and then rounds elsewhere; without it, all graphs must agree.
_OF_ONE_STEP = ("c10d", "staged")
_PLANNED = ("c10d-planned", "staged-planned", "c10d-planned-unmet", "staged-planned-unmet")
_AHEAD = ("c10d-ahead", "staged-ahead")
SAME_BITS = {
    "inductor": (_OF_ONE_STEP, _AHEAD, _PLANNED),
    "eager": (("capture", *_OF_ONE_STEP, *_AHEAD, *_PLANNED),),
}


@dataclass
class Task:
    """What the program asks of its ranks."""

    device: str
    shape: Shape
    # The batch of a rank, the exponent of its ids, steps of a block, blocks of each variant.
    sizes: dict[str, tuple[Size, float, int, int]]
    variants: list[str]
    codegen: str
    host_profile: str | None


class World:
    """What all variants of this rank share."""

    def __init__(self, task: Task) -> None:
        self.task, self.device = task, torch.device(task.device)
        self.storage = Storage(task.shape, self.device)
        self.books = dist.new_group(backend="gloo", timeout=timedelta(seconds=GROUP_SECONDS))
        samples = max(size.samples for size, *_ in task.sizes.values())
        self.dense = dense_part(task.shape, samples, self.device)
        self.start = [p.detach().clone() for p in self.dense.parameters()]
        backend = "inductor" if task.codegen == "inductor" else "eager"
        self.compiled_dense = torch.compile(self.dense, dynamic=True, backend=backend)
        self.anchor = torch.zeros(0, device=self.device, requires_grad=True)
        positions = max(2 * size.positions for size, *_ in task.sizes.values())
        self.rows = torch.randn(positions, task.shape.dim, device=self.device)
        self._compiled: dict[tuple[str, str, int], Any] = {}
        self._models: list[Planned] = []

    def compiled(self, variant: Variant) -> Any:
        """Variants that differ in the loop alone share a model."""
        key = (variant.transport, variant.passes, variant.further_tables)  # `compress` is a part of the passes
        if key not in self._compiled:
            model = Planned(self.task.shape, self.storage, self.dense, variant.further_tables)
            self._models.append(model)
            options = {"transport": variant.transport, "passes": variant.passes, "strict": True}
            options |= {"codegen": self.task.codegen, "compress": variant.compress}
            self._compiled[key] = torch.compile(model, backend="freescale", fullgraph=True, options=options)
        return self._compiled[key]

    def reset(self) -> None:
        self.storage.reset()
        for model in self._models:
            model.reset_further()
        with torch.no_grad():
            for p, start in zip(self.dense.parameters(), self.start, strict=True):
                p.copy_(start)
                p.grad = None

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def gather(self, value: Any) -> list[Any]:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, value, group=self.books)
        return everyone

    def to_device(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {k: v.to(self.device, non_blocking=True) for k, v in batch.items()}


def without_synchronization() -> Any:
    """Every rank takes it for granted that the others start the same step. Not safe, and not an option of freescale."""
    from freescale.runtime.lookahead.rendezvous import Action, RankStatus, RankSync

    gather = RankSync._gather

    def taken_for_granted(self: RankSync, own: RankStatus) -> list[list[int]]:
        return [list(own)] * self._world if own.action == Action.TRAIN else gather(self, own)

    return mock.patch.object(RankSync, "_gather", taken_for_granted)


class Trainee:
    """A variant, ready to be trained: `loop` hands out batches on the device, `loss` is the forward pass."""

    def __init__(self, variant: Variant, world: World) -> None:
        self.variant, self.world = variant, world
        # From block to block it goes on fitting what a sample costs, and choosing whether steps overlap.
        self.loader: Any = None
        if variant.transport:
            self.model = world.compiled(variant)

    def loop(self, data: Any) -> Iterator[dict[str, torch.Tensor]]:
        import freescale

        if self.variant.look_ahead:
            if self.loader is None:
                options = {"balance": self.variant.balance, "overlap": self.variant.overlap}
                self.loader = freescale.LookaheadLoader(data, self.model, **options)
            self.loader.loader = data
            with nullcontext() if self.variant.synchronizes else without_synchronization():
                yield from self.loader
            return
        for number, batch in enumerate(data):
            freescale.meter.mark(number)
            yield self.world.to_device(batch)
        freescale.meter.pause()

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.variant.transport:
            return self.model(batch)
        world = self.world
        if self.variant is DENSE:
            rows = world.rows[: batch["item"].shape[0]].detach().requires_grad_()
        else:
            rows = PlainExchange.apply(world.anchor, batch["item"], world.storage)
        return world.compiled_dense(rows, batch["item_lengths"], batch["labels"])
