"""Rows on both sides of 2**31 and 2**32: the kernels against their definitions on a small table with the same rows."""

from __future__ import annotations

import torch

from freescale.kernels import row_kernels
from interpreted import in_the_interpreter, on_a_gpu, run_cases
from sparse_table import sparse_zeros

ROWS = 2**32 + 100
USED = [3, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 2**32, ROWS - 1]
LENGTHS = [1, 2, 20, 0, 3, 17, 1]  # gradients of each: some segments are long ones


def _gradients(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n = sum(LENGTHS)
    ends = torch.tensor(LENGTHS).cumsum(0).to(device)
    return torch.randint(-3, 4, (n, 1)).to(device, torch.float16), torch.randperm(n).to(device), ends


def gathers_rows(device: str) -> None:
    from freescale.kernels import row_kernels_triton

    rows, few = torch.tensor(USED, device=device), torch.randn(len(USED), 1).to(device, torch.float16)
    with sparse_zeros(ROWS, 1, dtype=torch.float16, device=device) as weight:
        weight[rows] = few
        for order in (torch.arange(len(USED)), torch.tensor([6, 0, 5, 5, 1])):
            assert torch.equal(row_kernels_triton.gather(weight, rows[order.to(device)]), few[order.to(device)])


def updates_rows(device: str) -> None:
    from freescale.kernels import row_kernels_triton

    rows = torch.tensor(USED, device=device)
    few, at = torch.randn(len(USED), 1).to(device, torch.float16), torch.arange(len(USED), device=device)
    momenta = torch.rand(len(USED)).to(device, torch.float16)
    grad, order, ends = _gradients(device)
    with sparse_zeros(ROWS, 1, dtype=torch.float16, device=device) as weight:
        with sparse_zeros(ROWS, dtype=torch.float16, device=device) as momentum:
            for shape in (None, (-1,), (-1, 1)):  # of a momentum: SGD, row-wise Adagrad, Adagrad
                weight[rows], momentum[rows] = few, momenta
                expected = few.clone(), None if shape is None else momenta.clone().view(shape)
                row_kernels.update_rows_reference(*expected, grad, at, order, ends, 0.25, 1e-3)
                table = weight, None if shape is None else momentum.view(shape)
                row_kernels_triton.update_segments(*table, grad, rows, order, ends, 0.25, 1e-3)
                assert torch.equal(weight[rows], expected[0])
                assert shape is None or torch.equal(momentum[rows], expected[1].view(-1))


CASES = [gathers_rows, updates_rows]
test_in_the_interpreter = in_the_interpreter(__file__, CASES)
test_on_a_gpu = on_a_gpu(CASES)


if __name__ == "__main__":
    run_cases(CASES)
