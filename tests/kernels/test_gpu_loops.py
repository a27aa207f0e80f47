"""Loops over real TorchRec on a GPU that two ranks share, over NCCL: tables that the loop writes, and an exception that
leaves the loop on one rank. The same on the CPU: tests/runtime/lookahead."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import on_gpu
import trec
from ranks import run_ranks

pytestmark = on_gpu.MARKS
# TorchRec places the shards of rank r on GPU r % LOCAL_WORLD_SIZE.
ON_ONE_GPU = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}


def _build() -> Any:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingCollection
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints

    torch.manual_seed(0)
    model = trec.Model(small=True)
    model.ec = EmbeddingCollection(
        [t for t in trec.tables() if t.name in trec.SMALL], device=torch.device("meta")
    )
    for part in (model.mix, model.out):
        part.cuda()
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1, "eps": 1e-8}
    sharders: list[Any] = [EmbeddingCollectionSharder(fused)]
    constraints = {n: ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"]) for n in trec.SMALL}
    topology = Topology(world_size=dist.get_world_size(), local_world_size=1, compute_device="cuda")
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    device = torch.device("cuda", 0)
    sharded = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders, init_data_parallel=False)
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    for shard in _shards(sharded):
        shard.copy_(torch.rand(shard.shape, device=device, generator=generator) - 0.5)
    return sharded


def _shards(model: nn.Module) -> list[torch.Tensor]:
    found = [v.local_shards() for v in model.state_dict().values() if hasattr(v, "local_shards")]
    return [shard.tensor for shards in found for shard in shards]


def _loop(model: Any, wrapped: bool, before_step: Any = None, before_backward: Any = None) -> list[torch.Tensor]:
    """Six steps; `before_step` and `before_backward` are called with their numbers."""
    import freescale

    batches: Any = [trec.batch(t, dist.get_rank(), none=False) for t in range(6)]
    losses = []
    for i, (kjt, weight) in enumerate(freescale.LookaheadLoader(batches, model, overlap=True) if wrapped else batches):
        if before_step is not None:
            before_step(i)
        loss = model(kjt.to(torch.device("cuda")), weight.cuda())
        if before_backward is not None:
            before_backward(i)
        loss.backward()
        losses.append(loss.detach())
    return losses


def _written() -> str:
    """Rank 0 writes through the shards of state_dict(), then to a parameter. What every rank raises then."""
    torch.cuda.set_device(0)
    model, rank = _build(), dist.get_rank()
    model.compile(backend="freescale", options={"codegen": "eager", "strict": True})
    beginning = trec.snapshot(model), trec.optimizer_state(model)

    def through_shards(i: int) -> None:
        if i in (2, 4):
            for shard in _shards(model):
                shard.mul_(0.5 if rank == 0 else 1.0)

    def to_parameter(i: int) -> None:
        if i == 3 and rank == 0:
            with torch.no_grad():
                next(p for n, p in model.named_parameters() if "item" in n).mul_(0.5)

    results = []
    for wrapped in (False, True):
        trec.put_back(model, *beginning)
        results.append((torch.stack(_loop(model, wrapped, through_shards)), trec.snapshot(model)))
    (losses, rows), (same_losses, same_rows) = results
    assert torch.equal(losses, same_losses)
    assert all(torch.equal(v, same_rows[k]) for k, v in rows.items())
    with pytest.raises(RuntimeError) as refused:
        _loop(model, True, to_parameter)
    return str(refused.value)


def test_written_tables():
    for words in run_ranks(_written, 2, backend="cpu:gloo,cuda:nccl", env=ON_ONE_GPU, timeout=200):
        assert re.search("rank 0: something other than training wrote to a table before the gradients of step 2", words)


def _one_raises() -> str:
    """Rank 1, between forward and backward. The group's time-out is beyond the test's."""
    torch.cuda.set_device(0)
    model = _build()
    model.compile(backend="freescale", options={"codegen": "eager", "strict": True})

    def fail(i: int) -> None:
        assert i != 3 or dist.get_rank() == 0, "the loss is bad"

    with pytest.raises((AssertionError, RuntimeError)) as caught:
        _loop(model, True, before_backward=fail)
    return f"{caught.type.__name__}: {caught.value}"


def test_an_exception_on_one_rank():
    peer, raised = run_ranks(
        _one_raises, 2, backend="cpu:gloo,cuda:nccl", env=ON_ONE_GPU, timeout=200, group_timeout=900
    )
    assert raised.startswith("AssertionError: the loss is bad")
    assert re.search("rank 1 left its loop at batch 3: .*the loss is bad", peer)
