"""Private names of TorchRec's sharded collections and their optimizers. Works without TorchRec."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch


def is_sharded_collection(module: torch.nn.Module) -> bool:
    """Whether it is a sharded EmbeddingCollection or EmbeddingBagCollection."""
    return type(module).__name__ == "ShardedEmbeddingCollection" or is_pooled_collection(module)


def is_pooled_collection(module: Any) -> bool:
    return type(module).__name__ == "ShardedEmbeddingBagCollection"


def is_sharded_module(module: torch.nn.Module) -> bool:
    types = sys.modules.get("torchrec.distributed.types")  # not imported: no module can be an instance
    return types is not None and isinstance(module, types.ShardedModule)


def qualified_name(module: Any) -> str:
    """The module's name in its model; empty if TorchRec does not know it."""
    return module._module_fqn or ""


def sharding_env(module: Any) -> Any:
    """Rank, world size and process group of a sharded module."""
    return module._env


def device_of(module: Any) -> torch.device:
    return module._device if module._device is not None else torch.device("cpu")


def embedding_configs(collection: Any) -> list[Any]:
    return pooled_configs(collection) or collection._embedding_configs


def num_embeddings(collection: Any, table: str) -> int:
    return collection._table_name_to_config[table].num_embeddings


def embedding_dim(collection: Any) -> int:
    return collection._embedding_dim


def returns_indices(collection: Any) -> bool:
    return not is_pooled_collection(collection) and collection._need_indices


def pooled_output_names(collection: Any) -> list[str]:
    """The keys of a pooled collection's output, in order."""
    return collection._embedding_names


def pooled_output_widths(collection: Any) -> list[int]:
    return collection._embedding_dims


def sums_over_ranks(kind: str) -> bool:
    """Whether TorchRec pools a table with this sharding on several ranks and sums the results."""
    return kind in ("row_wise", "table_row_wise")


def divides_sums(collection: Any) -> bool:
    """Whether a pooled collection divides sums over ranks, because some feature uses mean pooling."""
    return collection._has_mean_pooling_callback


def shardings(collection: Any) -> Iterator[tuple[str, Any, Any]]:
    """(sharding type, sharding, lookup module) of each sharding in the collection."""
    if is_pooled_collection(collection):
        yield from zip(collection._sharding_types, collection._embedding_shardings, collection._lookups, strict=True)
        return
    by_type = collection._sharding_type_to_sharding
    for (kind, sharding), lookup in zip(by_type.items(), collection._lookups, strict=True):
        yield kind, sharding, lookup


def table_groups_per_rank(sharding: Any) -> list[list[Any]]:
    """For each rank, the groups of tables (GroupedEmbeddingConfig) that share one FBGEMM module."""
    return sharding._grouped_embedding_configs_per_rank


def fbgemm_modules(lookup: Any) -> list[Any]:
    return [kernel.emb_module for kernel in lookup._emb_modules]


def fbgemm_module_of(lookup: Any, group: Any) -> Any:
    """The module on this rank for a group of tables."""
    for config, kernel in zip(lookup.grouped_configs, lookup._emb_modules, strict=True):
        if config is group:
            return kernel.emb_module
    raise RuntimeError("freescale: TorchRec has no FBGEMM module for one of its groups of tables")


def replicated_groups(lookup: Any) -> list[tuple[Any, torch.Tensor]]:
    """(group of tables, its flat weights) for each FBGEMM module of a data-parallel lookup, which DDP wraps."""
    return [(kernel._config, kernel.emb_module.weights) for kernel in lookup.module._emb_modules]


def pooled_configs(module: Any) -> list[Any]:
    """The tables of an embedding bag collection; empty for any other module."""
    return list(getattr(module, "_embedding_bag_configs", ()))


def optimizers_within(optimizer: Any) -> Iterator[Any]:
    """An optimizer and all optimizers that it combines or wraps."""
    yield optimizer
    for _, part in getattr(optimizer, "optimizers", ()):
        yield from optimizers_within(part)
    if (wrapped := getattr(optimizer, "_optimizer", None)) is not None:
        yield from optimizers_within(wrapped)


def fbgemm_module_updated_by(optimizer: Any) -> Any:
    """The FBGEMM module whose fused optimizer this is, or None."""
    return getattr(optimizer, "_emb_module", None)
