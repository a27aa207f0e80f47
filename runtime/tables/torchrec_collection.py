"""TorchRec's `ShardedEmbeddingCollection` on our exchange: our forward, FBGEMM's storage and optimizer. Its sharded
tables become one Exchange per FBGEMM module (torchrec_layout.py), data-parallel ones a plain lookup.
torchrec_support.py says what is supported, torchrec_patch.py patches the forward, torchrec_pooling.py pools."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist

from freescale.compat import dynamo, torchrec
from freescale.kernels.ops import table_registry
from freescale.kernels.planning import row_requests
from freescale.runtime import dense_parameters
from freescale.runtime.tables import torchrec_layout
from freescale.runtime.tables.fbgemm import FbgemmBags, FbgemmTable
from freescale.runtime.tables.step_plan import ValueCounts
from freescale.runtime.tables.table_exchange import Exchange, KeyedLengths, ReplicatedRows
from freescale.runtime.tables.torchrec_layout import ExchangeLayout

log = logging.getLogger(__name__)

_collections: list[weakref.ref[CollectionTables]] = []  # indexed by CollectionTables.number


class CollectionTables:
    """The tables of one ShardedEmbeddingCollection, and its traced forward."""

    pooled = False

    def __init__(self, collection: Any) -> None:
        self.exchanges: list[Exchange] = []
        self.output_names: list[list[str]] = []  # per exchange, per entry
        # The model's code needs concrete row counts, but a graph that counts ids itself has only unbacked ones,
        self.counts_outside_graph = False
        self.sizes_are_free = True  # as has a graph with a plan while this is True
        self.number = len(_collections)
        _collections.append(weakref.ref(self))
        self.joined: dict[str, list[str]] = {}  # output -> its column-wise parts, in order
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
        if not self.pooled:
            looked_up = [f for exchange in self.exchanges for f in exchange.features]
            looked_up += [f for replicated in self.replicated for f in replicated.features]
            for exchange in self.exchanges:
                exchange.sequences = looked_up

    def _add_exchange(self, collection: Any, kind: str, layout: ExchangeLayout, lookup: Any) -> None:
        env, own = torchrec.sharding_env(collection), layout.parts[torchrec.sharding_env(collection).rank]
        emb = None if own is None else torchrec.fbgemm_module_of(lookup, own.group)
        descriptions = [torchrec_layout.describe(e.config, e.feature) for e in layout.entries]
        arguments = (emb, descriptions, layout.dim, torchrec.device_of(collection), env.world_size)
        table = FbgemmBags(*arguments, own.tables if own else []) if self.pooled else FbgemmTable(*arguments)
        entries, label = layout.features_and_tables(), f"{self.label}.{kind}"
        exchange = Exchange(label, table, layout.shards, layout.table_rows, entries, env.process_group)
        exchange.row_packing, exchange.gradient_packing = torchrec.packings(collection, kind)
        self.exchanges.append(exchange)
        self.output_names.append([e.output for e in layout.entries])

    def look_up(self, features: Any, divide: bool) -> Any:
        """The return value of the collection's forward. `divide`: divide gradients by the number of ranks."""
        from torchrec.sparse.jagged_tensor import JaggedTensor

        keys, values, lengths = parts_of(features)
        counts, of_kjt = value_counts(self, features, keys, values, lengths)
        lengths_of = {key: lengths[i] for i, key in enumerate(keys)}
        outputs: dict[str, Any] = {}
        for exchange, names in zip(self.exchanges, self.output_names, strict=True):
            sizes = [counts.of_run(keys.index(f), keys.index(f) + 1) for f in exchange.features]
            ids = ids_of(exchange, keys, values, counts)
            embeddings = exchange.lookup(ids, self.world_size if divide else 1, of_kjt).split(sizes)
            for name, feature, embedded in zip(names, exchange.features, embeddings, strict=True):
                outputs[name] = JaggedTensor(values=embedded, lengths=lengths_of[feature])
        for name, parts in self.joined.items():
            columns = [outputs.pop(part) for part in parts]
            outputs[name] = JaggedTensor(torch.cat([c.values() for c in columns], 1), lengths=columns[0].lengths())
        for replicated in self.replicated:
            ids = values_of(replicated.features, keys, values, counts)
            embeddings = replicated.look_up(ids, self.world_size, of_kjt).split([i.shape[0] for i in ids])
            for name, feature, part in zip(replicated.output_names, replicated.features, embeddings, strict=True):
                outputs[name] = JaggedTensor(values=part, lengths=lengths_of[feature])
        return outputs


