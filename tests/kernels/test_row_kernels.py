"""Rows packed, summed and updated: the kernels against their definitions, in the interpreter and on a GPU."""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

import freescale.kernels  # noqa: F401
from device_syncs import no_device_syncs
from freescale.kernels import reference, row_kernels
from freescale.runtime.tables.sharded_embedding import ShardedEmbedding
from interpreted import in_the_interpreter, needs_gpu, on_a_gpu, run_cases

TYPES = row_kernels.KERNEL_DTYPES


def segments(lengths: list[int], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A random `order` and the ends of segments of these lengths."""
    order = torch.randperm(sum(lengths))
    return order.to(device), torch.tensor(lengths, dtype=torch.int64).cumsum(0).to(device)


def same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape
    if got.device.type == "cpu" and got.dtype == torch.bfloat16:
        # Triton's interpreter cuts bfloat16 off instead of rounding it
        off = (got.view(torch.int16).int() - expected.view(torch.int16).int()).abs()
        assert off.numel() == 0 or int(off.max()) <= 1
    else:
        assert torch.equal(got, expected)


def exact(n: int, dim: int) -> torch.Tensor:
    """Numbers whose sums and sums of squares are exact in float32, in any order."""
    return torch.randint(-3, 4, (n, dim)).float()


SKEWED = [1, 0, 3, 40, 1, 2, 17, 0, 0, 16, 5, 1, 1, 150]
HUGE = [512, 1024, 3, 513, 1, 0, 512, 1700, 17]  # several runs: some begin with a window of runs, some within one
SEVERAL_OF_64 = [64, 128, 3, 65, 1, 0, 64, 213, 17]  # the same for runs of 64


# ---- cases: each runs in the interpreter and on a GPU --------------------------------------------------------------


def gathers_rows(device: str) -> None:
    from freescale.kernels import row_kernels_triton

    for dtype in TYPES:
        for dim, n in ((1, 5), (8, 1), (8, 0), (0, 4), (20, 33), (300, 9)):
            source = torch.randn(50, dim).to(device, dtype)
            index = torch.randint(0, 50, (n,), device=device)
            for tile in (64, 4096):  # 64 bytes: a row is gathered in several pieces
                assert torch.equal(row_kernels_triton.gather(source, index, tile=tile), source[index])


def compares_ids(device: str) -> None:
    from freescale.kernels import row_kernels_triton

    for n in (0, 1, 17, 8192, 20001):
        a = torch.randint(0, 2**40, (n,)).to(device)
        assert bool(row_kernels_triton.equal(a, a.clone()))
        for place in {0, n // 2, n - 1} if n else ():
            b = a.clone()
            b[place] += 1
            assert not bool(row_kernels_triton.equal(a, b))
        narrow = torch.randint(0, 9, (n,), dtype=torch.int32).to(device)
        assert bool(row_kernels_triton.equal(narrow, narrow.long()))


def compares_lengths(device: str) -> None:
    from freescale.kernels import row_kernels_triton

    for keys, samples, dtype in ((0, 3, torch.int64), (1, 1, torch.int32), (3, 0, torch.int64), (3, 1025, torch.int32)):
        lengths = torch.randint(0, 9, (keys, samples), dtype=dtype).to(device)
        counts = lengths.sum(1)
        assert bool(row_kernels_triton.has_counts(lengths, counts))
        for first, last in ((1, -1), (-9, 9), (0, 1)) if lengths.numel() > 1 else ():  # of a key; beyond it
            other = lengths.clone()
            other[0, 0] += first
            other[0 if first < -1 else -1, -1] += last
            same = reference.has_counts(other, counts)
            assert not bool(same) and not bool(row_kernels_triton.has_counts(other, counts))


def sums_segments_bit_for_bit(device: str) -> None:
    from freescale.kernels import row_kernels_triton

    for dtype in TYPES:
        for dim, lengths in ((1, SKEWED), (20, SKEWED), (20, [0, 0]), (20, []), (0, [2])):
            x = torch.randn(sum(lengths), dim).to(device, dtype)
            order, ends = segments(lengths, device)
            same_bits(row_kernels_triton.sum_segments(x, order, ends), reference.sum_rows(x, order, ends))


def sums_bags_that_share_rows_bit_for_bit(device: str) -> None:
    """As pooling does: far fewer rows than entries, and empty bags."""
    from freescale.kernels import row_kernels_triton

    for dtype in TYPES:
        x, ends = torch.randn(7, 12).to(device, dtype), torch.tensor(SKEWED).cumsum(0).to(device)
        order = torch.randint(0, 7, (sum(SKEWED),), device=device)
        same_bits(row_kernels_triton.sum_segments(x, order, ends), reference.sum_rows(x, order, ends))


@contextlib.contextmanager
def runs_of(length: int):
    """Shorter runs than the kernels have: several of them in a segment that Triton's interpreter adds in a second."""
    from freescale.kernels import row_kernels_triton

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "RUN_LENGTH", length)
        patch.setattr(row_kernels_triton, "RUN_LENGTH", length)
        yield


