"""Runs the passes on one post-grad graph: order, toggling, lint, timing, one log line, one artifact each.

The driver is what Inductor calls, for the forward and for the backward graph. On a hit in torch's caches it
does not run, so it has no effect but on the graph, and its `uuid` covers our sources and the configuration. What it did
is kept beside the cached code (graph_records.py) and told again on a hit.

The speed of the link is not in the `uuid`: it is measured anew in every process, and decides only where launches stand
among the compute. Code that was placed for a slower link computes the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import fx

import freescale.kernels
import freescale.passes
import freescale.runtime
from freescale import graph_records, progress
from freescale.compat import fx_values, inductor, logs
from freescale.config import Config
from freescale.graph_records import GraphRecord
from freescale.kernels.ops.schemas import COPY_TRANSPORTS
from freescale.kernels.transports import selection
from freescale.passes.exchange_meta import CannotApply, Exchange, argument, exchanges
from freescale.passes.find_exchanges import count_exchanges
from freescale.passes.graph_text import graph_text
from freescale.passes.overlap_attention import bindings

log = logging.getLogger(__name__)

Observer = Callable[[str, str, fx.Graph], None]


@dataclass
class Report:
    """What the passes did in this process."""

    seconds: float = 0.0
    graphs: dict[str, int] = field(default_factory=lambda: {"forward": 0, "backward": 0})
    from_cache: dict[str, int] = field(default_factory=lambda: {"forward": 0, "backward": 0})  # not passed over again
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
    files: list[str] = []
    for package in (freescale, freescale.passes, freescale.kernels, freescale.runtime):
        files += sorted(str(f) for f in Path(package.__path__[0]).rglob("*.py"))
    return str(inductor.get_hash_for_files(tuple(files)))


class Driver(inductor.CustomGraphPass):
    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg
        self._record: GraphRecord | None = None  # of the graph that was passed over last

    def uuid(self) -> str:
        settings = sorted(asdict(self.cfg).items())
        return f"{_source_hash()} {settings} {selection.selection_facts()}"

    def __call__(self, graph: fx.Graph) -> None:
        gm = cast(fx.GraphModule, graph.owning_module)
        record = self._record = GraphRecord(direction(graph))
        REPORT.graphs[record.way] += 1
        self._tell(record, "before", graph)
        enabled = self.cfg.enabled_passes()
        for name, apply in freescale.passes.PASSES:
            if name in enabled:
                start = time.perf_counter()
                record.sites[name] = self._run(record, name, apply, gm)
                spent = time.perf_counter() - start
                REPORT.seconds += spent
                log.info("%s %s: %d sites, %.1f ms", record.way, name, record.sites[name], spent * 1e3)
                self._tell(record, name, gm.graph)
        found = exchanges(graph)
        record.exchanges = len(found)
        _count(record)
        if found:
            _agree_on_launches(record.way, graph, found, self.cfg.timeout)
            gm.recompile()
        if self.cfg.codegen == "inductor":  # torch itself runs a graph in its order
            inductor.bind_order(graph, bindings(graph))

    def watch(self, gm: fx.GraphModule, compile_graph: Callable[[], Any]) -> Any:
        """Around the compilation of one graph: what is said of it, and kept for when it comes out of a cache."""
        way, n = direction(gm.graph), count_exchanges(gm.graph)
        progress.say(f"compiling the {way} graph ({n} exchange{'s' * (n != 1)}); this can take a minute")
        self._record, hits, start = None, inductor.cache_hits(), time.perf_counter()
        compiled = compile_graph()
        spent, key = time.perf_counter() - start, inductor.cache_key(compiled)
        if inductor.cache_hits() > hits:
            progress.say(f"the {way} graph came out of torch's cache after {spent:.1f} s")
            self._from_cache(way, key)
        else:
            progress.say(f"the {way} graph is compiled after {spent:.1f} s")
            if self._record is not None and key is not None:
                graph_records.keep(key, self._record)
        return compiled

    def came_whole(self, trained: bool) -> None:
        """A graph without collectives came out of AOTAutograd's cache, with its backward graph if it is trained."""
        for way in ("forward", "backward") if trained else ("forward",):
            REPORT.from_cache[way] += 1
            log.info("the %s graph, which has no collectives, came out of torch's cache", way)

    def _from_cache(self, way: str, key: str | None) -> None:
        REPORT.from_cache[way] += 1
        record = graph_records.recall(key) if key is not None else None
        if record is None:
            log.info("what the passes did to the %s graph when it was compiled is not known here", way)
            return
        _count(record)
        for name, text in record.texts.items():
            if name in record.sites:
                log.info("%s %s: %d sites, from torch's cache", way, name, record.sites[name])
            logs.trace_artifact(f"freescale_{way}_{name}", lambda text=text: text)  # type: ignore[misc]

    def _run(self, record: GraphRecord, name: str, apply: freescale.passes.Pass, gm: fx.GraphModule) -> int:
        try:
            sites = apply(gm, self.cfg)
        except CannotApply as why:
            if self.cfg.strict:
                raise
            record.refused.append(f"{name} does not apply: {why}")
            return 0
        gm.graph.lint()
        gm.recompile()
        return sites

    def _tell(self, record: GraphRecord, name: str, graph: fx.Graph) -> None:
        logs.trace_artifact(f"freescale_{record.way}_{name}", lambda: graph_text(graph))
        if self.cfg.codegen == "inductor":
            record.texts[name] = graph_text(graph)
        for observer in list(_observers):
            observer(record.way, name, graph)


def _count(record: GraphRecord) -> None:
    """Into the report, and into the log what did not apply."""
    REPORT.exchanges[record.way] += record.exchanges
    REPORT.refused += record.refused
    for message in record.refused:
        if message not in _said:
            _said.add(message)
            log.warning(message)


def _agree_on_launches(way: str, graph: fx.Graph, found: list[Exchange], timeout: float) -> None:
    """The graph itself asks the other ranks, once, whether they launch the same in the same order."""
    first = found[0].launch
    with graph.inserting_before(first):
        node = graph.call_function(
            torch.ops.freescale.agree.default,
            (first.args[0], "; ".join([way, *map(_carried, found)]), argument(first, "group_name"), timeout),
        )
    node.meta["val"] = fx_values.fake_value(node)


def _carried(x: Exchange) -> str:
    over = [name for name in COPY_TRANSPORTS if str(x.launch.target).endswith(f"_{name}.default")]
    return f"{x} over {over[0]}" if over else str(x)


def direction(graph: fx.Graph) -> str:
    """AOTAutograd names the gradients that come into a backward graph `tangents_*`."""
    backward = any(n.op == "placeholder" and n.name.startswith("tangents") for n in graph.nodes)
    return "backward" if backward else "forward"
