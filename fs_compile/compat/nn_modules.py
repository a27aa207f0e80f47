"""Private names around modules: compiled ones and their calls, the parameters of a graph, what DDP averages."""

from __future__ import annotations

import functools
import gc
import logging
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch._dynamo import eval_frame
from torch.nn.parallel import DistributedDataParallel

from freescale.compat import dynamo_settings

log = logging.getLogger(__name__)

T = TypeVar("T")


def is_compiled(x: Any) -> bool:
    """Whether torch.compile returned this module or function, or compiled this module in place."""
    if isinstance(x, torch._dynamo.OptimizedModule):
        return callable(x.dynamo_ctx.callback)  # torch.compiler.disable creates them too
    if isinstance(x, torch.nn.Module):
        return compiled_in_place(x) or is_compiled(x.__dict__.get("forward"))
    return hasattr(x, "_torchdynamo_orig_callable") and not getattr(x, "_torchdynamo_disable", False)


def compiled_in_place(module: torch.nn.Module) -> bool:
    return module._compiled_call_impl is not None


def called_past_compile() -> torch.nn.Module | None:
    """The outermost module on the call stack that freescale compiled in place and whose forward was called directly
    (`model.forward(...)`), which torch does not compile. There is nothing to hook."""
    frame, found = sys._getframe(1), None
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename == eval_frame.__file__:
            return None  # inside a compiled call, because of a graph break or a torch fallback
        if code.co_name == "forward" and code.co_argcount:
            values = frame.f_locals
            module = values.get(code.co_varnames[0])
            if sys.version_info < (3, 13):
                values.clear()  # a snapshot that would keep the frame's tensors alive
            compiled = isinstance(module, torch.nn.Module) and compiled_in_place(module)
            found = module if compiled and _is_ours(_callback_of(module)) else found
        frame = frame.f_back  # type: ignore[assignment]
    return found


class AroundCompiledCall:
    """Runs `before` and `after` around every call of a module that was compiled in place, until `remove`; `after` also
    if the call fails. (Hooks of such a module are compiled with it. Nothing runs inside a caller's graph.)"""

    def __init__(
        self, module: torch.nn.Module, before: Callable[[Any, Any, Any], None], after: Callable[[Any], None]
    ) -> None:
        compiled: Any = module._compiled_call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return compiled(*args, **kwargs)
            try:
                before(module, args, kwargs)
                result = compiled(*args, **kwargs)
            except BaseException:
                try:
                    after(module)
                except Exception as error:  # the caller must see the first error
                    log.warning("freescale: %s", error)
                raise
            after(module)
            return result

        self._module, self._compiled, self._call = module, compiled, call
        module._compiled_call_impl = call

    def remove(self) -> None:
        if self._module._compiled_call_impl is self._call:  # unless it was recompiled since
            self._module._compiled_call_impl = self._compiled


def backend_function(callback: Any) -> Any:
    fn = _unwrapped(callback)
    return getattr(fn, "compiler_fn", fn)


def _unwrapped(backend: Any) -> Any:
    while hasattr(backend, "_torchdynamo_orig_backend"):  # Dynamo's wrappers
        backend = backend._torchdynamo_orig_backend
    return backend


_PREFIX = "_orig_mod."  # of state_dict keys of what torch.compile returns


def load_eager_checkpoints(backend: Callable[..., Any]) -> None:
    """Let torch.compile(module, backend) load checkpoints of `module` as well as its own. A module that overrides
    state_dict (TorchRec's DistributedModelParallel) does not know a wrapper around it, so it saves and loads itself."""
    wrapper: Any = torch._dynamo.OptimizedModule
    if hasattr(wrapper.state_dict, "_freescale"):
        return
    save, load, load_own = wrapper.state_dict, wrapper.load_state_dict, wrapper._load_from_state_dict

    def is_ours(self: Any) -> bool:
        return backend_function(self.dynamo_ctx.callback) is backend

    def for_itself(self: Any) -> bool:
        return type(self._orig_mod).state_dict is not torch.nn.Module.state_dict and is_ours(self)

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
        if is_ours(self):
            eager = [k for k in state_dict if k.startswith(prefix) and not k.startswith(prefix + _PREFIX)]
            for key in eager:
                state_dict[prefix + _PREFIX + key[len(prefix) :]] = state_dict.pop(key)
        load_own(self, state_dict, prefix, *args)

    state_dict._freescale = True  # type: ignore[attr-defined]
    wrapper.state_dict, wrapper.load_state_dict = state_dict, load_state_dict
    wrapper._load_from_state_dict = _load_from_state_dict


