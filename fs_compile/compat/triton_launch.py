"""Launches of Triton kernels without what JITFunction does before each: it takes longer than the driver's launch.

JITFunction inspects and specializes every argument, each time, to find the kernel that it compiled for such arguments.
Here a few facts are enough: arguments that are not constants must be tensors, None, floats, or integers that the kernel
does not specialize (do_not_specialize).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from freescale.compat import cuda

_INT32 = range(-(2**31), 2**31)
_is_constant: dict[Any, tuple[bool, ...]] = {}  # of each kernel: its parameters
_compiled: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}


# Triton's own can be called in kernels, too; on the host each takes 4 us, a tenth of a launch.
def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 0 else 0


def launch(kernel: Any, grid: tuple[int], *args: Any, **options: Any) -> None:
    """kernel[grid](*args, **options), on the current device and stream."""
    constants = _is_constant.get(kernel)
    if constants is None:
        constants = _is_constant[kernel] = tuple(p.is_constexpr for p in getattr(kernel, "params", ()))
    if not constants or _is_watched(kernel):  # in the interpreter, or under a profiler
        kernel[grid](*args, **options)
        return
    device = torch._C._cuda_getDevice()
    key, values = [kernel, device, *options.values()], []
    for argument, constant in zip(args, constants, strict=True):
        if not constant and isinstance(argument, torch.Tensor):
            address = argument.data_ptr()
            key.append((argument.dtype, argument.is_cuda, address % 16 == 0))
            values.append(address)  # the driver would be asked where a tensor's memory is
        else:
            key.append(argument if constant else _fact(argument))
            values.append(argument)
    found = _compiled.get(tuple(key))
    if found is None:
        compiled = kernel[grid](*args, **options)
        if hasattr(compiled, "packed_metadata"):  # not while it is being compiled elsewhere
            _compiled[tuple(key)] = compiled.run, compiled.function, compiled.packed_metadata
        return
    run, function, metadata = found
    assert cuda.current_stream_handle is not None
    run(grid[0], 1, 1, cuda.current_stream_handle(device), function, metadata, None, None, None, *values)


def _fact(argument: Any) -> Any:
    """What a compiled kernel depends on."""
    return argument in _INT32 if isinstance(argument, int) else type(argument)


def _is_watched(kernel: Any) -> bool:
    runtime = _runtime_settings()
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(kernel.pre_run_hooks or getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


@cache
def _runtime_settings() -> Any:
    from triton import knobs

    return knobs.runtime


def probe() -> None:
    """Raise if a private name that is used here is gone. Cheap, needs no GPU."""
    try:
        from triton import knobs
        from triton.compiler.compiler import CompiledKernel
        from triton.runtime.jit import JITFunction, KernelParam
    except ImportError:
        return  # without Triton nobody launches
    assert hasattr(knobs.runtime, "launch_enter_hook") and hasattr(knobs.runtime, "launch_exit_hook")
    assert hasattr(KernelParam, "is_constexpr") and hasattr(CompiledKernel, "run")
    assert "launch_metadata" in JITFunction.run.__code__.co_names
    assert hasattr(torch._C, "_cuda_getDevice") or not torch.backends.cuda.is_built()
