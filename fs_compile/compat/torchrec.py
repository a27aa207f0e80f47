"""Private names of TorchRec and FBGEMM."""

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


def pooled_outputs(collection: Any) -> tuple[list[str], list[int]]:
    """The keys of a pooled collection's output, and their widths."""
    return collection._embedding_names, collection._embedding_dims


def sums_over_ranks(kind: str) -> bool:
    """Whether TorchRec pools a table with this sharding on several ranks and sums the results."""
    return kind in ("row_wise", "table_row_wise")


def packings(collection: Any, kind: str) -> tuple[str, str]:
    """How rows and gradients of tables with this sharding are sent (kernels/compression.py), by the collection's
    quantized communication; "" is float32. Raises NotImplementedError with the name of an unsupported codec."""
    op = "SEQUENCE_EMBEDDINGS_ALL_TO_ALL"
    if is_pooled_collection(collection):
        in_parts = sums_over_ranks(kind) or kind == "grid_shard"
        op = "POOLED_EMBEDDINGS_REDUCE_SCATTER" if in_parts else "POOLED_EMBEDDINGS_ALL_TO_ALL"
    codecs = (collection.qcomm_codecs_registry or {}).get(op)
    return ("", "") if codecs is None else (_packing(codecs.forward), _packing(codecs.backward))


def _packing(codec: Any) -> str:
    if type(codec).__name__ == "NoOpQuantizedCommCodec":
        return ""
    precision = getattr(getattr(codec, "_comm_precision", None), "value", type(codec).__name__)
    if precision == "fp32":
        return ""
    if precision not in ("fp16", "bf16"):
        raise NotImplementedError(precision)
    return f"{precision}:codec" + ("" if codec._loss_scale is None else f":{float(codec._loss_scale)!r}")


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


def flat_weight(emb: Any) -> torch.Tensor:
    """The rows of all tables of the module, flattened."""
    return emb.weights_dev if emb.weights_dev.numel() else emb.weights_host


def flat_momentum(emb: Any) -> torch.Tensor:
    """One number per element for Adagrad and Adam; one per row for row-wise Adagrad."""
    return emb.momentum1_dev if emb.momentum1_dev.numel() else emb.momentum1_host


def flat_squares(emb: Any) -> torch.Tensor:
    """One number per element for Adam; one per row for partial row-wise Adam."""
    return emb.momentum2_dev if emb.momentum2_dev.numel() else emb.momentum2_host


def count_lookup(emb: Any) -> None:
    """Increment the lookup counts of optimizers that count steps, also in evaluation, as FBGEMM's forward does: on the
    host, continuing from a checkpoint's count, and next to the rows for checkpoints."""
    emb.iter_cpu = emb.iter_cpu.cpu()
    if emb.iter_cpu.item() == 0:
        emb.iter_cpu.fill_(emb.iter.item())
    emb.iter_cpu.add_(1)
    emb.iter.add_(1)


def lookup_count(emb: Any) -> int:
    return int(emb.iter_cpu.item())


def state_in_unified_memory(emb: Any) -> bool:
    states = (emb.momentum1_uvm, emb.momentum2_uvm)
    return any(t.is_floating_point() and t.numel() > 0 for t in states)  # without state there is an integer placeholder


def plain_step(emb: Any) -> bool:
    """Whether the optimizer uses the textbook formula and keeps its state in ordinary memory."""
    args = emb.optimizer_args
    return not (args.weight_decay or args.max_norm or args.gradient_clipping or state_in_unified_memory(emb))


def rows_and_dims(emb: Any) -> list[tuple[int, int]]:
    return [(spec[0], spec[1]) for spec in emb.embedding_specs]


def decay_depends_on_history(emb: Any) -> bool:
    """Whether weight decay depends on when a row was last seen."""
    return emb._used_rowwise_adagrad_with_counter or emb._used_rowwise_adagrad_with_global_weight_decay
