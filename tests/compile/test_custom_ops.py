"""Ops of the user's in a graph with an exchange: functions of Python, without autograd's layer, unless they may need it
themselves."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from ranks import run_ranks


class Model(nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        import freescale

        self.item = freescale.ShardedEmbedding(20, 4, name="item", lr=0.0)
        self.op, self.out = op, nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.op(self.out(self.item(ids))).sum()


def _train(op: Any, plain: Any, seen: set[Any]) -> None:
    """Two steps, of which the second tells (torch runs the first under a mode of its own), against torch's gradients."""
    torch.manual_seed(0)
    model, ids = Model(op), torch.tensor([3, 5, 3])
    run = torch.compile(model, backend="freescale", fullgraph=True, options={"codegen": "inductor", "strict": True})
    run(ids).backward()
    seen.clear()
    model.zero_grad()
    run(ids).backward()
    parameters = list(model.out.parameters())
    expected = torch.autograd.grad(plain(model.out(model.item.weight.detach()[ids])).sum(), parameters)
    for parameter, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def _an_op_with_a_gradient() -> set[str]:
    """The functions that were on the stack when the op, or its gradient's, ran."""
    callers: set[str] = set()

    @torch.library.custom_op("ours::cube", mutates_args=())
    def cube(x: torch.Tensor) -> torch.Tensor:
        callers.update(frame.function for frame in inspect.stack())
        return x**3

    @torch.library.custom_op("ours::cube_backward", mutates_args=())
    def cube_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        callers.update(frame.function for frame in inspect.stack())
        return 3 * grad * x**2

    cube.register_fake(torch.empty_like)
    cube_backward.register_fake(lambda grad, x: torch.empty_like(x))
    cube.register_autograd(
        lambda ctx, grad: cube_backward(grad, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    _train(cube, lambda x: x**3, callers)
    return callers


def test_an_op_with_a_gradient_is_called_below_autograd_as_a_function():
    (callers,) = run_ranks(_an_op_with_a_gradient, 1)
    layers = {"autograd_impl", "forward_no_grad", "backend_impl"}  # the last is what torch's dispatcher would call
    assert {"cube", "cube_backward"} <= callers and not callers & layers


def _an_op_without_a_kernel_for_autograd() -> set[bool]:
    """Whether autograd was left out when it ran; it may want to differentiate inside."""
    left_out: set[bool] = set()
    lib = torch.library.Library("plain", "DEF")
    lib.define("cubes(Tensor x) -> Tensor")

    def cubes(x: torch.Tensor) -> torch.Tensor:
        left_out.add(torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradCPU))
        return x**3

    lib.impl("cubes", cubes, "CompositeExplicitAutograd")
    torch.library.register_fake("plain::cubes", torch.empty_like, lib=lib)
    _train(lambda x: torch.ops.plain.cubes(x.detach()) * x, lambda x: x.detach() ** 3 * x, left_out)
    return left_out


@pytest.mark.thorough
def test_an_op_without_a_kernel_for_autograd_keeps_it():
    assert run_ranks(_an_op_without_a_kernel_for_autograd, 1) == [{False}]
