"""The embeddings of the HSTU example in freescale's own tables, for platforms without TorchRec or FBGEMM.

A table is looked up once per step, so histories and candidates, which share a table, are one feature: a sample's ids
are its history followed by its candidate.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import freescale


class Jagged:
    """The rows of all samples, concatenated; has the methods of TorchRec's JaggedTensor that the model uses."""

    def __init__(self, values: Tensor, lengths: Tensor) -> None:
        self._values, self._lengths = values, lengths

    def values(self) -> Tensor:
        return self._values

    def lengths(self) -> Tensor:
        return self._lengths

    def offsets(self) -> Tensor:
        return torch.cat([self._lengths.new_zeros(1), self._lengths.cumsum(0)])


class NativeTables(nn.Module):
    """Items row-wise, actions table-wise; row-wise Adagrad in the backward pass."""

    def __init__(self, items: int, actions: int, dim: int, device: torch.device) -> None:
        super().__init__()
        settings = {"optimizer": "rowwise_adagrad", "lr": 0.05, "eps": 1e-8, "device": device}
        self.item = freescale.ShardedEmbedding(items, dim, name="item", **settings)
        self.action = freescale.ShardedEmbedding(actions, dim, name="action", sharding="table_wise", **settings)

    def forward(self, features: dict[str, Tensor]) -> dict[str, Jagged]:
        """From `item`, `item_lengths`, `action`, `action_lengths` to rows of `history`, `candidate` and `action`."""
        rows, lengths = self.item(features["item"]), features["item_lengths"]
        ends, history = lengths.cumsum(0), lengths - 1
        number = torch.arange(rows.shape[0] - lengths.shape[0], device=rows.device)
        # Row `number` of all histories comes after the candidates of the samples whose histories end there or earlier.
        before = torch.searchsorted(history.cumsum(0), number, right=True)
        return {
            "history": Jagged(rows.index_select(0, number + before), history),
            "candidate": Jagged(rows.index_select(0, ends - 1), torch.ones_like(lengths)),
            "action": Jagged(self.action(features["action"]), features["action_lengths"]),
        }
