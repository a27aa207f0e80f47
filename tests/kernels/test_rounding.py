"""Stochastic rounding to float16 and bfloat16: its promises; and the kernels that round, against their definitions."""

from __future__ import annotations

import pytest
import torch

from freescale.kernels import rounding
from interpreted import in_the_interpreter, on_a_gpu, run_cases

TYPES = (torch.float16, torch.bfloat16)


def neighbours(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of the type at or below x and at or above it; both as float32."""
    nearest = x.to(dtype)
    below = torch.where(nearest.float() > x, torch.nextafter(nearest, torch.full_like(nearest, -torch.inf)), nearest)
    above = torch.where(nearest.float() < x, torch.nextafter(nearest, torch.full_like(nearest, torch.inf)), nearest)
    return below.float(), above.float()


@pytest.mark.parametrize("dtype", TYPES)
def test_the_mean_is_right(dtype):
    """Also of what is too small for the type: between two of its smallest numbers, or below them."""
    torch.manual_seed(0)
    smallest = torch.finfo(dtype).smallest_normal
    x = torch.cat([torch.randn(200), torch.randn(200) * smallest, torch.randn(100) * smallest / 256])
    below, above = neighbours(x, dtype)
    draws, ups = 4000, torch.zeros(len(x), dtype=torch.float64)
    for number in range(draws):
        got = rounding.to_wide(x, dtype, number).float()
        assert ((got == below) | (got == above)).all()
        ups += (got == above) & (above != below)
    p = torch.where(above == below, 0.0, (x.double() - below.double()) / (above.double() - below.double()).clamp(min=1e-60))
    spread = (p * (1 - p) / draws).sqrt() + 1e-4
    assert ((ups / draws - p).abs() < 5 * spread).all()
    assert abs(float(((ups / draws - p) / spread).mean())) < 0.2  # over all values: 500 * 4000 draws
    assert (ups > 0).sum() > 300


@pytest.mark.parametrize("dtype", TYPES)
def test_what_fits_stays_and_what_is_too_large_is_rounded_to_nearest(dtype):
    largest = torch.finfo(dtype).max
    half_way = largest + (largest - float(torch.nextafter(torch.tensor(largest, dtype=dtype), torch.tensor(0.0, dtype=dtype)))) / 2
    just_below = torch.nextafter(torch.tensor(half_way), torch.tensor(0.0)).item()
    x = torch.tensor([0.0, -0.0, 1.0, -2.5, largest, -largest, just_below, half_way, torch.inf, -torch.inf, torch.nan])
    expected = torch.tensor([0.0, -0.0, 1.0, -2.5, largest, -largest, largest, torch.inf, torch.inf, -torch.inf, torch.nan])
    for number in range(50):
        got = rounding.to_wide(x, dtype, number).float()
        assert torch.equal(got.isnan(), x.isnan()) and torch.equal(got[:-1], expected[:-1])
        assert torch.equal(got[:2].signbit(), x[:2].signbit())


def test_a_draw_depends_on_place_and_launch_alone():
    x, state = torch.full((1000,), 1.0 + 2.0**-12), torch.get_rng_state()
    first, again, other = (rounding.to_wide(x, torch.float16, number) for number in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other) and len(first.unique()) == 2
    assert torch.equal(torch.get_rng_state(), state)


def rounds_as_defined(device: str) -> None:
    from freescale.kernels import rounding_triton

    for dtype in TYPES:
        for shape in ((0, 8), (3, 5), (700, 3)):
            x = torch.randn(shape) * torch.exp(30 * torch.randn(shape))
            for number in (1, 2, 2**20 + 7):
                got = rounding_triton.to_wide(x.to(device), dtype, number).cpu()
                assert torch.equal(got, rounding.to_wide(x, dtype, number)), (dtype, shape, number)
        odd = torch.tensor([0x7FFFFFFF, 0xFFC00000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x477FEFFF, 0x477FF000, 0x80000000, 1])
        x = torch.where(odd < 2**31, odd, odd - 2**32).int().view(torch.float32).repeat(150)
        got, expected = rounding_triton.to_wide(x.to(device), dtype, 9).cpu(), rounding.to_wide(x, dtype, 9)
        numbers = ~x.isnan()  # NaN may have other bits
        assert got[~numbers].isnan().all()
        assert torch.equal(got[numbers].view(torch.int16), expected[numbers].view(torch.int16))


def fp8_as_defined(device: str) -> None:
    from freescale.kernels import rounding_triton

    for n, dim in ((0, 8), (1, 1), (9, 3), (300, 4), (3, 1100)):
        x = torch.randn(n, dim) * torch.exp(20 * torch.randn(n, 1))
        if n > 4 and dim:
            x[2], x[3, 0], x[4, -1], x[0, 0] = -0.0, torch.inf, torch.nan, 0.0
        for number in (None, 1, 2**20 + 7):
            expected = rounding.to_fp8(x, number)
            got = rounding_triton.to_fp8(x.to(device), number)
            finite = x.isfinite().all(1)  # of the others, NaNs may have other bits
            assert torch.equal(got.cpu()[finite], expected[finite]), (n, dim, number)
            back, unpacked = torch.full_like(x, 7.0), torch.full_like(x, 7.0, device=device)
            rounding.from_fp8(expected, back)
            rounding_triton.from_fp8(got, unpacked)
            assert torch.equal(unpacked.cpu()[finite].view(torch.int32), back[finite].view(torch.int32))
            assert unpacked.cpu()[~finite].isnan().all() and back[~finite].isnan().all()


def every_code_has_its_value(device: str) -> None:
    from freescale.kernels import rounding_triton

    packed = torch.cat([torch.arange(256).to(torch.uint8), torch.tensor([1.0]).view(torch.uint8)])[None]
    got = torch.empty(1, 256, device=device)
    rounding_triton.from_fp8(packed.to(device), got)
    expected = packed[:, :256].view(torch.float8_e4m3fn).float()
    assert torch.equal(got.cpu().nan_to_num(999.0), expected.nan_to_num(999.0)) and int(expected.isnan().sum()) == 2


CASES = [rounds_as_defined, fp8_as_defined, every_code_has_its_value]
test_in_the_interpreter = in_the_interpreter(__file__, CASES)
test_on_a_gpu = on_a_gpu(CASES)

if __name__ == "__main__":
    run_cases(CASES)
