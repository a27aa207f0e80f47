"""Faster launches of the Triton kernels that Inductor generates.

Before every launch `CachingAutotuner.run` checks what cannot change after the first run: whether the kernel is compiled
and tuned, and whether launches are recorded. Together with the argument handling, a launch takes the host longer than
the driver. torch 2.13 and later avoid this themselves; this module does it for earlier releases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from freescale.compat import logs

_ADDRESS = "O"  # a tensor's address, in the launcher's argument types


def shorten(names: dict[str, Any]) -> None:
    """Shorten the launches of the kernels in generated code. Does nothing if torch does so itself."""
    autotuner = _autotuner()
    if autotuner is None:
        return
    for name, value in list(names.items()):
        if type(value) is autotuner:
            names[name] = ShortLaunches(value)


def needed() -> bool:
    return _autotuner() is not None


def _autotuner() -> Any:
    """The class of a generated kernel; None if its launches are already short."""
    try:
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    except ImportError:
        return None  # without Triton
    if torch.version.hip:
        return None
    return None if "_cached_launcher" in CachingAutotuner.run.__code__.co_names else CachingAutotuner


class ShortLaunches:
    """A kernel whose launches are short after the first. Under a profiler or a mode they are unchanged."""

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
    """The short equivalent of `kernel.run` after a run with `args`, or None if it does more."""
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
    """A `run` function for a kernel that does not need Triton's checks, since its argument types are known. Tensors are
    passed as addresses (otherwise the driver is queried for their memory)."""
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
