"""`python -m freescale doctor`: the words, the JSON and the exit code."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch

import freescale
from freescale import config, doctor
from freescale.__main__ import main
from freescale.compat import nixl, probes, version
from freescale.kernels.native import c_library
from freescale.kernels.transports import selection
from ranks import run_ranks_apart
from repo import ROOT

MAKEFILE = ROOT / "Makefile"


class Said(NamedTuple):
    code: int
    out: str
    err: str


def _ask(args: list[str], flags: dict[str, str]) -> Said:
    """In a process that has torch and TorchRec loaded."""
    for name in [v for v in os.environ if v.startswith("FREESCALE_")]:
        del os.environ[name]
    os.environ.update(flags)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["doctor", *args])
    return Said(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def doctors() -> dict[str, Said]:
    """Without waiting for all imports."""
    asked = {"words": ([], {"FREESCALE_TIMEOUT": "7"}), "bad flag": ([], {"FREESCALE_CODEGEN": "foo"}), "json": (["--json"], {})}
    return dict(zip(asked, run_ranks_apart(_ask, list(asked.values())), strict=True))


@pytest.mark.thorough
def test_as_a_user_asks_it(tmp_path):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("FREESCALE_")}
    done = subprocess.run(
        [sys.executable, "-m", "freescale", "doctor"], env={**clean, "FREESCALE_TIMEOUT": "7"}, text=True,
        cwd=tmp_path, capture_output=True, timeout=200,
    )  # fmt: skip
    _check_words(Said(done.returncode, done.stdout, done.stderr))


def test_words(doctors):
    _check_words(doctors["words"])


def _check_words(found: Said) -> None:
    assert found.code == 0, found
    lines = [" ".join(line.split()) for line in found.out.splitlines()]
    assert f"freescale {freescale.__version__}" in lines
    assert f"torch {torch.__version__} (supported)" in lines
    assert "gloo: yes" in lines
    assert "c10d: yes" in lines
    if torch.cuda.device_count() == 0:
        assert "staged: no: it copies between GPUs, and no GPU was found" in lines
        assert "nixl: no: it copies between GPUs, and no GPU was found" in lines
    else:
        assert "staged: yes" in lines
        assert ("nixl: yes" in lines) == (nixl.version() is not None)
    assert f"nixl {nixl.version() or 'not installed'}" in lines
    assert all(" ".join(sentence.split()) in lines for sentence in selection.RULE)
    assert "native: yes" in lines
    assert "library: yes" in lines
    assert "FREESCALE_TIMEOUT 7.0" in lines
    assert any(line.startswith("TorchRec: ") for line in lines)
    assert any(line.startswith("CPU: ") for line in lines)
    if "TorchRec: yes" in lines and torch.cuda.device_count() == 0 and "triton not installed" not in lines:
        assert lines[-1] == "Nothing is missing."


def test_bad_flag(doctors):
    found = doctors["bad flag"]
    assert found.code == 1
    assert "FREESCALE_CODEGEN must be one of inductor, eager, found 'foo'" in found.out
    assert "freescale cannot be used" in found.out
    assert "Traceback" not in found.out + found.err


def test_json(doctors):
    found = doctors["json"]
    assert found.code == 0, found
    facts = json.loads(found.out)
    assert facts["usable"] is True
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["torch_supported"] is True
    assert facts["process_groups"]["gloo"] is True
    assert set(facts["settings"]) == {f"FREESCALE_{name.upper()}" for name in config.FIELDS}


@pytest.fixture
def no_torchrec(monkeypatch):
    """Fast, and the same wherever TorchRec is installed or not."""
    monkeypatch.setitem(sys.modules, "torchrec", None)
    monkeypatch.setitem(sys.modules, "torchrec.distributed.embedding", None)
    for name in [v for v in os.environ if v.startswith("FREESCALE_")]:
        monkeypatch.delenv(name)


def test_no_c_library(no_torchrec, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(c_library, "_FOLDER", tmp_path)
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    why = f"its C library is not in {tmp_path}: install freescale with pip, in a checkout with `pip install -e .`"
    assert f"library: no: {why}" in said
    assert f"freescale's C library: {why}. Sharded tables need it to plan batches." in said


def test_torch_that_is_not_supported(no_torchrec, monkeypatch, capsys):
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "2.10.0 (not supported)" in said
    assert "a supported torch: this is 2.10.0. Install torch 2.11 or 2.12 or 2.13 or 2.14." in said


def test_self_test_that_fails(no_torchrec, monkeypatch, capsys):
    def broken() -> None:
        raise AttributeError("no such thing")

    monkeypatch.setattr(probes, "self_test", broken)
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "the self test of freescale.compat failed (AttributeError: no such thing)" in said


def test_torch_without_a_torchrec(no_torchrec, monkeypatch, capsys):
    monkeypatch.setattr(torch, "__version__", "2.15.0")
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "2.15.0 (supported)" in said
    assert "FBGEMM 1.9.0, the newest, does not load under torch 2.15.0. For TorchRec: torch 2.14." in said


def test_without_torchrec_it_is_usable(no_torchrec, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(doctor, "WITHOUT_TORCHREC", ())
    monkeypatch.setattr(torch, "__version__", "2.14.1")
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["tables"]["native"] == "yes"
    assert facts["tables"]["TorchRec"].startswith("no: ")
    (remedy,) = (m["remedy"] for m in facts["missing"] if m["what"].startswith("TorchRec: "))
    assert "run `make setup`, or pip install tensordict" in remedy
    assert " && pip install --no-deps torchrec==" in remedy and " fbgemm-gpu-cpu==" in remedy
    monkeypatch.setattr(freescale, "__path__", [str(tmp_path / "site-packages" / "freescale")])  # no checkout
    assert main(["doctor", "--json"]) == 0
    assert "make" not in capsys.readouterr().out


def test_fbgemm_for_cuda_without_cuda(tmp_path):
    """`pip install .[torchrec]` on a machine without a GPU: freescale works, and doctor names the cause and the fix."""
    (tmp_path / "torchrec").mkdir()
    (tmp_path / "torchrec" / "__init__.py").write_text("import fbgemm_gpu")
    (tmp_path / "fbgemm_gpu.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')")
    (tmp_path / "fbgemm_gpu-1.9.0.dist-info").mkdir()
    (tmp_path / "fbgemm_gpu-1.9.0.dist-info" / "METADATA").write_text("Name: fbgemm-gpu\nVersion: 1.9.0\n")
    env = {k: v for k, v in os.environ.items() if not k.startswith("FREESCALE_")} | {"CUDA_VISIBLE_DEVICES": ""}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(tmp_path), env.get("PYTHONPATH")]))
    code = "import sys, freescale.backend as _, freescale.doctor; sys.exit(freescale.doctor.main())"
    done = subprocess.run([sys.executable, "-c", code], env=env, text=True, cwd=tmp_path, capture_output=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout
    assert "native: yes" in done.stdout and "self test" not in done.stdout
    assert "fbgemm-gpu is built for CUDA, and no GPU was found. Without it, native tables work." in done.stdout
    fbgemm = doctor.TORCHREC_FOR[".".join(torch.__version__.split(".")[:2])][1]
    fix = ["    pip uninstall -y fbgemm-gpu", f"    pip install --no-deps fbgemm-gpu-cpu=={fbgemm}"]
    lines = done.stdout.splitlines()
    assert fix == lines[lines.index(fix[0]) :][:2]


def test_without_arguments_it_prints_usage(capsys):
    assert main([]) == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: python -m freescale") and "doctor" in said


def test_unknown_command(capsys):
    assert main(["docter"]) == 2
    assert capsys.readouterr().err.startswith("freescale has no command 'docter'. Known: doctor")


def test_versions_agree_with_compat_and_the_makefile():
    assert (*doctor.TORCHREC_FOR, *doctor.WITHOUT_TORCHREC) == version.SUPPORTED
    lines = MAKEFILE.read_text().splitlines()
    for minor, (torchrec, fbgemm) in doctor.TORCHREC_FOR.items():
        assert f"TORCHREC_{minor} := {torchrec}" in lines
        assert f"FBGEMM_{minor} := {fbgemm}" in lines
    assert f"TORCHREC_NEEDS := {doctor.TORCHREC_NEEDS}" in lines
