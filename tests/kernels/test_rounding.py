"""Rounding to fp8: which way, and the kernels against their definitions."""

from __future__ import annotations

import torch

from freescale.kernels import compression
from interpreted import in_the_interpreter, on_a_gpu, run_cases


def test_a_draw_depends_on_place_and_launch_alone():
    x, state = torch.full((10, 100), 1.0 + 2.0**-12), torch.get_rng_state()
    x[:, 0] = 448.0  # so that a row's scale is 1
    first, again, other = (compression.to_fp8(x, number) for number in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other) and len(first[:, 1:100].unique()) == 2
    assert torch.equal(torch.get_rng_state(), state)


def fp8_as_defined(device: str) -> None:
    from freescale.kernels import compression_triton

    for n, dim in ((0, 8), (1, 1), (9, 3), (300, 4), (3, 1100)):
        x = torch.randn(n, dim) * torch.exp(20 * torch.randn(n, 1))
        if n > 4 and dim:
            x[2], x[3, 0], x[4, -1], x[0, 0] = -0.0, torch.inf, torch.nan, 0.0
        for number in (None, 1, 2**20 + 7):
            expected = compression.to_fp8(x, number)
            got = compression_triton.to_fp8(x.to(device), number)
            finite = x.isfinite().all(1)  # of the others, NaNs may have other bits
            assert torch.equal(got.cpu()[finite], expected[finite]), (n, dim, number)
            back, unpacked = torch.full_like(x, 7.0), torch.full_like(x, 7.0, device=device)
            compression.from_fp8(expected, back)
            compression_triton.from_fp8(got, unpacked)
            assert torch.equal(unpacked.cpu()[finite].view(torch.int32), back[finite].view(torch.int32))
            assert unpacked.cpu()[~finite].isnan().all() and back[~finite].isnan().all()


def every_code_has_its_value(device: str) -> None:
    from freescale.kernels import compression_triton

    packed = torch.cat([torch.arange(256).to(torch.uint8), torch.tensor([1.0]).view(torch.uint8)])[None]
    got = torch.empty(1, 256, device=device)
    compression_triton.from_fp8(packed.to(device), got)
    expected = packed[:, :256].view(torch.float8_e4m3fn).float()
    assert torch.equal(got.cpu().nan_to_num(999.0), expected.nan_to_num(999.0)) and int(expected.isnan().sum()) == 2


CASES = [fp8_as_defined, every_code_has_its_value]
test_in_the_interpreter = in_the_interpreter(__file__, CASES)
test_on_a_gpu = on_a_gpu(CASES)

if __name__ == "__main__":
    run_cases(CASES)
