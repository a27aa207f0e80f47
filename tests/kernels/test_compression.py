"""What travels in place of rows: the definition's promises, and the ops that send it."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

import freescale.kernels  # noqa: F401
from freescale.kernels import compression, row_packing
from freescale.kernels.compression import Packing, Slabs, packed_counts, parse
from freescale.kernels.ops import table_registry
from freescale.kernels.transports import launch_record
from ranks import run_ranks

ops = torch.ops.freescale
wait = torch.ops._c10d_functional.wait_tensor


def largest(dim: int, share: Fraction = Fraction(1, 5), block: int = 1024) -> Packing:
    entries = share * 4 * dim / 6
    return Packing("largest", entries.numerator, entries.denominator, max(1, block // dim))


def round_trip(x: torch.Tensor, counts: torch.Tensor, packing: Packing, launch_number: int = 1) -> torch.Tensor:
    """Of a rank that sends nothing to itself."""
    counts, own = torch.cat([counts, torch.tensor([0])]), len(counts)
    packed = row_packing.pack(str(packing), x, counts, counts, own, launch_number)
    assert packed.x.shape == (packed.n_recv, compression.row_bytes(packing, x.shape[1]))
    out = torch.full_like(x, 7.0)
    packed.unpack(packed.x, out)
    return out


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from((1, 3, 64, 1000)), st.lists(st.integers(0, 40), min_size=1, max_size=4),
    st.sampled_from(("1/100", "1/20", "1/3", "1")), st.sampled_from(("normal", "few", "zeros")),
)  # fmt: skip
def test_each_block_keeps_its_largest_values(dim, counts, share, values):
    n = sum(counts)
    x = torch.randn(n, dim) if values == "normal" else torch.randint(-1, 2, (n, dim)).float()
    if values == "zeros":
        x.zero_()
    packing = largest(dim, Fraction(share))
    got = round_trip(x, torch.tensor(counts), packing)
    begin = 0
    for count in counts:
        sent = 0
        for first in range(0, count, packing.block_rows):
            last = min(first + packing.block_rows, count)
            kept = last * packing.num // packing.den - first * packing.num // packing.den
            block = x[begin + first : begin + last].reshape(-1)
            order = torch.argsort(block.abs(), descending=True, stable=True)[:kept]
            expected = torch.zeros_like(block)
            expected[order] = block[order]
            assert torch.equal(got[begin + first : begin + last].reshape(-1), expected)
            sent += kept
        assert sent == count * packing.num // packing.den
        assert sent * 6 <= Fraction(share) * count * dim * 4
        begin += count


def test_entries_stand_in_the_order_of_their_places():
    x = torch.tensor([[5.0, -1.0, 0.5, -9.0, 2.0, 3.0]])
    packed = compression.compress(x, Slabs.of(torch.tensor([1])), Packing("largest", 3, 1, 4))
    halves = packed.view(torch.int16)
    assert halves[:, 2].tolist() == [0, 3, 5]
    assert halves[:, :2].reshape(-1).view(torch.float32).tolist() == [5.0, -9.0, 3.0]


def test_a_place_may_need_all_16_bits():
    x = torch.zeros(65536, 1)
    x[40000], x[65535] = 1.0, -2.0
    got = round_trip(x, torch.tensor([65536]), Packing("largest", 2, 65536, 65536))
    assert torch.equal(got, x)


def test_what_is_not_finite_counts_as_largest():
    x = torch.full((4, 256), 1e30)
    x[2, 5], x[3, 7], x[0, 0] = float("nan"), float("-inf"), float("inf")
    got = round_trip(x, torch.tensor([4]), Packing("largest", 3, 4, 4)).view(-1)
    assert got.nonzero().view(-1).tolist() == [0, 2 * 256 + 5, 3 * 256 + 7] and got[517].isnan()


def test_packings_are_their_texts():
    for text in ("largest:32/15:16", "fp16", "bf16", "fp8", "fp8:stochastic"):
        assert str(parse(text)) == text
    for text in ("fp4", "fp16:nearest", "largest", "largest:1/2:2:stochastic", "fp16:stochastic", "lossless", ""):
        with pytest.raises(ValueError, match="unknown packing"):
            parse(text)


@pytest.mark.parametrize("dim", (1, 3, 64))
def test_wide_types_round_to_nearest(dim):
    x = torch.randn(9, dim)
    for text, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        assert torch.equal(round_trip(x, torch.tensor([4, 5]), parse(text)), x.to(dtype).float())


@pytest.mark.parametrize("dim", (1, 3, 64))
def test_fp8_is_torchs_e4m3_with_a_scale_per_row(dim):
    x = torch.randn(200, dim) * torch.logspace(-30, 30, 200)[:, None]
    x[7] = 0.0
    scale = (x.abs().amax(1, keepdim=True) * (1 / 448)).clamp(min=2.0**-126)
    expected = (x / scale).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(round_trip(x, torch.tensor([200]), parse("fp8")), expected)


def test_fp8_rounds_gradients_so_that_the_mean_is_right():
    x, counts, n = torch.rand(4, 64) + 0.01, torch.tensor([4]), 2000
    total = torch.zeros_like(x)
    for number in range(n):
        got = round_trip(x, counts, parse("fp8:stochastic"), number)
        assert (got - x).abs().max() <= 32 * 1.1 / 448
        total += got
    nearest = round_trip(x, counts, parse("fp8")) - x
    assert (total / n - x).abs().mean() < nearest.abs().mean() / 10
    again = [round_trip(x, counts, parse("fp8:stochastic"), 3) for _ in range(2)]
    assert torch.equal(*again) and not torch.equal(again[0], round_trip(x, counts, parse("fp8:stochastic"), 4))


def test_fp8_of_a_row_that_is_not_finite_is_nan():
    x = torch.ones(3, 8)
    x[0, 3], x[1, 2] = float("inf"), float("nan")
    got = round_trip(x, torch.tensor([3]), parse("fp8"))
    assert got[:2].isnan().all() and torch.equal(got[2], x[2])


class Table:
    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def describe(self, feature):
        return "a feature"


PACKINGS = ("largest:1/2:2", "largest:1/3:300", "fp16", "bf16", "fp8", "fp8:stochastic")


def _launched(device: str = "cpu", transport: str = "c10d") -> None:
    """Every packing, with counts that differ by peer and are 0 for some; launches overlap."""
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    sizes = torch.tensor([[(3 * i + 5 * j + 2) % 7 for j in range(world)] for i in range(world)])
    tables = [torch.randn(50, 3, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    table = Table(tables[rank].to(device))
    name = table_registry.register(table, "t")
    rows = [torch.arange(int(sizes[r].sum())) * 7 % 50 for r in range(world)]
    counts, n_recv = (sizes[rank], sizes[:, rank].contiguous()), int(sizes[:, rank].sum())
    # Of the peers' numbers, what each would have sent, unpacked as if it had come back; its own as they are.
    numbers = range(1, len(PACKINGS) + 1)

    def expected(r: int, text: str, number: int) -> torch.Tensor:
        slabs, others = tables[r][rows[r]].split(sizes[r].tolist()), torch.arange(world) != r
        sent = torch.cat([tables[r][:0], *(s for s, other in zip(slabs, others, strict=True) if other)])
        arrived = iter(round_trip(sent, sizes[r][others], parse(text), number).split(sizes[r][others].tolist()))
        return [next(arrived) if other else s for s, other in zip(slabs, others, strict=True)][rank]

    first = len(launch_record.records)
    token, mine = torch.empty(0, 3, device=device), rows[rank].to(device)
    launched = [ops.all_to_all_rows_launch(token, mine, *counts, n_recv, 2, name, group, transport, p) for p in PACKINGS]
    launched += [ops.all_to_all_launch(table.weight[mine], *counts, n_recv, 1, name, group, transport, p) for p in PACKINGS]
    for i, out in enumerate(launched):
        text, number = PACKINGS[i % len(PACKINGS)], numbers[i % len(PACKINGS)]
        assert torch.equal(wait(out).cpu(), torch.cat([expected(r, text, number) for r in range(world)])), text
    sent = [r.bytes for r in list(launch_record.records)[first:]]
    from_others = counts[1][torch.arange(world) != rank]
    sizes_packed = [int(packed_counts(from_others, parse(p)).sum()) * compression.row_bytes(parse(p), 3) for p in PACKINGS]
    assert sent == sizes_packed * 2
    assert launch_record.records[-1].label == "late gradients of t"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.sampled_from((1, 3, 64)), st.sampled_from(PACKINGS), st.data())
def test_what_a_rank_sends_to_itself_is_not_packed(counts, dim, text, data):
    """It is nowhere in what is sent, what is unpacked leaves it alone, and to the others it makes no difference."""
    rank = data.draw(st.integers(0, len(counts) - 1))
    x, ns = torch.randn(sum(counts), dim), torch.tensor(counts)
    own = torch.zeros(len(x), dtype=torch.bool)
    own[sum(counts[:rank]) : sum(counts[: rank + 1])] = True
    packed = row_packing.pack(text, x, ns, ns, rank, 5)
    assert packed.send_counts[rank] == packed.recv_counts[rank] == 0 and packed.n_recv == len(packed.x)
    out = torch.full_like(x, 7.0)
    packed.unpack(packed.x, out)
    others = torch.tensor([n for r, n in enumerate(counts) if r != rank], dtype=torch.int64)
    assert (out[own] == 7.0).all() and torch.equal(out[~own], round_trip(x[~own], others, parse(text), 5))
    row_packing.copy_own(text, x, out, ns, ns, rank)
    assert torch.equal(out[own], x[own]) and torch.equal(out[~own], round_trip(x[~own], others, parse(text), 5))


def test_a_rank_expects_from_itself_what_it_sends():
    x, send, recv = torch.randn(3, 2), torch.tensor([1, 2]), torch.tensor([1, 1])
    with pytest.raises(ValueError, match="rank 1 sends 2 rows to itself and expects 1"):
        row_packing.copy_own("fp16", x, x.clone(), send, recv, 1)


@pytest.mark.parametrize("world", (1, 2, 4))
def test_a_launch_delivers_what_the_definition_says(world):
    run_ranks(_launched, world)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("transport", ("c10d", "staged", "auto"))
def test_a_launch_delivers_it_on_a_gpu(transport):
    run_ranks(_launched, 2, "cuda", transport, backend="cpu:gloo,cuda:nccl")


def test_opcheck(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group, counts = dist.group.WORLD.group_name, torch.tensor([3])
        table = Table(torch.randn(10, 8))
        name = table_registry.register(table, "t")
        tests = ("test_schema", "test_faketensor")
        x, rows = torch.randn(3, 8), torch.tensor([1, 4, 1])
        args = (counts, counts, 3, 0, name, group, "c10d", "fp16")
        opcheck(ops.all_to_all_launch, (x, *args), test_utils=tests)
        opcheck(ops.all_to_all_rows_launch, (torch.empty(0, 8), rows, *args), test_utils=tests)
        opcheck(ops.all_reduce_launch, ([x, x[0]], "a, b", group, "largest:1/4:32"), test_utils=tests)
    finally:
        dist.destroy_process_group()


def test_codecs_of_torchrec_round_what_a_rank_sends_to_itself():
    x, counts = torch.randn(5, 3), torch.tensor([2, 3])
    for text in ("fp16:codec", "bf16:codec:3.0"):
        out = torch.empty_like(x)
        packed = row_packing.pack(text, x, counts, counts, 1, 0)
        packed.unpack(packed.x, out)
        row_packing.copy_own(text, x, out, counts, counts, 1)
        packing = parse(text)
        assert torch.equal(out, compression.decode(compression.encode(x, packing), packing)) and not torch.equal(out, x)
