"""The first values of a table: each rank makes its own rows, and together they are one table, however it is sharded."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import freescale
from freescale.runtime.tables import sharded_embedding
from ranks import run_ranks

TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def drawn(n: int, dim: int, first: int = 0, seed: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    rows = torch.empty(n, dim, dtype=dtype)
    sharded_embedding.fill_uniform(rows, first, 0.5, seed)
    return rows


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_parts_of_a_table_are_what_the_whole_has_there(dtype, monkeypatch):
    monkeypatch.setattr(sharded_embedding, "BLOCK_VALUES", 20)
    whole = drawn(50, 3, dtype=dtype)  # blocks of 6 rows
    for first in (0, 1, 5, 6, 17, 48, 49):
        for n in (0, 1, 2, 6, 7, 30):
            part = drawn(min(n, 50 - first), 3, first, dtype=dtype)
            assert torch.equal(part, whole[first : first + n])
    assert torch.equal(drawn(4, 30, 2, dtype=dtype), drawn(6, 30, dtype=dtype)[2:])  # a row is more than a block


def test_threads_change_nothing(monkeypatch):
    monkeypatch.setattr(sharded_embedding, "BLOCK_VALUES", 64)
    alone = drawn(100, 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    assert torch.equal(drawn(100, 8), alone)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_values_are_uniform(dtype):
    x = drawn(300_000, 7, dtype=dtype).double()  # three blocks
    assert -0.5 <= float(x.min()) < -0.499 and 0.499 < float(x.max()) <= 0.5
    shares = torch.histc(x, 20, -0.5, 0.5) / x.numel()
    assert float((shares - 0.05).abs().max()) < 0.002  # rounded to bfloat16, values at the border of two bins change bins
    assert abs(float((x[1:] * x[:-1]).mean())) < 0.001 and abs(float((x[:, 1:] * x[:, :-1]).mean())) < 0.001


def test_blocks_and_seeds_and_far_rows_differ():
    size = sharded_embedding.BLOCK_VALUES // 4
    some = [drawn(9, 4), drawn(9, 4, seed=4), drawn(9, 4, size), drawn(9, 4, 2 * size), drawn(9, 4, 2**33 * size)]
    for i, a in enumerate(some):
        assert not any((a == b).any() for b in some[i + 1 :])


def _own_rows(sharding, dtype):
    torch.manual_seed(7)
    table = freescale.ShardedEmbedding(1001, 3, sharding=sharding, dtype=dtype)
    return table.weight, torch.rand(2)


def test_a_table_does_not_depend_on_the_number_of_ranks():
    (whole, after), = run_ranks(_own_rows, 1, "row_wise", torch.float32)  # fmt: skip
    assert float(whole.abs().max()) <= 1001**-0.5
    for world, sharding in ((2, "row_wise"), (3, "row_wise"), (2, "table_wise")):
        parts = run_ranks(_own_rows, world, sharding, torch.float32)
        assert torch.equal(torch.cat([weight for weight, _ in parts]), whole), (world, sharding)
        assert all(torch.equal(rand, after) for _, rand in parts)  # what is drawn next is the same everywhere


def _peak_memory() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))


def _memory_for_a_table(mib):
    freescale.ShardedEmbedding(8, 4)  # what is loaded at first use
    before = _peak_memory()
    table = freescale.ShardedEmbedding(mib << 14, 16, sharding="table_wise", owner=1)
    assert table.weight.nbytes == (mib << 20 if dist.get_rank() == 1 else 0)
    return (_peak_memory() - before) >> 20


def test_a_rank_needs_memory_for_its_own_rows_alone():
    nothing, all_rows = run_ranks(_memory_for_a_table, 2, 256)
    assert nothing < 32 and all_rows < 256 + 64


def _made_where_a_context_says():
    torch.manual_seed(5)
    with torch.device("meta"):
        on_meta = freescale.ShardedEmbedding(40, 4, name="meta")
        drawn_next = torch.rand(2, device="cpu")
    torch.manual_seed(5)
    plain = freescale.ShardedEmbedding(40, 4, name="plain")
    return on_meta.weight.device.type, plain.weight.device.type, torch.equal(drawn_next, torch.rand(2))


def test_a_device_that_a_context_says():
    assert run_ranks(_made_where_a_context_says, 1) == [("meta", "cpu", True)]
