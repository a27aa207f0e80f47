"""A model for another backend, in plain torch. As a program (`python retrieval.py FILE`) it never imports freescale."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters


def _loss(linear: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """In-batch negatives: a graph that was once wrong under freescale's settings for symbolic sizes."""
    return F.cross_entropy(linear(x) @ x.T, torch.arange(x.size(0)))


def train_with_inductor() -> list[torch.Tensor]:
    """Losses and gradients."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    linear = torch.nn.Linear(4, 4)
    run = torch.compile(_loss, backend="inductor", dynamic=True)
    found = []
    for n in (3, 4, 7):
        linear.zero_grad()
        loss = run(linear, torch.randn(n, 4))
        loss.backward()
        found += [loss.detach(), linear.weight.grad.clone()]
    return found


def cache_hits() -> int:
    """Number of this process's graphs that were loaded from torch's caches."""
    return counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]


if __name__ == "__main__":
    found = train_with_inductor()
    assert not any(name.split(".")[0] == "freescale" for name in sys.modules)
    torch.save((found, cache_hits()), sys.argv[1])
