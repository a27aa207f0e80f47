"""Synthetic interaction histories: long-tailed lengths, Zipf ids and a learnable label.

Every batch is a pure function of ``(seed, rank, step)``, so a run can stop anywhere and resume, and two runs
can be compared batch by batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

try:
    from torchrec.streamable import Pipelineable
except (ImportError, OSError):  # TorchRec is missing or too old; its pipelines only need these methods
    Pipelineable = object  # type: ignore[assignment, misc]


@dataclass
class Batch(Pipelineable):
    """Features ``history``, ``action`` and ``candidate`` of B samples and their labels, float [B].

    Without TorchRec the features are tensors, as ``NativeTables`` expects.
    """

    features: KeyedJaggedTensor | dict[str, torch.Tensor]
    labels: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """The batch on ``device``."""
        if isinstance(self.features, dict):
            features = {k: x.to(device, non_blocking=non_blocking) for k, x in self.features.items()}
        else:
            features = self.features.to(device=device, non_blocking=non_blocking)
        return Batch(features=features, labels=self.labels.to(device=device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The batch in page-locked host memory."""
        if isinstance(self.features, dict):
            features = {k: x.pin_memory() for k, x in self.features.items()}
        else:
            features = self.features.pin_memory()
        return Batch(features=features, labels=self.labels.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the batch's memory alive until ``stream`` is done with it."""
        holders = self.features.values() if isinstance(self.features, dict) else [self.features]
        for x in (*holders, self.labels):
            x.record_stream(stream)


class SyntheticHistories:
    """An iterable of ``steps`` batches.

    Args:
        steps: number of batches.
        batch_size: samples per batch.
        items, actions: number of item and action ids.
        rank: ranks draw different batches from the same distribution.
        seed: selects the distribution (which items are popular or liked) and the draws.
        median, sigma, cap: histories have lognormal lengths of this median and shape, at most ``cap``.
        zipf: exponent of the popularity of items.
        empty_share: share of the empty histories.
        vary_batch: vary the number of samples between 0.5 and 1.5 times ``batch_size``, and make it 0
            in ``no_samples_share`` of the batches.
        native: features as ``NativeTables`` expects them, not a TorchRec KeyedJaggedTensor.
    """

    keys = ("history", "action", "candidate")

    def __init__(
        self,
        steps: int,
        batch_size: int,
        items: int,
        actions: int,
        rank: int = 0,
        seed: int = 0,
        median: float = 20.0,
        sigma: float = 1.0,
        cap: int = 512,
        zipf: float = 1.05,
        empty_share: float = 0.05,
        vary_batch: bool = False,
        no_samples_share: float = 0.03,
        native: bool = False,
    ) -> None:
        self.steps = steps
        self.native = native
        self.batch_size = batch_size
        self.actions = actions
        self.rank = rank
        self.seed = seed
        self.median = median
        self.sigma = sigma
        self.cap = cap
        self.empty_share = empty_share
        self.vary_batch = vary_batch
        self.no_samples_share = no_samples_share
        # NumPy pads entropy with zeros, so the fourth word makes this stream distinct from every batch's.
        tables = np.random.default_rng([seed, 0, 0, 1])
        self._cumulative = np.cumsum(np.arange(1, items + 1, dtype=np.float64) ** -zipf)
        self._cumulative /= self._cumulative[-1]
        self._item_of_rank = tables.permutation(items)  # spreads popular ids over the table
        self._liked = 1.0 / (1.0 + np.exp(-3.0 * tables.standard_normal(items)))  # P(label = 1 | candidate)

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        return (self.batch(step) for step in range(self.steps))

    def batch(self, step: int) -> Batch:
        """Batch number ``step``, on the CPU."""
        rng = np.random.default_rng([self.seed, self.rank, step])
        samples = self._samples(rng)
        lengths = np.rint(rng.lognormal(math.log(self.median), self.sigma, samples))
        lengths = np.minimum(lengths, self.cap).astype(np.int64)
        lengths[rng.random(samples) < self.empty_share] = 0
        total = int(lengths.sum())
        history, candidate = self._items(rng, total), self._items(rng, samples)
        action = rng.integers(0, self.actions, total)
        labels = rng.random(samples) < self._liked[candidate]
        make = self._native_features if self.native else self._keyed_features
        features = make(history, action, candidate, lengths)
        return Batch(features=features, labels=torch.from_numpy(labels.astype(np.float32)))

    def _keyed_features(
        self, history: np.ndarray, action: np.ndarray, candidate: np.ndarray, lengths: np.ndarray
    ) -> KeyedJaggedTensor:
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        return KeyedJaggedTensor(
            keys=list(self.keys),
            values=torch.from_numpy(np.concatenate([history, action, candidate])),
            lengths=torch.from_numpy(np.concatenate([lengths, lengths, np.ones_like(lengths)])),
        )

    def _native_features(
        self, history: np.ndarray, action: np.ndarray, candidate: np.ndarray, lengths: np.ndarray
    ) -> dict[str, torch.Tensor]:
        """``item``: each sample's history followed by its candidate."""
        arrays = {"item": np.insert(history, np.cumsum(lengths), candidate), "item_lengths": lengths + 1}
        arrays |= {"action": action, "action_lengths": lengths}
        return {name: torch.from_numpy(x) for name, x in arrays.items()}

    def _samples(self, rng: np.random.Generator) -> int:
        if not self.vary_batch:
            return self.batch_size
        if rng.random() < self.no_samples_share:
            return 0
        half = self.batch_size // 2
        return int(rng.integers(self.batch_size - half, self.batch_size + half, endpoint=True))

    def _items(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Item ids by inverse CDF: bounded Zipf over popularity ranks, then a fixed permutation."""
        ranks = np.searchsorted(self._cumulative, rng.random(count), side="right")
        return self._item_of_rank[ranks]
