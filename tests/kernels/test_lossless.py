"""Rows without their zeros: every bit arrives, what is sent is never longer than the rows, over real ranks too."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import freescale.kernels  # noqa: F401
from freescale.kernels import lossless
from freescale.kernels.ops import table_registry
from freescale.kernels.transports import launch_record
from ranks import run_ranks

ops = torch.ops.freescale
wait = torch.ops._c10d_functional.wait_tensor
ODD = torch.tensor([1 << 31, 1, 0x7F800000, 0x7FC00001, 0xFF800000, 0xFFFFFFFF, 0x3F800000])  # -0.0, tiny, inf, NaNs


def rows_of(n: int, dim: int, share: float, seed: int) -> torch.Tensor:
    """A share of the values is not zero, among them what is easily taken for zero or changed."""
    g = torch.Generator().manual_seed(seed)
    bits = ODD[torch.randint(len(ODD), (n, dim), generator=g)] * (torch.rand(n, dim, generator=g) < share)
    return torch.where(bits < 2**31, bits, bits - 2**32).int().view(torch.float32)


def words_of(slab: torch.Tensor) -> int:
    """That it should travel in."""
    rows, dim = slab.shape
    return min(slab.numel(), rows * -(-dim // 32) + int((slab.view(torch.int32) != 0).sum()))


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=4), st.sampled_from((1, 3, 40, 64)),
    st.sampled_from((0.0, 0.05, 0.97, 1.0)), st.data(),
)  # fmt: skip
def test_every_bit_arrives(counts, dim, share, data):
    rank = data.draw(st.integers(0, len(counts) - 1))
    x, ns = rows_of(sum(counts), dim, share, sum(counts)), torch.tensor(counts)
    packed = lossless.pack(x, ns, ns, rank, lambda sizes: sizes)
    slabs = list(x.split(counts))
    slabs[rank] = slabs[rank][:0]
    assert packed.send_counts.tolist() == [words_of(s) for s in slabs] and packed.x.nbytes == 4 * packed.n_recv
    out = torch.full_like(x, 7.0)
    packed.unpack(packed.x, out)
    for r, (got, expected) in enumerate(zip(out.split(counts), x.split(counts), strict=True)):
        if r == rank:
            assert (got == 7.0).all()
        else:
            assert torch.equal(got.view(torch.int32), expected.view(torch.int32))


class Table:
    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def describe(self, feature):
        return "a feature"


def _launched(device: str = "cpu") -> None:
    """Few values, many and none, to peers with different counts; each launch before the wait for the one before."""
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
    sizes = torch.tensor([[(3 * i + 5 * j + 2) % 7 for j in range(world)] for i in range(world)])
    tables = [torch.cat([rows_of(30, 9, s, r) for s in (0.1, 1.0, 0.0)]) for r in range(world)]
    table = Table(tables[rank].to(device))  # the registry does not keep it
    name = table_registry.register(table, "t")
    counts, n_recv = (sizes[rank], sizes[:, rank].contiguous()), int(sizes[:, rank].sum())
    launched, expected, received = [], [], []
    first = len(launch_record.records)
    for begin in (0, 30, 60, 25):
        rows = torch.arange(begin, begin + int(sizes[rank].sum()), device=device)
        token = torch.empty(0, 9, device=device)
        launched.append(ops.all_to_all_rows_launch_packed(token, rows, *counts, n_recv, 0, name, group, "lossless"))
        slabs = [tables[r][begin : begin + int(sizes[r].sum())].split(sizes[r].tolist())[rank] for r in range(world)]
        expected.append(torch.cat(slabs))
        received.append(4 * sum(words_of(s) for r, s in enumerate(slabs) if r != rank))
    for out, rows in zip(launched, expected, strict=True):
        assert torch.equal(wait(out).cpu().view(torch.int32), rows.view(torch.int32))
    records = list(launch_record.records)[first:]
    assert [r.bytes for r in records if r.label == "urgent rows of t"] == received
    assert [r.label for r in records].count("sizes of what is compressed") == 4


@pytest.mark.parametrize("world", (1, 2, 4))
def test_a_launch_delivers_every_bit(world):
    run_ranks(_launched, world)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_launch_delivers_every_bit_on_a_gpu():
    run_ranks(_launched, 2, "cuda", backend="cpu:gloo,cuda:nccl")
