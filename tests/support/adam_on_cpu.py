"""FBGEMM modules with Adam on the CPU: their storage, state and checkpoints, as on a GPU.

FBGEMM refuses to create them, since it has no CPU kernel for Adam. freescale runs Adam itself, so only one `assert` in
the constructor has to be removed. FBGEMM's own lookup of such a module still fails.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest import mock

import torch


@cache
def allow() -> None:
    from fbgemm_gpu import split_table_batched_embeddings_ops_training as training

    cls = training.SplitTableBatchedEmbeddingBagsCodegen
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls.__init__)))
    removed = _WithoutCheck(cls.__name__)
    tree = removed.visit(tree)
    assert removed.count == 1, "FBGEMM's constructor does not refuse Adam on the CPU where it used to"
    # `super()` finds its class in a closure variable
    around = ast.parse("def around(__class__):\n    return __init__")
    function: Any = around.body[0]
    function.body.insert(0, tree.body[0])
    namespace: dict[str, Any] = {}
    exec(compile(ast.fix_missing_locations(around), training.__file__, "exec"), vars(training), namespace)
    cls.__init__ = namespace["around"](cls)


@contextlib.contextmanager
def placeholders_step() -> Iterator[None]:
    """TorchRec's Adam for unsharded tables takes FBGEMM's step, which updates only rows with a gradient. (TorchRec's
    wheel only has a placeholder, and torch.optim.Adam also updates all other rows.)"""
    from torchrec.optim import optimizers

    kinds = {optimizers.Adam: False, optimizers.PartialRowWiseAdam: True}
    with contextlib.ExitStack() as stack:
        for kind, row_wise in kinds.items():
            stack.enter_context(mock.patch.object(kind, "step", functools.partialmethod(_step, row_wise=row_wise)))
        yield


@torch.no_grad()
def _step(self: Any, closure: Any = None, *, row_wise: bool) -> None:
    lr, eps, beta1, beta2 = (self._kwargs[name] for name in ("lr", "eps", "beta1", "beta2"))
    if "_rows" not in self.__dict__:
        self._params = list(self._params)
        self._rows = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self._params]
        self._steps = 0
    self._steps += 1
    for p, (mean, squares) in zip(self._params, self._rows, strict=True):
        seen = p.grad.abs().sum(1) > 0
        grad = p.grad[seen]
        square = grad.square().mean(1, keepdim=True).expand_as(grad) if row_wise else grad.square()
        mean[seen] = beta1 * mean[seen] + (1 - beta1) * grad
        squares[seen] = beta2 * squares[seen] + (1 - beta2) * square
        root = (squares[seen] / (1 - beta2**self._steps)).sqrt()
        p[seen] -= lr * mean[seen] / (1 - beta1**self._steps) / (root + eps)


class _WithoutCheck(ast.NodeTransformer):
    def __init__(self, class_name: str) -> None:
        self.class_name, self.count = class_name, 0

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if node.attr.startswith("__") and not node.attr.endswith("__"):
            node.attr = f"_{self.class_name}{node.attr}"  # name mangling, as inside the class
        return self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        if node.msg is None or "is not supported in CPU mode" not in ast.unparse(node.msg):
            return node
        self.count += 1
        return ast.Pass()
