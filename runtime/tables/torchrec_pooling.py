"""The traced forward of TorchRec's `ShardedEmbeddingBagCollection`: each requester sums its bags, so a row shared by
many bags is sent once, and can be early or late. Mean pooling has two variants: FBGEMM divides by a bag's length; for
tables with rows on several ranks, TorchRec divides by the length or the sum of weights, plus an epsilon."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from freescale.compat import dynamo, torchrec
from freescale.kernels.transports import open_transports
from freescale.runtime.tables.fbgemm import FbgemmBags
from freescale.runtime.tables.table_exchange import Bags
from freescale.runtime.tables.torchrec_collection import CollectionTables, ids_of, parts_of, value_counts, values_of
from freescale.runtime.tables.torchrec_layout import Entry, ExchangeLayout

SUM, MEAN_OF_BAG, MEAN_OF_SUMS, SUM_BESIDE_MEAN = range(4)  # how a feature is pooled
_EPS = 1e-6  # TorchRec adds it to the divisor


class PooledTables(CollectionTables):
    """The tables of one ShardedEmbeddingBagCollection, and its traced forward."""

    pooled = True

    def __init__(self, collection: Any) -> None:
        self.pooling: list[list[int]] = []  # per exchange, per entry
        self._means_of_sums = torchrec.divides_sums(collection)
        super().__init__(collection)
        self.keys, self.key_widths = torchrec.pooled_outputs(collection)
        self.in_order = [part for key in self.keys for part in self.joined.get(key, [key])]

    def _add_exchange(self, collection: Any, kind: str, layout: ExchangeLayout, lookup: Any) -> None:
        super()._add_exchange(collection, kind, layout, lookup)
        self.pooling.append([self._pooling(e, kind) for e in layout.entries])
        table = self.exchanges[-1].table
        assert isinstance(table, FbgemmBags)
        table.ranks_per_table = max(Counter(s.table for s in layout.shards if s.rows).values(), default=1)

    def _pooling(self, entry: Entry, kind: str) -> int:
        mean = entry.config.pooling.value == "MEAN"
        if self._means_of_sums and torchrec.sums_over_ranks(kind):
            return MEAN_OF_SUMS if mean else SUM_BESIDE_MEAN
        return MEAN_OF_BAG if mean else SUM

    def look_up(self, features: Any, divide: bool) -> Any:
        from torchrec.sparse.jagged_tensor import KeyedTensor

        keys, values, lengths = parts_of(features)
        samples = lengths.shape[1]
        counts, of_kjt = value_counts(self, features, keys, values, lengths)
        weights = self._weights(features, values, planned_lengths=of_kjt.lengths is not None)
        pooled: dict[str, torch.Tensor] = {}
        for exchange, names, pooling in zip(self.exchanges, self.output_names, self.pooling, strict=True):
            ids = ids_of(exchange, keys, values, counts)
            of_bags, of_ids = lengths.view(-1), weights
            if exchange.features != keys:
                of_bags = torch.cat([lengths[keys.index(f)] for f in exchange.features])
                of_ids = None if weights is None else torch.cat(values_of(exchange.features, keys, weights, counts))
            bag_ends = of_bags.cumsum(0, dtype=torch.int64)
            sums = exchange.lookup(ids, self.world_size if divide else 1, of_kjt, Bags(bag_ends, of_ids))
            divisor = _divisor(pooling, of_bags.view(len(names), samples), of_ids, bag_ends)
            if divisor is not None:
                sums = sums / divisor.view(-1, 1)
            by_feature = sums.view(len(names), samples, sums.shape[1])
            for i, name in enumerate(names):
                pooled[name] = by_feature[i]
        values = torch.cat([pooled[name] for name in self.in_order], 1)
        return KeyedTensor(keys=self.keys, length_per_key=self.key_widths, values=values, key_dim=1)

    def _weights(self, features: Any, values: torch.Tensor, planned_lengths: bool) -> torch.Tensor | None:
        """Per-id weights. As in TorchRec, they get no gradient."""
        weights = features.weights_or_none()
        if weights is None:
            return None
        weights = weights.detach().float()
        if planned_lengths:
            torch._check(weights.shape[0] == values.shape[0])  # checked by the LookaheadLoader
            return weights
        return torch.ops.freescale.checked_weights(weights, values, self.label, self.exchanges[0].host_group_name)


def tables_of(collection: Any) -> CollectionTables:
    """The tables of a supported collection, pooled or not, created on first use."""
    if "_freescale" not in collection.__dict__:
        make = PooledTables if torchrec.is_pooled_collection(collection) else CollectionTables
        with dynamo.outside_inference_mode():  # the first use may be an evaluation
            collection.__dict__["_freescale"] = make(collection)
        collection.register_state_dict_pre_hook(open_transports.drain)
    return collection.__dict__["_freescale"]


def _divisor(
    pooling: list[int], lengths: torch.Tensor, weights: torch.Tensor | None, bag_ends: torch.Tensor
) -> torch.Tensor | None:
    """Divisor per feature and sample; None if there is no division."""
    if all(p == SUM for p in pooling):
        return None
    total = lengths
    if weights is not None and MEAN_OF_SUMS in pooling:
        positions = torch.arange(weights.shape[0], device=weights.device)
        total = torch.ops.freescale.sum_rows(weights[:, None], positions, bag_ends).view(lengths.shape)
    divisors = []
    for i, p in enumerate(pooling):
        if p == MEAN_OF_BAG:
            divisors.append(lengths[i].clamp(min=1).float())
        elif p == MEAN_OF_SUMS:
            divisors.append(total[i].float() + _EPS)
        else:
            divisors.append(torch.ones_like(lengths[i], dtype=torch.float32) + (_EPS if p == SUM_BESIDE_MEAN else 0.0))
    return torch.stack(divisors)
