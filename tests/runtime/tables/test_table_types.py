"""`model.double()` and the like after construction: the exchange follows the table."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import trec
from ranks import HAS_TORCHREC, run_ranks

ROWS, DIM = 19, 4


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        import freescale

        torch.manual_seed(0)
        self.table = freescale.ShardedEmbedding(ROWS, DIM, name="item", optimizer="rowwise_adagrad", lr=0.1)
        self.out = nn.Linear(DIM, DIM)
        self.table.weight = self.table.weight.to(dtype).to(torch.float32)  # numbers that every type can hold

    def forward(self, item: torch.Tensor) -> torch.Tensor:
        rows = self.table(item)
        return (torch.tanh(self.out(rows)) * rows).sum()


def _train(run, model, ahead: bool) -> tuple[list[float], torch.Tensor]:
    import freescale

    g = torch.Generator().manual_seed(dist.get_rank())
    batches = [{"item": torch.randint(0, ROWS, (n,), generator=g)} for n in (5, 3, 7, 4)]
    losses = []
    for batch in freescale.LookaheadLoader(batches, run) if ahead else batches:
        loss = run(batch["item"])
        loss.backward()
        losses.append(float(loss))
    return losses, model.table.weight.clone()


def _follows(dtype: torch.dtype, codegen: str, loops: tuple[bool, ...] = (False, True)) -> list[str]:
    """A compiled model that is turned into `dtype` trains as the uncompiled one does; before and after a first step."""
    wrong = []
    options = {"codegen": codegen, "strict": True}
    plain = Model(dtype).to(dtype)
    expected = _train(plain, plain, False)
    assert expected[1].dtype == dtype and expected[0][0] != expected[0][-1]
    for ahead in loops:
        model = Model(dtype)
        run = torch.compile(model, backend="freescale", fullgraph=True, options=options)
        if ahead:  # it has a graph for another type already
            start = {k: v.clone() for k, v in model.state_dict().items()}
            _train(run, model, False)
            model.load_state_dict(start)
        model.to(dtype)
        losses, rows = _train(run, model, ahead)
        tolerance = 1e-12 if dtype == torch.float64 else 0.02  # Inductor keeps half precision in registers longer
        close = torch.allclose(rows.double(), expected[1].double(), rtol=tolerance, atol=tolerance)
        if rows.dtype != dtype or not close or abs(losses[0] - expected[0][0]) > tolerance * max(1, abs(losses[0])):
            wrong.append(f"{dtype} {codegen} ahead={ahead}: {losses} instead of {expected[0]}")
    return wrong


@pytest.mark.parametrize("dtype, codegen", (
    pytest.param(torch.float64, "eager", marks=pytest.mark.thorough),
    pytest.param(torch.float64, "inductor", marks=pytest.mark.slow),
    pytest.param(torch.bfloat16, "eager", marks=pytest.mark.thorough),
), ids=("double-eager", "double-inductor", "bfloat16-eager"))  # fmt: skip
def test_a_native_table_follows_its_type(dtype, codegen):
    for wrong in run_ranks(_follows, 2, dtype, codegen):
        assert wrong == []


def test_a_native_table_follows_its_type_without_look_ahead():
    for wrong in run_ranks(_follows, 2, torch.bfloat16, "eager", (False,)):
        assert wrong == []


def _turned_in_the_middle() -> str:
    import freescale

    model = Model(torch.float32)
    run = torch.compile(model, backend="freescale", options={"codegen": "eager"})
    for n, batch in enumerate(freescale.LookaheadLoader([{"item": torch.tensor([1, 2])}] * 3, run)):
        if n == 1:
            model.double()
        run(batch["item"]).backward()
    return "nothing was said"


def test_a_type_that_changes_in_a_loop_is_an_error_on_every_rank():
    for error in run_ranks(_turned_in_the_middle, 2, expect_errors=True):
        assert "item was torch.float32 on cpu when" in error and "is torch.float64 on cpu now" in error, error


def _torchrec(codegen: str) -> tuple[str, str]:
    """What eager TorchRec says of a model that was turned into double, and what the compiled one does."""
    said = []
    for compiled in (False, True):
        model = trec.build("row_wise", "sgd")
        model.double()
        run = torch.compile(model, backend="freescale", options={"codegen": codegen}) if compiled else model
        try:
            said.append(str(trec.train(model, run, 2, none=False)))
        except Exception as error:  # noqa: BLE001
            said.append(f"{type(error).__name__}: {str(error).splitlines()[0][:60]}")
    return said[0], said[1]


@pytest.mark.thorough
@pytest.mark.skipif(not HAS_TORCHREC, reason="torchrec or fbgemm_gpu is not installed")
@pytest.mark.parametrize("codegen", ("eager", pytest.param("inductor", marks=pytest.mark.slow)))
def test_torchrec_tables_in_another_type_are_torchrecs_own(codegen):
    for eager, compiled in run_ranks(_torchrec, 2, codegen):
        assert eager == compiled
