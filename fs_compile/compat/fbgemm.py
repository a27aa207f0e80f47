"""Names of FBGEMM's table-batched embeddings that are private, or public by their spelling alone."""

from __future__ import annotations

from typing import Any

import torch

FLOAT32 = 0  # as FBGEMM numbers its types, in `output_dtype`


def flat_weight(emb: Any) -> torch.Tensor:
    """The rows of all tables of the module, one after the other."""
    return emb.weights_dev if emb.weights_dev.numel() else emb.weights_host


def flat_momentum(emb: Any) -> torch.Tensor:
    """Of Adagrad and Adam, one number for each element of the rows; of row-wise Adagrad, one for each row."""
    return emb.momentum1_dev if emb.momentum1_dev.numel() else emb.momentum1_host


def flat_squares(emb: Any) -> torch.Tensor:
    """Of Adam, one number for each element of the rows; of partial row-wise Adam, one for each row."""
    return emb.momentum2_dev if emb.momentum2_dev.numel() else emb.momentum2_host


def count_lookup(emb: Any) -> None:
    """Optimizers that count steps count lookups, those of an evaluation too, as FBGEMM's forward does it: on the host,
    from the count of a checkpoint on, and beside the rows, for checkpoints."""
    emb.iter_cpu = emb.iter_cpu.cpu()
    if emb.iter_cpu.item() == 0:
        emb.iter_cpu.fill_(emb.iter.item())
    emb.iter_cpu.add_(1)
    emb.iter.add_(1)


def set_lookup_count(emb: Any, count: int) -> None:
    """On the host alone: for a late update, which belongs to the step before."""
    emb.iter_cpu.fill_(count)


def lookup_count(emb: Any) -> int:
    return int(emb.iter_cpu.item())


def corrects_bias_of_each_row(emb: Any) -> bool:
    """Whether Adam counts the steps of every row."""
    return bool(getattr(emb, "use_rowwise_bias_correction", False))


def row_type(emb: Any) -> torch.dtype:
    """In which FBGEMM was told to store rows."""
    return emb.weights_precision.as_dtype()


def state_in_unified_memory(emb: Any) -> bool:
    states = (emb.momentum1_uvm, emb.momentum2_uvm)
    return any(t.is_floating_point() and t.numel() > 0 for t in states)  # without state: a placeholder of integers


def plain_step(emb: Any) -> bool:
    """Whether the optimizer's step is the formula in the books, and its state in ordinary memory."""
    args = emb.optimizer_args
    return not (args.weight_decay or args.max_norm or args.gradient_clipping or state_in_unified_memory(emb))


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
