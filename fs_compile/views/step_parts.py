"""Names of the parts of a step's time, and how a wait for other ranks is split. Does not import torch, so that
`python -m freescale report` starts fast.
"""

from __future__ import annotations

PARTS = ("compute", "exposed", "loader", "straggler", "host_bound")  # of a step's seconds
LOADER, PLANNER, MEETING = "loader", "planner", "meeting of the ranks"  # host waits between two steps
BETWEEN_STEPS = (LOADER, PLANNER, MEETING)


def straggling(busy: float, waited: float, at_begin: float, longest_busy: float | None) -> float:
    """The part of the seconds `waited` for other ranks that is due to a rank with more work in this step.

    busy: this rank's own work. longest_busy: that of the busiest rank, None if unknown. at_begin: time waited until all
    ranks had started the step, which is always due to another rank's work.
    """
    more = 0.0 if longest_busy is None else longest_busy - busy
    return max(at_begin, min(more, waited))
