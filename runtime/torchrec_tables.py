"""TorchRec's `ShardedEmbeddingCollection` behind our exchange: our forward, FBGEMM's storage and optimizer.

`teach` gives the class a forward that Dynamo can trace. While a graph is traced, each collection is looked at
once (`_freescale_prepare`): its row-wise and table-wise tables become one Exchange per FBGEMM module, its
data-parallel tables a plain lookup. A collection with something that we do not serve keeps TorchRec's own
forward, outside the graph, with one warning. Outside torch.compile nothing changes. Storage, optimizer state,
learning rate and checkpoints stay TorchRec's.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from freescale import compat
from freescale.config import Config, load
from freescale.kernels import plan, tables
from freescale.runtime.exchange import Exchange, ReplicatedRows

log = logging.getLogger(__name__)

_refused: list[str] = []  # reasons of this process, for `strict`
_original_forward: Any = None


class Refused(RuntimeError):
    """Under `strict`: a collection that freescale does not serve."""


def raise_if_refused(cfg: Config) -> None:
    if cfg.strict and _refused:
        raise Refused(_refused[0])


# Their updates depend on a row, its gradient and settings alone. The others count steps, or look at more than the row.
OPTIMIZERS = ("exact_sgd", "exact_adagrad", "exact_row_wise_adagrad")


_FLOAT32 = 0  # as FBGEMM numbers its types


class _Settings(NamedTuple):
    arguments: Any  # eps, weight decay and so on, immutable
    learning_rate: float


class FbgemmTable:
    """The rows that this rank owns in one FBGEMM module (its tables one after the other), or none of them."""

    def __init__(self, emb: Any, names: list[str], dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.emb, self.names, self.dim = emb, names, dim  # names: table and feature of each entry, for errors
        self._none = torch.empty(0, dim, dtype=dtype, device=device)
        if emb is None:
            return
        rows = [spec[0] for spec in emb.embedding_specs]
        self._starts = torch.tensor([0, *rows]).cumsum(0).to(device)
        # FBGEMM wants its indices per feature; a table's rows all go in through its first feature.
        first = [emb.feature_table_map.index(t) for t in range(len(rows))]
        self._bags = torch.zeros(len(emb.feature_table_map) + 1, dtype=torch.int64)
        self._first = torch.tensor(first, dtype=torch.int64)

    @property
    def weight(self) -> torch.Tensor:
        return self._none if self.emb is None else _flat_weight(self.emb).detach().view(-1, self.dim)

    def apply_update(self, rows: torch.Tensor, grads: torch.Tensor) -> None:
        """FBGEMM's own fused optimizer, through its public lookup: one index per row, one gradient each."""
        if self.emb is None:
            return
        table = torch.searchsorted(self._starts, rows, right=True) - 1
        counts = torch.bincount(table.cpu(), minlength=self._first.shape[0])
        sizes = torch.zeros_like(self._bags)
        sizes[self._first + 1] = counts
        with compat.autograd_inside_op():
            looked_up = self.emb(rows - self._starts[table], sizes.cumsum(0).to(rows.device))
            torch.autograd.backward(looked_up, grads.view_as(looked_up))

    def settings(self) -> _Settings | None:
        if self.emb is None:
            return None
        return _Settings(self.emb.optimizer_args, self.emb.get_learning_rate())

    @contextmanager
    def with_settings(self, settings: _Settings | None) -> Iterator[None]:
        if self.emb is None or settings is None:
            yield
            return
        now = _Settings(self.emb.optimizer_args, self.emb.get_learning_rate())
        self._set(settings)
        try:
            yield
        finally:
            self._set(now)

    def _set(self, settings: _Settings) -> None:
        self.emb.optimizer_args = settings.arguments
        self.emb.set_learning_rate(settings.learning_rate)

    def describe(self, feature: int) -> str:
        return self.names[feature]


def _flat_weight(emb: Any) -> torch.Tensor:
    return emb.weights_dev if emb.weights_dev.numel() else emb.weights_host


