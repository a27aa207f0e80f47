"""Runs the passes on one post-grad graph: order, toggling, lint, timing, one log line and one artifact each.

On a hit in torch's caches it does not run, so it only affects the graph, and its `uuid` covers our sources and the
configuration. Two things are not in the `uuid`: the bandwidth of the link, which only affects where launches are placed
among the compute, and the transport that `auto` chooses at the launch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import fx

import freescale.kernels
import freescale.passes
import freescale.runtime
from freescale import graph_report
from freescale.compat import dynamo, fx_values, inductor, logs
from freescale.compile_once import compiling_once
from freescale.config import Config
from freescale.graph_report import GraphRecord
from freescale.passes.find_exchanges import count_exchanges
from freescale.passes.graph import CannotApply, argument, dense_collectives, exchanges, exchanges_at, graph_text
from freescale.passes.node_order import control_dependencies
from freescale.passes.timeline import timeline
from freescale.runtime import agreement, recording

log = logging.getLogger(__name__)

Observer = Callable[[str, str, fx.Graph], None]


@dataclass
class Report:
    seconds: float = 0.0
    graphs: dict[str, int] = field(default_factory=lambda: {"forward": 0, "backward": 0})
    from_cache: dict[str, int] = field(default_factory=lambda: {"forward": 0, "backward": 0})  # passes not run again
    exchanges: dict[str, int] = field(default_factory=lambda: {"forward": 0, "backward": 0})
    dense_buckets: int = 0  # launches of dense gradients
    refused: list[str] = field(default_factory=list)


REPORT = Report()
_observers: list[Observer] = []
_warn_once = cache(log.warning)


def observe(observer: Observer) -> Callable[[], None]:
    """Call `observer(direction, pass name, graph)` after each pass, with the name "before" before the first.

    Returns a function that unregisters it. The graph is live: do not modify it.
    """
    _observers.append(observer)
    return lambda: _observers.remove(observer)


@cache
def _source_hash() -> str:
    files: list[str] = []
    for package in (freescale, freescale.passes, freescale.kernels, freescale.runtime):
        files += sorted(str(f) for f in Path(package.__path__[0]).rglob("*.py"))
    return str(inductor.get_hash_for_files(tuple(files)))


class Driver(inductor.CustomGraphPass):
    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg
        self._record: GraphRecord | None = None  # of the last graph

    def uuid(self) -> str:
        settings = sorted(self.cfg.affecting_graphs().items())
        return f"{_source_hash()} {settings}"

    def __call__(self, graph: fx.Graph) -> None:
        gm = cast(fx.GraphModule, graph.owning_module)
        record = self._record = GraphRecord(direction_of(graph))
        REPORT.graphs[record.direction] += 1
        self._publish_graph(record, "before", graph)
        enabled = self.cfg.enabled_passes()
        for name, apply in freescale.passes.PASSES:
            if name in enabled:
                start = time.perf_counter()
                record.sites[name] = self._apply_pass(record, name, apply, gm)
                spent = time.perf_counter() - start
                REPORT.seconds += spent
                record.pass_seconds[name] = spent
                log.info("%s %s: %d sites, %.1f ms", record.direction, name, record.sites[name], spent * 1e3)
                self._publish_graph(record, name, gm.graph)
        launched, dense = exchanges(graph), dense_collectives(graph)
        record.exchanges = sum(x.kind != "dense" for x in launched)
        _add_to_report(record)
        if self._keeps_texts and launched:
            record.timeline = timeline(graph, self.cfg.link_gbps * 1e9 / 8)
        if self.cfg.codegen != "inductor":
            self._to_file(record, sum(record.pass_seconds.values()), from_cache=False)
        if launched or dense:
            _insert_agreement(record.direction, graph, [*(x.launch for x in launched), *dense], self.cfg.timeout)
            gm.recompile()
        if self.cfg.codegen == "inductor":  # otherwise torch runs the graph in its order
            inductor.bind_order(graph, control_dependencies(graph))

    def around_compile(self, gm: fx.GraphModule, compile_graph: Callable[[], Any]) -> Any:
        """Compile one graph: report start and end, and store the record of the passes for cache hits."""
        direction, n, printed = direction_of(gm.graph), count_exchanges(gm.graph), self.cfg.progress
        doing = f"compiling the {direction} graph"
        graph_report.say(f"{doing} ({n} exchange{'s' * (n != 1)}); this can take a minute", printed)
        self._record, hits, start = None, inductor.cache_hits(), time.perf_counter()
        # the backward graph is compiled separately
        with (
            agreement.while_compiling(self.cfg.timeout),
            graph_report.repeating(doing, printed),
            compiling_once(gm, self.uuid(), self.cfg.timeout),
        ):
            compiled = compile_graph()
        spent, key = time.perf_counter() - start, inductor.cache_key(compiled)
        if inductor.cache_hits() > hits:
            graph_report.say(f"loaded the {direction} graph from torch's cache in {spent:.1f} s", printed)
            self._recall(direction, key, spent)
        else:
            graph_report.say(f"compiled the {direction} graph in {spent:.1f} s", printed)
            if self._record is not None:
                self._to_file(self._record, spent, from_cache=False)
                if key is not None:
                    graph_report.keep(key, self._record)
        return compiled

    def compile_interpreted(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile forward and backward without code generation; observers of the passes are called."""
        start = time.perf_counter()
        with compiling_once(gm, self.uuid(), self.cfg.timeout):
            compiled, from_cache = inductor.compile_with_interpreter(
                gm, inputs, self, lambda: self._record, looked_up=not _observers
            )
        for record in from_cache:
            REPORT.from_cache[record.direction] += 1
            self._tell_again(record, time.perf_counter() - start)
        return compiled

    def count_whole_cache_hit(self, trained: bool) -> None:
        """Count a graph without collectives that was loaded from AOTAutograd's cache, and its backward graph."""
        for direction in ("forward", "backward") if trained else ("forward",):
            REPORT.from_cache[direction] += 1
            log.info("loaded the %s graph, which has no collectives, from torch's cache", direction)

    def _recall(self, direction: str, key: str | None, spent: float) -> None:
        REPORT.from_cache[direction] += 1
        record = graph_report.recall(key) if key is not None else None
        if record is None:
            log.info("no record of the passes for the cached %s graph", direction)
            self._to_file(GraphRecord(direction), spent, from_cache=True)
            return
        self._tell_again(record, spent)

    def _tell_again(self, record: GraphRecord, spent: float) -> None:
        _add_to_report(record)
        self._to_file(record, spent, from_cache=True)
        for name, text in record.texts.items():
            if name in record.sites:
                log.info("%s %s: %d sites, from torch's cache", record.direction, name, record.sites[name])
            logs.trace_artifact(f"freescale_{record.direction}_{name}", lambda text=text: text)  # type: ignore[misc]

    @property
    def _keeps_texts(self) -> bool:
        return inductor.caches_are_on() or bool(self.cfg.record)

    def _to_file(self, record: GraphRecord, seconds: float, from_cache: bool) -> None:
        if (recorder := recording.recorder(self.cfg.record)) is not None:
            compilation = dynamo.current_compile_id()  # shared with its backward graph, which is compiled later
            entry = {**asdict(record), "compilation": compilation, "seconds": seconds, "from_cache": from_cache}
            recorder.add("graph", entry)

    def _apply_pass(self, record: GraphRecord, name: str, apply: freescale.passes.Pass, gm: fx.GraphModule) -> int:
        try:
            sites = apply(gm, self.cfg)
        except CannotApply as reason:
            if self.cfg.strict:
                raise
            record.refused.append(f"{name} does not apply: {reason}")
            return 0
        gm.graph.lint()
        gm.recompile()
        return sites

    def _publish_graph(self, record: GraphRecord, name: str, graph: fx.Graph) -> None:
        logs.trace_artifact(f"freescale_{record.direction}_{name}", lambda: graph_text(graph))
        if self._keeps_texts:
            record.texts[name] = graph_text(graph)
        for observer in list(_observers):
            observer(record.direction, name, graph)


