"""Assign transports to launches.

Needs:    find_exchanges has run, and split_exchanges if there are composites: those keep the group's own all-to-all.
Promises: same values; only an argument of launches changes, identically on every rank.
Before:   chunk = all_to_all_launch(grad, ...)
After:    chunk = all_to_all_launch(grad, ..., transport="staged"), or "auto" to choose at the launch

Plain all-to-alls are unchanged: their counts are Python numbers in the graph, and freescale does not own their groups.
"""

from __future__ import annotations

import logging

from torch import fx

from freescale.config import Config
from freescale.kernels.transports import selection
from freescale.passes.graph import exchanges

log = logging.getLogger(__name__)


def lower_copies(gm: fx.GraphModule, cfg: Config) -> int:
    """Return the number of launches with another transport than c10d."""
    chunks = [x for x in exchanges(gm.graph) if x.kind == "chunk"]
    chosen = []
    for x in chunks:
        device = x.launch.meta["val"].device.type
        name, reason = selection.choose_transport(cfg.transport, device)
        log.info("%s uses %s: %s", x, name, reason)
        chosen.append((x.launch, name))
    for launch, name in chosen:
        if name != "c10d":
            launch.kwargs = {**launch.kwargs, "transport": name}
    return sum(name != "c10d" for _, name in chosen)