def options_of(compiled: Any) -> dict[str, Any]:
    """The `options` of torch.compile(..., backend="freescale", options=...); empty for another backend. `compiled`:
    what torch.compile returned, or a module compiled in place, or one whose forward was compiled."""
    return _options_of_backend(_callback_of(compiled))


def _callback_of(compiled: Any) -> Any:
    """Dynamo's callback; None if torch.compile did not return it."""
    found: Any
    for found in (getattr(compiled, "_compiled_call_impl", None), compiled, getattr(compiled, "forward", None)):
        context = getattr(found, "dynamo_ctx", None)
        if context is None and hasattr(found, "get_compiler_config"):  # a function: its context is in a closure
            cells = [cell.cell_contents for cell in found.get_compiler_config.__closure__ or ()]
            context = next((c for c in cells if hasattr(c, "callback")), None)
        if context is not None:
            return context.callback
    return None


def options_while_tracing() -> dict[str, Any]:
    """The options of the compilation that Dynamo is tracing for; empty outside of tracing."""
    from torch._dynamo.symbolic_convert import InstructionTranslator, tls

    tracing = getattr(tls, "current_tx", None)
    return _options_of_backend(InstructionTranslator.current_tx().output.compiler_fn) if tracing else {}


def _is_ours(callback: Any) -> bool:
    return getattr(_unwrapped(callback), "compiler_name", "") == "freescale"


def _options_of_backend(callback: Any) -> dict[str, Any]:
    return dict(_unwrapped(callback).kwargs.get("options") or {}) if _is_ours(callback) else {}


_PART = re.compile(r"\._(?:modules|parameters)\['([^']+)'\]")
_WRAPPERS = ("_dmp_wrapped_module", "_orig_mod")


@dataclass(frozen=True)
class ParameterInput:
    index: int  # index among the inputs
    node: fx.Node
    tensor: nn.Parameter
    name: str  # in the model; the same on every rank

    @property
    def is_trained(self) -> bool:
        return self.tensor.requires_grad and self.tensor.is_leaf


def parameter_inputs(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[ParameterInput]:
    nodes = gm.graph.find_nodes(op="placeholder")
    return [
        ParameterInput(i, node, x, _name_in_model(node))
        for i, (node, x) in enumerate(zip(nodes, inputs, strict=True))
        if isinstance(x, nn.Parameter)
    ]


def _name_in_model(node: fx.Node) -> str:
    """L['self']._modules['mix']._parameters['weight'] -> mix.weight; another source, or the node's name, as it is."""
    source = getattr(node, "_dynamo_source", None)
    text = "" if source is None else dynamo_settings.source_name(source)
    parts = _PART.findall(text)
    return (".".join(p for p in parts if p not in _WRAPPERS) if parts else text) or node.name


def copy_example(new: fx.Node, old: fx.Node) -> None:
    new.meta.update({k: old.meta[k] for k in ("example_value", "tensor_dict") if k in old.meta})


def live_objects(kind: type[T]) -> list[T]:
    return [x for x in gc.get_objects() if issubclass(type(x), kind)]


def averaged_by_ddp(wrapper: DistributedDataParallel) -> list[nn.Parameter]:
    ignored = getattr(wrapper, "parameters_to_ignore", ())  # none during construction
    return [p for n, p in wrapper.named_parameters() if p.requires_grad and n.removeprefix("module.") not in ignored]


def left_out_of_ddp(tensor: torch.Tensor) -> bool:
    """Whether DDP._set_params_and_buffers_to_ignore_for_model excluded it, as TorchRec does for sharded tables."""
    return bool(getattr(tensor, "_ddp_ignored", False))


def before_ddp_wraps(call: Callable[[DistributedDataParallel], None]) -> None:
    """From now on, `call` gets each DDP wrapper during construction, before it sends anything."""
    # (Patching __init__ would attribute its warnings to freescale.)
    build = DistributedDataParallel._build_params_for_reducer

    @functools.wraps(build)
    def called_first(self: Any) -> Any:
        call(self)
        return build(self)

    DistributedDataParallel._build_params_for_reducer = called_first  # type: ignore[method-assign]


def leave_buffers_out_of_ddp(kind: type[nn.Module]) -> None:
    """From now on, DDP neither broadcasts nor casts the buffers of modules of this class. It reads the names to ignore
    from the module it wraps, so they cannot be set earlier."""

    def leave_out(wrapper: Any) -> None:
        buffers = {id(b): b for m in wrapper.module.modules() if isinstance(m, kind) for b in m.buffers()}
        for buffer in buffers.values():
            buffer._ddp_ignored = True  # type: ignore[attr-defined]
        named = wrapper.module.named_buffers(remove_duplicate=False) if buffers else ()
        wrapper.parameters_to_ignore |= {name for name, b in named if id(b) in buffers}

    before_ddp_wraps(leave_out)