def _sums_several_runs(dtype: torch.dtype, dim: int, lengths: list[int], device: str) -> None:
    from freescale.kernels import row_kernels_triton

    x = torch.randn(sum(lengths), dim).to(device, dtype)
    order, ends = segments(lengths, device)
    same_bits(row_kernels_triton.sum_segments(x, order, ends), reference.sum_rows(x, order, ends))


def sums_segments_of_several_runs_bit_for_bit(device: str) -> None:
    from freescale.kernels import row_kernels_triton

    interpreted = device == "cpu"
    lengths = SEVERAL_OF_64 if interpreted else HUGE
    with runs_of(64) if interpreted else contextlib.nullcontext():
        _sums_several_runs(torch.float32, 5, lengths, device)
        _sums_several_runs(torch.bfloat16, 8, lengths, device)
        for longest in (None, max(lengths)):
            weight, at, order, ends = _table(4, device, torch.float32, lengths)
            grad, expected = torch.randn(sum(lengths), 4, device=device), weight.clone()
            row_kernels.update_rows_reference(expected, None, grad, at, order, ends, 0.1, 0.0)
            row_kernels_triton.update_segments(weight, None, grad, at, order, ends, 0.1, 0.0, longest)
            same_bits(weight, expected)


def sums_segments_of_several_whole_runs_bit_for_bit(device: str) -> None:
    _sums_several_runs(torch.float32, 5, HUGE, device)
    _sums_several_runs(torch.float32, 1, [600], device)


def keeps_minus_zero_infinity_and_nan(device: str) -> None:
    from freescale.kernels import row_kernels_triton

    x = torch.tensor([[-0.0, float("inf")], [1e30, float("nan")], [-0.0, 1.0], [-1e30, 3e38], [7.0, 3e38]], device=device)
    order, ends = torch.tensor([0, 2, 1, 3, 4], device=device), torch.tensor([1, 2, 5], device=device)
    got, expected = row_kernels_triton.sum_segments(x, order, ends), reference.sum_rows(x, order, ends)
    assert torch.equal(got.isnan(), expected.isnan()) and torch.equal(got.nan_to_num(), expected.nan_to_num())
    assert torch.equal(got.signbit(), expected.signbit())


def _table(dim: int, device: str, dtype: torch.dtype, lengths: list[int]):
    at = torch.randperm(len(lengths) + 9)[: len(lengths)].sort().values.to(device)
    order, ends = segments(lengths, device)
    return torch.randn(len(lengths) + 9, dim).to(device, dtype), at, order, ends


def steps_of_sgd_bit_for_bit(device: str) -> None:
    from freescale.kernels import row_kernels_triton

    for dtype in TYPES:
        for dim, lengths in ((1, SKEWED), (20, SKEWED), (20, [2, 1, 0]), (20, [])):
            weight, at, order, ends = _table(dim, device, dtype, lengths)
            grad, expected = torch.randn(sum(lengths), dim).to(device, dtype), weight.clone()
            row_kernels.update_rows_reference(expected, None, grad, at, order, ends, 0.1, 0.0)
            row_kernels_triton.update_segments(weight, None, grad, at, order, ends, 0.1, 0.0)
            same_bits(weight, expected)


