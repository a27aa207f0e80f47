"""Row owner for pooling FBGEMM modules. Their tables may differ in width; one exchange handles one width."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import torch

from freescale.compat import dynamo, torchrec
from freescale.runtime import batch_structure
from freescale.runtime.tables.fbgemm_table import FbgemmTable
from freescale.runtime.tables.step_plan import StepPlan
from freescale.runtime.tables.table_exchange import Exchange

log = logging.getLogger(__name__)

_BATCHES = 20  # before a warning


class FbgemmBags(FbgemmTable):
    """The rows that this rank owns in `tables` of one FBGEMM module, concatenated; no rows if `emb` is None."""

    pooled = True
    ranks_per_table = 1  # max ranks that hold rows of one table

    def __init__(
        self, emb: Any, descriptions: list[str], dim: int, device: torch.device, world_size: int,
        tables: list[int],
    ) -> None:  # fmt: skip
        super().__init__(emb, descriptions, dim, device, world_size)
        if emb is None:
            return
        specs, table_of = torchrec.rows_and_dims(emb), torchrec.table_of_each_feature(emb)
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

    def _table_and_row(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        table = torch.searchsorted(self._table_starts, rows, right=True) - 1
        return table, rows - self._table_starts[table]

    def apply_update(self, rows: torch.Tensor, grads: torch.Tensor) -> None:
        """Run FBGEMM's fused optimizer through its public lookup: one bag and one gradient per row.

        A batch has a bag for every feature, so the bag count is the largest row count of any table.
        """
        if self.emb is None:
            return
        if self._is_adam:
            self._apply_adam(rows, grads)
            return
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

    def sum_and_update(
        self, grad: torch.Tensor, rows: torch.Tensor, order: torch.Tensor, ends: torch.Tensor
    ) -> None:
        if self.emb is None or self._all_tables:
            super().sum_and_update(grad, rows, order, ends)
        else:
            self.apply_update(rows, torch.ops.freescale.sum_rows.default(grad, order, ends))


class PooledBytes:
    """What one loader's exchanges of pooled features receive, compared with what they would if the owners pooled.
    Warns when that would be less."""

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