class Collection:
    """How one ShardedEmbeddingCollection is served: what its traced forward needs."""

    def __init__(self, module: Any) -> None:
        self.exchanges: list[Exchange] = []
        self.outputs: list[list[str]] = []  # output names of each exchange's entries
        self.replicas: list[_Replica] = []
        env = module._env
        self.world = env.world_size
        position = 0
        for kind, sharding in module._sharding_type_to_sharding.items():
            lookup = module._lookups[position]
            position += 1
            if kind == "data_parallel":
                for emb in lookup.module._emb_modules:
                    self.replicas.append(_Replica(module, emb, env.process_group))
            else:
                self._add_exchanges(module, kind, sharding, lookup)

    def _add_exchanges(self, module: Any, kind: str, sharding: Any, lookup: Any) -> None:
        per_rank = sharding._grouped_embedding_configs_per_rank
        order = {c.name: i for i, c in enumerate(module._embedding_configs)}
        for dtype, nth in _merge(per_rank):
            # The nth group of this data type on each rank: updates are local, so optimizers may differ.
            groups = [_nth_of(configs, dtype, nth) for configs in per_rank]
            configs = {t.name: t for g in groups if g is not None for t in g.embedding_tables}
            names = sorted(configs, key=order.__getitem__)
            index = {name: i for i, name in enumerate(names)}
            rows = [module._table_name_to_config[name].num_embeddings for name in names]
            shards = [s for rank, g in enumerate(groups) if g is not None for s in _shards(g, rank, index)]
            entries, outputs, words = [], [], []
            for name in names:
                for feature, output in zip(
                    configs[name].feature_names, configs[name].embedding_names, strict=True
                ):
                    entries.append((feature, index[name]))
                    outputs.append(output)
                    words.append(_words(configs[name], feature))
            mine = groups[module._env.rank]
            emb = None if mine is None else _module_of(lookup, mine)
            table = FbgemmTable(emb, words, module._embedding_dim, _torch_dtype(dtype), _device(module))
            label = f"{module._module_fqn or 'embeddings'}.{kind}"
            self.exchanges.append(
                Exchange(label, table, shards, rows, entries, module._env.process_group)
            )
            self.outputs.append(outputs)


class _Replica:
    """A data-parallel FBGEMM module: a flat parameter that holds its tables one after the other."""

    def __init__(self, module: Any, emb: Any, group: dist.ProcessGroup) -> None:
        self.flat, self.dim, self.group_name = emb.emb_module.weights, module._embedding_dim, group.group_name
        self.features: list[str] = []
        self.outputs: list[str] = []
        self.firsts: list[int] = []
        self.sizes: list[int] = []
        first = 0
        for table in emb._config.embedding_tables:
            for feature, output in zip(table.feature_names, table.embedding_names, strict=True):
                self.features.append(feature)
                self.outputs.append(output)
                self.firsts.append(first)
                self.sizes.append(table.local_rows)
            first += table.local_rows
        self.table = _Words(emb._config)
        self.name = tables.register(self.table, f"{module._module_fqn or 'embeddings'}.data_parallel")


class _Words:
    """Names the entries of a replica in errors; its optimizer is the user's."""

    weight = torch.empty(0)

    def __init__(self, config: Any) -> None:
        self.words = [_words(t, f) for t in config.embedding_tables for f in t.feature_names]

    def describe(self, feature: int) -> str:
        return self.words[feature]

    def apply_update(self, rows: torch.Tensor, grads: torch.Tensor) -> None:
        raise NotImplementedError

    def settings(self) -> Any:
        raise NotImplementedError

    def with_settings(self, settings: Any) -> Any:
        raise NotImplementedError


def _words(table: Any, feature: str) -> str:
    return f"table {table.name!r} (feature {feature!r}), which has {table.num_embeddings} rows"


def _merge(per_rank: list[list[Any]]) -> list[tuple[Any, int]]:
    """Every (data type, how manieth) that some rank has, in a fixed order."""
    seen: list[tuple[Any, int]] = []
    for configs in per_rank:
        counts: dict[Any, int] = {}
        for c in configs:
            n = counts.get(c.data_type, 0)
            counts[c.data_type] = n + 1
            if (c.data_type, n) not in seen:
                seen.append((c.data_type, n))
    return seen


def _nth_of(configs: list[Any], dtype: Any, nth: int) -> Any:
    same = [c for c in configs if c.data_type == dtype]
    return same[nth] if nth < len(same) else None


