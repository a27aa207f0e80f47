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
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from freescale.compat import compiled_modules, dynamo
from freescale.config import Config, load
from freescale.kernels.ops import table_registry
from freescale.kernels.planning import exchange_plan
from freescale.kernels.transports import open_transports
from freescale.runtime.tables import fbgemm_table
from freescale.runtime.tables.table_exchange import Exchange, ReplicatedRows

log = logging.getLogger(__name__)

_refused: list[str] = []  # reasons of this process
_refused_strictly: list[str] = []  # those met while a model with `strict` was traced
_original_forward: Any = None


class Refused(RuntimeError):
    """Under `strict`: a collection that freescale does not serve."""


def raise_if_refused(cfg: Config) -> None:
    if cfg.strict and _refused_strictly:
        raise Refused(_refused_strictly[0])


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
            table = fbgemm_table.FbgemmTable(emb, words, module._embedding_dim, _torch_dtype(dtype), _device(module))
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
        self.name = table_registry.register(self.table, f"{module._module_fqn or 'embeddings'}.data_parallel")


class _Words:
    """Names the entries of a replica in errors; its rows and their optimizer are the user's."""

    def __init__(self, config: Any) -> None:
        self.words = [_words(t, f) for t in config.embedding_tables for f in t.feature_names]

    def describe(self, feature: int) -> str:
        return self.words[feature]


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


def _shards(group: Any, rank: int, index: dict[str, int]) -> list[exchange_plan.Shard]:
    shards, base = [], 0
    for t in group.embedding_tables:
        first = t.local_metadata.shard_offsets[0] if t.local_metadata is not None else 0
        shards.append(exchange_plan.Shard(index[t.name], first, t.local_rows, rank, base))
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
            if (reason := fbgemm_table.why_not(lookup_group.emb_module)) is not None:
                return f"tables {names}: {reason}"
    return None


def _refuse(module: Any, reason: str) -> None:
    message = f"freescale: TorchRec's own path is used for {module._module_fqn or 'a collection'}: {reason}"
    if message not in _refused:
        _refused.append(message)
        log.warning(message)
    if load(compiled_modules.options_while_tracing()).strict:
        _refused_strictly.append(message)
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
        with dynamo.outside_inference_mode():  # the first use may be an evaluation
            module.__dict__["_freescale"] = Collection(module)
        module.register_state_dict_pre_hook(open_transports.drain)
    return module.__dict__["_freescale"]


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling():
        _must_not_be_planned(self)
        return _original_forward(self, *args, **kwargs)
    features = args[0] if args else kwargs["features"]
    weighted = features.weights_or_none() is not None
    if not self._freescale_prepare(weighted, features.variable_stride_per_key()):
        return _torchrec_forward(self, features)
    return _serve(self._freescale, features, _division())


@torch._dynamo.disable
def _torchrec_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """TorchRec's own code, outside the graph."""
    _must_not_be_planned(self)
    found = _original_forward(self, *args, **kwargs)
    return found.wait() if hasattr(found, "wait") else found


def _forward_of_others(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Sharded modules that hold no EmbeddingCollection, in a model that is traced: Dynamo does not look inside."""
    if not torch.compiler.is_compiling():
        return _original_forward(self, *args, **kwargs)
    self._freescale_leave()
    return _torchrec_forward(self, *args, **kwargs)


def _freescale_leave(self: Any) -> bool:
    """Runs while Dynamo traces."""
    names = ", ".join(repr(c.name) for c in getattr(self, "_embedding_bag_configs", ()))
    _refuse(self, f"pooled tables {names} are not served" if names else f"{type(self).__name__} is not served")
    return True


def _must_not_be_planned(module: Any) -> None:
    """TorchRec's own lookup in a planned step would read rows that lack the gradients which are pending."""
    collection = module.__dict__.get("_freescale")
    if collection is not None and any(x.freescale_plan is not None for x in collection.exchanges):
        raise RuntimeError(
            f"freescale: TorchRec's own code looks up the tables of {module._module_fqn or 'a collection'} in a step "
            "that a LookaheadLoader has planned, because torch.compile has not compiled that lookup: did it hit "
            "torch._dynamo.config.recompile_limit (it says so), is it inside torch.compiler.disable, or are features "
            "weighted? Mend that, or loop without a LookaheadLoader"
        )


def _division() -> bool:
    from torchrec.distributed.comm_ops import get_gradient_division

    return get_gradient_division()


def _split_by_key(features: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Values and lengths of each feature, for any number of samples, even 0 (which KJT.to_dict refuses)."""
    keys, values, lengths = features.keys(), features.values(), features.lengths()
    samples = lengths.shape[0] // len(keys)
    if samples == 1:  # one sample makes a graph of its own (dynamo_settings.specialize_sizes_of_one)
        samples = 1
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


_watching: OrderedDict[int, tuple[list[Any], Callable[[], None], Callable[[], None]]] = OrderedDict()


def watch_optimizers(modules: list[Any], read: Callable[[], None], load: Callable[[], None]) -> RemovableHandle:
    """Call `read` before the state of TorchRec's optimizers of these modules is read, `load` before it is loaded."""
    handle = RemovableHandle(_watching)
    _watching[handle.id] = modules, read, load
    return handle


def _watched(method: Any, which: int) -> Any:
    @functools.wraps(method)
    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        for modules, *calls in tuple(_watching.values()):
            if _updates(self, modules):
                calls[which]()
        return method(self, *args, **kwargs)

    return told


def _updates(optimizer: Any, modules: list[Any]) -> bool:
    """Whether rows of these modules are among what the optimizer updates. The same on every rank: a collection's own
    optimizer is there also on a rank that holds none of its rows."""
    parts = list(_parts(optimizer))
    for module in (m for m in modules if "_freescale" in m.__dict__):
        held = [x.table.emb for x in module._freescale.exchanges if x.table.emb is not None]
        for part in parts:
            if part is module.fused_optimizer or any(getattr(part, "_emb_module", None) is emb for emb in held):
                return True
    return False


def _parts(optimizer: Any) -> Iterator[Any]:
    """An optimizer, and those that it combines or wraps."""
    yield optimizer
    for _, part in getattr(optimizer, "optimizers", ()):
        yield from _parts(part)
    if (wrapped := getattr(optimizer, "_optimizer", None)) is not None:
        yield from _parts(wrapped)


def teach() -> bool:
    """Teach TorchRec's classes, once. False where TorchRec is not installed."""
    global _original_forward
    try:
        from torchrec.distributed.embedding import ShardedEmbeddingCollection
        from torchrec.distributed.types import ShardedModule
        from torchrec.optim.keyed import KeyedOptimizer
    except ImportError:
        return False
    if _original_forward is None:
        KeyedOptimizer.state_dict = _watched(KeyedOptimizer.state_dict, 0)
        KeyedOptimizer.load_state_dict = _watched(KeyedOptimizer.load_state_dict, 1)
        _original_forward = ShardedModule.forward
        ShardedModule._freescale_leave = dynamo.assume_constant_result(_freescale_leave)
        ShardedModule.forward = _forward_of_others
        ShardedEmbeddingCollection._freescale_prepare = dynamo.assume_constant_result(_freescale_prepare)
        ShardedEmbeddingCollection.forward = _forward
    return True
