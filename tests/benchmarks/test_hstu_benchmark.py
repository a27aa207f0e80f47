"""The fused HSTU attention that the benchmarks use as work: against its definition, forward and backward."""

from __future__ import annotations

import sys

import pytest
import torch

from interpreted import HAS_TRITON, in_the_interpreter, needs_gpu, on_a_gpu, run_cases
from repo import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
NAMES = ("out", "dq", "dk", "dv")


def inputs(batch: int, heads: int, length: int, dim: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    return [(2 * torch.randn(batch, heads, length, dim)).to(device, dtype) for _ in range(4)]


def out_and_gradients(attention, q, k, v, grad) -> list[torch.Tensor]:
    qkv = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention(*qkv)
    return [out.detach(), *torch.autograd.grad(out, qkv, grad)]


def check(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str, most: float) -> None:
    """Distance to float64, relative, of the whole and of each tile of rows."""
    import hstu_equal_length

    given = inputs(*shape, dtype, device)
    expected = out_and_gradients(hstu_equal_length.hstu_attention_reference, *(x.double() for x in given))
    for name, got, right in zip(NAMES, out_and_gradients(hstu_equal_length.hstu_attention, *given), expected, strict=True):
        assert got.dtype == dtype and got.shape == right.shape
        for a, b in zip((got, *got.split(64, 2)), (right, *right.split(64, 2)), strict=True):
            off = float((a.double() - b).norm() / b.norm())
            assert off <= most, f"{name} of {shape}: {off:.2e}"


# ---- cases: each runs in the interpreter and on a GPU --------------------------------------------------------------


def lengths_of_any_size(device: str) -> None:
    # on a GPU float32 products are rounded to tf32 first
    for shape in ((2, 1, 200, 16), (1, 2, 129, 16), (1, 1, 64, 32), (1, 1, 1, 16)):
        check(shape, torch.float32, device, 1e-5 if device == "cpu" else 3e-3)


def whole_tiles(device: str) -> None:
    check((1, 2, 256, 64), torch.float32, device, 1e-5 if device == "cpu" else 3e-3)


def the_future_is_not_seen(device: str) -> None:
    import hstu_equal_length

    q, k, v, grad = inputs(1, 1, 150, 16, torch.float32, device)
    out, dq, _, _ = out_and_gradients(hstu_equal_length.hstu_attention, q, k, v, grad)
    for x in (k, v):
        x[:, :, 100:] = 1e4
    changed = out_and_gradients(hstu_equal_length.hstu_attention, q, k, v, grad)
    assert torch.equal(out[:, :, :100], changed[0][:, :, :100]) and torch.equal(dq[:, :, :100], changed[1][:, :, :100])
    assert not torch.equal(out[:, :, 100:], changed[0][:, :, 100:])
    grad[:, :, 100:] = 0  # only the first hundred queries ask for anything
    _, _, dk, dv = out_and_gradients(hstu_equal_length.hstu_attention, q, k, v, grad)
    assert not dk[:, :, 100:].any() and not dv[:, :, 100:].any() and dk[:, :, :100].any()


CASES = [lengths_of_any_size, whole_tiles, the_future_is_not_seen]
test_in_the_interpreter = in_the_interpreter(__file__, CASES)
test_on_a_gpu = on_a_gpu(CASES)


@pytest.mark.skipif(not HAS_TRITON, reason="no triton")
def test_bad_input():
    import hstu_equal_length

    q = torch.zeros(1, 2, 8, 16)
    for bad in (q[0], q.double(), q.transpose(1, 2), torch.zeros(1, 2, 8, 24)):
        with pytest.raises(ValueError, match="freescale: hstu_attention expected .* found torch.float"):
            hstu_equal_length.hstu_attention(q if bad.dim() == 4 and bad.shape[-1] == 16 else bad, bad, bad)


class TestOnGpu:
    pytestmark = needs_gpu

    @pytest.mark.parametrize("length", (2048, 1000))
    def test_as_the_benchmark_runs_it(self, length):
        torch.manual_seed(7)
        check((2, 3, length, 64), torch.bfloat16, "cuda", 1e-2)

    def test_same_bits_every_time(self):
        import hstu_equal_length

        given = inputs(2, 4, 1000, 64, torch.bfloat16, "cuda")
        first, second = (out_and_gradients(hstu_equal_length.hstu_attention, *given) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


if __name__ == "__main__":
    run_cases(CASES)
