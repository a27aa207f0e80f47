"""Every private torch API that freescale uses, so that a new torch release breaks this file and no other.

Imports torch alone. `self_test` touches each of them; tests/test_compat.py runs it on every version that we
support.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import sympy
import torch
import torch.distributed as dist
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

__all__ = ["CustomGraphPass", "get_hash_for_files"]

SUPPORTED = ("2.11", "2.12", "2.13")


def torch_version() -> str:
    """Major and minor version, as in "2.13"."""
    return ".".join(torch.__version__.split("+")[0].split(".")[:2])


# ---- distributed -------------------------------------------------------------------------------------------


def register_work(tensor: torch.Tensor, work: dist.Work) -> None:
    """Make `_c10d_functional.wait_tensor(tensor)` wait for `work`."""
    torch._C._distributed_c10d._register_work(tensor, work)


def group_by_name(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def default_store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def devices_of_group(group: dist.ProcessGroup) -> tuple[str, ...]:
    """Device types that the group can send from, as ("cpu", "cuda")."""
    return tuple(d.type for d in group._device_types)


def gather_ints(mine: Sequence[int], group: dist.ProcessGroup) -> list[list[int]]:
    """What every rank says, in rank order."""
    said = torch.tensor(mine)
    heard = [torch.empty_like(said) for _ in range(group.size())]
    group.allgather([heard], [said]).wait()
    return [h.tolist() for h in heard]


def hang_up(group: dist.ProcessGroup) -> None:
    """Close this rank's connections of a gloo group: what its peers wait for fails at once, there and here.

    Gloo cannot abort a group; it closes one in which a receive has timed out. So: one that nobody sends. Never raises.
    """
    if group.size() > 1:
        with contextlib.suppress(Exception):
            nobody = group.recv([torch.empty(1)], (group.rank() + 1) % group.size(), _NEVER_SENT)
            nobody.wait(timedelta(milliseconds=1))


_NEVER_SENT = 2**31 - 1  # a tag


def is_gloo(group: dist.ProcessGroup) -> bool:
    """Does gloo carry the group's CPU tensors?"""
    if "cpu" not in devices_of_group(group):
        return False
    return isinstance(group._get_backend(torch.device("cpu")), getattr(dist, "ProcessGroupGloo", ()))


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long an operation of the group may take."""
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError, AttributeError):
            return group._get_backend(torch.device(device)).options._timeout  # type: ignore[no-any-return]
    return dist.default_pg_timeout


def symmetric_buffer(
    nbytes: int, device: torch.device, group: dist.ProcessGroup
) -> tuple[torch.Tensor, list[int]]:
    """Bytes of this rank that its peers can reach, and every rank's address of its own as seen from here."""
    import torch.distributed._symmetric_memory as symmetric

    buffer = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
    handle: Any = symmetric.rendezvous(buffer, group)
    return buffer, [int(p) for p in handle.buffer_ptrs]


def profiling() -> bool:
    """Is a torch profiler on?"""
    return torch.autograd.profiler._is_profiler_enabled


# ---- Dynamo ------------------------------------------------------------------------------------------------


def _dynamo_config() -> Any:
    import torch._dynamo.config as dynamo

    return dynamo


def dynamo_settings(dynamic: bool) -> dict[str, Any]:
    """What Dynamo must be told so that a TorchRec model becomes one graph, as {attribute: value}."""
    settings: dict[str, Any] = {
        "capture_scalar_outputs": True,  # sizes that depend on the batch stay in the graph
        "capture_dynamic_output_shape_ops": True,  # and so do ops whose output sizes do (plan_now)
        "skip_torchrec": False,  # trace into TorchRec's modules
        "force_unspec_int_unbacked_size_like_on_torchrec_kjt": True,  # lengths per key are not constants
        "optimize_ddp": False,  # no cut of the graph at DDP's buckets
        # Training, evaluation, batches of one sample, with and without a plan: each has a graph. Torch gives up at 8.
        "recompile_limit": max(64, _dynamo_config().recompile_limit),
    }
    if dynamic:
        settings["assume_static_by_default"] = False
        settings["specialize_float"] = True  # else LayerNorm.eps and the like become inputs
    return settings


def shape_settings(dynamic: bool) -> dict[str, Any]:
    """The same for symbolic shapes."""
    if not dynamic:
        return {}
    return {
        "backed_size_oblivious": True,  # an empty batch does not make a graph of its own; see specialize_sizes_of_one
        "use_duck_shape": False,  # nor do two sizes that are equal by chance in the first batch
    }


