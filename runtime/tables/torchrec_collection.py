"""TorchRec's `ShardedEmbeddingCollection` behind our exchange: our forward, FBGEMM's storage and optimizer.

The sharded tables of a collection become one Exchange per FBGEMM module (torchrec_layout.py), its data-parallel tables
a plain lookup. Storage, optimizer state, learning rate and checkpoints stay TorchRec's. Which collections are served is
in torchrec_support.py, how their forward gets here in torchrec_patch.py, collections that pool in torchrec_pooling.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from freescale.compat import dynamo, torchrec
from freescale.kernels.ops import table_registry
from freescale.kernels.transports import open_transports
from freescale.runtime import dense_parameters
from freescale.runtime.tables import torchrec_layout
from freescale.runtime.tables.fbgemm_bags import FbgemmBags
from freescale.runtime.tables.fbgemm_table import FbgemmTable
from freescale.runtime.tables.table_exchange import Exchange, ReplicatedRows
from freescale.runtime.tables.torchrec_layout import ExchangeLayout


class CollectionTables:
    """The tables of one ShardedEmbeddingCollection, as its traced forward needs them."""

    def __init__(self, collection: Any) -> None:
        self.exchanges: list[Exchange] = []
        self.output_names: list[list[str]] = []  # of each exchange's entries
        self.joined: dict[str, list[str]] = {}  # outputs whose columns come apart: what to join, in order
        self.replicated: list[ReplicatedTables] = []
        env = torchrec.sharding_env(collection)
        self.label = torchrec.qualified_name(collection) or "embeddings"
        self.world_size, entries = env.world_size, []
        for kind, sharding, lookup in torchrec.shardings(collection):
            if kind == "data_parallel":
                for group, flat_weight in torchrec.replicated_groups(lookup):
                    self.replicated.append(ReplicatedTables(collection, group, flat_weight, env.process_group))
            else:
                for layout in torchrec_layout.exchange_layouts(collection, sharding):
                    self._add_exchange(collection, kind, layout, lookup)
                    entries += layout.entries
        self.joined = torchrec_layout.outputs_to_join(entries)

    def _add_exchange(self, collection: Any, kind: str, layout: ExchangeLayout, lookup: Any) -> None:
        env, own = torchrec.sharding_env(collection), layout.parts[torchrec.sharding_env(collection).rank]
        emb = None if own is None else torchrec.fbgemm_module_of(lookup, own.group)
        descriptions = [torchrec_layout.describe(e.config, e.feature) for e in layout.entries]
        arguments = (emb, descriptions, layout.dim, torchrec.device_of(collection), env.world_size)
        pooled = torchrec.is_pooled_collection(collection)
        table = FbgemmBags(*arguments, own.tables if own else []) if pooled else FbgemmTable(*arguments)
        entries, label = layout.features_and_tables(), f"{self.label}.{kind}"
        self.exchanges.append(Exchange(label, table, layout.shards, layout.table_rows, entries, env.process_group))
        self.output_names.append([e.output for e in layout.entries])


class ReplicatedTables:
    """A data-parallel FBGEMM module: a flat parameter that holds its tables one after the other."""

    def __init__(self, collection: Any, group: Any, flat_weight: torch.Tensor, ranks: dist.ProcessGroup) -> None:
        self.flat_weight, self.dim = flat_weight, torchrec.embedding_dim(collection)
        self.group_name = ranks.group_name
        dense_parameters.AVERAGED_BY_TABLES.add(flat_weight)
        self.features: list[str] = []
        self.output_names: list[str] = []
        self.row_offsets: list[int] = []
        self.table_sizes: list[int] = []
        offset = 0
        for table in group.embedding_tables:
            for feature, output in torchrec_layout.features_and_outputs(table):
                self.features.append(feature)
                self.output_names.append(output)
                self.row_offsets.append(offset)
                self.table_sizes.append(table.local_rows)
            offset += table.local_rows
        self._descriptions = [torchrec_layout.describe(t, f) for t in group.embedding_tables for f in t.feature_names]
        self.name = table_registry.register(
            self, f"{torchrec.qualified_name(collection) or 'embeddings'}.data_parallel"
        )

    def describe(self, feature: int) -> str:
        return self._descriptions[feature]


def tables_of(collection: Any, make: type[CollectionTables] = CollectionTables) -> CollectionTables:
    """The tables of a supported collection; made on first use."""
    if "_freescale" not in collection.__dict__:
        with dynamo.outside_inference_mode():  # the first use may be an evaluation
            collection.__dict__["_freescale"] = make(collection)
        collection.register_state_dict_pre_hook(open_transports.drain)
    return collection.__dict__["_freescale"]


def existing_tables_of(module: Any) -> CollectionTables | None:
    """The same, None if no use of the module has made them."""
    return module.__dict__.get("_freescale")


# ---- the traced forward ------------------------------------------------------------------------------------


def parts_of(features: Any) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    """Keys, values, and lengths [keys, samples] of a KeyedJaggedTensor."""
    keys, lengths = features.keys(), features.lengths()
    samples = lengths.shape[0] // len(keys)
    if samples == 1:  # one sample makes a graph of its own (dynamo_settings.specialize_sizes_of_one)
        samples = 1
    return keys, features.values(), lengths.view(len(keys), samples)


def look_up(tables: CollectionTables, features: Any, divide: bool) -> dict[str, Any]:
    """What the collection's forward returns. `divide`: gradients are divided by the number of ranks."""
    from torchrec.sparse.jagged_tensor import JaggedTensor

    keys, values, lengths = parts_of(features)
    counts = value_counts(tables, keys, values, lengths)
    lengths_of = {key: lengths[i] for i, key in enumerate(keys)}
    outputs: dict[str, Any] = {}
    divide_by = tables.world_size if divide else 1
    for exchange, names in zip(tables.exchanges, tables.output_names, strict=True):
        sizes = [counts[f] for f in exchange.features]
        if exchange.freescale_plan is not None and exchange.features == keys:
            ids = [values]  # as planned, in one piece: a graph of many features need not cut it up
        else:
            ids = values_of(exchange.features, keys, values, counts)
        embeddings = exchange.lookup(ids, divide_by, sizes)
        for name, feature, embedded in zip(names, exchange.features, embeddings, strict=True):
            outputs[name] = JaggedTensor(values=embedded, lengths=lengths_of[feature])
    for name, parts in tables.joined.items():
        columns = [outputs.pop(part) for part in parts]
        outputs[name] = JaggedTensor(torch.cat([c.values() for c in columns], 1), lengths=columns[0].lengths())
    for replicated in tables.replicated:
        ids = values_of(replicated.features, keys, values, counts)
        rows = torch.ops.freescale.checked_rows(
            ids, replicated.row_offsets, replicated.table_sizes, replicated.name, replicated.group_name
        )
        embedded = ReplicatedRows.apply(
            replicated.flat_weight, replicated.dim, rows, tables.world_size, replicated.group_name
        )
        embeddings = torch.split(embedded, [i.shape[0] for i in ids])
        for name, feature, part in zip(replicated.output_names, replicated.features, embeddings, strict=True):
            outputs[name] = JaggedTensor(values=part, lengths=lengths_of[feature])
    return outputs