def steps_of_adagrad_bit_for_bit_where_squares_add_exactly(device: str) -> None:
    from freescale.kernels import row_kernels_triton

    for dim in (1, 32):  # powers of two: torch divides by multiplying on a GPU
        weight, at, order, ends = _table(dim, device, torch.float32, SKEWED)
        grad, momentum = exact(sum(SKEWED), dim).to(device), torch.rand(weight.shape[0], device=device)
        expected = weight.clone(), momentum.clone()
        row_kernels.update_rows_reference(*expected, grad, at, order, ends, 0.1, 1e-3)
        row_kernels_triton.update_segments(weight, momentum, grad, at, order, ends, 0.1, 1e-3)
        assert torch.equal(momentum, expected[1]) and torch.equal(weight, expected[0])


def steps_of_adagrad_per_element_bit_for_bit(device: str) -> None:
    from freescale.kernels import row_kernels_triton

    for dtype in TYPES:
        for dim, lengths in ((1, SKEWED), (20, SKEWED), (20, [])):
            weight, at, order, ends = _table(dim, device, dtype, lengths)
            grad, momentum = torch.randn(sum(lengths), dim).to(device, dtype), torch.rand(weight.shape, device=device)
            expected = weight.clone(), momentum.clone()
            row_kernels.update_rows_reference(*expected, grad, at, order, ends, 0.1, 1e-3)
            row_kernels_triton.update_segments(weight, momentum, grad, at, order, ends, 0.1, 1e-3)
            same_bits(weight, expected[0])
            assert torch.equal(momentum, expected[1])


def fused_steps_round_a_product_and_a_sum_once(device: str) -> None:
    """As one instruction does. The interpreter has none: there, the product and the sum are rounded one by one."""
    from freescale.kernels import row_kernels_triton

    weight, at, order, ends = _table(20, device, torch.float32, [1, 2, 1, 3])
    grad, lr = torch.randn(7, 20, device=device), float(torch.tensor(0.1))
    summed = reference.sum_rows(grad, order, ends).double()
    product = lr * summed if device == "cuda" else (lr * summed).float()
    expected = (weight[at].double() - product).float()
    row_kernels_triton.update_segments(weight, None, grad, at, order, ends, lr, 0.0, fused=True)
    assert torch.equal(weight[at], expected)
    for momentum in (torch.rand(weight.shape[0], device=device), torch.rand(weight.shape, device=device)):
        twice = weight.clone(), momentum.clone()
        row_kernels_triton.update_segments(*twice, grad, at, order, ends, lr, 1e-3)
        row_kernels_triton.update_segments(weight, momentum, grad, at, order, ends, lr, 1e-3, fused=True)
        assert torch.allclose(weight, twice[0], 1e-6, 1e-7) and torch.allclose(momentum, twice[1], 3e-7, 0)


def adagrad_is_as_near_to_float64_as_its_definition(device: str) -> None:
    from freescale.kernels import row_kernels_triton

    for dim in (3, 100):
        weight, at, order, ends = _table(dim, device, torch.float32, SKEWED)
        grad, momentum = torch.randn(sum(SKEWED), dim, device=device), torch.rand(weight.shape[0], device=device)
        wide = weight.double(), momentum.double()
        row_kernels.update_rows_reference(*wide, grad.double(), at, order, ends, 0.1, 1e-8)
        row_kernels_triton.update_segments(weight, momentum, grad, at, order, ends, 0.1, 1e-8)
        # a sum of 150 rounded terms: well within 150 roundings of 2**-24
        assert float((weight.double() - wide[0]).abs().max()) <= 1e-5 * float(wide[0].abs().max())
        assert float((momentum.double() / wide[1] - 1).abs().max()) <= 1e-5


def low_precision_is_rounded_once(device: str) -> None:
    from freescale.kernels import row_kernels_triton

    for dtype in (torch.bfloat16, torch.float16):
        weight, at, order, ends = _table(8, device, dtype, SKEWED)
        grad, momentum = exact(sum(SKEWED), 8).to(device, dtype), torch.rand(weight.shape[0], device=device)
        expected = weight.clone(), momentum.clone()
        row_kernels.update_rows_reference(*expected, grad, at, order, ends, 0.1, 1e-3)
        row_kernels_triton.update_segments(weight, momentum, grad, at, order, ends, 0.1, 1e-3)
        same_bits(weight, expected[0])
        assert torch.equal(momentum, expected[1])