def apply_dynamo_settings(dynamic: bool) -> dict[str, tuple[Any, Any]]:
    """Set them; return what changed as {name: (before, after)}."""
    import torch._dynamo.config as dynamo
    import torch.fx.experimental._config as shapes

    changed: dict[str, tuple[Any, Any]] = {}
    wanted = [(dynamo, k, v) for k, v in dynamo_settings(dynamic).items()]
    wanted += [(shapes, k, v) for k, v in shape_settings(dynamic).items()]
    for module, name, value in wanted:
        before = getattr(module, name)
        if before != value:
            setattr(module, name, value)
            changed[name] = (before, value)
    return changed


PLANNED = "freescale_plan"  # in the names by which Dynamo knows the tensors of a plan


def specialize_sizes_of_one() -> None:
    """A size of 1 in what the user passes makes a graph of its own, as it always does in torch.

    `backed_size_oblivious` lets sizes 0 and 1 stay symbolic, and takes every comparison with them for false without a
    guard. For 0 that is sound. For 1 it is not: what broadcasts, squeezes or is contiguous depends on it. So only the
    sizes of our own plans, which nothing broadcasts, may be anything.

    And a parameter's gradient has no symbolic size: Dynamo does not know its sources, so it cannot guard on them.
    (A view into one of DDP's buckets gets some.)
    """
    from torch._dynamo.source import TensorProperty, TensorPropertySource
    from torch.fx.experimental import _config as shapes
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    create = ShapeEnv.create_symbol
    if getattr(create, "_freescale", False):
        return

    def create_symbol(
        self: Any,
        val: Any,
        source: Any,
        dynamic_dim: Any = DimDynamic.DUCK,
        constraint_dim: Any = None,
        positive: Any = True,
        do_not_specialize_zero_one: bool = False,
        **kwargs: Any,
    ) -> Any:
        planned = PLANNED in _source_name(source)
        is_base = getattr(getattr(source, "base", None), "member", None) == "_base"  # of a view
        not_asked_for = is_base or (dynamic_dim is DimDynamic.DYNAMIC and constraint_dim is None)
        if not_asked_for and _is_gradient(source) and not planned:
            dynamic_dim = DimDynamic.STATIC
        backed = type(val) is int and dynamic_dim is not DimDynamic.STATIC and shapes.backed_size_oblivious
        is_size = isinstance(source, TensorPropertySource) and source.prop is TensorProperty.SIZE
        theirs = backed and is_size and do_not_specialize_zero_one and not planned
        if theirs and val == 1:
            do_not_specialize_zero_one = False
        made = create(
            self, val, source, dynamic_dim, constraint_dim, positive, do_not_specialize_zero_one, **kwargs
        )
        if theirs and not is_base and made in self.backed_var_to_val:
            self.evaluate_expr(sympy.Ne(made, 1))
        return made

    create_symbol._freescale = True  # type: ignore[attr-defined]
    ShapeEnv.create_symbol = create_symbol  # type: ignore[method-assign, assignment]


def _source_name(source: Any) -> str:
    return source.name() if callable(source.name) else source.name  # a method before 2.13


def _is_gradient(source: Any) -> bool:
    """A property of some tensor's `.grad`, or of what that is a view of."""
    tensor = getattr(source, "base", None)
    while getattr(tensor, "member", None) == "_base":
        tensor = tensor.base  # type: ignore[union-attr]
    return getattr(tensor, "member", None) == "grad"


