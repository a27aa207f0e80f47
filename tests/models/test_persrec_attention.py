"""PerSRec's attention: the kernels against the loop that defines it, forward and all gradients."""

from __future__ import annotations

import sys

import torch

from device_syncs import no_device_syncs
from interpreted import in_the_interpreter, needs_gpu, on_a_gpu, run_cases
from repo import ROOT

sys.path.insert(0, str(ROOT / "examples"))
NAMES = ("out", "dq", "dk", "dv", "dbias")
MOST = {torch.float32: 3e-6, torch.bfloat16: 2e-2}


class Given:
    """Inputs as the model makes them."""

    def __init__(self, lengths, segments, tokens, recent, device, dtype=torch.float32, heads=1, dim=16, distances=20) -> None:
        import persrec_attention as pa

        offsets = torch.tensor([0, *lengths]).cumsum(0).to(device)
        self.where = pa.cut(offsets, sum(lengths), segments, tokens, recent)
        count = len(self.where.number)
        parts = torch.randn(count, 3 * heads * dim).to(device, dtype).split(heads * dim, 1)
        self.qkv = [x.unflatten(1, (heads, -1)) for x in parts]
        self.grad = torch.randn(count, heads, dim).to(device, dtype)
        self.qkv[2].abs_(), self.grad.abs_()  # else there may be little left of a sum over so many rows
        self.bias, self.alpha = torch.randn(heads, distances).to(device, dtype), dim**-0.5

    def fused(self) -> list[torch.Tensor]:
        import hstu_triton
        import persrec_triton

        w = self.where
        tiles = hstu_triton.list_tiles(w.rows, len(w.number))
        rest = (*self.qkv, w.rows, w.number, self.bias, self.alpha, w.segments, w.tokens, tiles)
        return [persrec_triton.attention(*rest), *persrec_triton.attention_backward(self.grad, *rest)]

    def loop(self) -> list[torch.Tensor]:
        """In float64."""
        import persrec_attention as pa

        w = self.where
        rest = (*(x.double() for x in self.qkv), w.rows, self.bias.double(), self.alpha, w.segments, w.tokens)
        return [pa.attention_loop(*rest), *pa.attention_backward_loop(self.grad.double(), *rest)]

    def check(self) -> None:
        """Distance to float64, relative, of the whole and of each 32 rows."""
        for name, got, right in zip(NAMES, self.fused(), self.loop(), strict=True):
            assert got.dtype == self.grad.dtype and got.shape == right.shape
            pieces = [(got, right)] if name == "dbias" else zip((got, *got.split(32)), (right, *right.split(32)), strict=True)
            for a, b in pieces:
                off = float((a.double() - b).norm() / b.norm())
                assert off <= MOST[self.grad.dtype] or not b.any() and not a.any(), f"{name}: {off:.2e}"


def one_segment(device: str) -> None:
    Given([0, 1, 60], 1, 4, 20, device, heads=2).check()


def several_segments(device: str) -> None:
    Given([150, 12], 3, 2, 10, device).check()


def many_tokens(device: str) -> None:
    """More than a block of keys, of one segment and of all."""
    Given([30], 2, 18, 9, device).check()


def few_and_many_distances(device: str) -> None:
    for distances in (1, 200):
        Given([40], 2, 3, 15, device, distances=distances).check()


def bfloat16(device: str) -> None:
    Given([50], 2, 4, 20, device, torch.bfloat16, dim=24).check()


def nothing_to_compress(device: str) -> None:
    Given([5, 0], 2, 3, 10, device).check()
    for lengths in ([], [0, 0]):
        given = Given(lengths, 2, 3, 10, device)
        out, dq, dk, dv, dbias = given.fused()
        assert not any(x.any() for x in (out, dq, dk, dv, dbias)) and dbias.shape == (1, 20)


CASES = [one_segment, several_segments, many_tokens, few_and_many_distances, bfloat16, nothing_to_compress]
test_in_the_interpreter = in_the_interpreter(__file__, CASES, thorough=(several_segments, few_and_many_distances))
test_on_a_gpu = on_a_gpu(CASES)


class TestOnGpu:
    pytestmark = needs_gpu

    def test_long(self):
        for dtype in (torch.float32, torch.bfloat16):
            for segments in (1, 4):
                Given([1280, 3000, 0, 100], segments, 4, 256, "cuda", dtype, heads=4, dim=32, distances=128).check()

    def test_same_bits_every_time(self):
        for dtype in (torch.float32, torch.bfloat16):
            given = Given([1280, 0, 37, 2000], 2, 4, 256, "cuda", dtype, heads=4, dim=32, distances=128)
            first = given.fused()
            for _ in range(3):
                assert all(torch.equal(a, b) for a, b in zip(first, given.fused(), strict=True))

    def test_the_model_takes_the_kernels_and_never_waits(self, monkeypatch):
        import persrec_attention as pa
        import persrec_triton
        from hstu import HSTUBlock, attention_tiles

        calls = []
        for name in ("attention", "attention_backward"):
            was = getattr(persrec_triton, name)
            monkeypatch.setattr(persrec_triton, name, lambda *a, n=name, f=was: (calls.append(n), f(*a))[1])
        blocks = torch.nn.ModuleList(HSTUBlock(32, 2, 128) for _ in range(2)).cuda()
        x, offsets = torch.randn(300, 32, device="cuda"), torch.tensor([0, 200, 200, 300], device="cuda")
        tokens = torch.randn(4, 32, device="cuda")

        def run(x, tokens, blocks, offsets):
            where = pa.cut(offsets, x.shape[0], 2, 4, 50)
            x = pa.put_tokens(x, tokens, where)
            tiles = attention_tiles(where.rows, x.shape[0])
            for block in blocks:
                x = block.around(x, lambda q, k, v, b, a: pa.segment_attention(q, k, v, where, b, a, tiles))
            return x.index_select(0, where.of_item)

        run(x, tokens, blocks, offsets).sum().backward()
        calls.clear()
        with no_device_syncs():
            out = run(x, tokens, blocks, offsets)
            out.sum().backward()
        assert calls == [*2 * ["attention"], *2 * ["attention_backward"]]
        expected = run(x.cpu().double(), tokens.cpu().double(), blocks.cpu().double(), offsets.cpu()).detach()
        assert float((out.detach().cpu().double() - expected).norm() / expected.norm()) < 2e-6


if __name__ == "__main__":
    run_cases(CASES)
