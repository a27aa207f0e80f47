"""Which rows of a TorchRec collection share an exchange: all tables of one width in one FBGEMM module of each rank.
Column-wise shards of a table are tables of their own here, each with its owners, and are joined after the exchange."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from freescale.compat import torchrec
from freescale.kernels.planning.owners import Shard


class Columns(NamedTuple):
    """A column-wise part of a table, with its own owners."""

    table: str
    first: int


class Entry(NamedTuple):
    """What one feature looks up in one column-wise part of a table."""

    feature: str
    columns: Columns
    embedding_name: str  # the collection's output that these columns belong to
    config: Any  # TorchRec's config of this part

    @property
    def output(self) -> str:
        """The collection's output name, with the column range appended if the table is column-wise sharded."""
        width, first = self.config.local_cols, self.columns.first
        whole = width == self.config.embedding_dim
        return self.embedding_name if whole else f"{self.embedding_name}[{first}:{first + width}]"


class _Part(NamedTuple):
    """The tables of one width in one FBGEMM module."""

    group: Any  # GroupedEmbeddingConfig
    tables: list[int]  # indices into the group's tables

    def configs(self) -> list[Any]:
        return [self.group.embedding_tables[t] for t in self.tables]


@dataclass
class ExchangeLayout:
    dim: int
    columns: list[Columns]  # its tables, in the collection's order
    table_rows: list[int]
    parts: list[_Part | None]  # per rank
    shards: list[Shard] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)

    def features_and_tables(self) -> list[tuple[str, int]]:
        index = {c: i for i, c in enumerate(self.columns)}
        return [(e.feature, index[e.columns]) for e in self.entries]


def exchange_layouts(collection: Any, sharding: Any) -> Iterator[ExchangeLayout]:
    """Layouts of all tables of one sharding, in a deterministic order."""
    parts_per_rank = [list(_parts(groups)) for groups in torchrec.table_groups_per_rank(sharding)]
    order = {c.name: i for i, c in enumerate(torchrec.embedding_configs(collection))}
    seen = dict.fromkeys(key for parts in parts_per_rank for key, _ in parts)
    for key in seen:
        # The nth part of its kind on each rank: updates are local, so optimizers may differ.
        parts = [dict(on_rank).get(key) for on_rank in parts_per_rank]
        configs = {_columns(t): t for part in parts if part is not None for t in part.configs()}
        columns = sorted(configs, key=lambda c: (order[c.table], c.first))
        rows = [torchrec.num_embeddings(collection, c.table) for c in columns]
        layout = ExchangeLayout(key.dim, columns, rows, parts)
        for rank, part in enumerate(parts):
            layout.shards += [] if part is None else _shards(part, rank, columns)
        for c in columns:
            layout.entries += [Entry(f, c, output, configs[c]) for f, output in features_and_outputs(configs[c])]
        yield layout


class _Kind(NamedTuple):
    data_type: Any
    dim: int
    nth: int


def _parts(groups: list[Any]) -> Iterator[tuple[_Kind, _Part]]:
    """The tables on one rank, grouped by what can share an exchange."""
    counts: dict[tuple[Any, int], int] = {}
    for group in groups:
        by_dim: dict[int, list[int]] = {}
        for i, table in enumerate(group.embedding_tables):
            by_dim.setdefault(table.local_cols, []).append(i)
        for dim, tables in by_dim.items():
            nth = counts[group.data_type, dim] = counts.get((group.data_type, dim), -1) + 1
            yield _Kind(group.data_type, dim, nth), _Part(group, tables)


def _columns(table: Any) -> Columns:
    return Columns(table.name, _shard_offsets(table)[1])


def _shards(part: _Part, rank: int, columns: list[Columns]) -> list[Shard]:
    shards, base = [], 0
    for t in part.configs():
        shards.append(Shard(columns.index(_columns(t)), _shard_offsets(t)[0], t.local_rows, rank, base))
        base += t.local_rows
    return shards


def _shard_offsets(table: Any) -> tuple[int, int]:
    if table.local_metadata is None:
        return 0, 0
    row, column = table.local_metadata.shard_offsets
    return row, column


def outputs_to_join(entries: list[Entry]) -> dict[str, list[str]]:
    """For each column-wise sharded output, the entries' outputs to concatenate, in order."""
    parts: dict[str, list[Entry]] = {}
    for e in entries:
        if e.output != e.embedding_name:
            parts.setdefault(e.embedding_name, []).append(e)
    return {name: [e.output for e in sorted(es, key=lambda e: e.columns.first)] for name, es in parts.items()}


def features_and_outputs(table: Any) -> list[tuple[str, str]]:
    return list(zip(table.feature_names, table.embedding_names, strict=True))


def describe(table: Any, feature: str) -> str:
    return f"table {table.name!r} (feature {feature!r}), which has {table.num_embeddings} rows"