def _add_to_report(record: GraphRecord) -> None:
    """Add a record to the report; log each pass that did not apply, once."""
    REPORT.exchanges[record.direction] += record.exchanges
    REPORT.dense_buckets += record.sites.get("bucket_gradients", 0)
    REPORT.refused += record.refused
    for message in record.refused:
        _warn_once(message)


def _insert_agreement(direction: str, graph: fx.Graph, launched: list[fx.Node], timeout: float) -> None:
    """Insert an op that checks once that all ranks launch the same in the same order."""
    launched = [n for n in graph.nodes if n in set(launched)]
    first, sent = launched[0], launched[0].args[0]
    text = "; ".join([direction, *map(_launch_text, launched)])
    with graph.inserting_before(first):
        node = graph.call_function(
            torch.ops.freescale.agree.default,
            (sent[0] if isinstance(sent, (list, tuple)) else sent, text, argument(first, "group_name"), timeout),
        )
    node.meta["val"] = fx_values.fake_value(node)


def _launch_text(launch: fx.Node) -> str:
    fs = torch.ops.freescale
    if launch.target is fs.all_reduce_launch.default:
        return f"dense gradients of {argument(launch, 'parameters')}"
    if launch.target is fs.average_gradient.default:
        return f"dense gradient of {argument(launch, 'name')}"
    what = ", then ".join(map(str, exchanges_at(launch)))
    transport = launch.kwargs.get("transport", "")
    return f"{what} over {transport}" if transport else what


def direction_of(graph: fx.Graph) -> str:
    """AOTAutograd names the incoming gradients of a backward graph `tangents_*`."""
    backward = any(n.op == "placeholder" and n.name.startswith("tangents") for n in graph.nodes)
    return "backward" if backward else "forward"
