"""Preloaded by the forkserver of ranks.py: all that every rank imports and prepares before its first compilation.

Loads freescale's modules without using them; the backend reads its settings at import, so ranks import it themselves.
Trains a small model of the same kind (symbolic and unbacked sizes, a custom op, an autograd.Function) through
AOTAutograd and Inductor's passes, so that torch and SymPy fill graph-independent caches: a quarter of a rank's first
compilation. Also hashes the sources of torch and Triton for torch's cache keys, which takes a second per rank. Leaves
no threads, which a fork would lose.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
from typing import Any

import sympy
import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
import torch.distributed  # noqa: F401
import torch.fx.experimental._config as shapes
import tqdm
from torch import nn
from torch._inductor.compile_fx import _recursive_post_grad_passes, compile_fx
from torch._inductor.fx_passes import joint_graph, post_grad
from torch._inductor.virtualized import V

# Imported by tests, or by torch during code generation and checkpointing.
LATER = (
    "expecttest",
    "hypothesis.strategies",
    "pytest",
    "sympy.physics.units",
    "torch._dynamo.dce_extra_outputs",
    "torch._higher_order_ops.passes.inline_invoke_subgraph",
    "torch._inductor.bounds",
    "torch._inductor.choices",
    "torch._inductor.codegen.cpp",
    "torch._inductor.codegen.cpp_wrapper_cpu",
    "torch._inductor.codegen.cpp_wrapper_gpu",
    "torch._inductor.codegen.cpu_device_op_overrides",
    "torch._inductor.codegen.memory_planning",
    "torch._inductor.codegen.segmented_tree",
    "torch._inductor.codegen.wrapper",
    "torch._inductor.codegen.wrapper_fxir",
    "torch._inductor.extern_node_serializer",
    "torch._inductor.fx_passes.apply_gumbel_max_trick",
    "torch._inductor.fx_passes.efficient_conv_bn_eval",
    "torch._inductor.hooks",
    "torch._inductor.kernel_template_choice",
    "torch._inductor.runtime.triton_heuristics",
    "torch._inductor.scheduler",
    "torch._subclasses.schema_check_mode",
    "torch.distributed._functional_collectives",
    "torch.distributed.checkpoint",
    "torch.export._trace",
    "torch.export._unlift",
    "torch.fx.experimental.validator",
    "torch.utils._cpp_embed_headers",
    "torch.utils.cpp_extension",
)
FREESCALE = (
    "freescale.driver",
    "freescale.runtime.lookahead.loader",
    "freescale.runtime.tables.sharded_embedding",
)
TORCHREC = ("torchrec", "torchrec.distributed.embedding", "torchrec.distributed.planner")
HAS_TORCHREC = all(importlib.util.find_spec(name) is not None for name in ("torchrec", "fbgemm_gpu"))


lib = torch.library.Library("warm", "DEF")
lib.define("unique(Tensor ids) -> (Tensor, Tensor)")


@torch.library.register_fake("warm::unique", lib=lib)
def _(ids):
    return ids.new_empty(torch.library.get_ctx().new_dynamic_size()), torch.empty_like(ids)


@torch.library.impl("warm::unique", "CPU", lib=lib)
def _unique(ids):
    return torch.unique(ids, return_inverse=True)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor, weight, rows, inverse):  # type: ignore[override]
        ctx.save_for_backward(anchor.detach(), rows, inverse)
        return weight.index_select(0, rows).index_select(0, inverse)

    @staticmethod
    def backward(ctx: Any, grad):  # type: ignore[override]
        anchor, rows, inverse = ctx.saved_tensors
        summed = grad.new_zeros(rows.shape[0], grad.shape[1]).index_add(0, inverse, grad / 2)
        return torch.empty_like(anchor) + summed.sum() * 0, None, None, None


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(5, 4))
        self.anchor = torch.empty(0, 4).requires_grad_()
        self.out = nn.Linear(4, 4)

    def lookup(self, ids: list[torch.Tensor]) -> Any:
        rows, inverse = torch.ops.warm.unique(torch.cat(ids))
        found = _Rows.apply(self.anchor, self.weight, rows, inverse)
        return torch.split(found, [i.shape[0] for i in ids])

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = batch["weight"].sum() * 0.0
        for found in self.lookup([batch["item"], batch["user"]]):
            loss = loss + (torch.tanh(self.out(found)) * found).sum() / 8
        return loss


def _interpret(gm: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
    mode = torch._guards.detect_fake_mode([n.meta["val"] for n in gm.graph.nodes if "val" in n.meta])
    with torch.utils._python_dispatch._disable_current_modes(), V.set_fake_mode(mode):
        _recursive_post_grad_passes(gm, is_inference=False)
    gm.recompile()
    interpreter = torch.fx.Interpreter(gm)

    def run(args: Any) -> Any:
        return interpreter.run(*args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
    return compile_fx(gm, inputs, inner_compile=_interpret)


def _train(model: nn.Module, *batch: Any) -> None:
    with (
        torch._dynamo.config.patch(
            capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True, assume_static_by_default=False,
            specialize_float=True, skip_torchrec=False, force_unspec_int_unbacked_size_like_on_torchrec_kjt=True,
        ),
        shapes.patch(use_duck_shape=False),
    ):  # fmt: skip
        torch.compile(model, backend=_backend, fullgraph=True)(*batch).backward()
        with torch.no_grad():
            torch.compile(model, backend=_backend, fullgraph=True)(*batch)
    torch._dynamo.reset()


def _sizes() -> None:
    """SymPy's facts about sizes; it caches them by name, and torch names sizes s0 to s99, u0, u1, ..."""
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.symbol import SymT, make_symbol

    sizes = [make_symbol(SymT.SIZE, i, positive=True, integer=True) for i in range(100)]
    sizes += [make_symbol(SymT.UNBACKED_INT, i, integer=True) for i in range(40)]
    for s in sizes:
        for x in (s, -s, s - 1, 1 - s, s - 2, s + 1):
            x.is_extended_nonnegative, x.is_extended_positive, x.is_zero  # noqa: B018
        for n in (0, 1, 2, int_oo):
            s >= n, s > n, s <= n, s < n, sympy.Eq(s, n), sympy.Ne(s, n), n <= s  # noqa: B015, B018


