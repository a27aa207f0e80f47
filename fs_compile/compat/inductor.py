"""Compilation with Inductor: custom passes, caches, lowerings, node order."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch._functorch.config as functorch
import torch._inductor.config as config
from torch import fx
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from freescale.compat import direct_calls, dynamo, dynamo_settings, fx_values, interpreted_graph, kernel_launches
from freescale.compat.direct_calls import DirectOps
from freescale.compat.version import torch_version

__all__ = ["CustomGraphPass", "get_hash_for_files"]

log = logging.getLogger(__name__)

_OPS_WITHOUT_AUTOGRAD = ("aten", "prims", "inductor", "_c10d_functional", "freescale")
# Called around the compilation of each graph, with the graph and a function that compiles it or loads it from a cache.
Watch = Callable[[fx.GraphModule, Callable[[], Any]], Any]


def compile_with_inductor(
    gm: fx.GraphModule, inputs: Sequence[Any], post_pass: CustomGraphPass, watch: Watch, traced_anew: bool,
    direct_ops: DirectOps,
) -> Callable[..., Any]:  # fmt: skip
    """Compile; `post_pass` sees the post-grad graphs of the forward and the lazily compiled backward.

    `traced_anew`: skip AOTAutograd's cache, so that each graph is looked up by itself, under `watch`. Then a graph that
    needs no autograd calls `direct_ops` as functions and launches kernels with less overhead.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.output_code import CompiledFxGraph

    def compile_one(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        leave_autograd_out = traced_anew and _needs_no_autograd(gm)
        with dynamo_settings.compiling():
            compiled = watch(gm, lambda: compile_fx_inner(gm, inputs, **kwargs))
        if leave_autograd_out and isinstance(compiled, CompiledFxGraph):
            names = direct_calls.names_of(compiled)
            direct_ops.call_from(names)
            kernel_launches.shorten(names)
            compiled.current_callable = _below_autograd(compiled.current_callable)
        return compiled

    with functorch.patch(enable_autograd_cache=False) if traced_anew else contextlib.nullcontext():
        return compile_fx(gm, inputs, inner_compile=compile_one, config_patches=_patches(post_pass))  # type: ignore


def _needs_no_autograd(gm: fx.GraphModule) -> bool:
    """Whether each op is torch's or ours, or has an autograd kernel, inside which torch.library turns autograd off."""
    ops = {n.target for n in gm.graph.nodes if isinstance(n.target, torch._ops.OpOverload)}
    foreign = (op.name() for op in ops if op.namespace not in _OPS_WITHOUT_AUTOGRAD)
    return all(torch._C._dispatch_has_kernel_for_dispatch_key(name, "Autograd") for name in foreign)


def _below_autograd(call: Any) -> Callable[..., Any]:
    """Skip the autograd dispatch of every op, which for a Python op (`torch.library.custom_op`) is in Python, too."""
    guard = torch._C._AutoDispatchBelowAutograd

    def run(inputs: Any) -> Any:
        with guard():
            return call(inputs)

    return run


def compile_with_interpreter(
    gm: fx.GraphModule, inputs: Sequence[Any], post_pass: CustomGraphPass, record: Callable[[], Any], looked_up: bool
) -> tuple[Callable[..., Any], list[Any]]:
    """Run the same passes on the same graphs, but let torch run the graphs. AOTAutograd's cache stores them with what
    `record` returns after the passes, and loads them if `looked_up`. Also returns the records of loaded graphs."""
    from torch._inductor.compile_fx import compile_fx

    interpreted_graph.complete_values(gm)
    interpreted_graph.take_loaded()
    compile_one = functools.partial(_interpret, record=record)
    with interpreted_graph.keeping_graphs(looked_up and not _ranks_talk_while_compiling()):
        compiled: Any = compile_fx(gm, inputs, inner_compile=compile_one, config_patches=_patches(post_pass))  # type: ignore
    return compiled, interpreted_graph.take_loaded()


def _patches(post_pass: CustomGraphPass) -> dict[str, Any]:
    theirs = config.post_grad_custom_post_pass
    if theirs is not None and type(theirs) is not type(post_pass):
        post_pass = _Chain(theirs, post_pass)
    patches: dict[str, Any] = {"post_grad_custom_post_pass": post_pass}
    if hasattr(getattr(config, "aten_distributed_optimizations", None), "enable_simple_overlap"):
        # On since torch 2.14. It reorders c10d launches and waits around ours, which it does not know, and undoes the
        # placement by overlap_attention.
        patches["aten_distributed_optimizations.enable_simple_overlap"] = False
    if config.cpp_wrapper:
        # Seen with torch 2.11 on a GPU: with lookahead, the C++ wrapper computes wrong results.
        log.warning("Inductor's cpp_wrapper is off for graphs that freescale compiles")
        patches["cpp_wrapper"] = False
    return patches


class _Chain(CustomGraphPass):
    def __init__(self, theirs: Any, ours: CustomGraphPass) -> None:
        self.passes = [*theirs, ours] if isinstance(theirs, (list, tuple)) else [theirs, ours]

    def __call__(self, graph: fx.Graph) -> None:
        for p in self.passes:
            p(graph)

    def uuid(self) -> Any:
        ids = [p.uuid() if hasattr(p, "uuid") else None for p in self.passes]
        return None if None in ids else repr(ids)


def _interpret(
    gm: fx.GraphModule, inputs: Sequence[Any], record: Callable[[], Any], **kwargs: Any
) -> Callable[[list[Any]], Any]:
    """An `inner_compile` that stops after the post-grad passes: the graph's own Python code runs. Boxed: the caller's
    references are dropped when the graph starts, so memory is freed as usual."""
    from torch._inductor.compile_fx import _recursive_post_grad_passes
    from torch._inductor.virtualized import V
    from torch.fx.graph import _BoxedCodeGen

    with dynamo_settings.compiling(), dynamo.no_modes(), V.set_fake_mode(fx_values.detect_fake_mode(gm)):
        _recursive_post_grad_passes(gm, is_inference=kwargs.get("is_inference", False))
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    if interpreted_graph.graphs_are_kept():
        return interpreted_graph.InterpretedGraph(gm, record())

    def run(args: list[Any]) -> Any:
        return gm.forward(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def caches_are_on() -> bool:
    # Inductor's cache; without it AOTAutograd's is off too
    return bool(config.fx_graph_cache) and not torch.compiler.config.force_disable_caches


def waiting_for_caches_pays() -> bool:
    """Whether code compiled by another process will be in a cache, and that process needs no other rank to compile."""
    return caches_are_on() and not _ranks_talk_while_compiling()


def _ranks_talk_while_compiling() -> bool:
    """torch features, off by default, with which ranks compare or measure something during compilation."""
    overlap = getattr(config, "aten_distributed_optimizations", None)
    flags = (
        (functorch, "_sync_decision_cross_ranks"),
        (config, "distributed_max_autotune_gemm"),
        (config, "reorder_for_compute_comm_overlap"),
        (overlap, "enable_overlap_scheduling"),
    )
    return any(getattr(where, name, False) for where, name in flags)


def cache_hits() -> int:
    return counters["inductor"]["fxgraph_cache_hit"]


def whole_hits() -> int:
    """Graphs loaded from AOTAutograd's cache, together with their backward graphs."""
    return counters["aot_autograd"]["autograd_cache_hit"]


def cache_key(compiled: Any) -> str | None:
    return getattr(compiled, "_fx_graph_cache_key", None)


def cache_dir() -> str:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def bind_order(graph: fx.Graph, after: Mapping[fx.Node, Sequence[fx.Node]]) -> None:
    """Make Inductor run each node after those listed for it, regardless of its reordering."""
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    preserve_node_ordering(graph, {node: OrderedSet(deps) for node, deps in after.items()})


def register_launch_lowering(op: Any) -> None:
    """Lower an asynchronous collective so that Inductor keeps its input until the wait. (It keeps only the first of
    several inputs, so an op that takes a list has a send buffer of its own.)"""
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering

    @register_lowering(op, type_promotion_kind=None)
    def _lower(x: Any, *args: Any, **kwargs: Any) -> Any:
        contiguous: Any = ir.ExternKernel.require_contiguous
        sent: Any = [contiguous(t) for t in x] if isinstance(x, (list, tuple)) else contiguous(x)
        kernel: Any = ir._CollectiveKernel.create_out_of_place(op.default, sent, *args, **kwargs)
        return ir.TensorBox.create(kernel)


def ops_of(namespace: str) -> list[torch._ops.OpOverload]:
    names = sorted(n for n in torch._C._dispatch_get_all_op_names() if n.startswith(f"{namespace}::"))
    return [getattr(getattr(torch.ops, namespace), n.partition("::")[2]).default for n in names]


def backport_empty_grids() -> None:
    """Before 2.13 a tiled Triton kernel over no elements divides by zero at launch. Applies to all models: launch code
    may be generated long after the kernel was compiled."""
    from torch._inductor.runtime.triton_heuristics import Grid2DWithYZOverflow

    generate = Grid2DWithYZOverflow.generate
    if torch_version() not in ("2.11", "2.12") or getattr(generate, "_freescale", False):
        return

    def guarded(self: Any, *args: Any, **kwargs: Any) -> None:
        generate(self, *args, **kwargs)
        if self.mode == "python":
            self.y_grid = f"(0 if y_grid_div_ == 0 else {self.y_grid})"

    guarded._freescale = True  # type: ignore[attr-defined]
    Grid2DWithYZOverflow.generate = guarded  # type: ignore[method-assign]


def backport_fake_of_fake() -> None:
    """2.12's pattern matcher makes fakes of fakes, which checks whether an unknown size is 0: return existing fakes."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    from_tensor = FakeTensorMode.from_tensor
    if torch_version() != "2.12" or getattr(from_tensor, "_freescale", False):
        return

    def keep_fakes(self: Any, tensor: torch.Tensor, **kwargs: Any) -> Any:
        is_own = not kwargs and isinstance(tensor, FakeTensor) and tensor.fake_mode is self
        if is_own and dynamo_settings.is_tracing():
            return tensor
        return from_tensor(self, tensor, **kwargs)

    keep_fakes._freescale = True  # type: ignore[attr-defined]
    FakeTensorMode.from_tensor = keep_fakes  # type: ignore[method-assign]
