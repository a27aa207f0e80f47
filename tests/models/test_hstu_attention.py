"""The example's attention: the fused kernels against the loop that defines it, forward and all gradients."""

from __future__ import annotations

import contextlib
import os
import sys

import pytest
import torch

from device_syncs import no_device_syncs
from interpreted import in_the_interpreter, needs_gpu, on_a_gpu, run_cases
from repo import ROOT

sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks")]
NAMES = ("out", "dq", "dk", "dv", "dbias")
MOST = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


class Given:
    """Inputs as the model makes them: q, k and v are parts of the rows of one tensor."""

    def __init__(self, lengths, distances, dtype, device, heads=1, dim=16, value_dim=None) -> None:
        value_dim = value_dim or dim
        self.offsets = torch.tensor([0, *lengths]).cumsum(0).to(device)
        self.count = sum(lengths)
        together = torch.randn(self.count, heads * (2 * dim + value_dim)).to(device, dtype)
        parts = together.split([heads * dim, heads * dim, heads * value_dim], 1)
        self.qkv = [x.unflatten(1, (heads, -1)) for x in parts]
        self.grad = torch.randn(self.count, heads, value_dim).to(device, dtype)
        self.bias = torch.randn(heads, distances).to(device, dtype)
        self.alpha = dim**-0.5

    def fused(self, blocks=None) -> list[torch.Tensor]:
        import hstu_triton

        tiles = hstu_triton.list_tiles(self.offsets, self.count)
        rest = (*self.qkv, tiles, self.bias, self.alpha, blocks)
        return [hstu_triton.attention(*rest), *hstu_triton.attention_backward(self.grad, *rest)]

    def loop(self) -> list[torch.Tensor]:
        """In float64."""
        import hstu

        rest = (*(x.double() for x in self.qkv), self.offsets, self.bias.double(), self.alpha)
        return [hstu._attention_loop(*rest), *hstu._attention_backward_loop(self.grad.double(), *rest)]

    def check(self, blocks=None) -> None:
        """Distance to float64, relative, of the whole and of each 64 rows."""
        most = MOST[self.grad.dtype]
        for name, got, right in zip(NAMES, self.fused(blocks), self.loop(), strict=True):
            assert got.dtype == self.grad.dtype and got.shape == right.shape
            # the bias is one small sum over all rows for each distance: only the whole has a scale
            parts = [(got, right)] if name == "dbias" else zip((got, *got.split(64)), (right, *right.split(64)), strict=True)
            for a, b in parts:
                off = float((a.double() - b).norm() / b.norm())
                assert off <= most or not b.any() and not a.any(), f"{name}: {off:.2e}"


# ---- cases: each runs in the interpreter and on a GPU --------------------------------------------------------------


def tiles_are_those_of_the_definition(device: str) -> None:
    import hstu
    import hstu_triton

    for lengths in ([0, 1, 128, 129, 0, 700], [5] * 300, [0, 0], [], [1280]):
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        for dtype in (torch.int64, torch.int32):
            got = hstu_triton.list_tiles(offsets.to(device, dtype), sum(lengths))
            assert torch.equal(got.cpu(), hstu._tiles(offsets, sum(lengths))), lengths


def empty_single_and_ragged(device: str) -> None:
    Given([130, 0, 1, 37, 0], 20, torch.float32, device, heads=2).check()


def dims_that_are_no_power_of_two(device: str) -> None:
    Given([70, 3], 8, torch.float32, device, dim=24, value_dim=40).check()


def few_and_many_distances(device: str) -> None:
    for distances in (1, 2, 33, 300):
        given = Given([140], distances, torch.float32, device)
        for x in (given.grad, given.qkv[2]):
            x.abs_()  # else there may be little left of the sum over so many rows
        given.check()


def half_precision(device: str) -> None:
    Given([260, 70], 20, torch.bfloat16, device, dim=32).check()
    Given([200], 130, torch.float16, device).check()


