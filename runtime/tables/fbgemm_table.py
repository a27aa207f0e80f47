"""FBGEMM's table-batched embeddings as the owner of rows: storage, optimizer, and which of them we serve."""

from __future__ import annotations

from typing import Any

import torch

from freescale.compat import dynamo

# Their updates depend on a row, its gradient and settings alone. The others count steps, or look at more than the row.
OPTIMIZERS = ("exact_sgd", "exact_adagrad", "exact_row_wise_adagrad")
_FLOAT32 = 0  # as FBGEMM numbers its types


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
        with dynamo.autograd_inside_op():
            looked_up = self.emb(rows - self._starts[table], sizes.cumsum(0).to(rows.device))
            grads = grads.clone() if grads.is_inference() else grads
            torch.autograd.backward(looked_up, grads.view_as(looked_up))

    def settings(self) -> tuple[Any, float] | None:
        """Eps, weight decay and so on, which FBGEMM keeps in a tuple, and the learning rate."""
        return None if self.emb is None else (self.emb.optimizer_args, self.emb.get_learning_rate())

    def set_settings(self, settings: tuple[Any, float] | None) -> None:
        if settings is not None:
            self.emb.optimizer_args, learning_rate = settings
            self.emb.set_learning_rate(learning_rate)

    def describe(self, feature: int) -> str:
        return self.names[feature]


def _flat_weight(emb: Any) -> torch.Tensor:
    return emb.weights_dev if emb.weights_dev.numel() else emb.weights_host


def why_not(emb: Any) -> str | None:
    """The first reason to leave a module to TorchRec; None if we serve it."""
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
    if _flat_weight(emb).dtype != torch.float32:  # FBGEMM was told another type than it holds
        return f"their rows were turned into {_flat_weight(emb).dtype}"
    if emb.output_dtype != _FLOAT32:
        return "their output is not float32 (output_dtype)"
    dims = {spec[1] for spec in emb.embedding_specs}
    total = sum(spec[0] * spec[1] for spec in emb.embedding_specs)
    if len(dims) != 1 or _flat_weight(emb).numel() != total:
        return "FBGEMM does not store their rows one after the other"
    return None
