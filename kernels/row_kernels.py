"""Kernels on table rows: pack, sum, update. Each runs in Triton (row_kernels_triton.py) for float32, bfloat16 and
float16 rows on a GPU, else in the plain torch of the definitions. The two are bit-identical except that Adagrad's mean
of squares is summed in a different order. A row's result depends only on its own values, its gradients and their order.
Rows that are not float32 are summed and updated in float32 and rounded once, when written."""

from __future__ import annotations

import torch

from freescale.kernels import reference
from freescale.kernels.ops.schemas import implement

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad")
MAX_SUMMANDS = torch.iinfo(torch.int32).max  # rows of one tensor that the kernels can sum; tables may have more
MAX_COLUMNS = 16384  # per row, limited by what one program can hold


def pack_rows(weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """weight[rows]. If `rows` is grouped by peer, the result is the slabs of all peers."""
    _check("pack_rows", weight, index=rows)
    if not _served_by_kernels(weight):
        return weight.index_select(0, rows)
    from freescale.kernels import row_kernels_triton

    return row_kernels_triton.gather(weight, rows)


def sum_rows(x: torch.Tensor, order: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """out[i] = x[order[ends[i-1]]] + ... + x[order[ends[i]-1]], in reference.sum_rows' order and at least float32."""
    _check("sum_rows", x, order=order, ends=ends)
    if not _served_by_kernels(x) or x.shape[0] > MAX_SUMMANDS:
        return reference.sum_rows(x, order, ends)
    from freescale.kernels import row_kernels_triton

    return row_kernels_triton.sum_segments(x.contiguous(), order, ends)


def expect_ids(token, ids, planned, step, table, lengths=None, counts=None, fault=None):
    from freescale.kernels import row_kernels_triton

    def equal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return row_kernels_triton.equal(a.contiguous(), b)

    reference.require_planned(ids, planned, step, table, equal)
    if lengths is not None:
        reference.require_counts(lengths.contiguous(), counts, step, table, row_kernels_triton.has_counts)
    return torch.empty_like(token)


def update_rows(
    weight: torch.Tensor, momentum: torch.Tensor | None, grad: torch.Tensor, rows: torch.Tensor,
    order: torch.Tensor, ends: torch.Tensor, lr: float, eps: float, optimizer: str, longest: int | None = None,
    fused: bool = False,
) -> None:  # fmt: skip
    """One optimizer step on weight[rows[i]] with the sum of grad[order[ends[i-1]]] ... grad[order[ends[i]-1]]. `rows`
    are distinct. `momentum` has one number per element for Adagrad, one per row for row-wise Adagrad. `longest`, an
    upper bound on the gradients of one row, saves the search for long segments. `fused`: round a * b + c once, as
    FBGEMM does; else twice, as torch does."""
    _check("update_rows", weight, rows=rows, order=order, ends=ends)
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"freescale: optimizer must be one of {', '.join(OPTIMIZERS)}, found {optimizer!r}")
    shape = None if momentum is None else list(momentum.shape)
    needed = {"sgd": None, "adagrad": list(weight.shape), "rowwise_adagrad": [weight.shape[0]]}[optimizer]
    if shape != needed:
        raise ValueError(
            f"freescale: {optimizer} on {list(weight.shape)} rows needs {_momentum(needed)}, found {_momentum(shape)}"
        )
    if rows.shape != ends.shape or grad.shape[1:] != weight.shape[1:]:
        raise ValueError(
            f"freescale: update_rows expected gradients [n, {weight.shape[1]}] and as many ends as rows, "
            f"found {list(grad.shape)}, {ends.shape[0]} ends and {rows.shape[0]} rows"
        )
    if not (_served_by_kernels(weight) and _served_by_kernels(grad)) or grad.shape[0] > MAX_SUMMANDS:
        update_rows_reference(weight, momentum, grad, rows, order, ends, lr, eps)
        return
    from freescale.kernels import row_kernels_triton

    row_kernels_triton.update_segments(weight, momentum, grad.contiguous(), rows, order, ends, lr, eps, longest, fused)


def _momentum(shape: list[int] | None) -> str:
    return "no momentum" if shape is None else f"a momentum {shape}"


def update_rows_reference(
    weight: torch.Tensor, momentum: torch.Tensor | None, grad: torch.Tensor, rows: torch.Tensor,
    order: torch.Tensor, ends: torch.Tensor, lr: float, eps: float,
) -> None:  # fmt: skip
    """The definition of update_rows."""
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    step_rows(weight, momentum, rows, reference.sum_wide(grad.to(wide), order, ends), lr, eps)


def step_rows(
    weight: torch.Tensor, momentum: torch.Tensor | None, rows: torch.Tensor, grads: torch.Tensor, lr: float, eps: float
) -> None:
    """SGD, or with a momentum (row-wise) Adagrad, with one gradient per row, in the gradients' dtype."""
    step = lr * grads
    if momentum is not None:
        squares = grads.square()
        new_momentum = momentum.index_select(0, rows).to(grads.dtype)
        new_momentum = new_momentum + (squares.sum(1) / weight.shape[1] if momentum.dim() == 1 else squares)
        momentum.index_copy_(0, rows, new_momentum.to(momentum.dtype))
        denominator = new_momentum.sqrt() + eps
        step = (lr / denominator)[:, None] * grads if momentum.dim() == 1 else lr * (grads / denominator)
    new_weight = weight.index_select(0, rows).to(grads.dtype) - step
    weight.index_copy_(0, rows, new_weight.to(weight.dtype))


def adam_rows(
    weight: torch.Tensor, means: torch.Tensor, squares: torch.Tensor, rows: torch.Tensor, grads: torch.Tensor,
    lr: float, eps: float, betas: tuple[float, float], weight_decay: float, step: int,
) -> None:  # fmt: skip
    """Adam step number `step` (from 1), with one gradient per row, in the gradients' dtype. As in FBGEMM, rows that are
    not looked up keep their averages, and all rows share the step count. `squares` is [rows, dim], or [rows] for
    partial row-wise Adam, which averages the mean of a row's squares."""
    beta1, beta2 = betas
    new_squares = grads.square()
    if squares.dim() == 1:
        new_squares = new_squares.sum(1) / weight.shape[1]
    old = squares.index_select(0, rows).to(grads.dtype)
    new_squares = beta2 * old + (1 - beta2) * new_squares
    new_means = beta1 * means.index_select(0, rows).to(grads.dtype) + (1 - beta1) * grads
    squares.index_copy_(0, rows, new_squares.to(squares.dtype))
    means.index_copy_(0, rows, new_means.to(means.dtype))
    root = (new_squares / (1 - beta2**step)).sqrt() + eps
    direction = new_means / (1 - beta1**step) / (root[:, None] if squares.dim() == 1 else root)
    old_weight = weight.index_select(0, rows).to(grads.dtype)
    new_weight = old_weight - lr * (direction + weight_decay * old_weight)
    weight.index_copy_(0, rows, new_weight.to(weight.dtype))


def _served_by_kernels(x: torch.Tensor) -> bool:
    return x.is_cuda and x.dtype in KERNEL_DTYPES and x.shape[1] <= MAX_COLUMNS


def _check(name: str, matrix: torch.Tensor, **indices: torch.Tensor) -> None:
    if matrix.dim() != 2 or not matrix.is_contiguous():
        raise ValueError(
            f"freescale: {name} expected contiguous rows [n, dim], found {list(matrix.shape)}, "
            f"strides {matrix.stride()}"
        )
    for argument, index in indices.items():
        if index.dtype != torch.int64 or index.dim() != 1 or not index.is_contiguous():
            raise ValueError(
                f"freescale: {name} expected `{argument}` as a contiguous int64 [n], "
                f"found {index.dtype} {list(index.shape)}"
            )


implement("pack_rows", pack_rows)
implement("sum_rows", sum_rows, on_gpu=True)
implement("expect_ids", expect_ids, on_gpu=True)
