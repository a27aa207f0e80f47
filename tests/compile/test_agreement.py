"""Ranks that would run different programs: a sentence on every rank, no hang."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from freescale import config, driver
from ranks import run_ranks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        import freescale

        self.table = freescale.ShardedEmbedding(32, 4)

    def forward(self, ids):
        return self.table(ids).sum()


def _step(options=None):
    model = torch.compile(Model(), backend="freescale", fullgraph=True, options=options or {"codegen": "eager"})
    return float(model(torch.tensor([1, 2, 31])).detach())


def test_same_flags_run():
    a, b = run_ranks(_step, 2, env={"FREESCALE_CODEGEN": "eager"})
    assert a == b


def test_different_flags_raise_on_every_rank():
    for error in run_ranks(_step, 2, env_of={1: {"FREESCALE_PASSES": "none"}}, expect_errors=True):
        assert "ranks disagree: FREESCALE_PASSES is 'all' on rank 0 and 'none' on rank 1" in error


# For each setting another value than that of CONFIG.
CONFIG = config.Config(passes="all,compress_exchange", dense="allreduce")
OTHER = {
    "passes": "all", "codegen": "eager", "strict": True, "dynamic": False, "timeout": 60.0, "dense": "off",
    "bucket_mb": 1.0, "link_gbps": 1.0, "transport": "c10d", "ring_mb": 1.0, "min_bytes": 1.0, "compress": "rows:0.5",
    "wire": "fp16", "record": "folder", "progress": False,
}  # fmt: skip
_WITHOUT_EFFECT = ["record", "progress"]


def _changed(name):
    more = {"compress": "rows:0.5"} if name == "strict" else {}  # which refuses a lossy pass without a ratio
    base = dataclasses.replace(CONFIG, **more)
    return base, dataclasses.replace(base, **{name: OTHER[name]})


def test_every_setting_that_affects_graphs_is_in_the_key_of_torchs_caches():
    assert OTHER.keys() == config.FIELDS.keys()
    same = []
    for name in OTHER:
        base, changed = _changed(name)
        assert base != changed
        same += [name] if driver.Driver(base).uuid() == driver.Driver(changed).uuid() else []
    assert same == _WITHOUT_EFFECT


def _one_setting_differs():
    from freescale import backend
    from freescale.runtime import agreement

    errors = {}
    for name in OTHER:
        cfg = _changed(name)[dist.get_rank()]
        backend._settings_compared.clear()
        run = backend._meet_before_first_run(lambda: "ran", cfg, None, None)
        try:
            errors[name] = run()
        except agreement.Disagreement as error:
            errors[name] = str(error)
    return errors


def test_every_setting_that_affects_graphs_is_compared():
    for errors in run_ranks(_one_setting_differs, 2):
        assert [errors.pop(name) for name in _WITHOUT_EFFECT] == ["ran", "ran"]
        for name, words in errors.items():
            values = "{!r} on rank 0 and {!r} on rank 1".format(*(getattr(cfg, name) for cfg in _changed(name)))
            assert f"ranks disagree: FREESCALE_{name.upper()} is {values}" in words


def test_a_bad_flag_on_one_rank_raises_on_every_rank():
    for env in ({"FREESCALE_CODEGEN": "fast"}, {"FREESCALE_PASES": "none"}):
        first, second = run_ranks(_step, 2, env_of={1: env}, expect_errors=True)
        name = next(iter(env))
        assert "rank 1 failed before the first step" in first and name in first
        assert name in second and "ConfigError" in second


def _comes_when_the_other_has_given_up():
    from freescale.compat import distributed

    store = distributed.default_store()
    if dist.get_rank() == 1:
        store.wait(["given up"], timedelta(seconds=60))
        return _step()
    try:
        return _step()
    finally:
        store.set("given up", "")


def test_a_rank_that_does_not_come_is_named():
    limits = {"FREESCALE_TIMEOUT": "2"}
    results = run_ranks(_comes_when_the_other_has_given_up, 2, env=limits, expect_errors=True)
    assert "rank 1 did not reach the first compiled step" in results[0]


def _compiles_long():
    from freescale import backend

    compile_graph = backend._compile

    def slowly(*args):
        if dist.get_rank() == 1:
            time.sleep(7)
        return compile_graph(*args)

    with mock.patch.object(backend, "_compile", slowly):
        return _step()


@pytest.mark.thorough
def test_a_rank_that_compiles_is_waited_for():
    a, b = run_ranks(_compiles_long, 2, env={"FREESCALE_TIMEOUT": "2"})
    assert a == b


class CountingStore:
    """What a rank asks of the store. (Whoever waits asks now and then whether it may go on.)"""

    def __init__(self, store):
        self.store, self.calls = store, Counter()

    def __getattr__(self, name):
        self.calls[name] += 1
        return getattr(self.store, name)


def _count_requests(odd_one=None):
    from freescale.compat import distributed
    from freescale.runtime import agreement

    store = CountingStore(distributed.default_store())
    dist.barrier()
    with mock.patch.object(distributed, "default_store", lambda: store):
        try:
            agreement.agree({"flag": dist.get_rank() == odd_one, "same": 1}, 30.0)
        except agreement.Disagreement as error:
            return str(error)
    return sum(n for name, n in store.calls.items() if name != "check")


def test_what_a_rank_asks_of_the_store_does_not_grow_with_the_ranks():
    assert max(run_ranks(_count_requests, 2)) == max(run_ranks(_count_requests, 6)) <= 6


def test_one_of_many_that_differs_is_named_everywhere():
    for error in run_ranks(_count_requests, 6, 4):
        assert "flag is False on rank 0 and True on rank 4" in error


def _dies_between(flag):
    """Rank 1 posts what it runs and is never counted; the others must not wait for its verdict for ever."""
    from freescale.runtime import agreement

    if dist.get_rank() == 1:
        posted = agreement._Agreement("all")
        posted._store = mock.Mock(wraps=posted._store, add=mock.Mock(side_effect=ZeroDivisionError))
        with suppress(ZeroDivisionError):
            posted.post({"flag": flag}, dist.get_world_size())
        return "died"
    try:
        agreement.agree({"flag": 0}, 2.0)
    except agreement.Disagreement as error:
        return str(error)
    return "agreed"


@pytest.mark.thorough
def test_a_rank_that_dies_before_it_is_counted():
    assert run_ranks(_dies_between, 3, 0, timeout=60) == ["agreed", "died", "agreed"]
    first, _, third = run_ranks(_dies_between, 3, 1, timeout=60)
    assert first == third and "flag is 0 on rank 0 and 1 on rank 1" in first


def _other_launches():
    """Rank 1's passes find something else to launch."""
    from freescale.passes.graph import GraphExchange

    if dist.get_rank() == 1:
        GraphExchange.__str__ = lambda x: f"{x.payload} {x.priority}"
    return _step()


