"""What the planning threads of all ranks talk over: a gloo group, and connections that C uses without Python's lock."""

from __future__ import annotations

import torch.distributed as dist

from freescale.compat import distributed
from freescale.kernels.planning import rank_mesh
from freescale.kernels.planning.batch_plan import BatchPlan
from freescale.kernels.planning.exchange_plan import ExchangeTables, OwnerMap
from freescale.kernels.planning.native_batch import NativeBatchPlan
from freescale.kernels.planning.reference_batch import ReferenceBatchPlan
from freescale.runtime.tables.table_exchange import Exchange


class PlanningConnection:
    """For one loop at a time. Made at the same place on every rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._mesh = rank_mesh.open_mesh(group)

    def new_plan(self, exchanges: list[Exchange]) -> BatchPlan:
        tables = [
            ExchangeTables(x.row_offsets, x.table_sizes, OwnerMap(x.bounds, x.shifts, x.starts)) for x in exchanges
        ]
        if self._mesh is None:
            return ReferenceBatchPlan(self.group, tables)
        return NativeBatchPlan(self._mesh, tables, distributed.timeout_of(self.group).total_seconds())

    def hang_up(self) -> None:
        """The other ranks are not to wait for this one: what they wait for fails at once. It serves no further loop."""
        distributed.hang_up(self.group)
        if self._mesh is not None:
            self._mesh.hang_up()
