"""Batches of samples with ids and lengths, for tests that move samples between ranks."""

from __future__ import annotations

from typing import Any

import torch

ROWS, DIM = 50, 4


def batch_of(step: int, rank: int, samples: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(1000 * step + rank)
    lengths = (torch.rand(samples, generator=g) * 3).exp().long() - 1
    return {
        "item": torch.randint(0, ROWS, (int(lengths.sum()),), generator=g),
        "item_lengths": lengths,
        "user": torch.randint(0, 9, (samples,), generator=g),
        "dense": torch.randn(samples, 3, generator=g, dtype=torch.float64),
        "label": torch.rand(samples, generator=g, dtype=torch.float64),
        "words": [f"{step} {rank} {i}" for i in range(samples)],
    }