def _shards(group: Any, rank: int, index: dict[str, int]) -> list[plan.Shard]:
    shards, base = [], 0
    for t in group.embedding_tables:
        first = t.local_metadata.shard_offsets[0] if t.local_metadata is not None else 0
        shards.append(plan.Shard(index[t.name], first, t.local_rows, rank, base))
        base += t.local_rows
    return shards


def _module_of(lookup: Any, group: Any) -> Any:
    for config, module in zip(lookup.grouped_configs, lookup._emb_modules, strict=True):
        if config is group:
            return module.emb_module
    raise RuntimeError("freescale: TorchRec holds no FBGEMM module for a group of tables that it planned")


def _torch_dtype(data_type: Any) -> torch.dtype:
    from torchrec.modules.embedding_configs import data_type_to_dtype

    return data_type_to_dtype(data_type)


def _device(module: Any) -> torch.device:
    return module._device if module._device is not None else torch.device("cpu")


# ---- what we serve -----------------------------------------------------------------------------------------


def why_not(module: Any) -> str | None:
    """The first reason to leave a collection to TorchRec, naming the table; None if we serve it."""
    for name, sharding in module.module_sharding_plan.items():
        kernel = "dense" if sharding.sharding_type == "data_parallel" else "fused"
        if sharding.sharding_type not in ("row_wise", "table_wise", "data_parallel"):
            return f"table {name!r} is sharded {sharding.sharding_type}"
        if sharding.compute_kernel != kernel:
            return f"table {name!r} uses compute kernel {sharding.compute_kernel}"
    for config in module._embedding_configs:
        if config.data_type.value != "FP32":
            return f"table {config.name!r} holds {config.data_type.value} rows"
    names = ", ".join(repr(c.name) for c in module._embedding_configs)
    if type(module._env).__name__ != "ShardingEnv" or module._env.process_group is None:
        return f"tables {names} are sharded over more than one dimension of ranks"
    if module.qcomm_codecs_registry:
        return f"tables {names} use quantized communication"
    if module._need_indices:
        return f"tables {names} return their indices (need_indices)"
    for kind, sharding in module._sharding_type_to_sharding.items():
        for group in (g for groups in sharding._grouped_embedding_configs_per_rank for g in groups):
            if group.is_weighted or group.has_feature_processor:
                what = "weighted" if group.is_weighted else "feature-processed"
                return f"table {group.embedding_tables[0].name!r} has {what} features"
        if kind == "data_parallel":
            continue
        for lookup_group in module._lookups[list(module._sharding_type_to_sharding).index(kind)]._emb_modules:
            if (reason := _why_not_fbgemm(lookup_group.emb_module)) is not None:
                return f"tables {names}: {reason}"
    return None


def _why_not_fbgemm(emb: Any) -> str | None:
    if emb.weights_uvm.numel():
        return "their rows are in unified memory"
    if emb.weights_dev.numel() and emb.weights_host.numel():
        return "their rows are spread over host and device"
    if emb.optimizer.value not in OPTIMIZERS:
        return f"their optimizer is {emb.optimizer.value}; freescale serves {', '.join(OPTIMIZERS)}"
    if emb._used_rowwise_adagrad_with_counter or emb._used_rowwise_adagrad_with_global_weight_decay:
        return "their weight decay depends on when a row was seen last"
    if emb.optimizer_args.gradient_clipping:
        return "FBGEMM clips the gradients of single values (gradient_clipping)"
    if emb.output_dtype != _FLOAT32:
        return "their output is not float32 (output_dtype)"
    dims = {spec[1] for spec in emb.embedding_specs}
    total = sum(spec[0] * spec[1] for spec in emb.embedding_specs)
    if len(dims) != 1 or _flat_weight(emb).numel() != total:
        return "FBGEMM does not store their rows one after the other"
    return None


def _refuse(module: Any, reason: str) -> None:
    message = f"freescale: TorchRec's own path is used for {module._module_fqn or 'a collection'}: {reason}"
    if message not in _refused:
        _refused.append(message)
        log.warning(message)
    if load().strict:
        raise Refused(message)


# ---- the traced forward ------------------------------------------------------------------------------------


def _freescale_prepare(self: Any, weighted: bool, varying: bool) -> bool:
    """Runs while Dynamo traces, its result a constant of the graph: is this collection ours?"""
    reason = why_not(self)
    if weighted:
        reason = f"features of table {self._embedding_configs[0].name!r} are weighted"
    if varying:
        reason = f"the batch size varies per feature of table {self._embedding_configs[0].name!r}"
    if reason is not None:
        _refuse(self, reason)
        return False
    collection_of(self)
    return True


