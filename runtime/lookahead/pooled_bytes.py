"""What pooled features send, beside what they would send if their owners pooled: no loss goes by in silence."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from freescale.runtime import batch_structure
from freescale.runtime.tables.fbgemm_bags import FbgemmBags
from freescale.runtime.tables.step_plan import StepPlan
from freescale.runtime.tables.table_exchange import Exchange

log = logging.getLogger(__name__)

_BATCHES = 20  # before anything is said


class PooledBytes:
    """Of one loader: how its exchanges of pooled features compare with pooled sums."""

    def __init__(self) -> None:
        self._batches: Counter[str] = Counter()
        self._rows: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()

    def count(self, exchange: Exchange, plan: StepPlan, batch: Any) -> dict[str, int]:
        """For `stats`: nothing unless the features are pooled."""
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
