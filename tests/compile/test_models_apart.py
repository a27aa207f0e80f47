"""A loop keeps to its own tables: dense parts need no other rank, other models hear nothing of its errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import trec
from loops import Model, Training, batch_of, data, threads
from ranks import HAS_TORCHREC, run_ranks


def _native() -> bool:
    t = Training(True)
    loader = t.loader(data(9))
    loop = iter(loader)
    for _ in range(3):
        t.step(next(loop))
    if dist.get_rank() == 0:
        assert set(t.model.out.state_dict()) == {"weight", "bias"}
        t.optimizer.state_dict()
    dist.barrier()  # the others are here, and not on their way to a step
    run = loader._session.loops[-1]
    assert run.pending == 2
    t.model.state_dict()
    assert run.pending == -1

    torch.autograd.grad(t.run(next(loop)), list(t.model.parameters()))
    with pytest.raises(RuntimeError, match="gradients of step 3 for table item.* were not applied"):
        loop.close()
    t.model.out.state_dict()
    other = Model()
    other_run = torch.compile(other, backend="freescale", options={"codegen": "eager"})
    other.state_dict()
    other_run(batch_of(0)).backward()
    with pytest.raises(RuntimeError, match="gradients of step 3 for table item.* were not applied"):
        t.model.state_dict()
    t.model.state_dict()
    assert threads() == []
    return True


class OneTable(nn.Module):
    """Table-wise, it is on one rank alone; the other one has none of its parameters and must come all the same."""

    def __init__(self) -> None:
        super().__init__()
        from torchrec import EmbeddingCollection, EmbeddingConfig

        torch.manual_seed(0)
        table = EmbeddingConfig(name="item", num_embeddings=31, embedding_dim=4, feature_names=["item"])
        self.ec = EmbeddingCollection(tables=[table], device=torch.device("cpu"))
        self.out = nn.Linear(4, 4)

    def forward(self, features: Any) -> torch.Tensor:
        found = self.ec(features)["item"].values()
        return (torch.tanh(self.out(found)) * found).sum()


def _torchrec() -> bool:
    from torchrec import KeyedJaggedTensor
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

    import freescale

    def batches() -> list[Any]:
        items = [batch_of(step + 1)["item"] for step in range(11)]
        return [KeyedJaggedTensor(["item"], values=i, lengths=torch.ones_like(i)) for i in items]

    def build() -> tuple[Any, Any, Any]:
        model = trec.shard(OneTable(), {"item": "table_wise"}, "rowwise_adagrad")
        run = torch.compile(model, backend="freescale", options={"codegen": "eager"})
        dense = dict(model.module.out.named_parameters())
        optimizer = KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adagrad(params, lr=0.1))
        return model, run, optimizer

    model, run, dense = build()
    loader = freescale.LookaheadLoader(batches(), run)
    loop = iter(loader)

    def steps(n: int) -> Any:
        for _ in range(n):
            run(next(loop)).backward()
        return loader._session.loops[-1]

    state = steps(3)
    if dist.get_rank() == 0:
        model.module.out.state_dict()
        dense.state_dict()
        dense.load_state_dict(dense.state_dict())
    dist.barrier()
    reads = (
        model.fused_optimizer.state_dict,
        CombinedOptimizer([("dense", dense), ("sparse", model.fused_optimizer)]).state_dict,
        model.module.ec.fused_optimizer.state_dict,
        model.module.ec.embeddings.state_dict,
        model.state_dict,
    )
    for n, read in enumerate(reads, 2):
        assert state.pending == n
        read()
        assert state.pending == -1, read
        dist.barrier()
        state = steps(1)

    torch.autograd.grad(run(next(loop)), list(model.module.out.parameters()))
    lost = "gradients of step 8 for table .* were not applied"
    with pytest.raises(RuntimeError, match=lost):
        loop.close()
    other, other_run, other_dense = build()
    for read in (other.fused_optimizer.state_dict, other.state_dict, other_dense.state_dict, dense.state_dict):
        read()
    other.fused_optimizer.load_state_dict(other.fused_optimizer.state_dict())
    for batch in freescale.LookaheadLoader(batches()[:3], other_run):
        other_run(batch).backward()
    with pytest.raises(RuntimeError, match=lost):
        model.fused_optimizer.state_dict()
    model.fused_optimizer.state_dict()
    assert threads() == []
    return True


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ("native", "torchrec"))
def test_a_loop_keeps_to_its_own_tables(kind):
    if kind == "torchrec" and not HAS_TORCHREC:
        pytest.skip("no TorchRec")
    assert run_ranks(_native if kind == "native" else _torchrec, 2, env={"FREESCALE_TIMEOUT": "10"}) == [True, True]
