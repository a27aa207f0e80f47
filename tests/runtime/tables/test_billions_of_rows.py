"""A table of five billion rows against a small one with the rows that are used: same losses, same rows, bit for bit."""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ranks import run_ranks
from sparse_table import sparse_zeros

ROWS = 5_000_000_000  # float16, so bytes go further than rows
# Ids on both sides of 2**31, of where a shard ends if two ranks share the table, of 2**32, and at the ends.
USED = torch.tensor([0, 7, 2**31 - 1, 2**31, 2**31 + 1, ROWS // 2 - 1, ROWS // 2, 2**32 - 1, 2**32, 2**32 + 1, 2**32 + 5, ROWS - 1])


class Model(nn.Module):
    def __init__(self, table) -> None:
        super().__init__()
        self.table = table

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.tanh(self.table(batch[self.table.name]).float() * 3).sum()


def ids_of(step: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randint(0, len(USED), (3 + step % 4,), generator=g)


def train(model: Model, batches: list[torch.Tensor], ahead: bool) -> list[float]:
    import freescale

    torch._dynamo.reset()
    run = torch.compile(model, backend="freescale", fullgraph=True, options={"codegen": "eager", "strict": True})
    losses = []
    data = [{model.table.name: ids} for ids in batches]
    for batch in freescale.LookaheadLoader(data, run) if ahead else data:
        loss = run(batch)
        loss.backward()
        losses.append(float(loss.detach()))
    return losses


def _trains_like_a_small_one(sharding, optimizer, ahead, sockets):
    import freescale
    from freescale.kernels.planning import rank_mesh

    settings = {"optimizer": optimizer, "lr": 0.5, "eps": 1e-3, "sharding": sharding, "dtype": torch.float16}
    small = freescale.ShardedEmbedding(len(USED), 1, name="small", **settings)
    large = freescale.ShardedEmbedding(ROWS, 1, name="large", device="meta", **settings)
    shard = large.shards[dist.get_rank()]
    local = USED[(shard.first <= USED) & (USED < shard.first + shard.rows)] - shard.first
    assert small.weight.shape[0] == local.shape[0]  # both tables have the rows that are used on the same ranks
    batches = [ids_of(step) for step in range(9)]
    with ExitStack() as stack:
        if not sockets:  # gloo carries what C plans
            stack.enter_context(mock.patch.object(rank_mesh, "open_mesh", lambda *args: None))
        state = {
            name: stack.enter_context(sparse_zeros(*x.shape, dtype=x.dtype)) if x.numel() else torch.empty(x.shape, dtype=x.dtype)
            for name, x in large.state_dict().items()
        }
        large.load_state_dict(state, assign=True)
        assert large.weight.data_ptr() == state["weight"].data_ptr()
        large.weight[local] = small.weight
        losses = train(Model(large), [USED[ids] for ids in batches], ahead)
        assert losses == train(Model(small), batches, ahead)
        assert torch.equal(large.weight[local], small.weight)
        assert optimizer == "sgd" or torch.equal(large.momentum[local], small.momentum)
    return losses[0] != losses[-1]


@pytest.mark.parametrize("sharding, optimizer, ahead, sockets", (
    pytest.param("row_wise", "rowwise_adagrad", True, True, marks=pytest.mark.thorough),
    pytest.param("table_wise", "sgd", True, True, marks=pytest.mark.thorough),
    pytest.param("table_wise", "rowwise_adagrad", False, False, marks=pytest.mark.thorough),
    pytest.param("row_wise", "sgd", True, False, marks=pytest.mark.slow),
))  # fmt: skip
def test_trains_like_a_small_table(sharding, optimizer, ahead, sockets):
    assert run_ranks(_trains_like_a_small_one, 2, sharding, optimizer, ahead, sockets) == [True, True]


def _id_outside():
    import freescale

    table = freescale.ShardedEmbedding(ROWS, 1, device="meta", dtype=torch.float16)
    errors = []
    for wrong in (ROWS, -1):
        with pytest.raises(IndexError) as raised:
            table(torch.tensor([ROWS - 1, wrong]))
        errors.append(str(raised.value))
    return errors


def test_an_id_outside_a_large_table_is_named():
    (errors,) = run_ranks(_id_outside, 1)
    assert errors == [f"freescale: rank 0: id {i} is outside table 'embedding', which has {ROWS} rows" for i in (ROWS, -1)]