class ReplicatedTables:
    """A data-parallel FBGEMM module: one flat parameter with its tables concatenated."""

    def __init__(self, collection: Any, group: Any, flat_weight: torch.Tensor, ranks: dist.ProcessGroup) -> None:
        self.flat_weight, self.dim = flat_weight, torchrec.embedding_dim(collection)
        self.group_name = ranks.group_name
        dense_parameters.AVERAGED_BY_TABLES[flat_weight] = None
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

    def look_up(self, ids: list[torch.Tensor], world_size: int, of_kjt: KeyedLengths) -> torch.Tensor:
        rows = torch.ops.freescale.checked_rows(
            ids, self.row_offsets, self.table_sizes, self.name, self.group_name, of_kjt.fault
        )
        return ReplicatedRows.apply(self.flat_weight, self.dim, rows, world_size, self.group_name)


def existing_tables_of(module: Any) -> CollectionTables | None:
    """The tables of a collection; None if it has not been used: see torchrec_pooling.tables_of."""
    return module.__dict__.get("_freescale")


# ---- the traced forward ------------------------------------------------------------------------------------


def parts_of(features: Any) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    """Keys, values, and lengths [keys, samples] of a KeyedJaggedTensor. Tolerates faults that value_counts reports
    later: duplicate keys are renamed, and surplus lengths are dropped."""
    keys, lengths = features.keys(), features.lengths()
    if not row_requests.are_unique(keys):
        keys = [key if keys.index(key) == i else f"{key} ({i})" for i, key in enumerate(keys)]
    samples = lengths.shape[0] // len(keys)
    if samples == 1:  # specialize on one sample
        samples = 1
    if lengths.shape[0] % len(keys):
        lengths = lengths[: samples * len(keys)]
    return keys, features.values(), lengths.view(len(keys), samples)


class CountedValues:
    """Number of values per key of a KeyedJaggedTensor, counted in the graph."""

    def __init__(self, keys: list[str], counts: list[int]) -> None:
        self.keys, self.counts = keys, counts

    def of_run(self, first: int, last: int) -> int:
        return sum(self.counts[first:last])


class PlannedValues:
    """The same from the plan. The graph reads the sizes of requested keys only."""

    def __init__(self, keys: list[str], planned: ValueCounts, free: bool) -> None:
        self.keys, self.planned, self.free = keys, planned, free

    def of_run(self, first: int, last: int) -> int:
        places = [self.planned.keys.index(key) for key in self.keys[first:last]]
        if places == list(range(places[0], places[0] + len(places))):
            return self._end(places[-1]) - self._end(places[0] - 1)
        return sum([self._end(place) - self._end(place - 1) for place in places])

    def _end(self, place: int) -> int:
        if place < 0:
            return 0
        return (self.planned.free_slots[place] if self.free else self.planned.slots[place]).shape[0]


def value_counts(
    tables: CollectionTables, features: Any, keys: list[str], values: torch.Tensor, lengths: torch.Tensor
) -> tuple[CountedValues | PlannedValues, KeyedLengths]:
    """Number of values per key: from the step's plan, on the host, or else from the lengths; and what to check."""
    pooled = tables.pooled  # the model does not see these sizes
    plan = tables.exchanges[0].freescale_plan if tables.exchanges else None
    # A second lookup in a step has its own error, regardless of its values.
    if plan is not None and not plan.used and all(key in plan.value_counts.keys for key in keys):
        planned = plan.value_counts
        free = pooled or (tables.sizes_are_free and planned.few)
        if free and not pooled:
            _note_unknown_sizes(tables.number, planned=True)
        # If the values or lengths differ from the plan, expect_ids reports it.
        return PlannedValues(keys, planned, free), KeyedLengths(lengths, planned.of_keys(keys))
    unique = row_requests.are_unique(features.keys())
    # With a plan, plan_now does not run, so it cannot report faults to the other ranks.
    group = None if plan is None else tables.exchanges[0].host_group_name
    read = features.lengths(), features.offsets_or_none(), values, len(keys), unique, tables.label, group
    if tables.counts_outside_graph and not pooled:
        counts, fault = _count_outside_graph(*read)
        return CountedValues(keys, counts), KeyedLengths(fault=fault)
    if not pooled:
        _note_unknown_sizes(tables.number, planned=False)
    counts_and_fault = torch.ops.freescale.count_values(*read)
    counts = counts_and_fault[0].tolist()
    for n in counts:
        torch._check(n >= 0)
    torch._check(sum(counts) == values.shape[0])  # guaranteed by the op
    return CountedValues(keys, counts), KeyedLengths(fault=counts_and_fault[1])


