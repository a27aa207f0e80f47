"""The model of benchmarks/dense_allreduce.py: a sharded table and a tower of linear layers."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import freescale


class Tower(nn.Module):
    def __init__(self, rows: int, width: int, layers: int) -> None:
        super().__init__()
        self.table = freescale.ShardedEmbedding(rows, width, name="item")
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x = self.table(batch["item"])
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def in_ddp(model: Tower) -> DistributedDataParallel:
    """The rows of the table, which are buffers, stay each rank's own."""
    own = [name for name, _ in model.named_buffers()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
    return DistributedDataParallel(model, forward_sync_buffers=False, bucket_cap_mb=25)
