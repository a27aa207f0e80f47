"""Blocks that sleep where a model would compute: for more ranks than there are cores.

A block is a product with weights as the passes see it: an op in forward; in backward one for the gradient of its input
and one, which nothing waits for, for that of its weights. Each takes its time without using the core: ranks that
share one do not slow each other down. The passes measure the ops as they do those of a user.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

slept = 0.0  # seconds, in this process


def _sleep(seconds: float) -> None:
    global slept
    began = time.perf_counter()
    time.sleep(seconds)
    slept += time.perf_counter() - began


@torch.library.custom_op("freescale_fidelity::product", mutates_args=())
def product(x: Tensor, weight: Tensor, seconds: float) -> Tensor:
    _sleep(seconds)
    return x.clone()


@torch.library.custom_op("freescale_fidelity::input_gradient", mutates_args=())
def input_gradient(grad: Tensor, weight: Tensor, seconds: float) -> Tensor:
    _sleep(seconds)
    return grad.clone()


@torch.library.custom_op("freescale_fidelity::weight_gradient", mutates_args=())
def weight_gradient(grad: Tensor, weight: Tensor, seconds: float) -> Tensor:
    _sleep(seconds)
    return torch.zeros_like(weight)


@product.register_fake
@input_gradient.register_fake
def _(x: Tensor, weight: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(x)


@weight_gradient.register_fake
def _(grad: Tensor, weight: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, weight, ctx.seconds = inputs
    ctx.save_for_backward(weight)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    (weight,) = ctx.saved_tensors
    return input_gradient(grad, weight, ctx.seconds), weight_gradient(grad, weight, ctx.seconds), None


product.register_autograd(_gradients, setup_context=_save)


class Block(nn.Module):
    """In place of an HSTU block: a third of `seconds` in forward, the rest in backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.weight = seconds / 3, nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        return product(x, self.weight, self.seconds)
