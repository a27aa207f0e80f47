"""Row owners backed by FBGEMM's table-batched embeddings: storage, optimizer, and which configurations are supported.

On a GPU our kernel applies the optimizer to FBGEMM's storage, with FBGEMM's formulas. FBGEMM itself handles weight
decay, max_norm, float16 rows (with its own rounding) and everything on the CPU. Adam is always ours: FBGEMM would count
a late update as a step, and has no Adam on the CPU. An exchange handles one width of a module that pools.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import torch

from freescale.compat import dynamo, torchrec
from freescale.kernels import row_kernels
from freescale.runtime import batch_structure
from freescale.runtime.tables.step_plan import StepPlan
from freescale.runtime.tables.table_exchange import Exchange

# FBGEMM's names to our kernels' names. Updates depend only on the row, its gradient, the settings and the step count.
OPTIMIZERS = {"exact_sgd": "sgd", "exact_adagrad": "adagrad", "exact_row_wise_adagrad": "rowwise_adagrad"}
ADAM = ("adam", "partial_row_wise_adam")


class FbgemmTable:
    """The rows that this rank owns in one FBGEMM module (its tables concatenated); no rows if `emb` is None."""

    _all_tables = True  # of the module
    row_dtype = torch.float32  # of sent rows and of their gradients; FBGEMM also returns float32 for any storage type

    def __init__(self, emb: Any, descriptions: list[str], dim: int, device: torch.device, world_size: int) -> None:
        # descriptions: table and feature of each entry, for error messages
        self.emb, self.descriptions, self.dim, self.world_size = emb, descriptions, dim, world_size
        self._no_rows = torch.empty(0, dim, dtype=self.row_dtype, device=device)
        if emb is None:
            return
        table_rows = [rows for rows, _ in torchrec.rows_and_dims(emb)]
        self._table_starts = torch.tensor([0, *table_rows]).cumsum(0).to(device)
        # FBGEMM expects indices per feature; rows of a table go in through its first feature.
        table_of = emb.feature_table_map
        first_features = [table_of.index(t) for t in range(len(table_rows))]
        tables_before = [sum(first < f for first in first_features) for f in range(len(table_of) + 1)]
        self._tables_before = torch.tensor(tables_before, device=device)  # before each feature, and in total
        self._is_adam = emb.optimizer.value in ADAM
        self._counts_lookups = self._is_adam

    def count_lookup(self) -> None:
        if self.emb is not None and self._counts_lookups:
            torchrec.count_lookup(self.emb)

    @property
    def weight(self) -> torch.Tensor:
        return self._no_rows if self.emb is None else torchrec.flat_weight(self.emb).detach().view(-1, self.dim)

    def stored(self) -> tuple[torch.Tensor, ...]:
        if self.emb is None:
            return (self._no_rows,)
        states = 2 if self._is_adam else 0 if self.emb.optimizer.value == "exact_sgd" else 1
        flat = (torchrec.flat_weight, torchrec.flat_momentum, torchrec.flat_squares)
        return tuple(tensor_of(self.emb) for tensor_of in flat[: 1 + states])

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.ops.freescale.pack_rows.default(self.weight, rows).to(self.row_dtype)

    def _table_and_row(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        table = torch.searchsorted(self._table_starts, rows, right=True) - 1
        return table, rows - self._table_starts[table]

    def apply_update(self, rows: torch.Tensor, grads: torch.Tensor) -> None:
        if self.emb is not None:
            apply = self._apply_adam if self._is_adam else self._apply_fbgemm
            apply(rows, grads)

    def _apply_fbgemm(self, rows: torch.Tensor, grads: torch.Tensor) -> None:
        """Run FBGEMM's fused optimizer through its public lookup: one index and one gradient per row. No host sync."""
        with dynamo.autograd_inside_op():
            offsets = torch.searchsorted(rows, self._table_starts)[self._tables_before]
            embeddings = self.emb(self._table_and_row(rows)[1], offsets)
            grads = grads.clone() if grads.is_inference() else grads
            torch.autograd.backward(embeddings, grads.view_as(embeddings))

    def sum_and_update(self, grad: torch.Tensor, rows: torch.Tensor, order: torch.Tensor, ends: torch.Tensor) -> None:
        """apply_update with the sums of sum_rows. Each rank sends a row at most once."""
        if self.emb is None:
            return
        ours = self._all_tables and not self._is_adam and self.weight.dtype == self.row_dtype
        if not ours or not torchrec.plain_step(self.emb):
            self.apply_update(rows, torch.ops.freescale.sum_rows.default(grad, order, ends))
            return
        args, lr = self.emb.optimizer_args, self.emb.get_learning_rate()
        optimizer = OPTIMIZERS[self.emb.optimizer.value]
        row_kernels.update_rows(
            self.weight, self._momentum(optimizer), grad, rows, order, ends, lr, args.eps, optimizer, self.world_size,
            fused=True
        )  # fmt: skip

    def _apply_adam(self, rows: torch.Tensor, grads: torch.Tensor) -> None:
        means = torchrec.flat_momentum(self.emb).detach().view(-1, self.dim)
        squares = torchrec.flat_squares(self.emb).detach()
        self._adam_step(self.weight, means, squares if self._is_row_wise else squares.view(-1, self.dim), rows, grads)

    @property
    def _is_row_wise(self) -> bool:
        return self.emb.optimizer.value == "partial_row_wise_adam"

    def _adam_step(
        self, weight: torch.Tensor, means: torch.Tensor, squares: torch.Tensor, rows: torch.Tensor, grads: torch.Tensor
    ) -> None:
        args, lr = self.emb.optimizer_args, self.emb.get_learning_rate()
        betas, step = (args.beta1, args.beta2), torchrec.lookup_count(self.emb)
        row_kernels.adam_rows(weight, means, squares, rows, grads, lr, args.eps, betas, args.weight_decay, step)

    def _momentum(self, optimizer: str) -> torch.Tensor | None:
        if optimizer == "sgd":
            return None
        flat = torchrec.flat_momentum(self.emb).detach()
        return flat if optimizer == "rowwise_adagrad" else flat.view(-1, self.dim)

    def settings(self) -> tuple[Any, float, int] | None:
        if self.emb is None:
            return None
        steps = torchrec.lookup_count(self.emb) if self._is_adam else 0
        return self.emb.optimizer_args, self.emb.get_learning_rate(), steps

    def set_settings(self, settings: tuple[Any, float, int] | None) -> None:
        if settings is not None:
            self.emb.optimizer_args, lr, count = settings
            self.emb.set_learning_rate(lr)
            if self._is_adam:
                self.emb.iter_cpu.fill_(count)  # the host's count only: a late update belongs to the previous step

    def describe(self, feature: int) -> str:
        return self.descriptions[feature]


