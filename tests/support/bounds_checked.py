"""Triton's interpreter with bounds checks: a kernel may access only the elements of its arguments.

On a GPU, a load past the end of a tensor usually finds other data and goes unnoticed until that memory is freed. Here
it is an error that names kernel and address. Masked accesses are not checked.
"""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any

import numpy as np
import torch


class Argument:
    """The memory of one tensor's elements; for a view, without the gaps between its rows."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name, self.size = name, tensor.element_size()
        self.base = tensor.data_ptr()
        # a dimension of stride 0 has one element in memory
        sizes = [1 if stride == 0 else n for n, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        last = sum((n - 1) * stride for n, stride in zip(sizes, tensor.stride(), strict=True))
        self.length = last + 1 if tensor.numel() else 0
        self.elements: np.ndarray | None = None  # all of them, if there are no gaps: a table may have billions
        if tensor.numel() and not tensor.is_contiguous():
            self.elements = np.zeros(self.length, dtype=bool)
            torch.from_numpy(self.elements).as_strided(sizes, tensor.stride()).fill_(True)

    def holds(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Which of the accesses of `size` bytes are in bounds."""
        at, within = np.divmod(addresses.astype(np.int64) - self.base, self.size)
        inside = (at >= 0) & (at < self.length) & (within + size <= self.size)
        if self.elements is not None:
            inside[inside] = self.elements[at[inside]]
        return inside


class Launch:
    """The arguments of one kernel launch."""

    current: Launch | None = None

    def __init__(self, kernel: str, arguments: dict[str, Any]) -> None:
        self.kernel = kernel
        self.arguments = [Argument(k, x) for k, x in arguments.items() if isinstance(x, torch.Tensor)]

    def check(self, what: str, pointers: Any, mask: Any) -> None:
        addresses, wanted = np.broadcast_arrays(pointers.data, mask.data)
        addresses, size = addresses[wanted.astype(bool)], pointers.get_element_ty().primitive_bitwidth // 8
        for argument in self.arguments:
            addresses = addresses[~argument.holds(addresses, max(size, 1))]
        if len(addresses):
            at = int(addresses[0])
            near = min(self.arguments, key=lambda a: abs(at - a.base))
            raise IndexError(
                f"{self.kernel} {what} {len(addresses)} out-of-bounds addresses, the first |"
                f"{at - near.base} bytes from the start of {near.name}, which has {near.length * near.size}"
            )


def install() -> None:
    """Patch the interpreter in this process."""
    from triton.runtime import interpreter

    prepare = interpreter.GridExecutor._init_args_hst

    @wraps(prepare)
    def noting(self: Any, args_dev: Any, kwargs: Any) -> Any:
        args, kwargs = prepare(self, args_dev, kwargs)
        Launch.current = Launch(self.fn.__name__, inspect.getcallargs(self.fn, *args, **kwargs))
        return args, kwargs

    interpreter.GridExecutor._init_args_hst = noting
    builder = interpreter.InterpreterBuilder
    load, store, change = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw

    @wraps(load)
    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        Launch.current.check("loads", pointers, mask)
        return load(self, pointers, mask, *rest)

    @wraps(store)
    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        Launch.current.check("stores to", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    @wraps(change)
    def checked_change(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        Launch.current.check("adds to", pointers, mask)
        return change(self, operation, pointers, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    builder.create_atomic_rmw = checked_change
