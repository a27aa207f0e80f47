"""Tables that TorchRec stores in float16: in the graph, with FBGEMM's own rounding, bit for bit.

Gradients are small whole numbers over a power of two, so that sums do not depend on their order, and a row is never
rounded the other way.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import trec
from ranks import HAS_TORCHREC, run_ranks

pytestmark = pytest.mark.skipif(not HAS_TORCHREC, reason="torchrec or fbgemm_gpu is not installed")

DIM, STEPS = 8, 8
# table: rows, sharding, type
SEQUENCES = {"item": (97, "row_wise", "FP16"), "user": (41, "table_wise", "FP32"), "shop": (23, "column_wise", "FP16")}
POOLED = {"tag": (31, "row_wise", "FP16"), "word": (29, "column_wise", "FP32")}
KEYS = (*SEQUENCES, *POOLED)


class Halves(nn.Module):
    """`small`: of two tables, which compile in less time."""

    def __init__(self, small: bool = False) -> None:
        super().__init__()
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
        from torchrec.modules.embedding_configs import DataType

        def configs(make: Any, tables: dict[str, Any]) -> list[Any]:
            return [
                make(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[name], data_type=DataType[dtype])
                for name, (rows, _, dtype) in tables.items()
            ]

        cpu = torch.device("cpu")
        self.names, self.bags = (["item", "shop"], []) if small else ([*SEQUENCES], [*POOLED])
        sequences = {name: SEQUENCES[name] for name in self.names}
        self.sequences = EmbeddingCollection(tables=configs(EmbeddingConfig, sequences), device=cpu)
        if self.bags:
            self.pooled = EmbeddingBagCollection(tables=configs(EmbeddingBagConfig, POOLED), device=cpu)

    def forward(self, features: Any, factor: torch.Tensor) -> torch.Tensor:
        found, pooled = self.sequences(features), self.pooled(features) if self.bags else {}
        values = [found[name].values() for name in self.names] + [pooled[name] for name in self.bags]
        assert all(v.dtype == torch.float32 for v in values)
        return sum((v * factor).sum() for v in values) / 8


def _batch(step: int) -> tuple[Any, torch.Tensor]:
    from torchrec import KeyedJaggedTensor

    g = torch.Generator().manual_seed(100 * step + dist.get_rank())
    rows = [n for n, _, _ in (SEQUENCES | POOLED).values()]
    lengths = torch.randint(0, 6, (len(KEYS), 4), generator=g)
    ids = [torch.randint(0, n, (int(of.sum()),), generator=g) for n, of in zip(rows, lengths, strict=True)]
    kjt = KeyedJaggedTensor(keys=list(KEYS), values=torch.cat(ids), lengths=lengths.flatten())
    return kjt, torch.randint(-3, 4, (DIM,), generator=g).float()


def _train(
    optimizer: str, options: dict[str, Any] | None, ahead: bool, small: bool, device: str
) -> tuple[list[float], dict[str, torch.Tensor]]:
    import freescale

    torch._dynamo.reset()
    torch.manual_seed(0)
    kinds = {n: kind for n, (_, kind, _) in (SEQUENCES | POOLED).items()}
    # On a GPU, FBGEMM by default rounds up or down at random.
    fused = {} if device == "cpu" else {"stochastic_rounding": False}
    model = trec.shard(Halves(small), kinds, optimizer, device=device, **fused)
    run = model
    if options is not None:
        run = torch.compile(model, backend="freescale", fullgraph=True, options={"strict": True, **options})
    batches: Any = [_batch(step) for step in range(STEPS)]
    losses = []
    for batch in freescale.LookaheadLoader(batches, run) if ahead else batches:
        loss = run(*trec.on(torch.device(device), *batch))
        loss.backward()
        losses.append(float(loss.detach()))
    return losses, trec.snapshot(model) | trec.optimizer_state(model)


def compare(optimizer: str, codegen: str, ahead: bool, small: bool = False, device: str = "cpu") -> None:
    expected_losses, expected = _train(optimizer, None, False, small, device)
    losses, found = _train(optimizer, {"codegen": codegen}, ahead, small, device)
    halves = [t for t in expected.values() if t.dtype == torch.float16]
    assert len(halves) >= 2 and len(set(expected_losses)) == STEPS
    assert losses == pytest.approx(expected_losses, rel=1e-5, abs=1e-5)
    if device == "cpu":
        assert {n for n in expected if not torch.equal(found[n], expected[n])} == set()
    else:  # FBGEMM's kernels sum a row's gradients in another order, after which float16 may round the other way
        assert {n: d for n in expected if (d := _off(found[n], expected[n])) is not None} == {}


def _off(found: torch.Tensor, expected: torch.Tensor) -> Any:
    """None if all values are as good as equal: float32 to 1e-6, float16 to one rounding in few places."""
    difference = (found.double() - expected.double()).abs()
    if expected.dtype != torch.float16:
        return None if difference.max() <= 1e-6 * expected.abs().max() else float(difference.max())
    step = expected.double().abs().clamp(min=2.0**-14) * 2.0**-10
    share = float((difference > 0).double().mean())
    return None if (difference <= step).all() and share < 0.02 else (float((difference / step).max()), share)


def test_two_tables_of_float16_train_as_in_eager_torchrec_bit_for_bit():
    run_ranks(compare, 2, "rowwise_adagrad", "eager", True, True)


@pytest.mark.thorough
@pytest.mark.parametrize("case", (
    ("sgd", "eager", False), ("rowwise_adagrad", "eager", True), ("adagrad", "inductor", True),
), ids=lambda c: "-".join(map(str, c)))  # fmt: skip
def test_rows_of_float16_train_as_in_eager_torchrec_bit_for_bit(case):
    run_ranks(compare, 2, *case)


def _adam() -> str | None:
    import adam_on_cpu
    from freescale.runtime.tables.torchrec_support import unsupported_reason

    adam_on_cpu.allow()
    model = trec.shard(Halves(), {n: kind for n, (_, kind, _) in (SEQUENCES | POOLED).items()}, "adam")
    return unsupported_reason(model.module.sequences)


def test_adam_of_float16_is_left_to_torchrec():
    (reason,) = run_ranks(_adam, 1)
    assert "their rows are torch.float16, and freescale's Adam supports only float32" in reason