def random_segments(device: str) -> None:
    from freescale.kernels import row_kernels_triton

    @settings(max_examples=25 if device == "cpu" else 200, deadline=None, database=None)
    @given(st.lists(st.integers(0, 20), max_size=12), st.sampled_from((1, 5, 8)), st.integers(0, 2**31))
    def check(lengths, dim, seed):
        torch.manual_seed(seed)
        x = torch.randn(sum(lengths), dim, device=device)
        order, ends = segments(lengths, device)
        assert torch.equal(row_kernels_triton.sum_segments(x, order, ends), reference.sum_rows(x, order, ends))

    check()


def random_segments_of_short_runs(device: str, examples: int = 8) -> None:
    from freescale.kernels import row_kernels_triton

    @settings(max_examples=examples if device == "cpu" else 200, deadline=None, database=None)
    @given(st.lists(st.integers(0, 70), max_size=8), st.integers(0, 2**31))
    def check(lengths, seed):
        torch.manual_seed(seed)
        x = torch.randn(sum(lengths), 3, device=device)
        order, ends = segments(lengths, device)
        assert torch.equal(row_kernels_triton.sum_segments(x, order, ends), reference.sum_rows(x, order, ends))

    with runs_of(20):
        check()


def many_random_segments_of_short_runs(device: str) -> None:
    random_segments_of_short_runs(device, 25)


CASES = [
    compares_ids,
    compares_lengths,
    gathers_rows,
    sums_segments_bit_for_bit,
    sums_bags_that_share_rows_bit_for_bit,
    sums_segments_of_several_runs_bit_for_bit,
    sums_segments_of_several_whole_runs_bit_for_bit,
    keeps_minus_zero_infinity_and_nan,
    steps_of_sgd_bit_for_bit,
    steps_of_adagrad_bit_for_bit_where_squares_add_exactly,
    steps_of_adagrad_per_element_bit_for_bit,
    fused_steps_round_a_product_and_a_sum_once,
    adagrad_is_as_near_to_float64_as_its_definition,
    low_precision_is_rounded_once,
    random_segments,
    random_segments_of_short_runs,
]
INTERPRETED = [*CASES, many_random_segments_of_short_runs]
THOROUGH = (many_random_segments_of_short_runs, sums_segments_of_several_whole_runs_bit_for_bit)
test_in_the_interpreter = in_the_interpreter(__file__, INTERPRETED, THOROUGH)
test_on_a_gpu = on_a_gpu(CASES)


# ---- definitions and ops -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("optimizer", row_kernels.OPTIMIZERS)
def test_the_definition_is_the_native_table_s_step(optimizer, dtype):
    torch.manual_seed(3)
    weight, at, order, ends = _table(6, "cpu", dtype, SKEWED)
    grad = torch.randn(sum(SKEWED), 6, dtype=dtype)
    shape = {"sgd": None, "rowwise_adagrad": weight.shape[:1], "adagrad": weight.shape}[optimizer]
    momentum = None if shape is None else torch.rand(shape, dtype=dtype)
    table = SimpleNamespace(weight=weight.clone(), lr=0.1, eps=1e-4, optimizer=optimizer, embedding_dim=6)
    table.momentum = None if momentum is None else momentum.clone()
    ShardedEmbedding.apply_update(table, at, reference.sum_rows(grad, order, ends))
    row_kernels.update_rows(weight, momentum, grad, at, order, ends, 0.1, 1e-4, optimizer)
    assert torch.equal(weight, table.weight)
    assert momentum is None or torch.equal(momentum, table.momentum)


def test_opcheck():
    weight, at, _, _ = _table(4, "cpu", torch.float32, [2, 0, 1])
    ops = torch.ops.freescale
    opcheck(ops.pack_rows, (weight, at))
    assert torch.equal(ops.pack_rows(weight, at), weight[at])


