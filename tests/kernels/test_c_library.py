"""The C code: where its library comes from, what is said without it, and what building it without a compiler says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from freescale.kernels.native import c_library
from repo import ROOT

FOLDER = Path(c_library.__file__).parent
BUILD_IT = "install freescale with pip, in a checkout with `pip install -e .`"


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """An empty one in which the library is looked for."""
    monkeypatch.setattr(c_library, "_FOLDER", tmp_path)
    c_library.library.cache_clear()
    return tmp_path


def test_it_comes_from_the_package_alone():
    assert c_library.problem() is None
    assert Path(c_library.library()._name).parent == FOLDER


@pytest.mark.parametrize("case", ("missing", "of other sources", "broken"))
def test_without_it_an_error_says_what_to_do(folder, case):
    expected, library = f"its C library is not in {folder}: {BUILD_IT}", folder / "_native.abi3.so"
    if case == "of other sources":
        (built,) = FOLDER.glob("_native*.so")
        shutil.copy(built, library)
        assert c_library.problem() is None  # in a wheel
        for source in FOLDER.glob("*.[ch]"):
            shutil.copy(source, folder)  # newer than the library, and the same
        assert c_library.problem() is None
        (folder / "planning.h").write_text("/* another one */")
        expected = f"its C code has changed since its library was built: {BUILD_IT}"
    if case == "broken":
        library.write_bytes(b"no ELF file")
        expected = f"its C library does not load ({library}: file too short): {BUILD_IT}"
    with pytest.raises(RuntimeError) as error:
        c_library.library()
    assert str(error.value) == f"freescale: this rank cannot plan batches: {expected}" and c_library.problem() == expected


def test_a_machine_without_a_compiler_gets_a_sentence(tmp_path):
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-temp", str(tmp_path), "--build-lib", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "CC": "no-such-cc"}, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "error: freescale is not installed, because its C code cannot be built. Install a C compiler (gcc or clang; "
        "Inductor and Triton need one too), then try again. ("
    )
    assert "no-such-cc" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("changed", ("mesh.c", "planning.h", None))
def test_make_builds_it_again_when_a_source_changes(tmp_path, changed):
    (tmp_path / "kernels/native").mkdir(parents=True)
    (tmp_path / ".venv").mkdir()
    shutil.copy(ROOT / "Makefile", tmp_path)
    library = "kernels/native/_native.abi3.so"
    sources = ["setup.py", "pyproject.toml", "kernels/native/mesh.c", "kernels/native/planning.h"]
    for time, name in enumerate(("Makefile", *sources, ".venv/.freescale-is-set-up", library)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time, time))
    if changed is not None:
        (tmp_path / "kernels/native" / changed).touch()
    command = ["make", "-n", "test", "TORCH=2.14.1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    lines = [line for line in done.stdout.splitlines() if " install " in line]
    assert [line.endswith("--no-deps --no-build-isolation -e .") for line in lines] == ([] if changed is None else [True])
    assert "/pytest" in done.stdout