def unsupported_reason(emb: Any) -> str | None:
    if emb.weights_uvm.numel():
        return "their rows are in unified memory"
    if emb.weights_dev.numel() and emb.weights_host.numel():
        return "their rows are spread over host and device"
    if emb.optimizer.value not in (*OPTIMIZERS, *ADAM):
        return f"their optimizer is {emb.optimizer.value}; freescale supports {', '.join((*OPTIMIZERS, *ADAM))}"
    if emb.optimizer.value in ADAM and (reason := _unsupported_adam(emb)) is not None:
        return reason
    if torchrec.decay_depends_on_history(emb):
        return "their weight decay depends on when a row was last seen"
    if emb.optimizer_args.gradient_clipping:
        return "FBGEMM clips the gradients of single values (gradient_clipping)"
    weight = torchrec.flat_weight(emb)
    if weight.dtype != emb.weights_precision.as_dtype():  # FBGEMM was configured with another type
        return f"their rows were converted to {weight.dtype}"
    if weight.dtype != torch.float32 and emb.optimizer.value in ADAM:
        return f"their rows are {weight.dtype}, and freescale's Adam supports only float32"
    if emb.output_dtype != 0:  # FBGEMM's number of float32
        return "their output is not float32 (output_dtype)"
    specs = torchrec.rows_and_dims(emb)
    one_width = len({dim for _, dim in specs}) == 1 or not emb.is_nobag
    if not one_width or weight.numel() != sum(rows * dim for rows, dim in specs):
        return "FBGEMM does not store their rows contiguously"
    return None


def _unsupported_adam(emb: Any) -> str | None:
    if getattr(emb, "use_rowwise_bias_correction", False):
        return "their Adam counts the steps of each row (use_rowwise_bias_correction)"
    if emb.optimizer_args.max_norm:
        return "their Adam limits the norm of rows (max_norm)"
    if torchrec.state_in_unified_memory(emb):
        return "their optimizer's state is in unified memory"
    return None


log = logging.getLogger(__name__)

_BATCHES = 20  # before a warning


