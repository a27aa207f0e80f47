"""What every test begins with: the same random numbers every time, so that a failure can be seen again.

`FRESH=1` takes new ones: other seeds, other examples of hypothesis (the seed is printed with a failure).
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch._functorch.config
from hypothesis import settings

import interpreted
import scheduling
import session_folder
from seeding import FRESH, seed

settings.register_profile("same", derandomize=True)
settings.register_profile("fresh", print_blob=True)
settings.load_profile("fresh" if FRESH else "same")

# What pytest itself compiles, it compiles to look at it; ranks find each other's graphs in torch's caches (ranks.py).
torch._functorch.config.enable_autograd_cache = False


@pytest.fixture(autouse=True)
def _seeded() -> None:
    print("seed", seed())


def pytest_configure(config: pytest.Config) -> None:
    """In the process that starts the run; its workers (pytest-xdist) inherit the environment."""
    if hasattr(config, "workerinput"):
        return
    # Of torch's caches, too: what is compiled depends on nothing that was there before.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(session_folder.create().name, "compiled")
    # Inductor compiles and runs a program for every instruction set before it believes that the CPU has it: seconds in
    # every fresh cache folder. Here the CPU's own word is enough (0: where the compiler is older than the CPU).
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        interpreted.stop_all()
        session_folder.create().cleanup()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return scheduling.scheduler(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: scheduling.place_of(item.nodeid))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Those of Triton's interpreter are slow and need one core: they begin now."""
    wanted: dict[str, list[str]] = {}
    for item in session.items:
        file = getattr(item.obj, "in_the_interpreter", None) if isinstance(item, pytest.Function) else None
        if file is not None:
            wanted.setdefault(file, []).append(item.callspec.params["case"])
    if interpreted.HAS_TRITON and wanted and not session.config.option.collectonly:
        interpreted.start(wanted)
