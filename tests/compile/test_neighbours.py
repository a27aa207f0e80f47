"""What freescale changes, it changes for the models that it compiles: no other model, process or cache sees it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import retrieval
import trec
from freescale.compat.dynamo_settings import is_tracing
from idioms import IDIOMS, SIZES, SMALL_SIZES, results
from ranks import HAS_TORCHREC, run_ranks, run_ranks_apart
from retrieval import cache_hits, train_with_inductor

# All that failed while freescale's settings were process-wide.
ONCE_BROKEN = ("in_batch_negatives", "slice_assigned", "first_two_unbound")


# ---- other models of the process, and torch's cache ---------------------------------------------------------------


def _settings() -> dict[str, Any]:
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config
    import torch.fx.experimental._config

    modules = (torch._dynamo.config, torch.fx.experimental._config, torch._inductor.config, torch._functorch.config)
    return {f"{m.__name__}.{k}": repr(v) for m in modules for k, v in m.get_config_copy().items()}  # type: ignore


def _alone(cache: str) -> list[torch.Tensor]:
    """A process that never asks for freescale."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    return train_with_inductor()


def _before_between_and_after(cache: str) -> list[list[torch.Tensor]]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    found, before = [], _settings()
    with torch.compiler.config.patch(force_disable_caches=True):
        found.append(train_with_inductor())
        for options in ({"codegen": "eager"}, {}):
            (seen,) = results(["layer_norm"], backend="freescale", options=options).values()
            assert not any(isinstance(x, str) for x in seen), seen
            found.append(train_with_inductor())
        assert cache_hits() == 0  # each was compiled where it was asked for
    after = _settings()
    assert {k: (before[k], v) for k, v in after.items() if v != before[k]} == {}
    return found


@pytest.mark.thorough
def test_inductor_beside_freescale_computes_what_it_computes_alone(tmp_path):
    (expected,) = run_ranks_apart(_alone, [(str(tmp_path / "one"),)])
    (beside,) = run_ranks_apart(_before_between_and_after, [(str(tmp_path / "two"),)])
    for found in beside:
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def _after_freescale(cache: str) -> list[torch.Tensor]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    (seen,) = results(["layer_norm"], SIZES[:1], backend="freescale").values()
    assert not any(isinstance(x, str) for x in seen), seen
    hits = cache_hits()
    found = train_with_inductor()
    assert cache_hits() == hits
    return found


@pytest.mark.thorough
def test_what_inductor_leaves_in_the_cache_after_freescale_serves_other_programs(tmp_path):
    (expected,) = run_ranks_apart(_alone, [(str(tmp_path / "one"),)])
    (found,) = run_ranks_apart(_after_freescale, [(str(tmp_path / "two"),)])
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "two"), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, retrieval.__file__, str(tmp_path / "found")], env=env, check=True, timeout=240)
    by_another, hits = torch.load(tmp_path / "found")
    assert hits > 0
    for these in (found, by_another):
        assert all(torch.equal(a, b) for a, b in zip(these, expected, strict=True))


def _is_memory_format_noted() -> bool:
    gm = make_fx(torch.sin, tracing_mode="fake")(torch.ones(2, 2))
    return all(n.meta["tensor_meta"].memory_format is not None for n in gm.graph.nodes if "tensor_meta" in n.meta)


def _in_another_thread() -> list[bool]:
    """What a thread sees that traces something of its own while freescale compiles in this one; and whether settings are
    as they were."""
    import freescale

    found, before = [], _settings()

    def look(*_: Any) -> None:
        for in_thread in (lambda: found.append(_is_memory_format_noted()), lambda: found.append(not is_tracing())):
            thread = threading.Thread(target=in_thread)
            thread.start()
            thread.join()
        found.append(is_tracing())  # in autograd's thread, too, where a backward graph is compiled

    stop = freescale.observe(look)
    results(["layer_norm"], SIZES[:1], backend="freescale", options={"codegen": "eager"})
    stop()
    return [*found, _is_memory_format_noted(), _settings() == before]


def test_another_thread_sees_nothing_of_a_compilation_and_settings_stay():
    (found,) = run_ranks(_in_another_thread, 1, compiled_anew=True)
    assert len(found) > 6 and all(found)


def _torchrec_under_inductor(freescale_first: bool) -> tuple[Any, ...]:
    if freescale_first:
        model = trec.build("row_wise", "sgd", small=True)
        torch.compile(model, backend="freescale", options={"codegen": "eager"})(*trec.batch(0, 0, samples=3))
        torch._dynamo.reset()
    graphs = []

    def backend(gm: Any, inputs: Any) -> Any:
        graphs.append(sorted(str(n.target) for n in gm.graph.nodes if n.op == "call_function"))
        return gm.forward

    model = trec.build("row_wise", "sgd", small=True)
    run = torch.compile(model, backend=backend, dynamic=True)
    losses = []
    for step in range(2):
        loss = run(*trec.batch(step, 0, samples=3))
        loss.backward()
        losses.append(float(loss.detach()))
    return losses, graphs


