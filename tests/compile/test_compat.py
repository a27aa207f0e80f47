"""freescale.compat: this torch has every private API that freescale uses."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from freescale.compat import distributed, dynamo, nixl, nn_modules, probes, triton_launch
from freescale.compat.version import SUPPORTED, torch_version
from freescale.kernels.transports import selection


def test_torch_is_a_supported_one():
    assert torch_version() in SUPPORTED


def test_self_test_passes():
    probes.self_test()


def test_order_at_the_end_of_a_backward_pass():
    calls = []

    def begin():
        calls.append("begin")
        return lambda: calls.append("end")

    def hook(grad):
        distributed.around_end_of_backward(begin)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: calls.append("between"))  # as DDP does

    x = torch.zeros(1, requires_grad=True)
    x.register_hook(hook)
    x.sum().backward()
    assert calls == ["begin", "between", "end"]


def test_autograd_inside_an_op_in_inference_mode():
    with torch.inference_mode(), dynamo.autograd_inside_op():
        assert (torch.zeros(1, requires_grad=True) * 2).requires_grad


@pytest.mark.parametrize("version", ["2.10.0", "2.16.0.dev20260101+cpu", "3.0.0"])
def test_self_test_refuses_other_versions(monkeypatch, version: str):
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(RuntimeError) as error:
        probes.self_test()
    assert str(error.value) == f"freescale supports torch 2.11, 2.12, 2.13, 2.14, 2.15; found {version}"


@pytest.fixture
def without_nixl(monkeypatch):
    for name in ("nixl", "nixl_cu13", "nixl_cu12"):
        monkeypatch.setitem(sys.modules, name, None)
    nixl.library.cache_clear()
    yield
    nixl.library.cache_clear()


def test_without_nixl_it_says_what_to_install(without_nixl):
    remedy = "NVIDIA's NIXL is missing, it is not installed: pip install 'freescale[nixl]'"
    assert nixl.missing_reason() == remedy
    probes.self_test()
    with pytest.raises(selection.UnsupportedTransport) as error:
        selection.choose_transport("nixl", "cuda")
    assert str(error.value) == f"freescale: FREESCALE_TRANSPORT=nixl is not supported here: {remedy}"


def test_a_nixl_that_does_not_load_is_another_reason(without_nixl, monkeypatch, tmp_path):
    (tmp_path / "nixl_cu12.py").write_text("raise ImportError('libcudart.so.12: no such file')")
    monkeypatch.delitem(sys.modules, "nixl_cu12")
    monkeypatch.syspath_prepend(tmp_path)
    said = nixl.missing_reason()
    assert said.startswith("NVIDIA's NIXL is missing, nixl_cu12 does not load: libcudart.so.12: no such file: pip install ")


def test_self_test_finds_what_is_gone(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    monkeypatch.delattr(torch.distributed.distributed_c10d, "_resolve_process_group")
    monkeypatch.delattr(torch._dynamo, "OptimizedModule")
    with pytest.raises(RuntimeError) as error:
        probes.self_test()
    gone = "torch._dynamo.OptimizedModule, torch.distributed.distributed_c10d._resolve_process_group"
    assert str(error.value) == f"torch 2.13.0+cpu lacks names that freescale uses: {gone}"


def test_what_is_gone_of_a_library_names_its_version_and_that_of_torch(monkeypatch):
    pytest.importorskip("torchrec")
    from torchrec.distributed import embedding, embedding_lookup

    monkeypatch.delattr(embedding_lookup, "GroupedEmbeddingsLookup")
    monkeypatch.setattr(embedding, "ShardedEmbeddingCollection", type("ShardedEmbeddingCollection", (), {"_env": None}))
    with pytest.raises(RuntimeError) as error:
        probes.self_test()
    found = str(error.value)
    assert found.startswith("torchrec 1.") and f" (with torch {torch.__version__}) lacks " in found
    assert "torchrec.distributed.embedding.ShardedEmbeddingCollection._device, " in found
    assert found.endswith("torchrec.distributed.embedding_lookup.GroupedEmbeddingsLookup") and "_env" not in found


def test_what_is_gone_of_nixl(monkeypatch):
    agent = type("nixl_agent", (), dict.fromkeys(probes.NIXL[":nixl_agent"].split()))
    sync = SimpleNamespace(NIXL_THREAD_SYNC_STRICT=1)
    library = SimpleNamespace(nixl_agent=agent, nixl_agent_config=None, nixl_thread_sync_t=sync)
    monkeypatch.setattr(nixl, "library", lambda: library)
    assert probes.missing(probes.NIXL) == []
    del agent.send_notif, library.nixl_agent_config
    assert probes.missing(probes.NIXL) == ["nixl_agent_config", "nixl_agent.send_notif"]


@pytest.mark.parametrize(
    ("where", "names", "gone"),
    [
        ("functools:partial", "func no_such", "no_such"),
        ("functools:wraps", "wrapped partial no_such", "no_such"),  # a parameter, and what its code mentions
        ("threading:Thread", "start _target|no_such", ""),  # a method, and what __init__ sets
        ("threading:Thread", "no_such|neither", "no_such|neither"),
        ("functools:no_such.path", "x", "."),
        ("no_such_module", "x y", "."),
    ],
)
def test_what_counts_as_there(where: str, names: str, gone: str):
    prefix = where.replace(":", ".")
    expected = [prefix] if gone == "." else [f"{prefix}.{gone}"] if gone else []
    assert probes.missing({where: names}) == expected


@pytest.mark.parametrize(
    ("version", "minor"), [("2.13.0", "2.13"), ("2.12.1+cpu", "2.12"), ("2.11.0+cu130", "2.11")]
)
def test_version_is_major_and_minor(monkeypatch, version: str, minor: str):
    monkeypatch.setattr(torch, "__version__", version)
    assert torch_version() == minor


def test_whole_numbers_as_triton_has_them():
    triton = pytest.importorskip("triton")
    assert all(triton_launch.next_power_of_2(n) == triton.next_power_of_2(n) for n in range(70))
    assert all(triton_launch.cdiv(a, b) == triton.cdiv(a, b) for a in range(20) for b in range(1, 9))


def test_what_follows_a_call_that_failed_does_not_hide_why():
    """Of a module that was compiled in place: `after` runs either way, and raises only where the call did not."""

    class Module(torch.nn.Module):  # of its own: Dynamo leaves code alone that it has failed with
        def forward(self, x):
            return x + 1

    module, calls = Module(), []

    def after(module):
        calls.append("after")
        raise RuntimeError("rank 1 has left")

    module.compile(backend="eager")
    around = nn_modules.AroundCompiledCall(module, lambda *_: calls.append("before"), after)
    with pytest.raises(RuntimeError, match="rank 1 has left"):
        module(torch.zeros(2))
    with pytest.raises(TypeError):
        module(1, 2, 3)
    assert calls == ["before", "after"] * 2
    around.remove()
    module(torch.zeros(2))
    assert len(calls) == 4
