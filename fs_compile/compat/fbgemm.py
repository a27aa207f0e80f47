"""Private and undocumented names of FBGEMM's table-batched embeddings."""

from __future__ import annotations

from typing import Any

import torch

FLOAT32 = 0  # FBGEMM's number in `output_dtype`


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
    """Increment the lookup counts of optimizers that count steps, including lookups in evaluation, as FBGEMM's forward
    does: on the host, continuing from a checkpoint's count, and next to the rows for checkpoints."""
    emb.iter_cpu = emb.iter_cpu.cpu()
    if emb.iter_cpu.item() == 0:
        emb.iter_cpu.fill_(emb.iter.item())
    emb.iter_cpu.add_(1)
    emb.iter.add_(1)


def set_lookup_count(emb: Any, count: int) -> None:
    """Set the host count only: for a late update, which belongs to the previous step."""
    emb.iter_cpu.fill_(count)


def lookup_count(emb: Any) -> int:
    return int(emb.iter_cpu.item())


def corrects_bias_of_each_row(emb: Any) -> bool:
    """Whether Adam counts steps per row."""
    return bool(getattr(emb, "use_rowwise_bias_correction", False))


def row_type(emb: Any) -> torch.dtype:
    """The dtype in which FBGEMM stores rows."""
    return emb.weights_precision.as_dtype()


def state_in_unified_memory(emb: Any) -> bool:
    states = (emb.momentum1_uvm, emb.momentum2_uvm)
    return any(t.is_floating_point() and t.numel() > 0 for t in states)  # without state there is an integer placeholder


def plain_step(emb: Any) -> bool:
    """Whether the optimizer uses the textbook formula and keeps its state in ordinary memory."""
    args = emb.optimizer_args
    return not (args.weight_decay or args.max_norm or args.gradient_clipping or state_in_unified_memory(emb))


def in_unified_memory(emb: Any) -> bool:
    return bool(emb.weights_uvm.numel())


def on_host_and_device(emb: Any) -> bool:
    return bool(emb.weights_dev.numel() and emb.weights_host.numel())


def rows_and_dims(emb: Any) -> list[tuple[int, int]]:
    """Rows and columns of each table."""
    return [(spec[0], spec[1]) for spec in emb.embedding_specs]


def pools(emb: Any) -> bool:
    """Whether its lookups return one row per bag, not one per id."""
    return not emb.is_nobag


def table_of_each_feature(emb: Any) -> list[int]:
    return emb.feature_table_map


def decay_depends_on_history(emb: Any) -> bool:
    """Whether weight decay depends on when a row was last seen."""
    return emb._used_rowwise_adagrad_with_counter or emb._used_rowwise_adagrad_with_global_weight_decay


def optimizer_settings(emb: Any) -> tuple[Any, float]:
    """Eps, weight decay and others, which FBGEMM keeps in a tuple, and the learning rate."""
    return emb.optimizer_args, emb.get_learning_rate()


def set_optimizer_settings(emb: Any, settings: tuple[Any, float]) -> None:
    emb.optimizer_args, learning_rate = settings
    emb.set_learning_rate(learning_rate)
