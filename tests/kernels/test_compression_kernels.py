"""The kernels that pack the largest values of rows, against their definition, in the interpreter and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch

from freescale.kernels import compression, row_packing
from freescale.kernels.compression import Packing, Slabs, packed_counts
from interpreted import in_the_interpreter, on_a_gpu, run_cases


def packing_of(dim: int, share: Fraction, block: int = 256) -> Packing:
    entries = share * 4 * dim / 6
    return Packing("largest", entries.numerator, entries.denominator, max(1, block // dim))


def rows_of(kind: str, n: int, dim: int) -> torch.Tensor:
    if kind == "normal":
        return torch.randn(n, dim)
    if kind == "wide":
        return torch.randn(n, dim) * torch.exp(15 * torch.randn(n, dim))
    if kind == "nans":  # those of a GPU and those of a CPU; of all bits, the GPU's are the largest
        return torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800000, 0])[torch.randint(4, (n, dim))].int().view(torch.float32)
    x = torch.randint(-1, 2, (n, dim)).float() * (kind == "few")
    if kind == "few" and x.numel() > 4:
        x.view(-1)[[1, 3]] = torch.tensor([float("nan"), float("-inf")])
    return x


SHAPES = [([3, 0, 40, 1], 3), ([0, 0], 8), ([5], 64), ([700, 9], 1), ([2, 3, 1], 300), ([0, 33, 0, 0, 6], 20)]


def compresses_bit_for_bit(device: str, kinds: Sequence[str] = ("normal", "few")) -> None:
    from freescale.kernels import compression_triton

    for kind in kinds:
        for counts, dim in SHAPES:
            for share in (Fraction(1, 50), Fraction(1, 3), Fraction(1)):
                own = None if share == 1 else len(counts) // 2
                x, slabs = rows_of(kind, sum(counts), dim), Slabs.of(torch.tensor(counts), own)
                packing = packing_of(dim, share)
                expected = compression.compress(x, slabs, packing)
                got = compression_triton.compress(x.to(device), slabs, packing).cpu()
                assert torch.equal(got, expected), (kind, counts, dim, share)


def compresses_extreme_values_bit_for_bit(device: str) -> None:
    compresses_bit_for_bit(device, ("zeros", "wide", "nans"))


def expands_bit_for_bit(device: str) -> None:
    from freescale.kernels import compression_triton

    for counts, dim in SHAPES:
        for share, own in ((Fraction(1, 50), None), (Fraction(1, 3), len(counts) // 2), (Fraction(1), None)):
            x, packing = rows_of("normal", sum(counts), dim), packing_of(dim, share)
            slabs, expected = Slabs.of(torch.tensor(counts), own), torch.full_like(x, 7.0)
            packed = compression.compress(x, slabs, packing)
            compression.expand(packed, expected, slabs, packing)
            got = torch.full_like(x, 7.0, device=device)
            compression_triton.expand(packed.to(device), got, slabs, packing)
            assert torch.equal(got.cpu(), expected), (counts, dim, share)
            compression_triton.expand(packed.to(device), got, slabs, packing, add=True)
            if own is not None:
                expected[int(slabs.first_row[own]) :][: counts[own]] /= 2
            assert torch.equal(got.cpu(), expected * 2)


def takes_what_it_sends(device: str) -> None:
    from freescale.kernels import compression_triton

    x, slabs, packing = torch.randn(1000, 1), Slabs.of(torch.tensor([1000])), Packing("largest", 1, 15, 500)
    rest = x.clone().to(device)
    packed = compression_triton.compress(rest, slabs, packing, clear=True)
    sent = torch.empty_like(rest)
    compression_triton.expand(packed, sent, slabs, packing)
    assert torch.equal((sent + rest).cpu(), x) and int((sent != 0).sum()) == int(packed_counts(slabs.rows, packing).sum())


def launches_take_the_kernels(device: str) -> None:
    """What an op packs and unpacks, wherever the rows are, is what the definition says; so is a bucket's error."""
    from freescale.kernels import dense_average

    for counts, dim in SHAPES:
        x, ns, packing = torch.randn(sum(counts), dim), torch.tensor(counts), packing_of(dim, Fraction(1, 5))
        packed = row_packing.pack(str(packing), x.to(device), ns, ns, 0, 1)
        got, expected, slabs = torch.zeros_like(x, device=device), torch.zeros_like(x), Slabs.of(ns, 0)
        packed.unpack(packed.x, got)
        compression.expand(compression.compress(x, slabs, packing), expected, slabs, packing)
        assert torch.equal(got.cpu(), expected)
    packing, gradients, errors = Packing("largest", 1, 15, 300), torch.randn(2, 500), torch.randn(2, 500)
    sent, left = [], []
    for where in ("cpu", device):
        rest = [e.clone().to(where) for e in errors]
        sent.append(dense_average.pack_with_error([g.to(where) for g in gradients], rest, packing))
        left.append(torch.cat(rest).cpu())
        out = torch.empty(1000, device=where)
        dense_average.average(torch.stack([sent[-1]] * 3), out, packing)
        left.append(out.cpu())
    assert torch.equal(sent[0], sent[1].cpu()) and torch.equal(left[0], left[2]) and torch.equal(left[1], left[3])


def a_place_may_need_all_16_bits(device: str) -> None:
    from freescale.kernels import compression_triton

    x, slabs, packing = torch.zeros(65536, 1), Slabs.of(torch.tensor([65536])), Packing("largest", 2, 65536, 65536)
    x[40000], x[65535] = 1.0, -2.0
    got = torch.empty_like(x, device=device)
    compression_triton.expand(compression_triton.compress(x.to(device), slabs, packing), got, slabs, packing)
    assert torch.equal(got.cpu(), x)


CASES = [
    compresses_bit_for_bit, compresses_extreme_values_bit_for_bit, expands_bit_for_bit, takes_what_it_sends,
    launches_take_the_kernels, a_place_may_need_all_16_bits,
]  # fmt: skip
test_in_the_interpreter = in_the_interpreter(__file__, CASES, thorough=(compresses_extreme_values_bit_for_bit,))
test_on_a_gpu = on_a_gpu(CASES)

if __name__ == "__main__":
    run_cases(CASES)
