"""What freescale did in this process, as plain numbers."""

from __future__ import annotations

from typing import Any

from freescale.compat import dynamo


def report() -> dict[str, Any]:
    """Graphs, recompilations, graph breaks and exchanges of this process.

    The passes do not run again for a graph loaded from torch's cache (`graphs_from_cache`): its exchanges, and passes
    that did not apply, come from the record stored next to torch's cache. If that is missing, as after a hit in a
    remote cache, they are not counted. DDP's wrapper, which Dynamo cannot trace, breaks the graph around the model but
    not inside it; those breaks are counted separately.
    """
    from freescale.backend import COMPILED
    from freescale.driver import REPORT

    breaks = dynamo.graph_breaks()
    ddp = sum(n for reason, n in breaks.items() if dynamo.is_ddp_break(reason))
    return {
        "graphs": len(COMPILED),
        "recompiles": sum(n - 1 for n in COMPILED.values()),
        "graph_breaks": sum(breaks.values()) - ddp,
        "graph_breaks_of_ddp": ddp,
        "graphs_from_cache": dict(REPORT.from_cache),
        "exchanges": dict(REPORT.exchanges),
        "dense_buckets": REPORT.dense_buckets,
        "pass_seconds": REPORT.seconds,
        "refused": list(REPORT.refused),
    }
