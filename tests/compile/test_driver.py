"""The driver: order, toggling, refusal, strict, artifacts, cache key, a user's own pass, the backward graph."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch._inductor.utils import fresh_cache

import freescale.passes
from fake_world import graphs_of
from freescale import config, driver, graph_report
from freescale.compat import inductor, logs
from freescale.passes.graph import CannotApply
from freescale.runtime import recording
from freescale.views import records
from ranks import run_ranks
from repo import ROOT


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    driver._warn_once.cache_clear()
    with fresh_cache():
        yield
    torch._dynamo.reset()


def _step(**options):
    model = torch.nn.Linear(4, 4)
    compiled = torch.compile(model, backend="freescale", fullgraph=True, options=options or None)
    x = torch.randn(3, 4)
    out = compiled(x)
    assert torch.allclose(out, model(x), atol=1e-6)
    out.sum().backward()


@pytest.mark.parametrize("codegen", (pytest.param("inductor", marks=pytest.mark.thorough), "eager"))
def test_both_graphs_are_passed_over(codegen):
    graphs = graphs_of(lambda: _step(codegen=codegen))
    assert set(graphs) == {(w, n) for w in ("forward", "backward") for n in ("before", *config.PASS_NAMES)}


def test_a_pass_that_is_off_does_not_run():
    graphs = graphs_of(lambda: _step(passes="none", codegen="eager"))
    assert set(graphs) == {("forward", "before"), ("backward", "before")}


def _refuses(gm, cfg):
    raise CannotApply("this graph is purple")


def _with_pass(fn):
    return mock.patch.object(freescale.passes, "PASSES", (("find_exchanges", fn),))


def test_a_refusal_is_said_once_and_changes_nothing(caplog):
    with _with_pass(_refuses), caplog.at_level(logging.WARNING, "freescale"):
        _step(codegen="eager")
    assert [r.message for r in caplog.records].count("find_exchanges does not apply: this graph is purple") == 1


def test_a_refusal_is_an_error_under_strict():
    with _with_pass(_refuses), pytest.raises(Exception, match="this graph is purple"):
        _step(codegen="eager", strict=True)


def test_a_pass_that_breaks_the_graph_is_caught():
    def breaks(gm, cfg):
        first = next(n for n in gm.graph.nodes if n.op == "call_function")
        first.append(next(n for n in gm.graph.nodes if n.op == "placeholder"))  # used before it is defined
        return 1

    with _with_pass(breaks), pytest.raises(Exception, match="before|used"):
        _step(codegen="eager")


def test_one_log_line_per_pass_and_graph(caplog):
    with caplog.at_level(logging.INFO, "freescale"):
        _step(codegen="eager")
    lines = [r.getMessage() for r in caplog.records if r.name == "freescale.driver"]
    assert [line.split(":")[0] for line in lines] == [f"{w} {n}" for w in ("forward", "backward") for n in config.PASS_NAMES]


def test_an_artifact_after_each_pass():
    with mock.patch.object(logs, "trace_artifact", wraps=logs.trace_artifact) as artifact:
        _step(codegen="eager")
    names = [call.args[0] for call in artifact.call_args_list]
    assert names == [f"freescale_{w}_{n}" for w in ("forward", "backward") for n in ("before", *config.PASS_NAMES)]
    assert "mm" in artifact.call_args_list[0].args[1]()


def test_cache_key_covers_config_and_sources():
    a, b = driver.Driver(config.Config()), driver.Driver(config.Config(passes="none"))
    assert a.uuid() == driver.Driver(config.Config()).uuid() != b.uuid()
    driver._source_hash.cache_clear()
    with mock.patch.object(inductor, "get_hash_for_files", return_value=b"other sources"):
        changed = a.uuid()
    driver._source_hash.cache_clear()
    assert changed != a.uuid()


def test_cache_key_covers_the_sources_in_every_sub_folder():
    driver._source_hash.cache_clear()
    with mock.patch.object(inductor, "get_hash_for_files", return_value=b"") as hash_of:
        driver._source_hash()
    driver._source_hash.cache_clear()
    hashed = {Path(f).resolve().relative_to(ROOT) for f in hash_of.call_args.args[0]}
    assert Path("kernels/transports/staged.py") in hashed
    folders = ("fs_compile", "passes", "kernels", "runtime")
    assert hashed == {f.relative_to(ROOT) for folder in folders for f in (ROOT / folder).rglob("*.py")}


def test_a_pass_that_the_user_set_runs_too():
    import torch._inductor.config as inductor_config

    seen = []

    class Theirs(inductor.CustomGraphPass):
        def __call__(self, graph):
            seen.append(driver.direction_of(graph))

        def uuid(self):
            return "theirs"

    with inductor_config.patch(post_grad_custom_post_pass=Theirs()):
        graphs = graphs_of(lambda: _step(codegen="inductor"))
    assert seen == ["forward", "backward"] and ("forward", "find_exchanges") in graphs


def test_a_cache_hit_runs_without_the_passes():
    """Inductor's cache returns code for the same graph and flags, and compiles anew for other flags."""
    _step()
    torch._dynamo.reset()
    before = dict(driver.REPORT.from_cache)
    assert graphs_of(_step) == {}
    assert driver.REPORT.from_cache == {way: n + 1 for way, n in before.items()}
    torch._dynamo.reset()
    assert graphs_of(lambda: _step(strict=True)) != {}


