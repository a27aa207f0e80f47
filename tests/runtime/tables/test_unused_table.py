"""Tables that are looked up and do not reach the loss, with weight decay: as in TorchRec.

It updates the tables of a collection together: in a collection without any gradient rows stay as they are, beside a
table that has one they decay.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import trec
import zoo
from ranks import HAS_TORCHREC, run_ranks


class OneOfTwo(nn.Module):
    """The loss depends on histories; targets are something to look at."""

    def __init__(self, together: bool) -> None:
        super().__init__()
        from torchrec import EmbeddingCollection, EmbeddingConfig

        configs = [
            EmbeddingConfig(name=n, num_embeddings=zoo.ITEMS, embedding_dim=4, feature_names=[n])
            for n in ("history", "target")
        ]
        parts = [configs] if together else [[config] for config in configs]
        self.collections = nn.ModuleList(EmbeddingCollection(tables=part) for part in parts)
        self.out = nn.Linear(4, 1)

    def forward(self, b: zoo.Batch) -> tuple[torch.Tensor, torch.Tensor]:
        found: dict[str, Any] = {}
        for collection in self.collections:
            found.update(collection(b.features))
        rows = found["history"].values()
        return (self.out(rows) * rows).sum(), found["target"].values().square().sum().detach()


def _train(together: bool, options: dict[str, Any] | None, ahead: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode

    import freescale

    torch.manual_seed(0)
    kinds = dict.fromkeys(("history", "target"), "row_wise")
    decay = {"weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.L2}
    model = trec.shard(OneOfTwo(together), kinds, "rowwise_adagrad", **decay)
    run: Any = model if options is None else torch.compile(model, backend="freescale", fullgraph=True, options=options)
    batches: Any = [zoo.batch(step, dist.get_rank(), 5) for step in range(6)]
    start, numbers = trec.snapshot(model), []
    for b in freescale.LookaheadLoader(batches, run) if ahead else batches:
        loss, looked_at = run(b)
        loss.backward()
        numbers += [float(loss.detach()), float(looked_at)]
    end = trec.snapshot(model)
    changed = {k for k in end if not torch.equal(start[k], end[k])}
    assert any("history" in k for k in changed) and any("target" in k for k in changed) == together, changed
    return numbers, end


def _differences(together: bool) -> list[float]:
    """To eager TorchRec, relative; plain and with look-ahead."""
    expected, end = _train(together, None, False)
    worst = []
    for ahead in (False, True):
        numbers, state = _train(together, {"codegen": "eager", "strict": True}, ahead)
        off = max(abs(a - b) / abs(b) for a, b in zip(numbers, expected, strict=True))
        worst.append(max(off, *(float((state[k] - v).abs().max() / v.abs().max()) for k, v in end.items() if v.numel())))
    return worst


@pytest.mark.skipif(not HAS_TORCHREC, reason="torchrec or fbgemm_gpu is not installed")
@pytest.mark.thorough
@pytest.mark.parametrize("together", (False, True))
def test_tables_that_the_loss_does_not_depend_on(together):
    for worst in run_ranks(_differences, 2, together):
        assert max(worst) <= 1e-6, worst
