"""What the planning threads of all ranks talk over: a gloo group, and connections that C uses without Python's lock."""

from __future__ import annotations

import weakref

import torch.distributed as dist

from freescale.compat import distributed
from freescale.kernels.planning import rank_mesh
from freescale.kernels.planning.batch_plan import BatchPlan
from freescale.kernels.planning.exchange_plan import ExchangeTables, OwnerMap
from freescale.kernels.planning.native_batch import NativeBatchPlan
from freescale.kernels.planning.reference_batch import ReferenceBatchPlan
from freescale.kernels.transports.shared_segment import SharedSegment, share_segment
from freescale.runtime.tables.table_exchange import Exchange

# Of one rank, in one of the three rounds of a batch, where the ranks share memory: 131,072 ids. What is beyond
# that goes over the connections.
_SHARED_MESSAGE_BYTES = 2**20


class PlanningConnection:
    """For one loop at a time. Made at the same place on every rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._mesh = rank_mesh.open_mesh(group)
        self._segment: SharedSegment | None = None
        if self._mesh is not None and group.size() > 1:
            nbytes = self._mesh.shared_bytes(_SHARED_MESSAGE_BYTES)
            self._segment, _ = share_segment(nbytes, group.rank(), group)
            if self._segment is not None:
                self._mesh.share(self._segment.bytes)
                weakref.finalize(self, self._segment.close)

    def new_plan(self, exchanges: list[Exchange], whole: bool = False) -> BatchPlan:
        """`whole`: see BatchPlan."""
        tables = [
            ExchangeTables(x.row_offsets, x.table_sizes, OwnerMap(x.bounds, x.shifts, x.starts)) for x in exchanges
        ]
        if self._mesh is None:
            return ReferenceBatchPlan(self.group, tables, whole)
        return NativeBatchPlan(self._mesh, tables, distributed.timeout_of(self.group).total_seconds(), whole)

    def hang_up(self) -> None:
        """The other ranks are not to wait for this one: what they wait for fails at once. It serves no further loop."""
        distributed.hang_up(self.group)
        if self._mesh is not None:
            self._mesh.hang_up()
