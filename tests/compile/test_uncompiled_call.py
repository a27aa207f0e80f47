"""`model.forward(batch)` after `model.compile(...)` runs what is not compiled: said once, and no other call is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import trec
from listening import listen
from ranks import HAS_TORCHREC, run_ranks

OPTIONS: dict[str, Any] = {"backend": "freescale", "options": {"codegen": "eager"}}


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        import freescale

        self.table = freescale.ShardedEmbedding(31, 4, name="item")

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.look_up(batch["item"]).sum()

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids)


class Broken(Inner):
    """Its lookup is outside of the graph, in the call of what is compiled."""

    @torch.compiler.disable
    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids)


class Outer(nn.Module):
    def __init__(self, inner: nn.Module, past: bool) -> None:
        super().__init__()
        self.inner, self.past = inner, past

    @torch.no_grad()
    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.inner.forward(batch) if self.past else self.inner(batch)


def _native() -> list[Any]:
    import freescale

    said, batch = listen(), {"item": torch.tensor([3, 5, 7]) + dist.get_rank()}
    plain, other, model, broken = Inner(), Inner(), Inner(), Broken()
    other.compile(backend="eager")
    broken.compile(**OPTIONS)
    model.compile(**OPTIONS)
    model(batch)  # so that the name of the backend is known to torch, as a user's
    for module in (plain, other, plain.table):
        module.forward(batch["item"] if module is plain.table else batch)
    Outer(plain, True)(batch)
    broken(batch), Outer(broken, False)(batch), Outer(model, False)(batch)
    assert said == [], said
    with torch.compiler.set_stance("force_eager"):
        model(batch)
    assert said == [], said
    for _ in freescale.LookaheadLoader([batch] * 2, model):
        with pytest.raises(RuntimeError, match=r"without its compiled model.*model\(batch\), not model\.forward\(batch\)"):
            model.forward(batch)
        break
    assert said == [], said
    model.forward(batch).backward()
    Outer(model, True)(batch)
    model.table.forward(batch["item"])
    Outer(broken, True)(batch)
    return said


def test_the_call_is_named_once():
    for said in run_ranks(_native, 2):
        assert len(said) == 2, said
        assert "Inner.forward(...) was called" in said[0] and "Broken.forward(...) was called" in said[1], said


def _torchrec() -> list[str]:
    said, batch = listen(), trec.batch(0, dist.get_rank())
    model = trec.build("row_wise", "sgd", small=True)
    model.compile(**OPTIONS)
    trec.build("row_wise", "sgd", small=True)(*batch)
    assert said == [], said
    for _ in range(2):
        model.forward(*batch).backward()
    return said


@pytest.mark.skipif(not HAS_TORCHREC, reason="torchrec or fbgemm_gpu is not installed")
def test_a_model_of_torchrec():
    for (said,) in run_ranks(_torchrec, 2):
        assert "DistributedModelParallel.forward(...) was called" in said
