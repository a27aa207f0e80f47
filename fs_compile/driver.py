"""Runs the passes on one post-grad graph: order, toggling, lint, timing, one log line, one artifact each.

The driver is what Inductor calls, for the forward and for the backward graph. On a hit in torch's caches it
does not run, so it has no effect but on the graph, and its `uuid` covers our sources and the configuration.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import cast

import torch
from torch import fx

import freescale.kernels
import freescale.passes
import freescale.runtime
from freescale import compat
from freescale.config import Config
from freescale.kernels import links, transports
from freescale.kernels.ops import COPYING
from freescale.passes.facts import CannotApply, Exchange, argument, exchanges
from freescale.passes.graph_text import graph_text
from freescale.passes.overlap_attention import bindings

log = logging.getLogger(__name__)

Observer = Callable[[str, str, fx.Graph], None]


@dataclass
class Report:
    """What the passes did in this process."""

    seconds: float = 0.0
    graphs: dict[str, int] = field(default_factory=lambda: {"forward": 0, "backward": 0})
    exchanges: dict[str, int] = field(default_factory=lambda: {"forward": 0, "backward": 0})
    refused: list[str] = field(default_factory=list)


REPORT = Report()
_observers: list[Observer] = []
_said: set[str] = set()


def observe(observer: Observer) -> Callable[[], None]:
    """Call `observer(direction, pass name, graph)` after each pass, with the name "before" before the first.

    Returns a function that ends it. The graph is the live one: look, do not touch.
    """
    _observers.append(observer)
    return lambda: _observers.remove(observer)


@cache
def _source_hash() -> str:
    """Of every source file of the package: passes, ops and the lowerings they rely on."""
    files = []
    for package in (freescale, freescale.passes, freescale.kernels, freescale.runtime):
        files += sorted(str(f) for f in Path(package.__path__[0]).glob("*.py"))
    return str(compat.get_hash_for_files(tuple(files)))


class Driver(compat.CustomGraphPass):
    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg

    def uuid(self) -> str:
        settings = sorted(asdict(self.cfg).items())
        return f"{_source_hash()} {settings} {links.rounded()} {transports.surroundings()}"

    def __call__(self, graph: fx.Graph) -> None:
        gm = cast(fx.GraphModule, graph.owning_module)
        way = direction(graph)
        REPORT.graphs[way] += 1
        self._tell(way, "before", graph)
        enabled = self.cfg.enabled_passes()
        for name, apply in freescale.passes.PASSES:
            if name in enabled:
                start = time.perf_counter()
                sites = self._run(name, apply, gm)
                spent = time.perf_counter() - start
                REPORT.seconds += spent
                log.info("%s %s: %d sites, %.1f ms", way, name, sites, spent * 1e3)
                self._tell(way, name, gm.graph)
        found = exchanges(graph)
        REPORT.exchanges[way] += len(found)
        if found:
            _agree_on_launches(way, graph, found, self.cfg.timeout)
            gm.recompile()
        if self.cfg.codegen == "inductor":  # torch itself runs a graph in its order
            compat.bind_order(graph, bindings(graph))

    def _run(self, name: str, apply: freescale.passes.Pass, gm: fx.GraphModule) -> int:
        try:
            sites = apply(gm, self.cfg)
        except CannotApply as why:
            if self.cfg.strict:
                raise
            message = f"{name} does not apply: {why}"
            REPORT.refused.append(message)
            if message not in _said:
                _said.add(message)
                log.warning(message)
            return 0
        gm.graph.lint()
        gm.recompile()
        return sites

    def _tell(self, way: str, name: str, graph: fx.Graph) -> None:
        compat.trace_artifact(f"freescale_{way}_{name}", lambda: graph_text(graph))
        for observer in list(_observers):
            observer(way, name, graph)


def _agree_on_launches(way: str, graph: fx.Graph, found: list[Exchange], timeout: float) -> None:
    """The graph itself asks the other ranks, once, whether they launch the same in the same order."""
    first = found[0].launch
    with graph.inserting_before(first):
        node = graph.call_function(
            torch.ops.freescale.agree.default,
            (first.args[0], "; ".join([way, *map(_carried, found)]), argument(first, "group_name"), timeout),
        )
    node.meta["val"] = None


def _carried(x: Exchange) -> str:
    over = [name for name in COPYING if str(x.launch.target).endswith(f"_{name}.default")]
    return f"{x} over {over[0]}" if over else str(x)


def direction(graph: fx.Graph) -> str:
    """AOTAutograd names the gradients that come into a backward graph `tangents_*`."""
    backward = any(n.op == "placeholder" and n.name.startswith("tangents") for n in graph.nodes)
    return "backward" if backward else "forward"
