"""A model that slices offsets, `offsets[1:]`, as most models of jagged histories do, under Inductor.

(torch before 2.13 cannot lower it where the size is a symbol that may be 0: a batch without samples has its own graph.)
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ranks import run_ranks


class LastOfEach(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        import freescale

        self.table = freescale.ShardedEmbedding(50, 4, name="item")

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        lengths = batch["lengths"]
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return self.table(batch["item"]).index_select(0, offsets[1:] - 1).square().sum()


def _losses() -> list[tuple[float, float]]:
    torch.manual_seed(0)
    model = LastOfEach()
    compiled = torch.compile(model, backend="freescale", fullgraph=True)
    losses = []
    for samples in (3, 5, 0, 4):
        lengths = torch.arange(1, samples + 1)
        batch = {"item": torch.randint(0, 50, (int(lengths.sum()),)), "lengths": lengths}
        with torch.no_grad():
            expected = model(batch).item()
        loss = compiled(batch)
        loss.backward()
        losses.append((loss.item(), expected))
    return losses


@pytest.mark.thorough
def test_offsets_without_their_first():
    (losses,) = run_ranks(_losses, 1)
    got, expected = zip(*losses, strict=True)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected))  # Inductor adds up in another order
    assert losses[2] == (0.0, 0.0) and losses[0][0] != 0