def test_other_launches_raise_on_every_rank():
    for error in run_ranks(_other_launches, 2, expect_errors=True, compiled_anew=True):
        assert "ranks disagree: what the forward graph launches is ['urgent rows of embedding'] on rank 0" in error
        assert "['rows urgent'] on rank 1" in error


def _inductor_step():
    """Loss or error, and how many graphs the passes saw: none where the code came out of a cache."""
    from freescale import driver
    from freescale.passes.graph import GraphExchange

    wrong = os.environ.get("WRONG")
    if wrong:
        GraphExchange.__str__ = lambda x: wrong
    try:
        seen: object = _step({"codegen": "inductor"})
    except Exception as error:  # noqa: BLE001
        seen = str(error)
    return seen, sum(driver.REPORT.graphs.values())


def _caches(tmp_path, rank: int, **more: str) -> dict[str, str]:
    return {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / f"cache{rank}"), **more}


@pytest.mark.thorough
def test_launches_are_compared_also_where_one_rank_had_a_cache_hit(tmp_path):
    (a, cold), (b, colder) = run_ranks(_inductor_step, 2, env=_caches(tmp_path, 0))  # one of them compiles
    assert a == b and cold + colder > 0
    for other in (2, 3):  # kernels that are compiled, and no graphs
        leave = shutil.ignore_patterns("fxgraph", "aotautograd")
        shutil.copytree(tmp_path / "cache0", tmp_path / f"cache{other}", ignore=leave)
    fresh = {0: _caches(tmp_path, 0), 1: _caches(tmp_path, 3)}
    (a, hit), (b, miss) = run_ranks(_inductor_step, 2, env_of=fresh)
    assert a == b and isinstance(a, float) and hit == 0 and miss > 0
    other = {0: _caches(tmp_path, 0), 1: _caches(tmp_path, 2, WRONG="something else")}
    (first, hit), (second, miss) = run_ranks(_inductor_step, 2, env_of=other)
    assert hit == 0 and miss > 0  # else this test does not test what it says
    for error in (first, second):
        assert "ranks disagree: what the forward graph launches" in error and "something else" in error
