"""The package: who may import whom, a wheel whose modules all import, and the entry point of the backend."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import freescale
from ranks import run_ranks_apart
from repo import ROOT

FOLDERS = {
    "freescale": "fs_compile",
    "freescale.passes": "passes",
    "freescale.kernels": "kernels",
    "freescale.runtime": "runtime",
}
# What each package may import beside the standard library, and which parts of freescale it may not.
ALLOWED = {
    "kernels": {"torch", "numpy", "triton", "freescale.compat", "freescale.kernels"},
    "passes": {"torch", "sympy"}
    | {"freescale.config", "freescale.compat", "freescale.kernels", "freescale.passes"},
    "runtime/balance": {"numpy", "freescale.runtime.balance"},  # its answers depend on nothing else
}
FORBIDDEN = {"passes": {"freescale.runtime"}, "runtime": {"freescale.passes"}}


def imports(source: str) -> set[str]:
    """Full names of what a source file imports, at any depth: `from a import b` counts as a.b."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            found |= {f"{start}.{alias.name}" for alias in node.names}
    return found


def within(name: str, packages: set[str]) -> bool:
    return any(name == p or name.startswith(p + ".") for p in packages)


def wrong_imports(folder: str, source: str) -> set[str]:
    wrong = {name for name in imports(source) if within(name, FORBIDDEN.get(folder, set()))}
    bare = set(FOLDERS.values())
    for name in imports(source):
        top = name.split(".")[0]
        if top in bare or name.startswith("."):  # the installed name, always
            wrong.add(name)
        elif folder in ALLOWED and top not in sys.stdlib_module_names and not within(name, ALLOWED[folder]):
            wrong.add(name)
    return wrong


@pytest.mark.parametrize("folder", dict.fromkeys([*FOLDERS.values(), *ALLOWED]))
def test_import_direction(folder: str):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    found = {str(f): wrong_imports(folder, f.read_text()) for f in files}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize(
    ("folder", "source", "wrong"),
    [
        ("kernels", "def f():\n    from freescale import config", {"freescale.config"}),
        ("kernels", "import scipy, numpy, torch, os", {"scipy"}),
        ("passes", "from freescale.runtime import meter", {"freescale.runtime.meter"}),
        ("passes", "from freescale import runtime", {"freescale.runtime"}),
        ("runtime", "import freescale.passes.graph", {"freescale.passes.graph"}),
        ("fs_compile", "import kernels.row_kernels", {"kernels.row_kernels"}),
        ("passes", "from . import node_cost", {"..node_cost"}),
        ("passes", "import sympy, torch\nfrom torch import fx\nfrom freescale.kernels import row_kernels", set()),
        ("runtime/balance", "import torch, heapq, numpy\nfrom freescale.runtime import meter", {"torch", "freescale.runtime.meter"}),
        ("runtime/balance", "from freescale.runtime.balance import swaps", set()),
    ],
)
def test_wrong_imports_are_found(folder: str, source: str, wrong: set[str]):
    assert wrong_imports(folder, source) == wrong


def test_the_environment_is_read_in_two_places():
    """Settings of freescale in one, what torchrun and torch say in the other."""
    files = [f for folder in FOLDERS.values() for f in (ROOT / folder).rglob("*.py")]
    reading = {str(f.relative_to(ROOT)) for f in files if re.search(r"\b(environb?|getenvb?)\b", f.read_text())}
    assert reading == {"fs_compile/config.py", "fs_compile/compat/cuda.py"}


def python(code: str, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter in `cwd`, which is on its path as it is for `python -c`."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith("FREESCALE_")}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=200)


def test_import_is_light(tmp_path):
    done = python("import freescale, sys; print('torch' in sys.modules, freescale.__version__)", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "False"


def test_dir_lists_the_api():
    assert dir(freescale) == sorted(freescale.__all__)


def _import_bare_name() -> str:
    """In a process that has loaded torch."""
    sys.path.insert(0, str(ROOT))
    try:
        importlib.import_module("kernels.ops.schemas")
    except Exception as error:  # noqa: BLE001
        return str(error)
    return "no error"


def test_bare_name_cannot_be_imported_beside_the_installed_one():
    (said,) = run_ranks_apart(_import_bare_name, [()])
    assert "TORCH_LIBRARY" in said and "freescale" in said


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without a network from a copy of the sources, and unpacked."""
    source, wheels, unpacked = (tmp_path_factory.mktemp(n) for n in ("source", "wheels", "unpacked"))
    for folder in FOLDERS.values():
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-index", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "-w", str(wheels), str(source)], capture_output=True, text=True, cwd=wheels, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = wheels.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(unpacked)
    return unpacked


@pytest.mark.thorough
def test_wheel_holds_one_package_every_module_and_the_c_library(unpacked: Path):
    tops = sorted(p.name for p in unpacked.iterdir())
    assert tops[0] == "freescale" and len(tops) == 2 and tops[1].endswith(".dist-info")
    packed = {str(p.relative_to(unpacked)) for p in (unpacked / "freescale").rglob("*") if p.is_file()}
    ours = {
        str(Path(name.replace(".", "/")) / f.relative_to(ROOT / folder))
        for name, folder in FOLDERS.items()
        for f in (ROOT / folder).rglob("*.py")
    }
    assert packed == ours | {"freescale/kernels/native/_native.abi3.so", "freescale/py.typed"}  # for any Python
    metadata = next(unpacked.glob("*.dist-info/METADATA")).read_text()
    assert f"\nVersion: {freescale.__version__}\n" in metadata
    assert "Tag: cp310-abi3-" in next(unpacked.glob("*.dist-info/WHEEL")).read_text()


@pytest.fixture(scope="session")
def imported(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """In one process, which takes its time to load torch: whether torch finds the backend; then every module."""
    files = sorted((unpacked / "freescale").rglob("*.py"))
    names = [".".join(f.relative_to(unpacked).with_suffix("").parts).removesuffix(".__init__") for f in files]
    assert len(names) > 10
    code = (
        "import torch\n"
        "print('freescale' in torch._dynamo.list_backends(exclude_tags=()))\n"
        "import importlib\n"
        f"for name in {names!r}:\n"
        "    module = importlib.import_module(name)\n"
        f"    assert module.__file__.startswith({str(unpacked)!r}), module.__file__\n"
        "from freescale.kernels.native import c_library\n"
        "print('all', c_library.problem())"
    )
    return python(code, tmp_path_factory.mktemp("imported"), unpacked)


@pytest.mark.thorough
def test_every_module_of_the_wheel_imports(imported):
    assert (imported.returncode, imported.stdout.strip().splitlines()[-1:]) == (0, ["all None"]), imported.stderr


@pytest.mark.thorough
def test_backend_is_found_without_an_import(unpacked: Path, imported):
    (entry_points,) = unpacked.glob("*.dist-info/entry_points.txt")
    assert entry_points.read_text().split() == [
        "[torch_dynamo_backends]",
        "freescale",
        "=",
        "freescale.backend:freescale",
    ]
    assert imported.stdout.split()[:1] == ["True"], imported.stderr
