"""The quality part of persrec_against_hstu.py: next items of MovieLens-100K, recall@10 of each user's last item.

All variants have the same targets, every item but the first of a history; they differ in what an item sees:

    full     all earlier items (HSTU)
    windows  the items of its own window of RECENT items: what is recent, and nothing of what was before
    N segments of PerSRec, with TOKENS tokens each, before the RECENT last items
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from hstu import HSTU
from persrec import PerSRec
from persrec_attention import cut

RECENT, TOKENS, LONGEST, DIM, BATCH, NEGATIVES = 32, 4, 100, 32, 32, 128
VARIANTS = ("full", "windows", "1 segments", "3 segments")


def load(path: Path) -> list[torch.Tensor]:
    """The last LONGEST items of each user, in the order of time."""
    with np.load(path) as found:
        each = np.split(found["ids"], np.cumsum(found["lengths"])[:-1])
    return [torch.from_numpy(ids[-LONGEST:].astype(np.int64)) for ids in each]


class NextItem(nn.Module):
    def __init__(self, items: int, variant: str) -> None:
        super().__init__()
        self.item, self.variant = nn.Embedding(items, DIM), variant
        nn.init.normal_(self.item.weight, std=DIM**-0.5)
        settings: dict[str, Any] = {"max_distance": 64}
        segments = int(variant.split()[0]) if variant.endswith("segments") else 0
        if segments:
            chosen = {"segments": segments, "tokens": TOKENS, "recent": RECENT}
            self.body: HSTU = PerSRec(nn.Identity(), DIM, 2, 2, **chosen, **settings)
        else:
            self.body = HSTU(nn.Identity(), DIM, 2, 2, **settings)
        self.segments = segments

    def forward(self, histories: list[torch.Tensor]) -> torch.Tensor:
        """What is to be near the next item, behind each item: [N, DIM]."""
        lengths = [len(h) for h in histories]
        if self.variant == "windows":  # counted from the end, so that the last one is RECENT long
            firsts = [n % RECENT for n in lengths]
            lengths = [x for n, first in zip(lengths, firsts, strict=True) for x in [first] + [RECENT] * (n // RECENT)]
        x, offsets = self.item(torch.cat(histories)), torch.tensor([0, *lengths]).cumsum(0)
        if self.segments:
            assert isinstance(self.body, PerSRec)
            x = self.body.encode(x, cut(offsets, x.shape[0], self.segments, TOKENS, RECENT))
        else:
            for block in self.body.blocks:
                x = block(x, offsets)
        return self.body.head(x)

    def loss(self, histories: list[torch.Tensor]) -> torch.Tensor:
        """Cross entropy of each next item among NEGATIVES random ones."""
        x, right = self([h[:-1] for h in histories]), self.item(torch.cat([h[1:] for h in histories]))
        others = self.item(torch.randint(self.item.num_embeddings, (NEGATIVES,)))
        scores = torch.cat([(x * right).sum(1, keepdim=True), x @ others.T], 1)
        return F.cross_entropy(scores, torch.zeros(len(x), dtype=torch.int64))


def recall(users: list[torch.Tensor], variant: str, seed: int, epochs: int) -> float:
    """At 10, of each user's last item, which is never trained on."""
    torch.manual_seed(seed)
    items = int(max(int(u.max()) for u in users)) + 1
    model = NextItem(items, variant)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(epochs):
        for chosen in torch.randperm(len(users)).split(BATCH):
            loss = model.loss([users[i][:-1] for i in chosen.tolist()])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    hits = 0
    with torch.no_grad():
        for first in range(0, len(users), BATCH):
            mine = users[first : first + BATCH]
            ends = torch.tensor([len(u) - 1 for u in mine]).cumsum(0) - 1
            best = (model([u[:-1] for u in mine])[ends] @ model.item.weight.T).topk(10).indices
            hits += int((best == torch.stack([u[-1] for u in mine]).unsqueeze(1)).any(1).sum())
    return hits / len(users)


def _recall(path: Path, variant: str, seed: int, epochs: int) -> float:
    torch.set_num_threads(1)
    return recall(load(path), variant, seed, epochs)


def quality(path: Path, seeds: int, epochs: int) -> list[dict[str, Any]]:
    """Of every variant and seed, in as many processes as there are cores."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        started = {v: [pool.submit(_recall, path, v, seed, epochs) for seed in range(seeds)] for v in VARIANTS}
        return [summary(variant, [f.result() for f in each]) for variant, each in started.items()]


def summary(variant: str, each: list[float]) -> dict[str, Any]:
    spread = statistics.stdev(each) if len(each) > 1 else 0.0
    return {"variant": variant, "recall": statistics.mean(each), "spread": spread, "each": each}


def print_quality(rows: list[dict[str, Any]]) -> None:
    print(f"\nMovieLens-100K, the last {LONGEST} items of each user, {RECENT} recent, {TOKENS} tokens, next item:")
    print(f"{'variant':<12} {'recall@10':>10} {'spread':>8}   (of {len(rows[0]['each'])} seeds, standard deviation)")
    for r in rows:
        print(f"{r['variant']:<12} {r['recall']:>10.4f} {r['spread']:>8.4f}")
