"""Which of TorchRec's sharded modules are supported. Each unsupported one gets one warning with the reason, or with
`strict` an error, and keeps TorchRec's own forward, outside the graph."""

from __future__ import annotations

import logging
import weakref
from functools import cache
from types import CodeType
from typing import Any

from freescale.compat import dynamo, nn_modules, torchrec
from freescale.config import Config, load
from freescale.runtime import batch_structure
from freescale.runtime.tables import fbgemm
from freescale.runtime.tables.table_exchange import Exchange

log = logging.getLogger(__name__)

_SHARDINGS = ("row_wise", "table_wise", "column_wise", "data_parallel")
_POOLED_SHARDINGS = ("row_wise", "table_wise", "column_wise", "table_column_wise", "table_row_wise", "grid_shard")
_warn_once = cache(log.warning)
_left_in: dict[CodeType, None] = {}  # code compiled up to the call of a module that is left to TorchRec
_strict_errors: list[tuple[weakref.ref[Any], str]] = []  # module and error, raised while tracing with `strict`


class UnsupportedTables(RuntimeError):
    """With `strict`: freescale does not support a module."""


def raise_if_unsupported(cfg: Config) -> None:
    """An error raised while tracing may have become a graph break. The module is alive unless the user has given its
    model up."""
    errors = [message for module, message in _strict_errors if module() is not None]
    if cfg.strict and errors:
        _strict_errors.clear()
        raise UnsupportedTables(errors[0])


def report_unsupported(module: Any, reason: str) -> None:
    """Warn once that `module` falls back to TorchRec's own forward; with `strict`, raise."""
    _left_in.update(dict.fromkeys(dynamo.codes_being_traced()))
    module.__dict__["_freescale_left_to_torchrec"] = True
    name = torchrec.qualified_name(module) or "a collection"
    message = f"freescale: TorchRec's own path is used for {name}: {reason}"
    _warn_once(message)
    if load(nn_modules.options_while_tracing()).strict:
        _strict_errors.append((weakref.ref(module), message))
        raise UnsupportedTables(message)


def forget_callers() -> None:
    """Discard code that Dynamo compiled up to the call of an unsupported module. It has no guard on which module it
    calls, so another model of the same class would reuse it."""
    dynamo.forget_compiled(_left_in)
    _left_in.clear()


def unsupported_reason(collection: Any) -> str | None:
    """The first reason why TorchRec must keep an embedding collection, naming the table; None if it is supported."""
    configs = torchrec.embedding_configs(collection)
    pooled = torchrec.is_pooled_collection(collection)
    for name, sharding in collection.module_sharding_plan.items():
        kernel = "dense" if sharding.sharding_type == "data_parallel" else "fused"
        if sharding.sharding_type not in (_POOLED_SHARDINGS if pooled else _SHARDINGS):
            return f"table {name!r} is sharded {sharding.sharding_type}"
        if sharding.compute_kernel != kernel:
            return f"table {name!r} uses compute kernel {sharding.compute_kernel}"
    for config in configs:
        if config.data_type.value not in ("FP32", "FP16"):
            return f"table {config.name!r} holds {config.data_type.value} rows"
        kind = collection.module_sharding_plan[config.name].sharding_type
        if config.data_type.value != "FP32" and kind == "data_parallel":
            return f"table {config.name!r} is data_parallel and holds {config.data_type.value} rows"
    names = ", ".join(repr(c.name) for c in configs)
    env = torchrec.sharding_env(collection)
    if type(env).__name__ != "ShardingEnv" or env.process_group is None:
        return f"tables {names} are sharded over a multi-dimensional device mesh"
    for kind in {sharding.sharding_type for sharding in collection.module_sharding_plan.values()}:
        try:
            torchrec.packings(collection, kind)
        except NotImplementedError as error:
            return f"tables {names} use quantized communication in {error}; fp16 and bf16 are supported"
    if torchrec.returns_indices(collection):
        return f"tables {names} return their indices (need_indices)"
    if pooled and (reason := _unsupported_means(collection)) is not None:
        return reason
    for kind, sharding, lookup in torchrec.shardings(collection):
        reason = _unsupported_features(sharding, pooled)
        if reason is None and kind != "data_parallel":
            reason = _unsupported_storage(lookup, names)
        if reason is not None:
            return reason
    return None


def _unsupported_means(collection: Any) -> str | None:
    """Mean pooling where TorchRec's own result is not a mean, and cannot be computed from rows otherwise."""
    kinds = {name: sharding.sharding_type for name, sharding in collection.module_sharding_plan.items()}
    for config in torchrec.embedding_configs(collection):
        if config.pooling.value != "MEAN":
            continue
        if kinds[config.name] == "grid_shard":
            return f"table {config.name!r} is grid_shard and mean-pooled: TorchRec sums means of partial bags"
        others = (name for name, kind in kinds.items() if not torchrec.sums_over_ranks(kind))
        if torchrec.sums_over_ranks(kinds[config.name]) and (other := next(others, None)) is not None:
            return (
                f"table {config.name!r} is {kinds[config.name]} and mean-pooled, so TorchRec also divides the output "
                f"of table {other!r} ({kinds[other]}) by lengths: put them into different collections"
            )
    return None


def _unsupported_features(sharding: Any, pooled: bool) -> str | None:
    for group in (g for groups in torchrec.table_groups_per_rank(sharding) for g in groups):
        weighted = group.is_weighted and not pooled
        if weighted or group.has_feature_processor:
            what = "weighted" if weighted else "feature-processed"
            return f"table {group.embedding_tables[0].name!r} has {what} features"
    return None


def _unsupported_storage(lookup: Any, names: str) -> str | None:
    for emb in torchrec.fbgemm_modules(lookup):
        if (reason := fbgemm.unsupported_reason(emb)) is not None:
            return f"tables {names}: {reason}"
    return None


def require_plannable(number: int, leaves: list[Any], exchanges: list[Exchange]) -> None:
    """Raise for a batch whose lookups TorchRec's own code runs, which cannot be planned."""
    features = {f for x in exchanges for f in x.features}
    sequences = {f for x in exchanges if x.sequences for f in x.features}
    for kjt in (x for x in leaves if batch_structure.is_kjt(x) and not features.isdisjoint(x.keys())):
        names, weights = ", ".join(map(repr, kjt.keys())), kjt.weights_or_none()
        n_weights, n_ids = (0 if t is None else t.shape[0] for t in (weights, kjt.values()))
        if weights is not None and n_weights != n_ids:
            raise ValueError(f"freescale: batch {number}: {n_weights} weights for {n_ids} ids of the features {names}")
        if kjt.variable_stride_per_key():
            problem = _describe_strides(dict(zip(kjt.keys(), kjt.stride_per_key(), strict=True)))
        elif weights is not None and any(key in sequences for key in kjt.keys()):
            problem = f"the features {names} are weighted. Omit the weights"
        elif weights is not None and not weights.is_floating_point():
            problem = f"the weights of the features {names} are {weights.dtype}. Make them floating-point numbers"
        else:
            continue
        raise ValueError(
            f"freescale: batch {number}: {problem}, or iterate the loader directly: TorchRec's own code supports "
            "such batches"
        )


def _describe_strides(samples: dict[str, int]) -> str:
    most = max(samples, key=lambda key: samples[key])
    other = next((key for key in samples if samples[key] != samples[most]), most)
    return (
        f"the number of samples differs by feature ({most!r} has {samples[most]}, {other!r} has {samples[other]}; "
        "stride_per_key_per_rank). Give all features the same number"
    )
