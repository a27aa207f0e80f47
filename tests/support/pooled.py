"""A model of two pooled and two sequence collections with all kinds of sharding, and batches for it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import trec

ROWS = {"item": 61, "genre": 19, "city": 67, "shop": 31, "liked": 47, "seen": 37, "history": 53, "tag": 17}
POOLED = {"viewed": "item", "bought": "item", "genre": "genre", "city": "city", "shop": "shop"}  # feature: its table
WEIGHTED = {"liked": "liked", "seen": "seen"}
SEQUENCES = {"history": "history", "tag": "tag"}

KINDS = {
    "item": "row_wise", "genre": "table_wise", "city": "table_wise", "shop": "column_wise",
    "liked": "row_wise", "seen": "row_wise",
    "history": "row_wise",
    "tag": "column_wise",
}  # fmt: skip


class Model(nn.Module):
    """Every feature affects the loss."""

    def __init__(self) -> None:
        super().__init__()
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
        from torchrec.modules.embedding_configs import PoolingType

        def bag(name: str, dim: int, mean: bool, *features: str) -> Any:
            pooling = PoolingType.MEAN if mean else PoolingType.SUM
            names = list(features or [name])
            return EmbeddingBagConfig(
                name=name, num_embeddings=ROWS[name], embedding_dim=dim, feature_names=names, pooling=pooling
            )

        def sequence(name: str) -> Any:
            return EmbeddingConfig(name=name, num_embeddings=ROWS[name], embedding_dim=8, feature_names=[name])

        self.bags = EmbeddingBagCollection(
            # widths differ, also between tables that one FBGEMM module holds; two tables share a feature
            [
                bag("item", 8, False, "viewed", "bought"), bag("genre", 12, True), bag("city", 8, False, "city", "viewed"),
                bag("shop", 16, True),
            ]
        )  # fmt: skip
        self.weighted = EmbeddingBagCollection([bag("liked", 8, True), bag("seen", 8, False)], is_weighted=True)
        self.sequences = EmbeddingCollection([sequence("history")])
        self.tags = EmbeddingCollection([sequence("tag")])
        self.mix = nn.Linear(2 * 8 + 12 + 2 * 8 + 16 + 8 + 8, 8)
        self.out = nn.Linear(8, 1)

    def forward(self, batch: tuple[Any, Any, torch.Tensor]) -> torch.Tensor:
        features, weighted, label = batch
        pooled, liked = self.bags(features), self.weighted(weighted)
        found = {**self.sequences(features), **self.tags(features)}
        hidden = torch.tanh(self.mix(torch.cat([pooled.values(), liked.values()], 1)))
        rows = torch.cat([found[name].values() for name in SEQUENCES])
        on_key = pooled["viewed@city"].sum(1) * liked["seen"].sum(1)  # by name as well as all together
        return (self.out(hidden).squeeze(1) * label + on_key).sum() / 8 + (self.out(rows.tanh()) * rows).sum() / 64


def build(optimizer: str = "rowwise_adagrad", kinds: dict[str, str] | None = None, **fused: Any) -> Any:
    torch.manual_seed(0)
    return trec.shard(Model(), kinds or KINDS, optimizer, **fused)


def batch_of(step: int, samples: int | None = None) -> tuple[Any, Any, torch.Tensor]:
    """Random lengths, including zero; some ids are frequent, so that bags and batches share rows."""
    g = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    samples = 3 + step % 4 if samples is None else samples
    weighted = _keyed({f: ROWS[t] for f, t in WEIGHTED.items()}, samples, g, weights=True)
    tables = {**POOLED, **SEQUENCES}
    return _keyed({f: ROWS[t] for f, t in tables.items()}, samples, g), weighted, torch.rand(samples, generator=g)


def _keyed(rows: dict[str, int], samples: int, g: torch.Generator, weights: bool = False) -> Any:
    from torchrec import KeyedJaggedTensor

    lengths = torch.randint(0, 6, (len(rows) * samples,), generator=g)
    per_key = lengths.view(len(rows), samples).sum(1).tolist()
    drawn = [torch.rand(n, generator=g).pow(3) * size for n, size in zip(per_key, rows.values(), strict=True)]
    ids = torch.cat(drawn).long()
    return KeyedJaggedTensor(
        keys=list(rows), values=ids, lengths=lengths,
        weights=torch.rand(ids.shape[0], generator=g) if weights else None,
    )  # fmt: skip


def train(model: Any, run: Any, batches: Any, first: int = 0) -> list[float]:
    """Plain steps of `run`, which is the model itself (eager) or compiled from it; each step has another learning rate.
    `first`: number of the first step.

    Dense gradients are summed over ranks, so the result does not depend on which rank has which samples."""
    dense = [p for _, p in model.named_parameters() if not hasattr(p, "_in_backward_optimizers")]
    optimizer = torch.optim.SGD(dense, lr=0.05)
    losses = []
    for step, batch in enumerate(batches, first):
        for group in model.fused_optimizer.param_groups:
            group["lr"] = 0.1 / (1 + step % 7)
        model.fused_optimizer.zero_grad()  # copies the learning rate to FBGEMM
        optimizer.zero_grad()
        loss = run(trec.on(dense[0].device, *batch))
        loss.backward()
        for p in dense:
            dist.all_reduce(p.grad)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses
