"""Code that Inductor has generated calls ops that are written in Python as the functions that they are.

An op goes through torch's dispatcher, which puts every argument into a box for C++ and takes it out of it again for
Python. That takes the host ten microseconds, as long as the launch of a kernel, and changes nothing: in compiled code
there is neither autograd nor tracing. Under a profiler, or in a mode that watches ops, they are ops as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch

from freescale.compat import logs

Function = Callable[..., Any]


class DirectOps:
    """Ops of one namespace, and the functions that they are."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._functions: dict[str, Function] = {}
        self._on_gpu: dict[str, Function] = {}

    def add(self, name: str, function: Function, on_gpu: bool = False) -> None:
        """`on_gpu`: where the op's first argument is there, instead of another one."""
        (self._on_gpu if on_gpu else self._functions)[name] = function

    def call_from(self, compiled: Any) -> None:
        """From what Inductor made of a graph; code that is not Python's is left alone."""
        call = getattr(getattr(compiled, "compiled_fn_runner", None), "call", None)
        names = getattr(call, "__globals__", {})
        if "torch" in names:
            names["torch"] = self._torch

    @cached_property
    def _torch(self) -> Any:
        """torch, in which these ops are functions."""
        ours = _Names(getattr(torch.ops, self._namespace), {}, self._replace)
        return _Names(torch, {"ops": _Names(torch.ops, {self._namespace: ours})})

    def _replace(self, name: str, packet: Any) -> Any:
        if name not in self._functions:
            return packet
        return _Names(packet, {"default": self.function_of(name)})

    def function_of(self, name: str) -> Function:
        """The op as such a function; the op itself where somebody watches ops."""
        op = getattr(getattr(torch.ops, self._namespace), name).default
        function, on_gpu = self._functions[name], self._on_gpu.get(name)
        modes = torch._C._len_torch_dispatch_stack

        def call(*args: Any) -> Any:
            if logs.profiling() or modes():
                return op(*args)
            return function(*args) if on_gpu is None or not args[0].is_cuda else on_gpu(*args)

        return call


class _Names:
    """The names of `original`, but for those that are given; `replace` may put another value in place of any."""

    def __init__(
        self, original: Any, given: Mapping[str, Any], replace: Callable[[str, Any], Any] | None = None
    ) -> None:
        self._original, self._replace = original, replace
        self.__dict__.update(given)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._original, name)
        if self._replace is not None:
            value = self._replace(name, value)
        self.__dict__[name] = value  # the next time it is found at once
        return value


def probe() -> None:
    """Raise if a private name that is used here is gone. Cheap, needs no process group."""
    from torch._inductor.output_code import CompiledFxGraph

    assert "compiled_fn_runner" in CompiledFxGraph.__annotations__
    assert torch._C._len_torch_dispatch_stack() == 0
