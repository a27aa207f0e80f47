"""freescale.compat: this torch has every private API that freescale uses."""

from __future__ import annotations

import pytest
import torch

from freescale.compat import probes
from freescale.compat.version import SUPPORTED, torch_version


def test_torch_is_a_supported_one():
    assert torch_version() in SUPPORTED


def test_self_test_passes():
    probes.self_test()


@pytest.mark.parametrize("version", ["2.10.0", "2.14.0.dev20260101+cpu", "3.0.0"])
def test_self_test_refuses_other_versions(monkeypatch, version: str):
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(RuntimeError) as error:
        probes.self_test()
    assert str(error.value) == f"freescale knows torch 2.11, 2.12, 2.13; this is {version}"


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
