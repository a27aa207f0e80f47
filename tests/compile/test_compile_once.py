"""Processes that need the same graph: one compiles it, the others find it in torch's cache, with what is to be said of it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from unittest import mock

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
import torch.distributed as dist
from torch import fx

import one_table
from freescale import compile_once, config
from freescale.compat import inductor
from freescale.compile_once import compiling_once
from ranks import run_ranks

NONE, ONE = {"forward": 0, "backward": 0}, {"forward": 1, "backward": 1}


def _start(observed: bool = False, **options) -> dict:
    """Two steps without code generation; what the passes, the report and the artifacts say afterwards."""
    import freescale
    from freescale import driver
    from freescale.compat import logs

    torch.manual_seed(0)
    model, artifacts, seen = one_table.Model(), {}, []
    run = torch.compile(model, backend="freescale", fullgraph=True, options={"codegen": "eager", **options})
    if observed:
        freescale.observe(lambda direction, name, graph: seen.append((direction, name)))
    with mock.patch.object(logs, "trace_artifact", lambda name, text: artifacts.update({name: text()})):
        for step in range(2):
            loss = run(torch.arange(5 + 3 * dist.get_rank() + step))
            loss.backward()
    report = freescale.report()
    return {
        "result": (float(loss.detach()), model.table.weight.detach().clone()),
        "passed": driver.REPORT.graphs,
        "from cache": report["graphs_from_cache"],
        "exchanges": report["exchanges"],
        "artifacts": artifacts,
        "seen": len(seen),
    }


def _same(a: tuple, b: tuple) -> bool:
    return a[0] == b[0] and torch.equal(a[1], b[1])


def _start_late() -> dict:
    """The first rank is not the first to come."""
    time.sleep(0.7 if dist.get_rank() == 0 else 0.0)
    return _start()


def test_the_first_rank_compiles_for_all(tmp_path):
    """Also for a second start."""
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    first, second = (run_ranks(_start_late, 2, env=env) for _ in range(2))
    assert [(rank["passed"], rank["from cache"]) for rank in first] == [(ONE, NONE), (NONE, ONE)]
    assert [(rank["passed"], rank["from cache"]) for rank in second] == [(NONE, ONE)] * 2
    for rank, before in zip(second, first, strict=True):
        assert _same(rank["result"], before["result"]) and rank["artifacts"] == before["artifacts"]


@pytest.mark.thorough
def test_what_comes_out_of_the_cache_is_what_would_be_compiled(tmp_path):
    """Other options, or an observer, are a reason to compile."""
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    anew = run_ranks(_start, 2, compiled_anew=True)
    assert [rank["passed"] for rank in anew] == [ONE, ONE]
    first = run_ranks(_start, 2, env=env)
    assert [(rank["passed"], rank["from cache"]) for rank in first] == [(ONE, NONE), (NONE, ONE)]
    second = run_ranks(_start, 2, env=env)
    assert [(rank["passed"], rank["from cache"]) for rank in second] == [(NONE, ONE)] * 2
    for rank, reference in zip(first + second, anew + anew, strict=True):
        assert _same(rank["result"], reference["result"])
        assert rank["exchanges"] == reference["exchanges"] == ONE
        assert rank["artifacts"] == reference["artifacts"] and len(rank["artifacts"]) == 2 * (1 + len(config.PASS_NAMES))
    observed = run_ranks(_start, 2, True, env=env)
    assert [(rank["passed"], rank["seen"]) for rank in observed] == [(ONE, 2 * (1 + len(config.PASS_NAMES)))] * 2
    assert run_ranks(_start, 1, env={**env, "FREESCALE_MIN_BYTES": "65"})[0]["passed"] == ONE


# ---- the lock ----------------------------------------------------------------------------------------------------


def _graph() -> fx.GraphModule:
    return fx.symbolic_trace(lambda x: x + 1)


@pytest.fixture
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(inductor, "cache_dir", lambda: str(tmp_path))


def _in_thread(settings: str, seconds: float) -> tuple[threading.Thread, list[float]]:
    """A thread that compiles a graph, and when it began to."""
    began: list[float] = []
    graph = _graph()  # not in the thread: torch traces in one thread at a time

    def compile_graph() -> None:
        with compiling_once(graph, settings, seconds):
            began.append(time.monotonic())

    thread = threading.Thread(target=compile_graph)
    thread.start()
    return thread, began


def test_others_wait_and_go_on_together(_own_folder):
    with compiling_once(_graph(), "a", 60):
        waiting = [_in_thread("a", 60) for _ in range(3)]
        another, at_once = _in_thread("b", 60)  # other settings, another graph
        another.join(30)
        assert at_once and not any(began for _, began in waiting)
        done = time.monotonic()
    for thread, began in waiting:
        thread.join(30)
        assert began and began[0] >= done


def test_nobody_waits_for_ever(_own_folder, caplog):
    with compiling_once(_graph(), "a", 60):
        thread, began = _in_thread("a", 0.2)
        thread.join(30)
        assert began
    assert "is still compiling the same graph after 0 s; no longer waiting" in caplog.text


def test_a_head_start_ends_when_another_has_begun_or_it_was_long_enough(_own_folder, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(compile_once, "_HEAD_START", 0.3)
    began = time.monotonic()
    with compiling_once(_graph(), "a", 60):  # the first rank does not come
        assert time.monotonic() - began >= 0.3
    monkeypatch.setattr(compile_once, "_HEAD_START", 600.0)
    with compiling_once(_graph(), "a", 60):  # in the cache by now
        pass
    with compiling_once(_graph(), "c", 60):  # it has another folder
        pass
    compile_once._without_first_rank.clear()
    monkeypatch.setenv("LOCAL_RANK", "0")
    with compiling_once(_graph(), "b", 60):  # the first rank itself, and others once it is at it
        monkeypatch.setenv("LOCAL_RANK", "1")
        thread, others = _in_thread("b", 0.2)
        thread.join(30)
        assert others
    monkeypatch.setattr(compile_once, "_HEAD_START", 0.3)
    for settings in ("d", "e"):  # it uses this folder, but not this graph
        began = time.monotonic()
        with compiling_once(_graph(), settings, 60):
            assert time.monotonic() - began >= 0.3


def test_an_error_ends_it(_own_folder):
    with pytest.raises(ZeroDivisionError), compiling_once(_graph(), "a", 60):
        raise ZeroDivisionError
    thread, began = _in_thread("a", 60)
    thread.join(30)
    assert began


@pytest.mark.parametrize("why", ("no cache", "ranks talk", "no folder", "no locks"))
def test_where_waiting_is_no_use(why, _own_folder, tmp_path, monkeypatch):
    """Caches are off, torch's ranks talk to each other while they compile, or the file system does not do it."""
    settings = contextlib.nullcontext()
    if why == "no cache":
        settings = torch._inductor.config.patch(fx_graph_cache=False)
    elif why == "ranks talk":
        settings = torch._functorch.config.patch(_sync_decision_cross_ranks=True)
    elif why == "no folder":
        (tmp_path / "file").write_text("")
        monkeypatch.setattr(inductor, "cache_dir", lambda: str(tmp_path / "file"))
    else:
        monkeypatch.setattr(compile_once.fcntl, "flock", mock.Mock(side_effect=OSError("not here")))
        monkeypatch.setenv("LOCAL_RANK", "1")
        monkeypatch.setattr(compile_once, "_HEAD_START", 0.1)
    with settings, compiling_once(_graph(), "a", 60):
        thread, began = _in_thread("a", 60)
        thread.join(30)
        assert began


def _its_holder_is_killed() -> bool:
    ready, said = os.pipe()
    child = os.fork()
    if child == 0:
        with compiling_once(_graph(), "a", 60):
            os.write(said, b"x")
            time.sleep(600)
    os.read(ready, 1)
    thread, began = _in_thread("a", 600)
    time.sleep(0.2)
    waited = not began
    os.kill(child, signal.SIGKILL)
    thread.join(30)
    os.waitpid(child, 0)
    return waited and bool(began)


def test_the_lock_ends_with_its_holder(tmp_path):
    assert run_ranks(_its_holder_is_killed, 1, env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}) == [True]