def assume_constant_result(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo runs `fn` while it traces and takes the result as a constant."""
    return torch._dynamo.assume_constant_result(fn)


def leave_graph(reason: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Dynamo never traces `fn`: a graph ends before it; where it must not end, torch's error says `reason`."""
    return torch._dynamo.disable(reason=reason)  # type: ignore[no-untyped-call,no-any-return]


def is_compiled(x: Any) -> bool:
    """A module or function that torch.compile returned, or a module that it has compiled in place."""
    if isinstance(x, torch._dynamo.OptimizedModule):
        return callable(x.dynamo_ctx.callback)  # torch.compiler.disable makes them too
    if isinstance(x, torch.nn.Module):
        return compiled_in_place(x) or is_compiled(x.__dict__.get("forward"))
    return hasattr(x, "_torchdynamo_orig_callable") and not getattr(x, "_torchdynamo_disable", False)


def compiled_in_place(module: torch.nn.Module) -> bool:
    """By module.compile(...)."""
    return module._compiled_call_impl is not None


class AroundCompiledCall:
    """Until `remove`, `before` and `after` run around every call of a module that was compiled in place.

    (Hooks of such a module are compiled with it. Inside the graph of a caller nothing runs.)
    """

    def __init__(
        self, module: torch.nn.Module, before: Callable[[Any, Any, Any], None], after: Callable[[Any], None]
    ) -> None:
        compiled: Any = module._compiled_call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return compiled(*args, **kwargs)
            try:
                before(module, args, kwargs)
                return compiled(*args, **kwargs)
            finally:
                after(module)

        self._module, self._compiled, self._call = module, compiled, call
        module._compiled_call_impl = call

    def remove(self) -> None:
        if self._module._compiled_call_impl is self._call:  # not compiled anew since
            self._module._compiled_call_impl = self._compiled


def backend_of(compiled: Any) -> Any:
    """The backend function of a module that torch.compile returned."""
    fn = _unwrapped(compiled.dynamo_ctx.callback)
    return getattr(fn, "compiler_fn", fn)


def _unwrapped(backend: Any) -> Any:
    while hasattr(backend, "_torchdynamo_orig_backend"):  # Dynamo's wrappers
        backend = backend._torchdynamo_orig_backend
    return backend


_PREFIX = "_orig_mod."  # of the keys of what torch.compile returns


def load_eager_checkpoints(backend: Callable[..., Any]) -> None:
    """What torch.compile(module, backend) returns loads checkpoints of `module` as well as its own.

    A module with a state_dict of its own (TorchRec's DistributedModelParallel) knows nothing of a wrapper around it, so
    that what the wrapper saves with its help has keys that nobody can load: there it saves and loads for the wrapper.
    """
    wrapper: Any = torch._dynamo.OptimizedModule
    if hasattr(wrapper.state_dict, "_freescale"):
        return
    save, load, load_own = wrapper.state_dict, wrapper.load_state_dict, wrapper._load_from_state_dict

    def for_itself(self: Any) -> bool:
        own = type(self._orig_mod).state_dict is not torch.nn.Module.state_dict
        return own and backend_of(self) is backend

    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._orig_mod.state_dict(*args, **kwargs) if for_itself(self) else save(self, *args, **kwargs)

    def load_state_dict(self: Any, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        if not for_itself(self):
            return load(self, state_dict, strict, assign)
        found = OrderedDict(state_dict)
        while any(key.startswith(_PREFIX) for key in found):
            torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(found, _PREFIX)
        return self._orig_mod.load_state_dict(found, strict=strict, **({"assign": True} if assign else {}))

    def _load_from_state_dict(self: Any, state_dict: Any, prefix: str, *args: Any) -> None:
        if backend_of(self) is backend:
            eager = [k for k in state_dict if k.startswith(prefix) and not k.startswith(prefix + _PREFIX)]
            for key in eager:
                state_dict[prefix + _PREFIX + key[len(prefix) :]] = state_dict.pop(key)
        load_own(self, state_dict, prefix, *args)

    state_dict._freescale = True  # type: ignore[attr-defined]
    wrapper.state_dict, wrapper.load_state_dict = state_dict, load_state_dict
    wrapper._load_from_state_dict = _load_from_state_dict


def mark_static(tensor: torch.Tensor, first: int = 0) -> torch.Tensor:
    """A graph input whose sizes, from dimension `first` on, are part of the graph.

    (torch._dynamo.mark_static does nothing while tracing.)
    """
    tensor._dynamo_static_indices = set(range(first, tensor.dim()))  # type: ignore[attr-defined]
    return tensor


def current_compile_id() -> str:
    """Frame and compilation, as "3/1"; a second number above 0 is a recompilation of that frame."""
    current = torch._guards.CompileContext.current_compile_id()
    return str(current) if current is not None else "?/0"


def options_of(compiled: Any) -> dict[str, Any]:
    """The `options` that torch.compile(..., backend="freescale", options=...) was given; none for another backend.

    `compiled` is what torch.compile returned, or a module that was compiled in place, or whose forward was compiled.
    """
    found: Any
    for found in (getattr(compiled, "_compiled_call_impl", None), compiled, getattr(compiled, "forward", None)):
        context = getattr(found, "dynamo_ctx", None)
        if context is None and hasattr(found, "get_compiler_config"):  # a function: its context is in a closure
            cells = [cell.cell_contents for cell in found.get_compiler_config.__closure__ or ()]
            context = next((c for c in cells if hasattr(c, "callback")), None)
        if context is not None:
            return _options_of_backend(context.callback)
    return {}


def options_while_tracing() -> dict[str, Any]:
    """The same, of the compilation for which Dynamo is tracing now; none where it is not."""
    from torch._dynamo.symbolic_convert import InstructionTranslator, tls

    tracing = getattr(tls, "current_tx", None)
    return _options_of_backend(InstructionTranslator.current_tx().output.compiler_fn) if tracing else {}


def _options_of_backend(backend: Any) -> dict[str, Any]:
    backend = _unwrapped(backend)
    ours = getattr(backend, "compiler_name", "") == "freescale"
    return dict(backend.kwargs.get("options") or {}) if ours else {}


def graph_breaks() -> dict[str, int]:
    """Reason and number of Dynamo's graph breaks in this process."""
    from torch._dynamo.utils import counters

    return dict(counters["graph_break"])


def is_ddp_break(reason: str) -> bool:
    """DDP's own forward, around the wrapped model: its logger and its context manager."""
    return "set_runtime_stats_and_log" in reason or "_inside_ddp_forward" in reason


def log_once(name: str) -> None:
    """Lines of a log to which TORCH_LOGS gave a handler do not go to the root's handlers too, as with torch's own."""
    from torch._logging._internal import _is_torch_handler

    log = logging.getLogger(name)
    if any(map(_is_torch_handler, log.handlers)):
        log.propagate = False


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """A file in tlparse's report (TORCH_TRACE)."""
    torch._logging.trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text
    )


@contextlib.contextmanager
def outside_inference_mode() -> Iterator[None]:
    """In place of torch.inference_mode, torch.no_grad: tensors that are made here can be trained with."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextlib.contextmanager
def autograd_inside_op() -> Iterator[None]:
    """Autograd works inside an op, also where a dispatch mode around it, or inference mode, has switched it off.

    AOTAutograd runs the first call of a forward graph under such a mode.
    """
    with outside_inference_mode():
        include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
            exclude = exclude.remove(key)
        with torch._C._ForceDispatchKeyGuard(include, exclude), torch.enable_grad():
            yield


# ---- Inductor ----------------------------------------------------------------------------------------------


# Called around the compilation of each graph: with the graph, and with what compiles it or takes it from a cache.
Watch = Callable[[fx.GraphModule, Callable[[], Any]], Any]


def compile_with_inductor(
    gm: fx.GraphModule, inputs: Sequence[Any], post_pass: CustomGraphPass, watch: Watch, traced_anew: bool
) -> Callable[..., Any]:
    """Compile; `post_pass` sees the post-grad graphs of the forward and of the lazily compiled backward.

    `traced_anew`: AOTAutograd's cache is left alone, so that each graph is looked up by itself, under `watch`.
    """
    import torch._functorch.config as functorch
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def compile_one(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        return watch(gm, lambda: compile_fx_inner(gm, inputs, **kwargs))

    with functorch.patch(enable_autograd_cache=False) if traced_anew else contextlib.nullcontext():
        return compile_fx(gm, inputs, inner_compile=compile_one, config_patches=_patches(post_pass))  # type: ignore


def compile_with_interpreter(
    gm: fx.GraphModule, inputs: Sequence[Any], post_pass: CustomGraphPass
) -> Callable[..., Any]:
    """The same graphs and passes as with `compile_with_inductor`, but run node by node by torch itself."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, inputs, inner_compile=_interpret, config_patches=_patches(post_pass))  # type: ignore


def _patches(post_pass: CustomGraphPass) -> dict[str, Any]:
    import torch._inductor.config as config

    theirs = config.post_grad_custom_post_pass
    if theirs is not None and type(theirs) is not type(post_pass):
        post_pass = _Chain(theirs, post_pass)
    return {"post_grad_custom_post_pass": post_pass}


class _Chain(CustomGraphPass):
    """A pass that the user had already set, then ours."""

    def __init__(self, theirs: Any, ours: CustomGraphPass) -> None:
        self.passes = [*theirs, ours] if isinstance(theirs, (list, tuple)) else [theirs, ours]

    def __call__(self, graph: fx.Graph) -> None:
        for p in self.passes:
            p(graph)

    def uuid(self) -> Any:
        ids = [p.uuid() if hasattr(p, "uuid") else None for p in self.passes]
        return None if None in ids else repr(ids)


def _interpret(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable[[list[Any]], Any]:
    """An `inner_compile` that ends after the post-grad passes."""
    from torch._inductor.compile_fx import _recursive_post_grad_passes
    from torch._inductor.virtualized import V

    with no_modes(), V.set_fake_mode(detect_fake_mode(gm)):
        _recursive_post_grad_passes(gm, is_inference=kwargs.get("is_inference", False))
    gm.recompile()

    def run(args: list[Any]) -> Any:
        owned = list(args)
        args.clear()  # boxed call: the caller's references end here, so memory is freed as it would be
        return fx.Interpreter(gm).boxed_run(owned)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def cache_hits() -> int:
    """Graphs whose code came out of Inductor's cache so far."""
    from torch._dynamo.utils import counters

    return counters["inductor"]["fxgraph_cache_hit"]


def whole_hits() -> int:
    """Graphs that came, with their backward if they have one, out of AOTAutograd's cache so far."""
    from torch._dynamo.utils import counters

    return counters["aot_autograd"]["autograd_cache_hit"]


def cache_key(compiled: Any) -> str | None:
    """Of what Inductor made of a graph; None where it was not looked up."""
    return getattr(compiled, "_fx_graph_cache_key", None)


def cache_dir() -> str:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def no_modes() -> Any:
    """A context without fake or tracing modes: tensors in it are real."""
    return torch.utils._python_dispatch._disable_current_modes()


def size_hint(size: Any, fallback: int) -> int:
    """A symbolic size, SymInt or expression, as it was in the batch that was traced; `fallback` per unknown symbol."""
    if isinstance(size, torch.SymInt):
        known = size.node.shape_env.backed_var_to_val
        size = size.node.expr
    elif isinstance(size, sympy.Expr) and size.free_symbols:
        known = _shape_env().backed_var_to_val
    else:
        return int(size)
    return int(size.subs({s: known.get(s, fallback) for s in size.free_symbols}))


def _shape_env() -> Any:
    from torch._inductor.virtualized import V

    return V.fake_mode.shape_env


def bind_order(graph: fx.Graph, after: Mapping[fx.Node, Sequence[fx.Node]]) -> None:
    """Inductor will run each node after those that are named for it, whatever it reorders."""
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    preserve_node_ordering(graph, {node: OrderedSet(deps) for node, deps in after.items()})


def fake_value(node: fx.Node) -> Any:
    """What a new call_function node computes, as fake tensors, from the values of its arguments."""

    def value(n: fx.Node) -> Any:
        return n.meta["val"]

    args, kwargs = fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)
    mode: Any = torch._guards.detect_fake_mode([*args, *kwargs.values()])
    with mode:
        return node.target(*args, **kwargs)  # type: ignore[operator]


def detect_fake_mode(gm: fx.GraphModule) -> Any:
    values = [n.meta.get("val") for n in gm.graph.nodes]
    return torch._guards.detect_fake_mode([v for v in values if isinstance(v, torch.Tensor)])


def backport_empty_grids() -> None:
    """Before 2.13 a tiled Triton kernel over no elements divides by zero when it is launched."""
    from torch._inductor.runtime.triton_heuristics import Grid2DWithYZOverflow

    generate = Grid2DWithYZOverflow.generate
    if getattr(generate, "_freescale", False):
        return

    def guarded(self: Any, *args: Any, **kwargs: Any) -> None:
        generate(self, *args, **kwargs)
        if self.mode == "python" and "== 0" not in str(self.y_grid):
            self.y_grid = f"(0 if y_grid_div_ == 0 else {self.y_grid})"

    guarded._freescale = True  # type: ignore[attr-defined]
    Grid2DWithYZOverflow.generate = guarded  # type: ignore[method-assign]


def backport_fake_of_fake() -> None:
    """2.12's pattern matcher makes fakes of fakes, which asks whether a size that is not known yet is 0."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    from_tensor = FakeTensorMode.from_tensor
    if torch_version() != "2.12" or getattr(from_tensor, "_freescale", False):
        return

    def keep_fakes(self: Any, tensor: torch.Tensor, **kwargs: Any) -> Any:
        if not kwargs and isinstance(tensor, FakeTensor) and tensor.fake_mode is self:
            return tensor
        return from_tensor(self, tensor, **kwargs)

    keep_fakes._freescale = True  # type: ignore[attr-defined]
    FakeTensorMode.from_tensor = keep_fakes  # type: ignore[method-assign]


def register_launch_lowering(op: Any) -> None:
    """Lower an asynchronous all-to-all so that Inductor keeps its input until the wait.

    A plain fallback would let Inductor reuse the send buffer while it is being sent.
    """
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering

    @register_lowering(op, type_promotion_kind=None)
    def _lower(x: Any, *args: Any) -> Any:
        sent: Any = ir.ExternKernel.require_contiguous(x)
        kernel: Any = ir._CollectiveKernel.create_out_of_place(op.default, sent, *args)
        return ir.TensorBox.create(kernel)


@contextlib.contextmanager
def fresh_caches() -> Iterator[None]:
    """No compiled code is taken from, or left in, torch's caches."""
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        yield


def _test_options() -> None:
    from torch._dynamo.symbolic_convert import tls  # noqa: F401

    given: Any = {"strict": True}
    module = torch.nn.Identity()
    compiled: Any = torch.compile(module, backend=_Named(), options=given)
    assert options_of(compiled) == options_of(torch.compile(len, backend=_Named(), options=given)) == given
    assert options_of(torch.compile(module, backend="eager")) == options_of(module) == {}


class _Named:
    """A backend of our name, for the self test: it compiles nothing."""

    __name__ = "freescale"

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        return gm.forward


def self_test() -> None:
    """Raise if a private API that we use is gone. Cheap, needs no process group."""
    import torch._dynamo.config as dynamo
    import torch.fx.experimental._config as shapes
    from torch._dynamo.source import TensorProperty, TensorPropertySource
    from torch._inductor import config, ir
    from torch._inductor.compile_fx import _recursive_post_grad_passes, compile_fx, compile_fx_inner  # noqa: F401
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering  # noqa: F401
    from torch._inductor.output_code import CompiledFxGraph
    from torch._inductor.utils import fresh_cache  # noqa: F401
    from torch._inductor.virtualized import V
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
    from torch.utils._ordered_set import OrderedSet  # noqa: F401

    if torch_version() not in SUPPORTED:
        raise RuntimeError(f"freescale knows torch {', '.join(SUPPORTED)}; this is {torch.__version__}")
    for name in dynamo_settings(True):
        getattr(dynamo, name)
    for name in shape_settings(True):
        getattr(shapes, name)
    assert hasattr(config, "post_grad_custom_post_pass") and hasattr(V, "fake_mode")
    assert ShapeEnv().backed_var_to_val == {}
    assert callable(ShapeEnv.create_symbol) and callable(ShapeEnv.evaluate_expr) and hasattr(DimDynamic, "DUCK")
    assert TensorProperty.SIZE and DimDynamic.STATIC and DimDynamic.DYNAMIC and isinstance(TensorPropertySource, type)
    assert hasattr(ir._CollectiveKernel, "create_out_of_place")
    assert hasattr(torch._C._distributed_c10d, "_register_work")
    assert hasattr(dist.distributed_c10d, "_resolve_process_group")
    assert hasattr(dist.distributed_c10d, "_get_default_store")
    assert hasattr(dist.ProcessGroup, "_device_types")
    assert hasattr(dist.ProcessGroup, "allgather") and hasattr(dist.ProcessGroup, "recv")
    assert hasattr(dist.ProcessGroup, "_get_backend") and dist.default_pg_timeout > timedelta(0)
    assert isinstance(profiling(), bool)
    import torch.distributed._symmetric_memory as symmetric

    assert callable(symmetric.empty) and callable(symmetric.rendezvous)
    assert callable(torch._dynamo.assume_constant_result)
    compiled: Any = torch.compile(torch.nn.Identity(), backend="eager")
    assert backend_of(compiled) is not compiled.dynamo_ctx.callback and is_compiled(compiled)
    assert hasattr(torch.nn.Module, "_compiled_call_impl") and not is_compiled(torch.nn.Identity())
    assert is_compiled(torch.compile(self_test, backend="eager")) and not is_compiled(leave_graph("")(self_test))
    assert list(compiled.state_dict(prefix="x.")) == [] and hasattr(compiled, "_load_from_state_dict")
    with torch.inference_mode(), autograd_inside_op():
        assert (torch.zeros(1, requires_grad=True) * 2).requires_grad
    marked = torch.zeros(1)
    torch._dynamo.mark_static(marked)
    assert marked._dynamo_static_indices == {0}  # type: ignore[attr-defined]
    assert callable(torch._logging.trace_structured)
    log_once("freescale")
    assert "_fx_graph_cache_key" in {f.name for f in dataclasses.fields(CompiledFxGraph)}
    assert cache_hits() >= 0 and whole_hits() >= 0 and cache_dir()
    _test_options()
    torch._guards.CompileContext.current_compile_id()
    backport_empty_grids()
    backport_fake_of_fake()
