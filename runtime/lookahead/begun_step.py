"""A step that begins before its rank has heard that all others begin it, too.

The ranks tell each other that they begin a step (rank_status.py). If each waited for all others there, every step would
take as long as that of the slowest host. So where nothing is pending, a rank goes on to the end of the forward pass
and only listens then, before anything changes a table. What it has done until then are launches of rows; and a rank
that does something else instead (it leaves the loop, brings a wrong batch) launches them too, by the plan that it has
of that batch: so nobody is left waiting for rows, and all that is lost is one forward pass.

That holds for a step whose forward pass launches nothing but the rows of its own batch: with
LookaheadLoader(overlap=False), or where the loader keeps steps apart; and needs nothing else of other ranks.
"""

from __future__ import annotations

import torch

from freescale.compat import dynamo
from freescale.kernels.ops.schemas import URGENT
from freescale.kernels.transports import launch_record
from freescale.runtime.lookahead.planned_batch import PlannedBatch
from freescale.runtime.tables.table_exchange import Exchange

_wait = torch.ops._c10d_functional.wait_tensor

# On the CPU the host itself waits for rows, and NCCL gives up a process whose peers are late: there is nothing to win.
only_over_copies = True


class RowsOfBegunStep:
    """Of one loop: in which order a forward pass launches rows, and the batch that other ranks may have begun."""

    def __init__(self, exchanges: list[Exchange]) -> None:
        self._exchanges = {x.name: x for x in exchanges}
        self._counts_lookups = any(hasattr(type(x.table), "count_lookup") for x in exchanges)
        self._order: list[tuple[str, launch_record.RowsLaunch]] | None = None  # as the last step did
        self._begun = -1  # the batch whose forward pass is under way
        self._last = -1  # the batch that went through the model last
        self._left_out: PlannedBatch | None = None  # the first that was handed out since, if another one followed
        self.one_graph = False  # the last call of the model was one graph of ours, and nothing else (graph_watch.py)

    def may_begin(self, planned: PlannedBatch | None) -> bool:
        """Whether this rank may begin the batch before it has heard of the others."""
        if self._order is None or not self.one_graph or planned is None or planned.number != self._last + 1:
            return False
        if not planned.whole and not (planned.apart and planned.next_apart):
            return False
        if self._counts_lookups:
            return False  # also one that is taken back
        return not only_over_copies or all(launch.copies for _, launch in self._order)

    def batch_follows(self, before: PlannedBatch | None) -> None:
        """The one after `before` is handed out."""
        if before is not None and not before.used and self._left_out is None:
            self._left_out = before

    def forward_begins(self, planned: PlannedBatch) -> None:
        self._begun = planned.number
        for name in self._exchanges:
            launch_record.rows_launches.pop(name, None)

    def forward_ended(self, planned: PlannedBatch) -> None:
        self._begun = -1
        if planned.used:
            order = [(name, launch) for name, launch in launch_record.rows_launches.items() if name in self._exchanges]
            self._order = order if len(order) == len(self._exchanges) else None
            self._last, self._left_out = planned.number, None

    def find(self, number: int, current: PlannedBatch | None) -> PlannedBatch | None:
        """The batch of that number, if it was handed out and not trained. `current`: handed out last."""
        return next((p for p in (current, self._left_out) if p is not None and p.number == number), None)

    @dynamo.runs_outside_inference_mode
    def serve(self, planned: PlannedBatch) -> None:
        """Launch the rows of the batch that this rank's forward pass has not launched, in its order."""
        if self._order is None:
            raise RuntimeError("freescale: in which order rows are launched is not known here")
        launched = launch_record.rows_launches if self._begun == planned.number else {}
        plans = dict(zip(self._exchanges, planned.plans, strict=True))
        for name, launch in self._order:
            if name in launched:
                continue
            x, plan = self._exchanges[name], plans[name]
            n_recv = plan.ends.shape[0] - plan.early_slots.shape[0]
            urgent = plan.urgent
            with torch.no_grad():
                rows = launch.op(
                    x.anchor.detach(), urgent.rows, urgent.send_counts, urgent.recv_counts, n_recv, URGENT,
                    name, x.group_name
                )  # fmt: skip
            _wait(rows)