def test_a_word_while_it_compiles(capfd, tmp_path):
    """Also where standard error is no terminal; not where the flag turns it off. The record tells which two graphs
    belong together."""
    with mock.patch.object(graph_report, "_REPEAT_EVERY", 0.01):
        _step(record=str(tmp_path))
    recording.recorder(str(tmp_path))._end()
    (rank,) = records.read(tmp_path).ranks.values()
    assert [(g["direction"], g["compilation"]) for g in rank.graph] == [("forward", "0/0"), ("backward", "0/0")]
    said = [line for line in capfd.readouterr().err.splitlines() if "freescale: " in line]
    repeated = [line for line in said if "still" in line]
    first, *_, last = said = [line for line in said if line not in repeated]
    assert first == "freescale: compiling the forward graph (0 exchanges); this can take a minute" and len(said) == 4
    assert re.fullmatch(r"freescale: compiled the backward graph in \d+\.\d s", last)
    assert re.fullmatch(r"freescale: still compiling the forward graph after \d+ s", repeated[0])
    torch._dynamo.reset()
    _step()
    said = capfd.readouterr().err.splitlines()
    assert re.fullmatch(r"freescale: loaded the backward graph from torch's cache in \d+\.\d s", said[-1]), said
    torch._dynamo.reset()
    _step(progress=False, min_bytes=1)
    assert "freescale: " not in capfd.readouterr().err


def _words_of_a_rank() -> list[str]:
    """What `say` leaves on standard error, where that is a file and the log is off, turned off, or on."""
    log, said = logging.getLogger("freescale"), []
    for level, printed in ((logging.WARNING, True), (logging.WARNING, False), (logging.INFO, True)):
        log.setLevel(level)
        with contextlib.redirect_stderr(io.StringIO()) as file:
            graph_report.say("something", printed)
        said.append(file.getvalue())
    return said


def test_rank_0_speaks_where_the_log_does_not():
    assert run_ranks(_words_of_a_rank, 2) == [["freescale: something\n", "", ""], ["", "", ""]]


def test_the_line_of_a_progress_bar_is_cleared():
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    with contextlib.redirect_stderr(terminal):
        graph_report.say("something")
    assert terminal.getvalue() == f"{graph_report._CLEAR}freescale: something\n"


LOGGED = """
import logging, torch
torch._dynamo.lookup_backend("freescale")  # as torch.compile does; compiling takes seconds in a fresh process
log = logging.getLogger("freescale.driver")
log.info("forward find_exchanges: 0 sites")
logging.basicConfig(level=logging.INFO)  # as many a library and script do
log.info("forward find_exchanges: 0 sites")
"""


@pytest.mark.thorough
def test_a_line_of_the_log_is_printed_once():
    done = subprocess.run(
        [sys.executable, "-c", LOGGED], env={**os.environ, "TORCH_LOGS": "+freescale"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("forward find_exchanges: 0 sites") == 2, done.stderr


def test_mode_is_refused():
    with pytest.raises(Exception, match="no mode, found mode='reduce-overhead'"):
        torch.compile(torch.nn.Linear(2, 2), backend="freescale", mode="reduce-overhead")(torch.ones(1, 2))


def test_unknown_option_is_refused():
    with pytest.raises(Exception, match="stict is not an option of freescale. Did you mean strict"):
        torch.compile(torch.nn.Linear(2, 2), backend="freescale", options={"stict": True})(torch.ones(1, 2))


def test_the_cpp_wrapper_is_off(caplog):
    """Both graphs, also the backward one, which is compiled later."""
    from torch._inductor import config as inductor_config
    from torch._inductor.utils import run_and_get_code

    with inductor_config.patch(cpp_wrapper=True), caplog.at_level(logging.WARNING, "freescale"):
        _, codes = run_and_get_code(_step)
    assert len(codes) == 2 and not any("cpp_wrapper_src" in code for code in codes)
    assert any("cpp_wrapper is off" in r.message for r in caplog.records)
