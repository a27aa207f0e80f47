"""The smallest model: one sharded table and a linear layer."""

from __future__ import annotations

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        import freescale

        self.table = freescale.ShardedEmbedding(2048, 8, name="item")
        self.out = nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.table(ids))).sum()
