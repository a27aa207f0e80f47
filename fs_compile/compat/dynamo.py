"""Private names of Dynamo and of the modes in which a graph is traced or run."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any

import torch

from freescale.compat import dynamo_settings


def assume_constant_result(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo runs `fn` while it traces and takes the result as a constant."""
    return torch._dynamo.assume_constant_result(fn)


def leave_graph(reason: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Dynamo never traces `fn`: a graph ends before it; where it must not end, torch's error says `reason`."""
    return torch._dynamo.disable(reason=reason)  # type: ignore[no-untyped-call,no-any-return]


def untraced(fn: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compiler.disable, which costs nothing where Dynamo is off anyway: in whatever a compiled graph calls."""
    disabled = torch.compiler.disable(fn)
    callback = torch._C._dynamo.eval_frame.get_eval_frame_callback

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs) if callback() is None else disabled(*args, **kwargs)

    return call


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


def traces_again(error: Exception) -> bool:
    """What a backend lets through is no failure: Dynamo has found out something and traces the frame once more."""
    return isinstance(error, torch._dynamo.exc.RestartAnalysis)


_recomputing: weakref.WeakSet[Any] = weakref.WeakSet()  # ShapeEnvs


def recompute_fakes() -> None:
    """Called while Dynamo traces: torch's cache of what ops return for fake tensors is off for the rest of this graph.

    Where nearly every op has sizes of its own, nothing is found in it, and with symbolic sizes an entry costs several
    times what the op does.
    """
    mode = torch._guards.TracingContext.get().fake_mode
    assert mode is not None and mode.shape_env is not None
    _recomputing.add(mode.shape_env)
    go_on_recomputing_fakes()


def go_on_recomputing_fakes() -> None:
    """Called by a backend: Dynamo has given it another mode, of the same sizes."""
    context = torch._guards.TracingContext.try_get()
    mode = None if context is None else context.fake_mode
    if mode is not None and mode.shape_env in _recomputing:
        mode.cache_enabled = False


def codes_being_traced() -> list[CodeType]:
    """Of the function that Dynamo traces for freescale now, and of those that it is in inside of it; else none."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    if not dynamo_settings.is_tracing():
        return []
    translator: Any = InstructionTranslator.current_tx()
    codes = []
    while translator is not None:
        codes.append(translator.f_code)
        translator = getattr(translator, "parent", None)
    return codes


def forget_compiled(codes: Iterable[CodeType]) -> None:
    """These are traced again when they are called next."""
    for code in codes:
        torch._C._dynamo.eval_frame.reset_code(code)


def graph_breaks() -> dict[str, int]:
    """Reason and number of Dynamo's graph breaks in this process."""
    from torch._dynamo.utils import counters

    return dict(counters["graph_break"])


def is_ddp_break(reason: str) -> bool:
    """DDP's own forward, around the wrapped model: its logger and its context manager."""
    return "set_runtime_stats_and_log" in reason or "_inside_ddp_forward" in reason


@contextlib.contextmanager
def outside_inference_mode() -> Iterator[None]:
    """In place of torch.inference_mode, torch.no_grad: tensors that are made here can be trained with."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def runs_outside_inference_mode(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same for a whole function, which costs nothing where there is no such mode."""

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return fn(*args)
        with outside_inference_mode():
            return fn(*args)

    return call


def version_of(tensor: torch.Tensor) -> int:
    """Counted up by each in-place write. Tensors of inference mode do not count."""
    return 0 if tensor.is_inference() else tensor._version


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


def no_modes() -> Any:
    """A context without fake or tracing modes: tensors in it are real."""
    return torch.utils._python_dispatch._disable_current_modes()
