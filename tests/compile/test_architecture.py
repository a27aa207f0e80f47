"""The folders are the architecture: who imports whom, drawn from the sources, and how long files and functions are."""

from __future__ import annotations

import ast
import statistics
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from repo import ROOT

FOLDERS = {"freescale": "fs_compile", "freescale.passes": "passes", "freescale.kernels": "kernels", "freescale.runtime": "runtime"}

# From the bottom up: a room imports from rooms before it, never from one behind it. A room is a folder; `freescale.config`
# is one of its own, since everybody may ask for the settings. The front door (freescale/__init__, which imports nothing
# until a name is used, and the command line) is open to all and used by none.
ROOMS = (
    "freescale.compat",
    "freescale.config",
    "freescale.views",
    "freescale.kernels.native",
    "freescale.kernels.ops",
    "freescale.kernels.planning",
    "freescale.kernels.transports",
    "freescale.kernels",
    "freescale.passes",
    "freescale.runtime",
    "freescale.runtime.balance",
    "freescale.runtime.tables",
    "freescale.runtime.samples",
    "freescale.runtime.lookahead",
    "freescale",
    "freescale.simulate",
)
FRONT_DOOR = ("freescale", "freescale.__main__", "freescale.doctor")


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its installed name."""
    return {
        ".".join([package, *f.relative_to(ROOT / folder).with_suffix("").parts]).removesuffix(".__init__"): f
        for package, folder in FOLDERS.items()
        for f in sorted((ROOT / folder).rglob("*.py"))
    }


def room_of(module: str) -> str:
    if module == "freescale.config":
        return module
    return module if modules()[module].name == "__init__.py" else module.rpartition(".")[0]


@cache
def imported(module: str) -> frozenset[str]:
    """The modules of freescale that a module imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(modules()[module].read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {full if (full := f"{node.module}.{alias.name}") in modules() else node.module for alias in node.names}
    return frozenset(name for name in names if name in modules() and name != module)


@cache
def room_graph() -> dict[str, frozenset[str]]:
    """room: the rooms that it imports from."""
    arrows: dict[str, set[str]] = {room: set() for room in ROOMS}
    for module in modules():
        if module not in FRONT_DOOR:
            arrows[room_of(module)] |= {room_of(name) for name in imported(module)} - {room_of(module)}
    return {room: frozenset(targets) for room, targets in arrows.items()}


def test_every_folder_is_a_room():
    assert {room_of(module) for module in modules()} == set(ROOMS)


def test_no_module_imports_itself_through_others():
    try:
        tuple(TopologicalSorter({m: imported(m) for m in modules() if m not in FRONT_DOOR}).static_order())
    except CycleError as circle:
        pytest.fail(" <- ".join(circle.args[1]))


def test_no_arrow_between_folders_points_upwards():
    wrong = [
        f"{room} -> {target}"
        for room, targets in room_graph().items()
        for target in sorted(targets)
        if ROOMS.index(target) > ROOMS.index(room)
    ]
    assert wrong == []


def test_passes_and_runtime_do_not_know_each_other():
    graph = room_graph()
    assert not any(target.startswith("freescale.runtime") for target in graph["freescale.passes"])
    assert not any("freescale.passes" in targets for room, targets in graph.items() if room.startswith("freescale.runtime"))


def test_the_graph_is_read_from_the_sources():
    """(Else the tests above would hold whatever the sources say.)"""
    graph = room_graph()
    assert "freescale.kernels.transports" in graph["freescale.kernels"]
    assert "freescale.passes" in graph["freescale"]
    assert imported("freescale.runtime.lookahead.planning") >= {"freescale.runtime.batch_structure"}


def test_sub_packages_hold_no_code():
    for name, file in modules().items():
        if file.name == "__init__.py" and name.count(".") > 1:
            assert len(file.read_text().splitlines()) <= 1, name


def sources() -> list[Path]:
    return [*modules().values(), *sorted(ROOT.glob("examples/*.py")), *sorted(ROOT.glob("benchmarks/*.py"))]


def test_files_are_short():
    lengths = {str(f.relative_to(ROOT)): len(f.read_text().splitlines()) for f in sources() if f.stat().st_size}
    assert {name: n for name, n in lengths.items() if n > 400} == {}
    assert statistics.median(lengths.values()) < 200


def test_functions_are_short():
    long = {
        f"{f.relative_to(ROOT)}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for f in sources()
        for node in ast.walk(ast.parse(f.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.end_lineno is not None and node.end_lineno - node.lineno + 1 > 60
    }
    assert long == {}


def test_programs_find_their_own_modules():
    """Examples, benchmarks and the support of tests are on the path together, so no two modules there share a name."""
    files = [f for folder in ("examples", "benchmarks", "tests/support") for f in sorted((ROOT / folder).glob("*.py"))]
    names = [f.stem for f in files]
    assert len(names) > 30 and len(set(names)) == len(names), sorted(n for n in names if names.count(n) > 1)
