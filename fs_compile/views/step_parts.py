"""Where the time of a step goes: the names of its parts, and how a wait for other ranks splits. Without torch, since
`python -m freescale report` starts sooner so.
"""

from __future__ import annotations

PARTS = ("compute", "exposed", "loader", "straggler", "host_bound")  # of a step's seconds
LOADER, PLANNER, MEETING = "loader", "planner", "meeting of the ranks"  # what the host waits for between two steps
BETWEEN_STEPS = (LOADER, PLANNER, MEETING)


def straggling(busy: float, waited: float, at_begin: float, longest_busy: float | None) -> float:
    """Of the seconds that a rank has `waited` for others, those for a rank that had more to do in this step.

    `busy`: what this rank did itself; `longest_busy`: the same of the rank that had the most to do, None if that is not
    known; `at_begin`: what it waited until all had begun the step, which nothing but another rank's work explains.
    """
    more = 0.0 if longest_busy is None else longest_busy - busy
    return max(at_begin, min(more, waited))