def nothing_at_all(device: str) -> None:
    for lengths in ([], [0, 0]):
        given = Given(lengths, 5, torch.float32, device)
        out, dq, dk, dv, dbias = given.fused()
        assert out.shape == dq.shape == dk.shape == dv.shape == (0, 1, 16) and not dbias.any() and dbias.shape == (1, 5)


def the_future_is_not_seen(device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        given = Given([150], 10, dtype, device)
        out, dq, *_ = given.fused()
        for x in given.qkv[1:]:
            x[100:] = 1e4
        changed = given.fused()
        assert torch.equal(out[:100], changed[0][:100]) and torch.equal(dq[:100], changed[1][:100])
        assert not torch.equal(out[100:], changed[0][100:])
        given.grad[100:] = 0  # only the first hundred queries ask for anything
        _, _, dk, dv, _ = given.fused()
        assert not dk[100:].any() and not dv[100:].any() and dk[:100].any() and dv[:100].any()


def sequences_do_not_see_each_other(device: str) -> None:
    given = Given([40, 50], 10, torch.float32, device)
    before = given.fused()
    for x in (*given.qkv, given.grad):
        x[40:] = torch.nan
    after = given.fused()
    for a, b in zip(before[:4], after[:4], strict=True):
        assert torch.equal(a[:40], b[:40]) and b[40:].isnan().all()


def blocks_of_the_benchmark(device: str) -> None:
    """All sizes of tiles that it tries, on keys and queries that are near, far, and where the sequence ends."""
    import hstu_attention_sweep as sweep
    import hstu_triton

    given = Given([260, 0, 70], 40, torch.bfloat16, device, dim=64)
    given.grad.abs_(), given.qkv[2].abs_()  # else there may be little left of the bias's sum over so many rows
    sizes = {kernel: [] for kernel in sweep.KERNELS}
    for kernel, block in sweep.variants():
        sides = {k: v for k, v in block.items() if k.isupper()} | ({} if "GRAIN" in block else {"NEAR_STAGES": 2})
        sizes[kernel] += [sides] if sides not in sizes[kernel] else []
    assert [len(x) for x in sizes.values()] == [4, 4, 4, 2]
    for number in range(4):
        chosen = {kernel: found[number % len(found)] for kernel, found in sizes.items()}
        chosen["backward_bias"] = {"GRAIN": max(chosen["backward_queries"]["QUERIES"], 64)}
        given.check(hstu_triton.Blocks(*chosen.values()))


def what_lies_outside_is_found(device: str) -> None:
    """By the interpreter of the tests, in loads, in stores, and between the elements of a view."""
    from small_kernels import copy_apart

    whole, target = torch.arange(8.0), torch.zeros(8)
    for count, behind, wrong in ((4, 0, ""), (3, 1, ""), (4, 1, "loads 1 .*from the start of source"), (4, -1, "loads 1")):
        with pytest.raises(Exception, match=wrong) if wrong else contextlib.nullcontext():
            copy_apart[(1,)](whole[2:6], target[::2], count, behind)
    with pytest.raises(Exception, match="copy_apart stores to 2 out-of-bounds addresses"):
        copy_apart[(1,)](whole, target[:3], 4, 0)
    with pytest.raises(Exception, match="copy_apart loads 2 out-of-bounds addresses"):
        copy_apart[(1,)](whole[::2], target, 4, 0)


CASES = [
    tiles_are_those_of_the_definition,
    empty_single_and_ragged,
    dims_that_are_no_power_of_two,
    few_and_many_distances,
    half_precision,
    nothing_at_all,
    the_future_is_not_seen,
    sequences_do_not_see_each_other,
]
INTERPRETED = [*CASES, blocks_of_the_benchmark, what_lies_outside_is_found]
test_in_the_interpreter = in_the_interpreter(
    __file__, INTERPRETED, thorough=(blocks_of_the_benchmark, the_future_is_not_seen, few_and_many_distances)
)
test_on_a_gpu = on_a_gpu(CASES)


def operators(device: str) -> None:
    import hstu

    given = Given([3, 0, 140], 8, torch.float32, device, heads=2)
    qkv, bias = [x.detach().requires_grad_() for x in given.qkv], given.bias.requires_grad_()
    tiles = hstu._tiles(given.offsets, given.count)
    torch.library.opcheck(hstu._tiles, (given.offsets, given.count))
    for last in ((), (tiles,)):
        torch.library.opcheck(hstu._attention, (*qkv, given.offsets, bias, 0.3, *last))
        detached = [x.detach() for x in (given.grad, *qkv, given.offsets, bias)]
        torch.library.opcheck(hstu._attention_backward, (*detached, 0.3, *last))


# torch's own check reads the gradients of what it made; since torch 2.14 it warns itself of that
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_operators():
    operators("cpu")


class TestOnGpu:
    pytestmark = needs_gpu

    def test_operators(self):
        operators("cuda")

    @pytest.mark.parametrize("distances", (128, 2048))
    @pytest.mark.parametrize("lengths", ([2048, 2048], [1000, 1, 0, 3000, 517]))
    def test_as_the_benchmark_runs_it(self, lengths, distances):
        Given(lengths, distances, torch.bfloat16, "cuda", heads=3, dim=64).check()

    def test_long_float32(self):
        Given([3000, 129], 128, torch.float32, "cuda", heads=2, dim=16).check()

    def test_wide(self):
        Given([700, 129], 128, torch.bfloat16, "cuda", heads=2, dim=128).check()
        Given([300, 29], 128, torch.float32, "cuda", heads=2, dim=64).check()

    @pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
    def test_same_bits_every_time(self, dtype):
        given = Given([1000, 0, 37, 4000], 128, dtype, "cuda", heads=4, dim=64 if dtype == torch.bfloat16 else 16)
        first = given.fused()
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(first, given.fused(), strict=True))

    def test_the_model_takes_the_kernels_and_never_waits(self, monkeypatch):
        import hstu
        import hstu_triton

        calls = []
        for name in ("list_tiles", "attention", "attention_backward"):
            was = getattr(hstu_triton, name)
            monkeypatch.setattr(hstu_triton, name, lambda *a, n=name, f=was: (calls.append(n), f(*a))[1])
        blocks = torch.nn.ModuleList(hstu.HSTUBlock(32, 2, 128) for _ in range(2)).cuda()
        x, offsets = torch.randn(300, 32, device="cuda"), torch.tensor([0, 200, 200, 300], device="cuda")

        def run(x, blocks, offsets):
            tiles = hstu.attention_tiles(offsets, x.shape[0])
            for block in blocks:
                x = block(x, offsets, tiles)
            return x

        run(x, blocks, offsets).sum().backward()  # compiles, and loads what first uses need
        calls.clear()
        with no_device_syncs():
            out = run(x, blocks, offsets)
            out.sum().backward()
        assert calls == ["list_tiles", *2 * ["attention"], *2 * ["attention_backward"]]
        expected = run(x.cpu().double(), blocks.cpu().double(), offsets.cpu()).detach()
        assert float((out.detach().cpu().double() - expected).norm() / expected.norm()) < 2e-6

    def test_what_the_kernels_do_not_support_goes_to_the_loop(self):
        import hstu

        for given in (Given([30, 4], 8, torch.float64, "cuda"), Given([30, 4], 8, torch.float32, "cuda", dim=80)):
            rest = (*given.qkv, given.offsets, given.bias, given.alpha)
            assert torch.equal(hstu.hstu_attention(*rest), hstu._attention_loop(*rest))
            pairs = zip(hstu._attention_backward(given.grad, *rest), hstu._attention_backward_loop(given.grad, *rest), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)


if __name__ == "__main__":
    run_cases(INTERPRETED if os.environ.get("TRITON_INTERPRET") == "1" else CASES)
