"""Lets Inductor's generated code call Python ops directly as functions.

torch's dispatcher boxes every argument for C++ and unboxes it again for Python. That takes the host 10 us, as long as a
kernel launch, and has no effect in compiled code, where there is neither autograd nor tracing. Under a profiler, or in
a mode that observes ops, ops go through the dispatcher.

This applies to freescale's ops, and to user ops (`torch.library.custom_op`) that mutate no argument, around which torch
runs more Python than around ours. The first call of each op goes through the dispatcher, where torch checks that no
output aliases an input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch._ops import _OpNamespace

from freescale.compat import logs

Function = Callable[..., Any]
# Argument types that the dispatcher passes unchanged. (It turns tuples into lists.)
_PLAIN = {f for kind in ("Tensor", "int", "float", "bool", "str") for f in (kind, f"Optional[{kind}]")}


class DirectOps:
    """Ops of one namespace, and their functions."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._functions: dict[str, Function] = {}
        self._on_gpu: dict[str, Function] = {}

    def add(self, name: str, function: Function, on_gpu: bool = False) -> None:
        """`on_gpu`: used instead of the other function if the op's first argument is on a GPU."""
        (self._on_gpu if on_gpu else self._functions)[name] = function

    def call_from(self, names: dict[str, Any]) -> None:
        """Replace ops in the globals of generated code."""
        if "torch" in names:
            names["torch"] = self._torch

    @cached_property
    def _torch(self) -> Any:
        """A torch namespace in which these ops are functions."""
        ours = _Names(getattr(torch.ops, self._namespace), {}, self._replace)
        return _Names(torch, {"ops": _Names(torch.ops, {self._namespace: ours}, _replace_namespace)})

    def _replace(self, name: str, packet: Any) -> Any:
        if name not in self._functions:
            return packet
        return _Names(packet, {"default": self.function_of(name)})

    def function_of(self, name: str) -> Function:
        """The op as a function; the op itself if ops are observed."""
        op = getattr(getattr(torch.ops, self._namespace), name).default
        function, on_gpu = self._functions[name], self._on_gpu.get(name)

        def call(*args: Any, **defaults: Any) -> Any:  # passed by name by Inductor before torch 2.13
            if logs.ops_are_watched():
                return op(*args, **defaults)
            return (function if on_gpu is None or not args[0].is_cuda else on_gpu)(*args, **defaults)

        return call


def names_of(compiled: Any) -> dict[str, Any]:
    """Globals of Inductor's code for a graph; empty if it is not Python."""
    call = getattr(getattr(compiled, "compiled_fn_runner", None), "call", None)
    return getattr(call, "__globals__", {})


# ---- user ops --------------------------------------------------------------------------------------------------------


def _replace_namespace(name: str, namespace: Any) -> Any:
    return _Names(namespace, {}, partial(_replace_packet, name)) if isinstance(namespace, _OpNamespace) else namespace


def _replace_packet(namespace: str, name: str, packet: Any) -> Any:
    function = _function_of_custom_op(f"{namespace}::{name}")
    return packet if function is None else _Names(packet, {"default": function})


def _function_of_custom_op(name: str) -> Function | None:
    """The function, or None if it is not a custom op, or not a pure function of its arguments."""
    definition = OPDEFS.get(name)
    if definition is None or not _is_function(definition):
        return None
    op, kernels, seen = definition._opoverload, definition._backend_fns, set[Any]()
    positional = [a.name for a in op._schema.arguments if not a.kwarg_only]
    floats = [i for i, a in enumerate(op._schema.arguments) if "float" in str(a.type)]

    def call(*args: Any, **kwargs: Any) -> Any:
        on_gpu = any(isinstance(a, torch.Tensor) and a.is_cuda for a in args)
        kernel = kernels.get("cuda" if on_gpu else "cpu") or kernels.get(None)
        if kernel is None or kernel not in seen or logs.ops_are_watched():
            seen.add(kernel)
            return op(*args, **kwargs)
        for argument in positional[len(args) :] if kwargs else ():  # as the dispatcher passes them
            if argument not in kwargs:
                break
            args = *args, kwargs.pop(argument)
        if any(type(args[i]) is int for i in floats if i < len(args)):
            return op(*args, **kwargs)  # converts them to floats
        return kernel(*args, **kwargs)

    return call


def _is_function(definition: Any) -> bool:
    """Whether the op takes and returns tensors and plain values only, according to the kernel that its definition
    has."""
    name, schema = definition._qualname, definition._opoverload._schema
    kinds = [str(a.type) for a in schema.arguments]
    has_kernel = partial(torch._C._dispatch_has_kernel_for_dispatch_key, name)
    return (
        not schema.is_mutable
        and not schema._is_view_op()
        and kinds[:1] == ["Tensor"]
        and _PLAIN.issuperset(kinds)
        and not any(map(has_kernel, ("AutocastCPU", "AutocastCUDA")))
        and {"cpu", "cuda", None}.issuperset(definition._backend_fns)
        and all(device in definition._backend_fns for device in ("cpu", "cuda") if has_kernel(device.upper()))
    )


class _Names:
    """The attributes of `original`, except those given; `replace` may substitute any value."""

    def __init__(
        self, original: Any, given: Mapping[str, Any], replace: Callable[[str, Any], Any] | None = None
    ) -> None:
        self._original, self._replace = original, replace
        self.__dict__.update(given)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._original, name)
        if self._replace is not None:
            value = self._replace(name, value)
        self.__dict__[name] = value  # cached for the next access
        return value
