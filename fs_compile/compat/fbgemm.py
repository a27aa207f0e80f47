"""Names of FBGEMM's table-batched embeddings that are private, or public by their spelling alone."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch

FLOAT32 = 0  # as FBGEMM numbers its types, in `output_dtype`


def flat_weight(emb: Any) -> torch.Tensor:
    """The rows of all tables of the module, one after the other."""
    return emb.weights_dev if emb.weights_dev.numel() else emb.weights_host


def flat_momentum(emb: Any) -> torch.Tensor:
    """Of Adagrad, one number for each element of the rows; of row-wise Adagrad, one for each row."""
    return emb.momentum1_dev if emb.momentum1_dev.numel() else emb.momentum1_host


def plain_step(emb: Any) -> bool:
    """Whether the optimizer's step is the formula in the books, and its state in ordinary memory."""
    args, state = emb.optimizer_args, emb.momentum1_uvm
    in_unified_memory = state.is_floating_point() and state.numel()  # without state, it is a placeholder of integers
    return not (args.weight_decay or args.max_norm or args.gradient_clipping or in_unified_memory)


def in_unified_memory(emb: Any) -> bool:
    return bool(emb.weights_uvm.numel())


def on_host_and_device(emb: Any) -> bool:
    return bool(emb.weights_dev.numel() and emb.weights_host.numel())


def rows_and_dims(emb: Any) -> list[tuple[int, int]]:
    """Of each table."""
    return [(spec[0], spec[1]) for spec in emb.embedding_specs]


def pools(emb: Any) -> bool:
    """Whether its lookups return a row per bag, not one per id."""
    return not emb.is_nobag


def table_of_each_feature(emb: Any) -> list[int]:
    return emb.feature_table_map


def decay_depends_on_history(emb: Any) -> bool:
    """Weight decay that looks at when a row was seen last."""
    return emb._used_rowwise_adagrad_with_counter or emb._used_rowwise_adagrad_with_global_weight_decay


def optimizer_settings(emb: Any) -> tuple[Any, float]:
    """Eps, weight decay and so on, which FBGEMM keeps in a tuple, and the learning rate."""
    return emb.optimizer_args, emb.get_learning_rate()


def set_optimizer_settings(emb: Any, settings: tuple[Any, float]) -> None:
    emb.optimizer_args, learning_rate = settings
    emb.set_learning_rate(learning_rate)


def names_used_by(cls: type) -> set[str]:
    """Every global and attribute that the methods of a class and of its bases mention."""
    functions = (f for base in cls.__mro__ for f in vars(base).values() if isinstance(f, FunctionType))
    return {name for f in functions for name in f.__code__.co_names}


def probe() -> None:
    """Raise if a private name that is used here is gone. Does nothing where FBGEMM is not installed."""
    try:
        from fbgemm_gpu.split_embedding_codegen_lookup_invokers.lookup_args import OptimizerArgs
        from fbgemm_gpu.split_embedding_configs import SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen as Emb
    except ImportError:
        return
    assert SparseType.FP32.as_int() == FLOAT32
    missing = {
        "embedding_specs", "feature_table_map", "optimizer", "optimizer_args", "output_dtype", "is_nobag",
        "_used_rowwise_adagrad_with_counter", "_used_rowwise_adagrad_with_global_weight_decay",
    } - names_used_by(Emb)  # fmt: skip
    assert not missing, missing
    tensors = {f"weights_{place}" for place in ("dev", "host", "uvm")} | {"momentum1_dev", "momentum1_host"}
    assert tensors <= names_used_by(Emb), tensors - names_used_by(Emb)
    assert {"weight_decay", "max_norm", "gradient_clipping", "eps"} <= set(OptimizerArgs._fields)
    assert callable(Emb.get_learning_rate) and callable(Emb.set_learning_rate)
