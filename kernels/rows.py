"""Rows of tables: packed for peers, expanded to positions, summed and updated. Definitions, ops, and who computes them.

    pack_rows      rows of a table, one after another, for all peers at once
    expand_rows    unique rows to positions; its gradient is sum_rows
    sum_rows       sums of rows in a fixed order (defined in reference.py; here it gets its GPU implementation)
    update_rows    sum_rows, then one step of SGD or row-wise Adagrad on the rows, in place, in one pass over memory

On a GPU rows of float32, bfloat16 and float16 are the Triton kernels' (rows_triton.py), which never wait for the
device; anything else is the definition's plain torch. The kernels give the definitions' bits, with one
exception: the mean of squares of Adagrad is summed in another order than torch's. A row's result depends on
nothing but its own values, its gradients and their order.

Rows that are not float32 are summed and stepped in float32 and rounded once, when they are written.
"""

from __future__ import annotations

import torch

from freescale.kernels import reference
from freescale.kernels.ops.schemas import lib

KERNEL_TYPES = (torch.float32, torch.bfloat16, torch.float16)
OPTIMIZERS = ("sgd", "rowwise_adagrad")
MOST_ROWS = torch.iinfo(torch.int32).max  # of one tensor, for the kernels; offsets in elements may be larger
MOST_COLUMNS = 16384  # of a row that one program of a kernel can hold


def pack_rows(weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """weight[rows]: where `rows` come by peer, the slabs of all peers."""
    return _gather("pack_rows", weight, rows)


def expand_rows(unique: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """unique[inverse]: for every position, the row that it asked for."""
    return _gather("expand_rows", unique, inverse)


def sum_rows(x: torch.Tensor, order: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """out[i] = x[order[ends[i-1]]] + ... + x[order[ends[i]-1]], in reference.sum_rows' order, in at least float32."""
    _check("sum_rows", x, order=order, ends=ends)
    if not _served_by_kernels(x):
        return reference.sum_rows(x, order, ends)
    from freescale.kernels import rows_triton

    return rows_triton.sum_segments(x.contiguous(), order, ends)


def update_rows(
    weight: torch.Tensor, momentum: torch.Tensor | None, grad: torch.Tensor, rows: torch.Tensor,
    order: torch.Tensor, ends: torch.Tensor, lr: float, eps: float, optimizer: str, longest: int | None = None,
) -> None:  # fmt: skip
    """One optimizer step on weight[rows[i]] with the sum of grad[order[ends[i-1]]] ... grad[order[ends[i]-1]].

    Rows are distinct. `momentum`, one number per row of the table, is row-wise Adagrad's. `longest` is the most
    gradients that a row has, where the caller knows a bound (the number of ranks, if each sends a row once): it saves
    a look for rows with very many.
    """
    _check("update_rows", weight, rows=rows, order=order, ends=ends)
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"freescale: optimizer must be one of {', '.join(OPTIMIZERS)}, found {optimizer!r}")
    if (momentum is not None) != (optimizer == "rowwise_adagrad"):
        found = "none" if momentum is None else "one"
        raise ValueError(f"freescale: rowwise_adagrad needs a momentum, sgd has none, found {optimizer} with {found}")
    if rows.shape != ends.shape or grad.shape[1:] != weight.shape[1:]:
        raise ValueError(
            f"freescale: update_rows expected gradients [n, {weight.shape[1]}] and as many ends as rows, "
            f"found {list(grad.shape)}, {ends.shape[0]} ends and {rows.shape[0]} rows"
        )
    if not (_served_by_kernels(weight) and _served_by_kernels(grad)):
        update_rows_reference(weight, momentum, grad, rows, order, ends, lr, eps)
        return
    from freescale.kernels import rows_triton

    rows_triton.update_segments(weight, momentum, grad.contiguous(), rows, order, ends, lr, eps, longest)


def update_rows_reference(
    weight: torch.Tensor, momentum: torch.Tensor | None, grad: torch.Tensor, rows: torch.Tensor,
    order: torch.Tensor, ends: torch.Tensor, lr: float, eps: float,
) -> None:  # fmt: skip
    """What update_rows computes."""
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    step_rows(weight, momentum, rows, reference.sum_wide(grad.to(wide), order, ends), lr, eps)


def step_rows(
    weight: torch.Tensor, momentum: torch.Tensor | None, rows: torch.Tensor, grads: torch.Tensor, lr: float, eps: float
) -> None:
    """One step of SGD, or with a momentum of row-wise Adagrad, with one gradient per row, in the gradients' type."""
    step = torch.full((rows.shape[0],), lr, dtype=grads.dtype, device=weight.device)
    if momentum is not None:
        now = momentum.index_select(0, rows).to(grads.dtype) + grads.square().sum(1) / weight.shape[1]
        momentum.index_copy_(0, rows, now.to(momentum.dtype))
        step = lr / (now.sqrt() + eps)
    stepped = weight.index_select(0, rows).to(grads.dtype) - step[:, None] * grads
    weight.index_copy_(0, rows, stepped.to(weight.dtype))


def _gather(name: str, source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    _check(name, source, index=index)
    if not _served_by_kernels(source):
        return source.index_select(0, index)
    from freescale.kernels import rows_triton

    return rows_triton.gather(source, index)


def _served_by_kernels(x: torch.Tensor) -> bool:
    return x.is_cuda and x.dtype in KERNEL_TYPES and x.shape[0] <= MOST_ROWS and x.shape[1] <= MOST_COLUMNS


def _check(name: str, matrix: torch.Tensor, **indices: torch.Tensor) -> None:
    if matrix.dim() != 2 or not matrix.is_contiguous():
        raise ValueError(
            f"freescale: {name} expected contiguous rows [n, dim], found {list(matrix.shape)}, "
            f"strides {matrix.stride()}"
        )
    for which, index in indices.items():
        if index.dtype != torch.int64 or index.dim() != 1 or not index.is_contiguous():
            raise ValueError(
                f"freescale: {name} expected `{which}` as a contiguous int64 [n], "
                f"found {index.dtype} {list(index.shape)}"
            )


# ---- as ops -----------------------------------------------------------------------------------------------------

lib.define("pack_rows(Tensor weight, Tensor rows) -> Tensor")
lib.define("expand_rows(Tensor unique, Tensor inverse) -> Tensor")
lib.define(
    "update_rows_(Tensor(a!) weight, Tensor(b!)? momentum, Tensor grad, Tensor rows, Tensor order, Tensor ends, "
    "float lr, float eps, str optimizer, int? longest=None) -> ()"
)


@torch.library.register_fake("freescale::pack_rows", lib=lib)
@torch.library.register_fake("freescale::expand_rows", lib=lib)
def _rows_at(source, index):
    return source.new_empty((index.shape[0], source.shape[1]))


@torch.library.register_fake("freescale::update_rows_", lib=lib)
def _nothing(weight, momentum, grad, rows, order, ends, lr, eps, optimizer, longest=None):
    return None


# disable: where a user's graph breaks, Dynamo must not try to compile the inside of an op
lib.impl("pack_rows", torch.compiler.disable(pack_rows), "CompositeExplicitAutograd")
lib.impl("expand_rows", torch.compiler.disable(expand_rows), "CompositeExplicitAutograd")
lib.impl("update_rows_", torch.compiler.disable(update_rows), "CompositeExplicitAutograd")
lib.impl("sum_rows", torch.compiler.disable(sum_rows), "CUDA")
