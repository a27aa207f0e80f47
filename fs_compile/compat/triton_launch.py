"""Faster launches of Triton kernels than JITFunction's, whose host overhead exceeds the driver's.

For each launch JITFunction inspects and specializes every argument to find the compiled kernel. Here arguments that are
not constants must be tensors, None, floats, or integers that the kernel does not specialize (do_not_specialize).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from freescale.compat import cuda

_INT32 = range(-(2**31), 2**31)
# By id, since hashing a kernel takes 1 us: the kernel, and the index of its first constant parameter.
_known: dict[int, tuple[Any, int]] = {}
_compiled: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}


# Triton's versions also work in kernels; on the host each takes 4 us, a tenth of a launch.
def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 0 else 0


def launch(kernel: Any, grid: tuple[int], *args: Any, **options: Any) -> None:
    """kernel[grid](*args, **options) on the current device and stream. The kernel's constants must be its last
    parameters.
    """
    known = _known.get(id(kernel))
    if known is None:
        known = _known[id(kernel)] = kernel, _find_first_constant(kernel)
    first_constant = known[1]
    if first_constant < 0 or _is_watched(kernel):  # interpreter or profiler
        kernel[grid](*args, **options)
        return
    assert cuda.current_device is not None and cuda.current_stream_handle is not None
    device, constants = cuda.current_device(), args[first_constant:]
    facts: list[Any] = [id(kernel), device, constants, *options.values()]
    values: list[Any] = []
    for argument in args[:first_constant]:
        if isinstance(argument, torch.Tensor):
            address = argument.data_ptr()
            facts.append(argument.dtype)
            if address & 15 or not argument.is_cuda:
                facts.append((address & 15 == 0, argument.is_cuda))
            values.append(address)  # otherwise the driver is queried for the tensor's memory
        else:
            facts.append(argument in _INT32 if isinstance(argument, int) else type(argument))
            values.append(argument)
    key = tuple(facts)
    found = _compiled.get(key)
    if found is None:
        compiled = kernel[grid](*args, **options)
        if hasattr(compiled, "packed_metadata"):  # not while it is compiled elsewhere
            _compiled[key] = compiled.run, compiled.function, compiled.packed_metadata
        return
    run, function, metadata = found
    run(grid[0], 1, 1, cuda.current_stream_handle(device), function, metadata, None, None, None, *values, *constants)


def _find_first_constant(kernel: Any) -> int:
    """The index of the first constant parameter; -1 in the interpreter, whose functions lack it."""
    is_constant = [p.is_constexpr for p in getattr(kernel, "params", ())]
    if not is_constant:
        return -1
    first = is_constant.index(True) if True in is_constant else len(is_constant)
    assert all(is_constant[first:]), f"{kernel}: a parameter after the first constant is not a constant"
    return first


def _is_watched(kernel: Any) -> bool:
    runtime = _runtime_settings()
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(kernel.pre_run_hooks or getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


@cache
def _runtime_settings() -> Any:
    from triton import knobs

    return knobs.runtime