class FbgemmBags(FbgemmTable):
    """The rows that this rank owns in `tables` of one FBGEMM module, concatenated; no rows if `emb` is None."""

    ranks_per_table = 1  # max ranks that hold rows of one table

    def __init__(
        self, emb: Any, descriptions: list[str], dim: int, device: torch.device, world_size: int,
        tables: list[int],
    ) -> None:  # fmt: skip
        super().__init__(emb, descriptions, dim, device, world_size)
        if emb is None:
            return
        specs, table_of = torchrec.rows_and_dims(emb), emb.feature_table_map
        self._all_tables = len(tables) == len(specs)
        self._counts_lookups = self._is_adam and 0 in tables  # one of the exchanges that share the module
        elements = torch.tensor([0, *(rows * width for rows, width in specs)]).cumsum(0)
        self._first_elements = elements[tables].to(device)
        self._first_rows = torch.tensor([0, *(rows for rows, _ in specs)]).cumsum(0)[tables].to(device)
        self._table_starts = torch.tensor([0, *(specs[t][0] for t in tables)]).cumsum(0).to(device)
        # Rows of a table are looked up through its first feature.
        self._features = [table_of.index(t) for t in tables]
        self._feature_count = len(table_of)
        self._first_outputs = [sum(specs[t][1] for t in table_of[:feature]) for feature in self._features]

    @property
    def weight(self) -> torch.Tensor:
        """For a subset of the module's tables, a view with a row starting at every element: see `gather`."""
        if self.emb is None or self._all_tables:
            return super().weight
        flat = torchrec.flat_weight(self.emb).detach()
        return flat.as_strided((flat.shape[0] - self.dim + 1, self.dim), (1, 1))

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        if self.emb is None or self._all_tables:
            return super().gather(rows)
        table, row = self._table_and_row(rows)
        return self.weight.index_select(0, self._first_elements[table] + row * self.dim).to(self.row_dtype)

    def _apply_fbgemm(self, rows: torch.Tensor, grads: torch.Tensor) -> None:
        """The same with one bag and one gradient per row. Every feature has as many bags as the largest row count."""
        ends = torch.searchsorted(rows, self._table_starts).tolist()  # host sync
        counts = [end - begin for begin, end in zip(ends, ends[1:], strict=False)]
        if max(counts) == 0:
            return
        lengths = torch.zeros(self._feature_count, max(counts), dtype=torch.int64, device=rows.device)
        for feature, n in zip(self._features, counts, strict=True):
            lengths[feature, :n] = 1
        offsets = torch.nn.functional.pad(lengths.view(-1).cumsum(0), (1, 0))
        with dynamo.autograd_inside_op():
            pooled = self.emb(self._table_and_row(rows)[1], offsets)
            grad = torch.zeros_like(pooled)
            for first, begin, n in zip(self._first_outputs, ends[:-1], counts, strict=True):
                grad[:n, first : first + self.dim] = grads[begin : begin + n]
            torch.autograd.backward(pooled, grad)

    def _apply_adam(self, rows: torch.Tensor, grads: torch.Tensor) -> None:
        if self._all_tables:
            super()._apply_adam(rows, grads)
            return
        table, row = self._table_and_row(rows)
        columns = torch.arange(self.dim, device=rows.device)
        elements = (self._first_elements[table] + row * self.dim)[:, None] + columns
        of_squares = self._first_rows[table] + row if self._is_row_wise else elements
        stored = [
            (torchrec.flat_weight(self.emb).detach(), elements), (torchrec.flat_momentum(self.emb).detach(), elements),
            (torchrec.flat_squares(self.emb).detach(), of_squares),
        ]  # fmt: skip
        weight, means, squares = (flat[places] for flat, places in stored)
        self._adam_step(weight, means, squares, torch.arange(rows.shape[0], device=rows.device), grads)
        for (flat, places), new in zip(stored, (weight, means, squares), strict=True):
            flat[places] = new


class PooledBytes:
    """What one loader's exchanges of pooled features receive, and would receive if owners pooled. Warns of more."""

    def __init__(self) -> None:
        self._batches: Counter[str] = Counter()
        self._rows: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()

    def count(self, exchange: Exchange, plan: StepPlan, batch: Any) -> dict[str, int]:
        """For `LookaheadLoader.stats`; {} unless the features are pooled."""
        table, name = exchange.table, exchange.name
        if not isinstance(table, FbgemmBags):
            return {}
        holders = filter(batch_structure.is_kjt, batch_structure.id_holders(batch, exchange.features))
        bags = sum(kjt.stride() * sum(f in kjt.keys() for f in exchange.features) for kjt in holders)
        sums = bags * table.ranks_per_table * table.dim * exchange.anchor.element_size()
        self._batches[name] += 1
        self._rows[name] += plan.stats["bytes_urgent"] + plan.stats["bytes_early"]
        self._sums[name] += sums
        if self._batches[name] == _BATCHES and self._rows[name] > self._sums[name]:
            log.warning(
                "freescale: the rows of %s are %.1f times the bytes of its pooled sums, which TorchRec's own code "
                "would send: its bags are long and share few rows",
                name, self._rows[name] / max(self._sums[name], 1),
            )  # fmt: skip
        return {"bytes_if_pooled": sums}
