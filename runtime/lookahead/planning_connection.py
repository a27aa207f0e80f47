"""What the planning threads of all ranks talk over: a gloo group, and connections that C uses without the GIL."""

from __future__ import annotations

import torch.distributed as dist

from freescale.compat import distributed
from freescale.kernels.planning import rank_mesh
from freescale.kernels.planning.native_batch import BatchPlan
from freescale.kernels.planning.owners import ExchangeTables, OwnerMap
from freescale.runtime.tables.table_exchange import Exchange


class PlanningConnection:
    """For one loop at a time. Made at the same place on every rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._mesh = rank_mesh.open_mesh(group)

    def new_plan(self, exchanges: list[Exchange], whole: bool = False) -> BatchPlan:
        """`whole`: see BatchPlan."""
        tables = [
            ExchangeTables(x.row_offsets, x.table_sizes, OwnerMap(x.bounds, x.shifts, x.starts)) for x in exchanges
        ]
        mesh = self._mesh if self._mesh is not None else rank_mesh.GroupMesh(self.group)
        return BatchPlan(mesh, tables, distributed.timeout_of(self.group).total_seconds(), whole)

    def hang_up(self) -> None:
        """The other ranks are not to wait for this one: what they wait for fails at once. It serves no further loop."""
        distributed.hang_up(self.group)
        if self._mesh is not None:
            self._mesh.hang_up()
