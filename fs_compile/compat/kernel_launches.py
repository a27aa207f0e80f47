"""Launches of the Triton kernels that Inductor has generated, without what it does before each.

Before every launch `CachingAutotuner.run` asks what cannot change any more once a kernel has run: is it compiled, is it
tuned, are its launches to be written down. With that, and with what it does to the arguments, a launch takes the host
longer than the driver does. torch 2.13 and later do without it themselves; this does so for those before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from freescale.compat import logs

_ADDRESS = "O"  # of a tensor, in what the launcher is told of its arguments' types


def shorten(names: dict[str, Any]) -> None:
    """In what Inductor has generated: the kernels among these names. Nothing where torch does that itself."""
    autotuner = _autotuner()
    if autotuner is None:
        return
    for name, value in list(names.items()):
        if type(value) is autotuner:
            names[name] = ShortLaunches(value)


def needed() -> bool:
    return _autotuner() is not None


def _autotuner() -> Any:
    """The kind of a kernel; None where its launches are short."""
    try:
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    except ImportError:
        return None  # without Triton
    if torch.version.hip:
        return None
    return None if "_cached_launcher" in CachingAutotuner.run.__code__.co_names else CachingAutotuner


class ShortLaunches:
    """A kernel, whose launches are short behind the first. Under a profiler, or in a mode, they are as ever."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.run: Callable[..., Any] = self._run_first

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def _run_first(self, *args: Any, stream: Any, **kwargs: Any) -> Any:
        result = self._kernel.run(*args, stream=stream, **kwargs)
        launch = None if kwargs else _short_launch(self._kernel, args)
        self.run = self._kernel.run if launch is None else _unless_watched(launch, self._kernel.run)
        return result


def _unless_watched(launch: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, stream: Any) -> Any:
        return (run if logs.ops_are_watched() else launch)(*args, stream=stream)

    return call


def _short_launch(kernel: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """What `kernel.run` comes to, now that it has run with `args`; None where it does more."""
    watched = kernel.triton_interpret or kernel.dump_launch_params or kernel.dump_launch_tensors
    if watched or len(kernel.launchers) != 1:
        return None
    (launcher,) = kernel.launchers
    if not getattr(launcher, "_is_static", False) or launcher.store_cubin:
        return None
    tensors = (a for a in args if isinstance(a, torch.Tensor))
    names = launcher.__globals__
    if all(t.is_cuda for t in tensors) and hasattr(names["runner"], "__self__"):
        names["runner"] = _short_runner(names["runner"].__self__)
    return launcher


def _short_runner(static: Any) -> Callable[..., Any]:
    """As `run` of a kernel that needs nothing of Triton's: what arguments it takes is known. A tensor is handed
    over as an address (else the driver is asked where its memory is)."""
    names = [f"a{i}" for i in range(len(static.arg_tys))]
    values = [f"{n}.data_ptr()" if t == _ADDRESS else n for n, t in zip(names, static.arg_tys, strict=True)]
    scratch = [None] * (static.has_global_scratch + static.has_profile_scratch)
    types = static.arg_tys + _ADDRESS * len(scratch)
    fixed = {"launch": static.C_impl._launch_kernel, "function": static.function, "types": types}
    fixed |= {"warps": static.num_warps, "shared": static.shared}
    arguments = "".join(f"{v}, " for v in (*values, *map(repr, scratch)))
    code = (
        f"def run({', '.join(('x', 'y', 'z', 'stream', *names))}):\n"
        f"    launch(function, x, y, z, warps, shared, types, ({arguments}), stream)"
    )
    exec(code, fixed)  # noqa: S102
    return fixed["run"]
