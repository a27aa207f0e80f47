"""Private names of Dynamo and of the modes in which graphs are traced or run."""

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
    """Dynamo runs `fn` while tracing and treats the result as a constant."""
    return torch._dynamo.assume_constant_result(fn)


def leave_graph(reason: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Dynamo never traces `fn` and breaks the graph before it; if a break is an error, torch's error contains
    `reason`."""
    return torch._dynamo.disable(reason=reason)  # type: ignore[no-untyped-call,no-any-return]


def untraced(fn: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compiler.disable without its cost if Dynamo is off anyway, for functions called by compiled graphs."""
    disabled = torch.compiler.disable(fn)
    callback = torch._C._dynamo.eval_frame.get_eval_frame_callback

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs) if callback() is None else disabled(*args, **kwargs)

    return call


def mark_static(tensor: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Make the sizes of a graph input static from dimension `first` on. (torch's own does nothing while tracing.)"""
    tensor._dynamo_static_indices = set(range(first, tensor.dim()))  # type: ignore[attr-defined]
    return tensor


def current_compile_id() -> str:
    """Frame and compilation, such as "3/1"; a second number above 0 is a recompilation of that frame."""
    current = torch._guards.CompileContext.current_compile_id()
    return str(current) if current is not None else "?/0"


def traces_again(error: Exception) -> bool:
    """Whether a backend should re-raise it: Dynamo learned something and traces the frame again."""
    return isinstance(error, torch._dynamo.exc.RestartAnalysis)


_recomputing: weakref.WeakSet[Any] = weakref.WeakSet()  # ShapeEnvs


def recompute_fakes() -> None:
    """Turn off torch's cache of fake-tensor results for the rest of the graph being traced. If nearly every op has
    sizes of its own, it never hits, and with symbolic sizes an entry costs several times as much as the op."""
    mode = torch._guards.TracingContext.get().fake_mode
    assert mode is not None and mode.shape_env is not None
    _recomputing.add(mode.shape_env)
    go_on_recomputing_fakes()


def go_on_recomputing_fakes() -> None:
    """Keep the cache off in a backend: Dynamo passes it another mode with the same sizes."""
    context = torch._guards.TracingContext.try_get()
    mode = None if context is None else context.fake_mode
    if mode is not None and mode.shape_env in _recomputing:
        mode.cache_enabled = False


def codes_being_traced() -> list[CodeType]:
    """Code objects of the function that Dynamo is tracing for freescale and of the functions inlined into it."""
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
    for code in codes:
        torch._C._dynamo.eval_frame.reset_code(code)


@contextlib.contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Replace torch.inference_mode by torch.no_grad, so that tensors created inside can be trained with."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


runs_outside_inference_mode = outside_inference_mode()  # as a decorator


def version_of(tensor: torch.Tensor) -> int:
    """Incremented by each in-place write. Inference tensors have no counter."""
    return 0 if tensor.is_inference() else tensor._version


@contextlib.contextmanager
def autograd_inside_op() -> Iterator[None]:
    """Enable autograd inside an op, even if inference mode, or the dispatch mode in which AOTAutograd runs the first
    call of a forward graph, turned it off."""
    with outside_inference_mode():
        include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
            exclude = exclude.remove(key)
        with torch._C._ForceDispatchKeyGuard(include, exclude), torch.enable_grad():
            yield


def no_modes() -> Any:
    """A context without fake or tracing modes, in which tensors are real."""
    return torch.utils._python_dispatch._disable_current_modes()
