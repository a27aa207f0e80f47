"""Trace the graphs of a sequence recommender before freescale orders them, and derive the program from their order.

The model is HSTU as seen by a compiler: one table, and blocks of two projections around an attention op, narrow and
with short batches. Nothing is timed. Graphs do not depend on the number of ranks, so the traced world has one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import fx, nn
from torch.utils.flop_counter import register_flop_formula

from freescale import driver
from freescale.passes import node_cost
from freescale.passes.graph import EXCHANGE_KEY, WAIT, GraphExchange, exchanges, waits_of
from freescale.passes.overlap_attention import best_order, memory_bound
from freescale.runtime.lookahead.loader import LookaheadLoader
from freescale.runtime.tables.sharded_embedding import ShardedEmbedding
from freescale.simulate.events import Compute, Launch, Program, Wait

DIM, HEADS, SAMPLES, LENGTH, ROWS = 8, 2, 4, 128, 4096
BEFORE_ORDER = "gather_parts"  # the pass before the ordering pass
ONE_FLOP_PER_SECOND = node_cost.MachineSpeed(flops=1.0, memory=float("inf"))
# Batch of a transfer, relative to the step that launches it.
STEP_OF = {"early rows": 1, "late gradients": -1}


@dataclass(frozen=True)
class TracedGraph:
    nodes: list[fx.Node]
    exchanges: list[GraphExchange]
    flops: dict[fx.Node, float]  # floating-point operations; 0 for nodes that are fused into others
    square: set[fx.Node]  # nodes with work quadratic in the length
    max_bytes: int  # memory limit, at the traced sizes


@torch.library.custom_op("freescale_simulate::attention", mutates_args=())
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return v.clone()


@attention.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(v)


@torch.library.custom_op("freescale_simulate::attention_backward", mutates_args=())
def attention_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.zeros_like(q), torch.zeros_like(k), grad.clone()


@attention_backward.register_fake
def _(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return (*attention_backward(grad, *ctx.saved_tensors), None)


attention.register_autograd(_gradients, setup_context=_save)


@register_flop_formula(torch.ops.freescale_simulate.attention)
def _flops(q: Any, k: Any, v: Any, offsets: Any, *args: Any, **kwargs: Any) -> int:
    """Two products of each query with all preceding keys."""
    rows, heads, width = q
    return 2 * rows * (rows // max(offsets[0] - 1, 1)) * heads * (width + v[2])


@register_flop_formula(torch.ops.freescale_simulate.attention_backward)
def _backward_flops(grad: Any, q: Any, k: Any, v: Any, offsets: Any, *args: Any, **kwargs: Any) -> int:
    """Five products instead of two."""
    return 5 * _flops(q, k, v, offsets) // 2


ATTENTION = (torch.ops.freescale_simulate.attention, torch.ops.freescale_simulate.attention_backward)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_out = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.project_in, self.project_out = nn.Linear(DIM, 4 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        u, *parts = F.silu(self.project_in(self.norm(x))).split(DIM, dim=1)
        v, q, k = (part.reshape(-1, HEADS, DIM // HEADS) for part in parts)
        return x + self.project_out(self.norm_out(attention(q, k, v, offsets).reshape(-1, DIM)) * u)


class Recommender(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.item = ShardedEmbedding(ROWS, DIM, name="item", optimizer="rowwise_adagrad")
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x, lengths = self.item(batch["item"]), batch["item_lengths"]
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        for block in self.blocks:
            x = block(x, offsets)
        return x.square().mean()


@contextmanager
def _world_of_one() -> Iterator[None]:
    if dist.is_initialized():
        raise RuntimeError("freescale: simulate creates its own process group, but this process already has one")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def trace(layers: int, look_ahead: bool) -> dict[str, TracedGraph]:
    found: dict[str, TracedGraph] = {}

    def keep(direction: str, name: str, graph: fx.Graph) -> None:
        if name == BEFORE_ORDER:
            found[direction] = _record(graph)

    batches = _batches()
    torch._dynamo.reset()
    stop = driver.observe(keep)
    try:
        with _world_of_one():
            options: Any = {"codegen": "eager", "passes": "-overlap_attention,-lower_copies", "dense": "off"}
            model: Any = torch.compile(Recommender(layers), backend="freescale", fullgraph=True, options=options)
            for batch in LookaheadLoader(batches, model) if look_ahead else batches[:1]:
                model(batch).backward()
    finally:
        stop()
        torch._dynamo.reset()
    return found


def _record(graph: fx.Graph) -> TracedGraph:
    nodes, to_place = list(graph.nodes), exchanges(graph)
    flops = {n: node_cost.seconds(n, ONE_FLOP_PER_SECOND) for n in nodes}
    square = {n for n in nodes if getattr(n.target, "overloadpacket", None) in ATTENTION}
    return TracedGraph(nodes, to_place, flops, square, memory_bound(nodes, to_place))


def _batches() -> list[dict[str, torch.Tensor]]:
    """Three batches: the first has no early rows, the last leaves no late gradients. All have the same graphs."""
    random = torch.Generator().manual_seed(0)
    lengths = torch.full((SAMPLES,), LENGTH)
    ids = [torch.randint(0, ROWS, (SAMPLES * LENGTH,), generator=random) for _ in range(3)]
    return [{"item": i, "item_lengths": lengths.clone()} for i in ids]


def program_of(
    graphs: Mapping[str, TracedGraph],
    per_token: float,
    per_square: float,
    traced_bytes: Mapping[str, float],
    bytes_per_second: float,
) -> Program:
    """The order that `overlap_attention` gives both graphs, as launches, waits and compute, for a rank with these
    seconds of compute per step and a first batch that sends these bytes ("urgent rows", ...)."""
    total = {False: 0.0, True: 0.0}  # floating-point operations, by whether they are quadratic in the length
    for graph in graphs.values():
        for n in graph.nodes:
            total[n in graph.square] += graph.flops[n]
    program: list[Compute | Launch | Wait] = []
    for direction in ("forward", "backward"):
        graph = graphs[direction]
        shares = {n: graph.flops[n] / max(total[n in graph.square], 1e-30) for n in graph.nodes}
        seconds = {n: share * (per_square if n in graph.square else per_token) for n, share in shares.items()}
        sized = [replace(x, bytes=sympy.Integer(round(traced_bytes[_name(x)]))) for x in graph.exchanges]
        order = best_order(graph.nodes, sized, seconds, bytes_per_second, graph.max_bytes)
        program += _instructions(order, graph, shares)
    return _joined(program)


def _name(x: object) -> str:
    return f"{x.priority} {x.payload}"  # type: ignore[attr-defined]


def _instructions(order: list[fx.Node], graph: TracedGraph, shares: Mapping[fx.Node, float]) -> Iterable:
    launched = {w: x for x in graph.exchanges for w in waits_of(x.launch)}
    for node in order:
        if EXCHANGE_KEY in node.meta:
            name = _name(node.meta[EXCHANGE_KEY])
            yield Launch(name, STEP_OF.get(name, 0))
        elif node in launched:
            name = _name(launched[node])
            yield Wait(name, STEP_OF.get(name, 0))
        elif node.target is WAIT:  # launched by the previous step
            yield Wait("early rows")
        elif "plan_now" in str(node.target):
            yield from (Launch("requests"), Wait("requests"))
        elif shares[node]:
            yield Compute(0.0, shares[node]) if node in graph.square else Compute(shares[node], 0.0)


def _joined(program: list) -> Program:
    joined: list = []
    for instruction in program:
        if joined and isinstance(instruction, Compute) and isinstance(joined[-1], Compute):
            joined[-1] = Compute(*(a + b for a, b in zip(joined[-1], instruction, strict=True)))
        else:
            joined.append(instruction)
    return joined
