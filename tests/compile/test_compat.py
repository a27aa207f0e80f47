"""freescale.compat: this torch has every private API that freescale uses."""

from __future__ import annotations

import sys

import pytest
import torch

from freescale.compat import compiled_modules, nixl, probes, triton_launch
from freescale.compat.version import SUPPORTED, torch_version
from freescale.kernels.transports import selection


def test_torch_is_a_supported_one():
    assert torch_version() in SUPPORTED


def test_self_test_passes():
    probes.self_test()


def test_self_test_passes_where_dynamo_has_given_up_on_code_of_torch():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        for size in (1, 2):
            torch.compile(torch.nn.BatchNorm1d(size), backend="eager", dynamic=False)(torch.zeros(2, size))
    probes.self_test()


@pytest.mark.parametrize("version", ["2.10.0", "2.16.0.dev20260101+cpu", "3.0.0"])
def test_self_test_refuses_other_versions(monkeypatch, version: str):
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(RuntimeError) as error:
        probes.self_test()
    assert str(error.value) == f"freescale knows torch 2.11, 2.12, 2.13, 2.14, 2.15; this is {version}"


@pytest.fixture
def without_nixl(monkeypatch):
    for name in ("nixl", "nixl_cu13", "nixl_cu12"):
        monkeypatch.setitem(sys.modules, name, None)
    nixl._library.cache_clear()
    yield
    nixl._library.cache_clear()


def test_without_nixl_it_says_what_to_install(without_nixl):
    remedy = "NVIDIA's NIXL is missing, it is not installed: pip install 'freescale[nixl]'"
    assert nixl.missing_reason() == remedy
    nixl.probe()
    with pytest.raises(selection.UnsupportedTransport) as error:
        selection.choose_transport("nixl", "cuda")
    assert str(error.value) == f"freescale: FREESCALE_TRANSPORT=nixl cannot be met: {remedy}"


def test_a_nixl_that_does_not_load_is_another_reason(without_nixl, monkeypatch, tmp_path):
    (tmp_path / "nixl_cu12.py").write_text("raise ImportError('libcudart.so.12: no such file')")
    monkeypatch.delitem(sys.modules, "nixl_cu12")
    monkeypatch.syspath_prepend(tmp_path)
    said = nixl.missing_reason()
    assert said.startswith("NVIDIA's NIXL is missing, nixl_cu12 does not load: libcudart.so.12: no such file: pip install ")


def test_self_test_finds_what_is_gone(monkeypatch):
    monkeypatch.delattr(torch.distributed.distributed_c10d, "_resolve_process_group")
    with pytest.raises(AssertionError):
        probes.self_test()


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
    around = compiled_modules.AroundCompiledCall(module, lambda *_: calls.append("before"), after)
    with pytest.raises(RuntimeError, match="rank 1 has left"):
        module(torch.zeros(2))
    with pytest.raises(TypeError):
        module(1, 2, 3)
    assert calls == ["before", "after"] * 2
    around.remove()
    module(torch.zeros(2))
    assert len(calls) == 4
