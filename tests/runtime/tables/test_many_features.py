"""Many features of many tables in one collection: the training of eager TorchRec."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import trec
from ranks import run_ranks

pytest.importorskip("torchrec")

TABLES, PER_TABLE, SAMPLES = 40, 5, 3
KEYS = [f"feature{t}_{i}" for t in range(TABLES) for i in range(PER_TABLE)]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from torchrec import EmbeddingCollection, EmbeddingConfig

        configs = [
            EmbeddingConfig(
                name=f"table{t}", num_embeddings=50, embedding_dim=8,
                feature_names=KEYS[t * PER_TABLE : (t + 1) * PER_TABLE],
            )
            for t in range(TABLES)
        ]  # fmt: skip
        self.collection = EmbeddingCollection(tables=configs, device=torch.device("cpu"))
        self.out = nn.Linear(8, 1)

    def forward(self, batch):
        found = self.collection(batch)
        return torch.tanh(self.out(torch.cat([found[key].values() for key in KEYS]))).sum() / 64


def batch_of(step: int):
    from torchrec import KeyedJaggedTensor

    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    lengths = torch.randint(0, 4, (len(KEYS) * SAMPLES,), generator=generator)
    values = torch.randint(0, 50, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(keys=KEYS, values=values, lengths=lengths)


def _losses(compiled: bool):
    import freescale

    torch.manual_seed(0)
    model = trec.shard(Model(), {f"table{t}": "row_wise" for t in range(TABLES)}, "rowwise_adagrad")
    data, losses = [batch_of(step) for step in range(5)], []
    if compiled:
        model.compile(backend="freescale", options={"codegen": "eager"})
        data = freescale.LookaheadLoader(data, model)
    for batch in data:
        loss = model(batch)
        loss.backward()
        losses.append(float(loss.detach()))
    return losses


def _both():
    return _losses(compiled=True), _losses(compiled=False)


@pytest.mark.slow
def test_200_features_over_40_tables():
    for ours, theirs in run_ranks(_both, 2, timeout=500):
        assert ours[0] != ours[-1]
        assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) <= 1e-6 * max(map(abs, theirs))