@pytest.mark.parametrize("call, words", (
    (lambda w, i: row_kernels.pack_rows(w, i.int()), r"pack_rows expected `index` as a contiguous int64 \[n\], found torch.int32"),
    (lambda w, i: row_kernels.pack_rows(w.t(), i), r"pack_rows expected contiguous rows \[n, dim\], found \[3, 5\]"),
    (lambda w, i: row_kernels.sum_rows(w, i, i.double()), "sum_rows expected `ends`"),
    (lambda w, i: row_kernels.update_rows(w, None, w, i, i, i, 0.1, 0.0, "adam"), "one of sgd, rowwise_adagrad, adagrad, found 'adam'"),
    (lambda w, i: row_kernels.update_rows(w, None, w, i, i, i, 0.1, 0.0, "rowwise_adagrad"), r"rowwise_adagrad on \[5, 3\] rows needs a momentum \[5\], found no momentum"),
    (lambda w, i: row_kernels.update_rows(w, w, w, i, i, i, 0.1, 0.0, "sgd"), r"sgd .* needs no momentum, found a momentum \[5, 3\]"),
    (lambda w, i: row_kernels.update_rows(w, w[0], w, i, i, i, 0.1, 0.0, "adagrad"), r"needs a momentum \[5, 3\], found a momentum \[3\]"),
    (lambda w, i: row_kernels.update_rows(w, None, w[:, :2], i, i, i, 0.1, 0.0, "sgd"), r"gradients \[n, 3\].*found \[5, 2\]"),
))  # fmt: skip
def test_bad_input(call, words):
    with pytest.raises(ValueError, match="freescale: .*" + words):
        call(torch.zeros(5, 3), torch.arange(2))


# ---- on a GPU ------------------------------------------------------------------------------------------------------


class OnGpu:
    pytestmark = needs_gpu

    @pytest.fixture(autouse=True)
    def seeded(self):
        torch.manual_seed(7)