@pytest.mark.thorough
@pytest.mark.skipif(not HAS_TORCHREC, reason="torchrec or fbgemm_gpu is not installed")
def test_torchrec_under_another_backend_is_traced_as_without_freescale():
    (without,) = run_ranks(_torchrec_under_inductor, 1, False, compiled_anew=True)
    (beside,) = run_ranks(_torchrec_under_inductor, 1, True, compiled_anew=True)
    assert not any("freescale" in target for graph in beside[1] for target in graph)
    assert beside == without


# ---- what Inductor compiles, freescale compiles --------------------------------------------------------------------


def _problems(names: tuple[str, ...], sizes: Any, **how: Any) -> dict[str, Any]:
    """Where freescale gives other values or gradients than eager torch, or an error, and Inductor alone does not."""
    expected = results(names, sizes, how.get("embed", ""))
    found = results(names, sizes, backend="freescale", **how)
    wrong = {name: found[name] for name in names if not _close(found[name], expected[name])}
    alone = results(wrong, sizes, backend="inductor", dynamic=True) if wrong else {}
    eager = results(wrong, sizes)
    return {name: found[name] for name in wrong if _close(alone[name], eager[name])}


def _close(found: list[Any], expected: list[Any]) -> bool:
    return len(found) == len(expected) and all(
        not isinstance(a, str) and all(_close_tensors(x, y) for x, y in zip(a, b, strict=True))
        for a, b in zip(found, expected, strict=True)
    )


def _close_tensors(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    # Of the largest entry: what is left of sums that nearly cancel has their error.
    largest = float(b.nan_to_num().abs().max()) if b.numel() else 0.0
    return a.shape == b.shape and torch.allclose(a, b, rtol=0.0, atol=1e-6 + 1e-5 * largest, equal_nan=True)


def test_idioms_that_once_failed():
    assert run_ranks(_problems, 1, ONCE_BROKEN, SIZES[:2]) == [{}]


PARTS = [tuple(IDIOMS)[i::8] for i in range(8)]


@pytest.mark.parametrize("names", [  # all of them, without code generation: test_idioms_on_rows_of_a_table
    pytest.param(names, marks=pytest.mark.slow if i % 2 else pytest.mark.thorough, id=names[0]) for i, names in enumerate(PARTS)
])  # fmt: skip
def test_idioms(names):
    assert run_ranks(_problems, 1, names, SIZES[:2], timeout=280) == [{}]


@pytest.mark.thorough
def test_idioms_with_sizes_of_one_and_none():
    assert run_ranks(_problems, 1, (*ONCE_BROKEN, "padded", "softmax_over_candidates"), SMALL_SIZES, timeout=280) == [{}]


def _of_table_rows(names: tuple[str, ...], tables: str, planned: bool) -> dict[str, Any]:
    return _problems(names, SIZES, embed=tables, planned=planned, options={"codegen": "eager", "strict": True})


TABLES = ("native", pytest.param("torchrec", marks=pytest.mark.skipif(not HAS_TORCHREC, reason="no TorchRec")))
on_rows = pytest.mark.parametrize("tables", TABLES)
with_and_without = pytest.mark.parametrize("planned", (False, True), ids=("without look-ahead", "with look-ahead"))


def _every_fourth(planned: bool, tables: str) -> tuple[str, ...]:
    """Of the idioms: each belongs to one kind of table, with look-ahead or without."""
    return tuple(IDIOMS)[2 * planned + (tables == "torchrec") :: 4]


@pytest.mark.thorough
@on_rows
@with_and_without
def test_idioms_on_rows_of_a_table(planned, tables):
    """Sizes of rows are as good as those of any other tensor; without code generation."""
    assert run_ranks(_of_table_rows, 1, _every_fourth(planned, tables), tables, planned, timeout=280) == [{}]


@pytest.mark.slow
@on_rows
@with_and_without
def test_other_idioms_on_rows_of_a_table(planned, tables):
    names = tuple(name for name in IDIOMS if name not in _every_fourth(planned, tables))
    assert run_ranks(_of_table_rows, 1, names, tables, planned, timeout=280) == [{}]


@pytest.mark.thorough
@pytest.mark.skipif(not HAS_TORCHREC, reason="torchrec or fbgemm_gpu is not installed")
def test_a_model_that_depends_on_how_many_ids_a_feature_has():
    """Without look-ahead, the graph itself counts them: it breaks where such a model needs to know."""
    assert run_ranks(_of_table_rows, 2, ("causal_mask",), "torchrec", False) == [{}, {}]


@pytest.mark.thorough
@pytest.mark.parametrize("planned", (False, True), ids=("without look-ahead", "with look-ahead"))
def test_generated_code_of_idioms_on_rows_of_a_table(planned):
    assert run_ranks(_generated, 1, planned, timeout=280) == [{}]


def _generated(planned: bool) -> dict[str, Any]:
    return _problems((*ONCE_BROKEN, "softmax_over_candidates"), SIZES[:2], embed="native", planned=planned)
