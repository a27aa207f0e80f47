"""Entry point of `torch.compile(model, backend="freescale")`; install.py lists the changes that its import makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from freescale import config, dense_gradients, install
from freescale.compat import dynamo, dynamo_settings, inductor
from freescale.driver import REPORT, Driver
from freescale.kernels.ops.schemas import direct_ops
from freescale.kernels.transports import open_transports
from freescale.runtime import agreement
from freescale.runtime.tables import torchrec_support

# frame -> number of compilations; more than 1 is a recompilation.
COMPILED: dict[str, int] = {}
_settings_compared: set[str] = set()


def freescale(
    gm: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    try:
        if mode not in (None, "default"):
            raise config.ConfigError(f"backend freescale takes options={{...}} but no mode, found mode={mode!r}")
        cfg = config.load(options)
        if cfg.dynamic != _process.dynamic:
            raise config.ConfigError("dynamic applies to the whole process: set FREESCALE_DYNAMIC instead of an option")
        for name in ("staged", "nixl"):
            open_transports.options[name]["ring_bytes"] = int(cfg.ring_mb * (1 << 20))
        torchrec_support.raise_if_unsupported(cfg)
        if not _has_exchange(gm) and "dense" not in (options or {}):  # an option may differ between models
            dense_gradients.compare_settings(gm, inputs, cfg)
        with agreement.while_compiling(cfg.timeout):
            before_first_run = dense_gradients.average_in_graph(gm, inputs, cfg)
            before_each_run = dense_gradients.before_each_run(gm, cfg)
            compiled = _explaining_assumptions(_compile(gm, inputs, Driver(cfg)), dynamo_settings.places_of_sizes(gm))
        dynamo_settings.drop_implied_guards()
    except Exception as error:
        if not dynamo.traces_again(error) and not dynamo_settings.depends_on_data(error):  # install.py retries those
            agreement.post_failure(error)
        raise
    frame = dynamo.current_compile_id().split("/")[0]
    COMPILED[frame] = COMPILED.get(frame, 0) + 1
    if not _has_exchange(gm):
        return compiled
    return _meet_before_first_run(compiled, cfg, before_first_run, before_each_run)


def _compile(gm: fx.GraphModule, inputs: Sequence[Any], driver: Driver) -> Callable[..., Any]:
    dynamo.go_on_recomputing_fakes()
    if driver.cfg.codegen == "eager":
        return driver.compile_interpreted(gm, inputs)
    # A graph without collectives has no record and may be loaded from AOTAutograd's cache as a whole.
    before = inductor.whole_hits()
    collectives = _calls(gm, "freescale", "c10d")
    compiled = inductor.compile_with_inductor(gm, inputs, driver, driver.around_compile, collectives, direct_ops)
    if inductor.whole_hits() > before:
        trained = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)
        driver.count_whole_cache_hit(trained)
    return compiled


def _explaining_assumptions(compiled: Callable[..., Any], places: dict[str, str]) -> Callable[..., Any]:
    if not places:
        return compiled

    def run(*args: Any) -> Any:
        try:
            return compiled(*args)
        except RuntimeError as error:
            if explained := dynamo_settings.explain_assumption(error, places):
                raise RuntimeError(explained) from error
            raise

    return run


def _has_exchange(gm: fx.GraphModule) -> bool:
    return _calls(gm, "freescale")


def _calls(gm: fx.GraphModule, *names: str) -> bool:
    modules = [m for m in gm.modules() if isinstance(m, fx.GraphModule)]  # includes bodies of autograd.Functions
    return any(name in str(n.target) for m in modules for n in m.graph.nodes for name in names)


def _meet_before_first_run(
    compiled: Callable[..., Any], cfg: config.Config, before_first_run: Callable[[Sequence[Any]], None] | None,
    before_each_run: Callable[[Sequence[Any]], None] | None,
) -> Callable[..., Any]:  # fmt: skip
    """Compare the ranks' settings before the first graph with these settings runs for the first time."""
    settings: dict[str, object] = {f"FREESCALE_{k.upper()}": v for k, v in cfg.affecting_graphs().items()}
    settings["torch"] = torch.__version__
    key = repr(sorted(settings.items()))

    def run(*args: Any) -> Any:
        nonlocal before_first_run
        if key not in _settings_compared:
            agreement.agree(settings, cfg.timeout)
            _settings_compared.add(key)
        if before_first_run is not None:
            before_first_run(args)
            before_first_run = None
        if before_each_run is not None:
            before_each_run(args)
        return compiled(*args)

    return run


_process = install.install(freescale)


def report() -> dict[str, Any]:
    """Graphs, recompilations, graph breaks and exchanges of this process.

    The exchanges of a graph loaded from torch's cache come from the record stored next to it; without one, as after a
    hit in a remote cache, they are not counted. Breaks around the model in DDP's own forward are counted separately.
    """
    breaks = dynamo_settings.GRAPH_BREAKS
    ddp = sum(n for found, n in breaks.items() if found.is_of_ddp())
    return {
        "graphs": len(COMPILED),
        "recompiles": sum(n - 1 for n in COMPILED.values()),
        "graph_breaks": breaks.total() - ddp,
        "graph_breaks_of_ddp": ddp,
        "graphs_from_cache": dict(REPORT.from_cache),
        "exchanges": dict(REPORT.exchanges),
        "dense_buckets": REPORT.dense_buckets,
        "pass_seconds": REPORT.seconds,
        "refused": list(REPORT.refused),
    }