def collection_of(module: Any) -> Collection:
    """How `module`, which `why_not` lets through, is served; made on first use."""
    if "_freescale" not in module.__dict__:
        module.__dict__["_freescale"] = Collection(module)
    return module.__dict__["_freescale"]


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling():
        return _original_forward(self, *args, **kwargs)
    features = args[0] if args else kwargs["features"]
    weighted = features.weights_or_none() is not None
    if not self._freescale_prepare(weighted, features.variable_stride_per_key()):
        return _torchrec_forward(self, features)
    return _serve(self._freescale, features, _division())


@torch._dynamo.disable
def _torchrec_forward(self: Any, features: Any) -> Any:
    return _original_forward(self, features).wait()


def _division() -> bool:
    from torchrec.distributed.comm_ops import get_gradient_division

    return get_gradient_division()


def _split_by_key(features: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Values and lengths of each feature, for any number of samples, even 0 (which KJT.to_dict refuses)."""
    keys, values, lengths = features.keys(), features.values(), features.lengths()
    samples = lengths.shape[0] // len(keys)
    lengths = lengths.view(len(keys), samples)
    counts = lengths.sum(1).tolist()
    for n in counts:
        torch._check(n >= 0)
    torch._check(sum(counts) == values.shape[0], lambda: "the lengths of a KeyedJaggedTensor miss its values")
    parts = torch.split(values, counts)
    return {key: (parts[i], lengths[i]) for i, key in enumerate(keys)}


def _serve(collection: Collection, features: Any, divide: bool) -> dict[str, Any]:
    from torchrec.sparse.jagged_tensor import JaggedTensor

    per_key = _split_by_key(features)
    found: dict[str, Any] = {}
    divide_by = collection.world if divide else 1
    for exchange, outputs in zip(collection.exchanges, collection.outputs, strict=True):
        embedded = exchange.lookup([per_key[f][0] for f in exchange.features], divide_by)
        for output, feature, e in zip(outputs, exchange.features, embedded, strict=True):
            found[output] = JaggedTensor(values=e, lengths=per_key[feature][1])
    for replica in collection.replicas:
        ids = [per_key[f][0] for f in replica.features]
        rows = torch.ops.freescale.checked_rows(
            ids, replica.firsts, replica.sizes, replica.name, replica.group_name
        )
        embedded = ReplicatedRows.apply(
            replica.flat, replica.dim, rows, collection.world, replica.group_name
        )
        parts = torch.split(embedded, [i.shape[0] for i in ids])
        for output, feature, e in zip(replica.outputs, replica.features, parts, strict=True):
            found[output] = JaggedTensor(values=e, lengths=per_key[feature][1])
    return found


class OptimizerWatch:
    """Calls `read` before the state of TorchRec's optimizers is read, `load` before it is loaded, until removed."""

    _all: list[OptimizerWatch] = []

    def __init__(self, read: Callable[[], None], load: Callable[[], None]) -> None:
        self.read, self.load = read, load
        self._all.append(self)

    def remove(self) -> None:
        self._all.remove(self)

    @classmethod
    def before(cls, method: Any, what: str) -> Any:
        @functools.wraps(method)
        def told(self: Any, *args: Any, **kwargs: Any) -> Any:
            for watch in tuple(cls._all):
                getattr(watch, what)()
            return method(self, *args, **kwargs)

        return told


def teach() -> bool:
    """Teach TorchRec's classes, once. False where TorchRec is not installed."""
    global _original_forward
    try:
        from torchrec.distributed.embedding import ShardedEmbeddingCollection
        from torchrec.optim.keyed import KeyedOptimizer
    except ImportError:
        return False
    if _original_forward is None:
        KeyedOptimizer.state_dict = OptimizerWatch.before(KeyedOptimizer.state_dict, "read")
        KeyedOptimizer.load_state_dict = OptimizerWatch.before(KeyedOptimizer.load_state_dict, "load")
        _original_forward = ShardedEmbeddingCollection.forward
        ShardedEmbeddingCollection._freescale_prepare = compat.assume_constant_result(_freescale_prepare)
        ShardedEmbeddingCollection.forward = _forward
    return True
