"""The simulated variants, as programs and traffic for the event simulation. freescale's programs come from its compiled
graphs (graphs.py); TorchRec's are written here, following its code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from freescale.simulate.assignments import ID_BYTES, Assignment, with_host_time
from freescale.simulate.cluster import Cluster
from freescale.simulate.collisions import Counts
from freescale.simulate.events import Compute, Launch, Program, Transfer, Wait

FORWARD = Compute(1 / 3, 2 / 7)  # of a step: backward has two matmuls per forward matmul, five per two in attention
BACKWARD = Compute(2 / 3, 5 / 7)
HALF_FORWARD = Compute(FORWARD.per_token / 2, FORWARD.per_square / 2)
PIECE_BYTES = 4 << 20  # `staged` piece size: the first is copied out before sending starts, the last copied in after

END = (Launch("dense gradients"), Wait("dense gradients"))
SYNCHRONOUS: Program = (
    Launch("lengths"), Wait("lengths"), Launch("ids"), Wait("ids"), Launch("rows"), Wait("rows"),
    FORWARD, BACKWARD, Launch("gradients"), Wait("gradients"), *END,
)  # fmt: skip
SPARSE_DIST: Program = (
    Wait("ids"), Launch("rows"), Launch("lengths", 1), Launch("ids", 1), Wait("rows"),
    FORWARD, BACKWARD, Launch("gradients"), Wait("gradients"), *END,
)  # fmt: skip
PEC: Program = (
    Wait("ids"), Launch("urgent values"), Wait("early values"), Wait("urgent values"),
    Launch("lengths", 1), Launch("ids", 1), Launch("masks", 1), Launch("late value gradients", -1),
    HALF_FORWARD, Wait("late value gradients", -1), Wait("masks", 1), Launch("early values", 1), HALF_FORWARD,
    BACKWARD, Launch("urgent value gradients"), Wait("urgent value gradients"), *END,
)  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """freescale's variants enable or disable parts; TorchRec's have a program."""

    name: str
    program: Program | None = None
    balance: bool = False
    look_ahead: bool = False
    copies: bool = False  # transfers without SMs

    @property
    def parts(self) -> str:
        on = [n for n, p in (("balance", self.balance), ("look-ahead", self.look_ahead), ("copies", self.copies)) if p]
        return " + ".join(on)


TORCHREC = (
    Variant("TorchRec, synchronous", SYNCHRONOUS),
    Variant("TorchRec, SparseDist pipeline", SPARSE_DIST),
    Variant("TorchRec, PEC", PEC),
)
EVERYTHING = Variant("freescale", balance=True, look_ahead=True, copies=True)


def freescale_variants() -> list[Variant]:
    """Each part alone, each omitted, none and all."""
    order = ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1))
    found = [Variant("freescale, no part", balance=bool(b), look_ahead=bool(a), copies=bool(c)) for b, a, c in order]
    return [*(replace(v, name=f"freescale, {v.parts}") if v.parts else v for v in found), EVERYTHING]


@dataclass(frozen=True)
class Traffic:
    cluster: Cluster
    ranks: int
    copies: bool
    share: float = 1.0  # of the link speed

    @property
    def staged(self) -> bool:
        """Through host memory; inside one host, copy engines reach the other GPUs directly."""
        return self.copies and self.ranks > self.cluster.ranks_per_host

    def seconds(self, size: np.ndarray) -> np.ndarray:
        """`size`: bytes of each rank, evenly spread over all owners, including itself."""
        c, same_host = self.cluster, min(self.cluster.ranks_per_host, self.ranks)
        inside, between = size * (same_host - 1) / self.ranks, size * (self.ranks - same_host) / self.ranks
        outside_seconds = between / (c.between_gb_per_s * self.share * 1e9)
        if self.staged:
            link = np.maximum(outside_seconds, (inside + between) / (c.copy_engine_gb_per_s * 1e9))
        else:
            link = np.maximum(outside_seconds, inside / (c.inside_gb_per_s * self.share * 1e9))
        return np.where(size > 0, link + (self.ranks - 1) * c.message_us * 1e-6, 0.0)

    def transfer(self, group: str, asked: np.ndarray, *, to_owner: bool) -> Transfer:
        """`asked`: bytes that each rank requests or returns, [batches, ranks], evenly spread over owners."""
        c = self.cluster
        requester, owner = self.seconds(asked), self.seconds(np.broadcast_to(asked.mean(1, keepdims=True), asked.shape))
        out, into = (requester, owner) if to_owner else (owner, requester)
        filling = 2 * PIECE_BYTES / (c.copy_engine_gb_per_s * 1e9) if self.staged else 0.0
        return Transfer(group, out, into, c.latency_us * 1e-6 + filling, c.copy_tax if self.copies else c.sm_tax)


def transfers_of(variant: Variant, counts: Sequence[Counts], moved: np.ndarray, c: Cluster) -> dict[str, Transfer]:
    """All transfers that a variant may launch. `moved`: bytes of moved samples per batch, over all ranks."""
    ranks, row = len(counts[0].values), c.dim * c.row_element_bytes
    n = {name: np.stack([getattr(x, name) for x in counts]) for name in Counts._fields}
    link = Traffic(c, ranks, variant.copies, c.torchrec_link_share if variant.program is not None else 1.0)
    host = Traffic(c, ranks, copies=False)
    nothing = np.zeros_like(n["values"])

    def to(size: np.ndarray, group: str = "training") -> Transfer:
        return link.transfer(group, size, to_owner=True)

    def back(size: np.ndarray, group: str = "training") -> Transfer:
        return link.transfer(group, size, to_owner=False)

    def untaxed(t: Transfer) -> Transfer:
        return Transfer(t.group, t.out, t.into, c.latency_us * 1e-6)

    dense = untaxed(host.transfer("dense", nothing, to_owner=True))
    if variant.program is not None:
        early = n["values"] - n["urgent_values"]
        late = n["values"] - n["urgent_gradient_values"]
        return {
            "lengths": to(nothing + ranks * 4), "ids": to(n["values"] * ID_BYTES), "masks": back(2 * n["values"]),
            "rows": back(n["values"] * row), "gradients": to(n["values"] * row),
            "urgent values": back(n["urgent_values"] * row), "early values": back(early * row),
            "urgent value gradients": to(n["urgent_gradient_values"] * row), "late value gradients": to(late * row),
            "dense gradients": dense,
        }  # fmt: skip
    urgent, urgent_back = n["urgent"], n["urgent_gradients"]
    if not variant.look_ahead:
        urgent = urgent_back = n["unique"]
    planned = n["unique"] * (ID_BYTES + 2) + moved[:, None] / ranks
    return {
        "requests": untaxed(host.transfer("training", n["unique"] * ID_BYTES, to_owner=True)),
        "plan": untaxed(host.transfer("planning", planned, to_owner=True)),
        "urgent rows": back(urgent * row), "urgent gradients": to(urgent_back * row),
        "early rows": back((n["unique"] - urgent) * row, "background"),
        "late gradients": to((n["unique"] - urgent_back) * row, "background"),
        "dense gradients": dense,
    }  # fmt: skip


def program_of(variant: Variant, schedule: Callable[[bool], Program]) -> Program:
    """`schedule(look_ahead)`: a step as ordered by the passes."""
    if variant.program is not None:
        return variant.program
    ahead = (Launch("plan", 1),) if variant.look_ahead or variant.balance else ()
    return (*ahead, *schedule(variant.look_ahead), *END)


def work_of(variant: Variant, assignments: Sequence[Assignment], c: Cluster) -> np.ndarray:
    host_ms = c.host_ms + (c.host_ms_look_ahead if variant.look_ahead else 0.0)
    return np.stack([with_host_time(a.seconds, host_ms * 1e-3) for a in assignments])