def _leave_out_logs() -> None:
    """Skip torch's computations that only go to its logs, which ranks of tests do not have."""
    for module, name, result in (
        ("torch._dynamo.guards", "profile_guard_manager", 0.0),  # measures guards, on a CPU with empty caches
        ("torch._functorch._aot_autograd.graph_compile", "_log_joint_graph", None),
        ("torch._functorch._aot_autograd.graph_compile", "_log_fw_bw_graphs", (None, None)),
    ):
        found = importlib.import_module(module)
        if hasattr(found, name):  # depends on the torch release
            setattr(found, name, lambda *_args, result=result: result)
    if hasattr(torch._dynamo.config, "side_effect_replay_policy"):
        torch._dynamo.config.side_effect_replay_policy = "silent"


def _cache_keys() -> None:
    from torch._inductor import codecache

    for name in ("torch_key", "triton_key"):  # depends on the torch release
        getattr(codecache, name, lambda: None)()
    codecache.CacheBase.get_system()


def _registered() -> None:
    """Fill torch's lists of backends (searched in all installed packages), of devices to compile for, and of the
    instruction sets of the CPU (Inductor compiles and runs a program for some of them in every fresh cache folder)."""
    from torch._inductor import cpu_vec_isa
    from torch._inductor.codegen import common

    torch._dynamo.list_backends()
    common.init_backend_registration()
    common.get_device_op_overrides("cpu")
    cpu_vec_isa.pick_vec_isa()


def _threads() -> int:
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1


def _start_autograd() -> None:
    """Autograd starts a thread per device, once. With CUDA builds of torch, the first fake tensor simulates eight."""
    torch.ones(1, requires_grad=True).sum().backward()


def _warm_up() -> None:
    torch.set_num_threads(1)
    _start_autograd()
    tqdm.tqdm.monitor_interval = 0  # else it starts a thread
    for name in LATER:
        with contextlib.suppress(ModuleNotFoundError):  # depends on the torch release
            importlib.import_module(name)
    for name in (*FREESCALE, *(TORCHREC if HAS_TORCHREC else ())):
        importlib.import_module(name)
    _leave_out_logs()
    joint_graph.lazy_init(torch.device("cpu"))
    post_grad.lazy_init()
    ids = torch.tensor([1, 2, 1])
    _train(_Model(), {"item": ids, "user": ids[:2], "weight": torch.ones(2)})
    _sizes()
    _cache_keys()
    _registered()
    torch._dynamo.utils.counters.clear()


_warm_up()
assert _threads() == 1, "a thread would be lost in a fork"
gc.collect()
gc.freeze()  # keeps a rank's garbage collector from visiting torch repeatedly
