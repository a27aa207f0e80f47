"""The work of hstu_attention.py: inputs, both kinds of kernels on them, and launches that only compile, or wait."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
HEADS, DIM, DISTANCES = 8, 64, 128
Works = dict[str, Callable[[], Any]]


def lognormal(rows: int) -> list[int]:
    """Lengths of median 1000 and sigma 1 up to 8192, about so many rows."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < rows:
        lengths.append(min(int((torch.randn((), generator=generator)).exp() * 1000), 8192))
    return lengths


def product_flops(lengths: list[int]) -> int:
    return sum(n * (n + 1) // 2 for n in lengths) * HEADS * DIM * 2


class Inputs:
    """q, k, v and the gradient as the model makes them: parts of the rows of one tensor."""

    def __init__(self, lengths: list[int], distances: int = DISTANCES, device: str = "cuda") -> None:
        import hstu_triton

        self.count, self.alpha = sum(lengths), DIM**-0.5
        kind = {"device": device, "dtype": torch.bfloat16}
        together = torch.randn(self.count, 4 * HEADS * DIM, **kind)
        _, v, q, k = (x.unflatten(1, (HEADS, DIM)) for x in together.split(HEADS * DIM, 1))
        self.qkv, self.grad = (q, k, v), torch.randn(self.count, HEADS, DIM, **kind)
        self.bias = torch.randn(HEADS, distances, **kind)
        self.offsets = torch.tensor([0, *lengths]).cumsum(0).to(device)
        self.tiles = hstu_triton.list_tiles(self.offsets, self.count)

    def works(self) -> Works:
        import hstu_triton as fused

        rest = (self.tiles, self.bias, self.alpha)
        return {
            "forward": lambda: fused.attention(*self.qkv, *rest),
            "backward": lambda: fused.attention_backward(self.grad, *self.qkv, *rest),
            "tiles": lambda: fused.list_tiles(self.offsets, self.count),
        }


def equal_length_works(batch: int, length: int, device: str = "cuda") -> Works:
    import hstu_equal_length as e

    q, k, v, grad = (torch.randn(batch, HEADS, length, DIM, device=device, dtype=torch.bfloat16) for _ in range(4))

    def forward() -> torch.Tensor:
        out = torch.empty_like(q)
        e.launch(e._forward, e.FORWARD, "QUERIES", q, k, v, out)
        return out

    def backward() -> tuple[torch.Tensor, ...]:
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        e.launch(e._backward_keys, e.BACKWARD_KEYS, "KEYS", q, k, v, grad, dk, dv)
        e.launch(e._backward_queries, e.BACKWARD_QUERIES, "QUERIES", q, k, v, grad, dq)
        return dq, dk, dv

    return {"forward": forward, "backward": backward}


# ---- launches ------------------------------------------------------------------------------------------------------


class _Instead:
    """A kernel, launched by `how`."""

    def __init__(self, name: str, kernel: Any, how: Callable[..., None]) -> None:
        self.name, self.kernel, self.how = name, kernel, how

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: self.how(self.name, self.kernel, grid, args, kwargs)


@contextlib.contextmanager
def launched_by(how: Callable[..., None]) -> Iterator[None]:
    """Inside, all launches of both kinds of kernels are calls of `how`: name, kernel, grid, arguments, named ones."""
    import hstu_equal_length
    import hstu_kernels

    fused = ("list_tiles", "expand_bias", "forward", "backward_keys", "backward_queries")
    fused += ("backward_bias", "reduce_bias")
    equal = ("_forward", "_backward_keys", "_backward_queries")
    with contextlib.ExitStack() as stack:
        for module, names in ((hstu_kernels, fused), (hstu_equal_length, equal)):
            for name in names:
                instead = _Instead(f"{module.__name__}.{name}", getattr(module, name), how)
                stack.enter_context(mock.patch.object(module, name, instead))
        yield


def compile_only(name: str, kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Nothing runs; the compiled kernel is in Triton's cache, where every process finds it."""
    kernel.warmup(*args, grid=grid, **kwargs)


class Checked:
    """Waits for each kernel, so that an error names the one which made it."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, name: str, kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            kernel[grid](*args, **kwargs)
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        except Exception as e:
            before = f" (fine before it: {', '.join(self.seen)})" if self.seen else ""
            raise RuntimeError(f"{name}, grid {grid}: {type(e).__name__}: {str(e).splitlines()[0]}{before}") from e
        self.seen.append(name)