class TestKernelsOnGpu(OnGpu):
    def test_nothing_waits_for_the_device(self):
        weight, at, order, ends = _table(32, "cuda", torch.float32, SKEWED)
        grad, momentum = torch.randn(sum(SKEWED), 32, device="cuda"), torch.rand(weight.shape[0], device="cuda")

        def all_of_them():
            row_kernels.pack_rows(weight, at)
            torch.ops.freescale.sum_rows(grad, order, ends)
            row_kernels.update_rows(weight, momentum, grad, at, order, ends, 0.1, 1e-8, "rowwise_adagrad")

        all_of_them()  # compiles, which does wait
        with no_device_syncs():
            all_of_them()

    @pytest.mark.parametrize(
        "dim, dtype", ((32, torch.float32), (513, torch.float32), (96, torch.bfloat16), (128, torch.float16))
    )
    def test_many_rows(self, dim, dtype):
        n, u = 60_000, 20_000
        ids = (torch.rand(n, device="cuda") ** 5 * u).long()  # the first has thousands
        order = torch.argsort(ids, stable=True)
        ends = torch.bincount(ids, minlength=u).cumsum(0)
        grad, weight = torch.randn(n, dim, device="cuda").to(dtype), torch.randn(2 * u, dim, device="cuda").to(dtype)
        assert torch.equal(torch.ops.freescale.sum_rows(grad, order, ends), reference.sum_rows(grad, order, ends))
        at = torch.randperm(2 * u, device="cuda")[:u]
        assert torch.equal(row_kernels.pack_rows(weight, at), weight[at])
        expected = weight.clone()
        row_kernels.update_rows_reference(expected, None, grad, at, order, ends, 0.3, 0.0)
        row_kernels.update_rows(weight, None, grad, at, order, ends, 0.3, 0.0, "sgd")
        assert torch.equal(weight, expected)

    @pytest.mark.parametrize("dim, dtype", ((32, torch.float32), (64, torch.bfloat16), (256, torch.float32)))
    @pytest.mark.parametrize("most", (8, 40), ids=("short", "some-long"))
    def test_every_program_takes_many_turns(self, dim, dtype, most):
        """More segments than all programs take at once, and few programs: numbers that add exactly, so all bits."""
        from freescale.kernels import row_kernels_triton

        n = 400_000
        lengths = torch.randint(0, 5, (n,), device="cuda")
        lengths[torch.rand(n, device="cuda") < 0.02] = most
        ends, order = lengths.cumsum(0), torch.randperm(int(lengths.sum()), device="cuda")
        grad = torch.randint(-2, 3, (order.numel(), dim), device="cuda").to(dtype)
        weight = torch.randint(-3, 4, (2 * n, dim), device="cuda").to(dtype)
        at = torch.randperm(2 * n, device="cuda")[:n].sort().values
        total = reference.sum_rows(grad, order, ends)
        for momentum in (None, torch.randint(0, 4, (2 * n,), device="cuda").float()):
            expected = weight.clone(), None if momentum is None else momentum.clone()
            row_kernels.update_rows_reference(*expected, grad, at, order, ends, 0.25, 1e-8)
            for programs in (256, 3):
                out = torch.empty_like(total)
                row_kernels_triton._launch(grad, order, ends, out, None, None, None, 0.0, 0.0, row_kernels_triton.SUM, programs=programs)
                assert torch.equal(out, total)
                got = weight.clone(), None if momentum is None else momentum.clone()
                mode = row_kernels_triton.SGD if momentum is None else row_kernels_triton.ROWWISE_ADAGRAD
                row_kernels_triton._launch(grad, order, ends, None, at, *got, 0.25, 1e-8, mode, programs=programs)
                assert torch.equal(got[0], expected[0])
                assert momentum is None or torch.equal(got[1], expected[1])

    @pytest.mark.parametrize("dim", (32, 700))
    def test_a_row_does_not_depend_on_the_others(self, dim):
        lengths = torch.randint(0, 30, (500,)).tolist()
        weight, at, order, ends = _table(dim, "cuda", torch.float32, lengths)
        grad, momentum = torch.randn(sum(lengths), dim, device="cuda"), torch.rand(weight.shape[0], device="cuda")
        parts = weight.clone(), momentum.clone()
        row_kernels.update_rows(weight, momentum, grad, at, order, ends, 0.1, 1e-8, "rowwise_adagrad")
        cut, first = 137, int(ends[136])
        for some in ((at[:cut], order[:first], ends[:cut]), (at[cut:], order[first:], ends[cut:] - first)):
            row_kernels.update_rows(*parts, grad, *some, 0.1, 1e-8, "rowwise_adagrad")
        assert torch.equal(weight, parts[0]) and torch.equal(momentum, parts[1])

    def test_launches_are_those_of_triton(self):
        """Arguments of other types, alignments and sizes are other kernels, in any order."""
        for _ in range(2):
            for dtype, dim, shift in itertools.product(TYPES, (8, 24), (0, 1)):
                source = torch.randn(1000, dim, device="cuda").to(dtype)
                whole = torch.randint(0, 1000, (301,), device="cuda")
                index = whole[shift:]  # 8 bytes from the beginning: not aligned to 16
                assert torch.equal(row_kernels.pack_rows(source, index), source[index])

    def test_offsets_beyond_int32(self):
        dim, n = 64, 36_000_000  # 2.3 billion elements
        weight = torch.zeros(n, dim, device="cuda", dtype=torch.bfloat16)
        at = torch.tensor([3, n - 2, n - 1], device="cuda")
        weight[at] = torch.randn(3, dim, device="cuda").bfloat16()
        assert torch.equal(row_kernels.pack_rows(weight, at), weight[at])
        order, ends = torch.tensor([n - 1, 3, n - 2], device="cuda"), torch.tensor([1, 2, 3], device="cuda")
        assert torch.equal(row_kernels.sum_rows(weight, order, ends), weight[order])
        expected = (weight[at].float() - 0.5 * weight[order].float()).bfloat16()
        row_kernels.update_rows(weight, None, weight[order], at, torch.arange(3, device="cuda"), ends, 0.5, 0.0, "sgd")
        assert torch.equal(weight[at], expected)

    def test_float64_is_the_definition(self):
        weight, at, order, ends = _table(5, "cuda", torch.float64, SKEWED)
        grad, expected = torch.randn(sum(SKEWED), 5, device="cuda", dtype=torch.float64), weight.clone()
        row_kernels.update_rows_reference(expected, None, grad, at, order, ends, 0.1, 0.0)
        row_kernels.update_rows(weight, None, grad, at, order, ends, 0.1, 0.0, "sgd")
        assert torch.equal(weight, expected)


if __name__ == "__main__":
    run_cases(INTERPRETED)