# For the current trace: collections whose sizes are unbacked in the graph, and whether a plan has them.
_unknown_sizes: ContextVar[dict[int, bool]] = ContextVar("freescale_unknown_sizes")


@dynamo.assume_constant_result
def _note_unknown_sizes(number: int, planned: bool) -> None:
    # Dynamo runs this while tracing.
    _unknown_sizes.get()[number] = planned


@dynamo.leave_graph(
    "freescale: the model depends on the number of ids of a feature, which is unknown in a graph that counts them "
    "itself: use a LookaheadLoader, which counts them beforehand, or compile without fullgraph=True"
)


def _count_outside_graph(*read: Any) -> tuple[list[int], torch.Tensor]:
    counts, fault = torch.ops.freescale.count_values(*read)
    return counts.tolist(), fault


def trace_begins() -> None:
    _unknown_sizes.set({})


@contextlib.contextmanager
def tracing_with_sizes(changed: list[tuple[CollectionTables, bool]]) -> Iterator[None]:
    """Inside, planned sizes are used as they are; ids without a plan are counted outside the graph, with a graph break.
    If that works, it stays so."""
    for tables, planned in changed:
        _set_sizes(tables, planned, True)
    try:
        yield
    except Exception:
        for tables, planned in changed:
            _set_sizes(tables, planned, False)
        raise
    for tables, planned in changed:
        if not planned:
            log.warning(
                "freescale: torch cannot compile the model in one graph with the counting of the ids of %s, so the "
                "graph breaks where they are counted. A LookaheadLoader counts them beforehand, without that break",
                tables.label,
            )


def collections_to_trace_again() -> list[tuple[CollectionTables, bool]]:
    """Collections of the current trace for which a retrace would know more sizes, and whether these are planned."""
    found = [(_collections[number](), planned) for number, planned in sorted(_unknown_sizes.get({}).items())]
    return [
        (t, planned)
        for t, planned in found
        if t is not None and (t.sizes_are_free if planned else not t.counts_outside_graph)
    ]


def _set_sizes(tables: CollectionTables, planned: bool, known: bool) -> None:
    if planned:
        tables.sizes_are_free = not known
    else:
        tables.counts_outside_graph = known


def ids_of(
    exchange: Exchange, keys: list[str], values: torch.Tensor, counts: CountedValues | PlannedValues
) -> list[torch.Tensor]:
    if exchange.freescale_plan is not None and exchange.features == keys:
        return [values]  # as planned, without a split: this keeps graphs of many features small
    return values_of(exchange.features, keys, values, counts)


def values_of(
    features: list[str], keys: list[str], values: torch.Tensor, counts: CountedValues | PlannedValues
) -> list[torch.Tensor]:
    """Values of each feature. Unlike KJT.to_dict, supports a batch without samples."""
    firsts = [i for i, key in enumerate(keys) if i == 0 or key in features or keys[i - 1] in features]
    runs = list(zip(firsts, [*firsts[1:], len(keys)], strict=True))  # a feature, or all keys between two features
    sizes = [counts.of_run(first, last) for first, last in runs]
    for size in sizes:
        torch._check(size >= 0)
    torch._check(sum(sizes) == values.shape[0])
    parts = dict(zip([keys[first] for first in firsts], torch.split(values, sizes), strict=True))
    return [parts[f] for f in features]