_LENGTHS_MISS_VALUES = "the lengths of a KeyedJaggedTensor miss its values"


def value_counts(
    tables: CollectionTables, keys: list[str], values: torch.Tensor, lengths: torch.Tensor
) -> dict[str, int]:
    """How many values each key has: as the step's plan says, which is on the host, or else as the lengths say."""
    plan = tables.exchanges[0].freescale_plan if tables.exchanges else None
    # A second lookup in a step is refused in its own words, whatever its values are.
    if plan is not None and not plan.used and all(key in plan.value_counts.keys for key in keys):
        torch._assert_async(lengths.sum() == values.shape[0], _LENGTHS_MISS_VALUES)
        planned = plan.value_counts.of_each_key()
        return {key: planned[key] for key in keys}  # of other values, expect_ids will say so
    counts = torch.ops.freescale.count_values(lengths, tables.label).tolist()  # waits for the device
    for n in counts:
        torch._check(n >= 0)
    torch._check(sum(counts) == values.shape[0], lambda: _LENGTHS_MISS_VALUES)
    return dict(zip(keys, counts, strict=True))


def values_of(
    features: list[str], keys: list[str], values: torch.Tensor, counts: dict[str, int]
) -> list[torch.Tensor]:
    """Of each feature. Also for a batch without samples, which KJT.to_dict refuses."""
    parts = dict(zip(keys, torch.split(values, [counts[key] for key in keys]), strict=True))
    return [parts[f] for f in features]
