"""Triton kernels on the CPU, in Triton's interpreter, where each access is checked (bounds_checked.py).

The interpreter must be chosen before Triton is imported, so the cases of a test file run in a process of their own: the
file itself, as a program (`run_cases`), started once for all of its tests (`in_the_interpreter`) and for all workers of
pytest-xdist, when pytest has found them: it takes its time while other tests run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

import bounds_checked
import faster_interpreter
import session_folder
from seeding import seed

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
HAS_TRITON = importlib.util.find_spec("triton") is not None


def in_the_interpreter(file: str, cases: Sequence[Callable[[str], None]]) -> Callable[..., None]:
    """The test that each case of the file holds there."""

    @pytest.mark.skipif(not HAS_TRITON, reason="no triton")
    @pytest.mark.parametrize("case", [case.__name__ for case in cases])
    def test(case: str) -> None:
        said = _outcomes(file)[case]
        assert said == "ok", said

    test.in_the_interpreter = file
    return test


def on_a_gpu(cases: Sequence[Callable[[str], None]]) -> Callable[..., None]:
    """The test that each case holds on a GPU."""

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    @pytest.mark.parametrize("case", cases, ids=lambda c: c.__name__)
    def test(case: Callable[[str], None]) -> None:
        case("cuda")

    return test


def _folder(file: str) -> Path:
    return session_folder.path() / f"interpreted-{Path(file).stem}"


def start(file: str) -> None:
    """Run the cases of a test file in the background, unless another worker has begun."""
    folder = _folder(file)
    try:
        folder.mkdir()
    except FileExistsError:
        return
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [os.path.dirname(__file__), os.environ.get("PYTHONPATH")]))
    script = '"$0" "$1" >out 2>errors; echo $? >code.part; mv code.part code'
    command = ["sh", "-c", script, sys.executable, os.path.abspath(file)]
    running = subprocess.Popen(command, env=env, cwd=folder, start_new_session=True)
    (folder / "pid").write_text(str(running.pid))


def stop_all() -> None:
    """What still runs when the tests are over."""
    for pid in session_folder.path().glob("interpreted-*/pid"):
        if not (pid.parent / "code").exists():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(pid.read_text()), signal.SIGKILL)


@cache
def _outcomes(file: str) -> dict[str, str]:
    """For each case of the test file "ok", or why not."""
    start(file)
    folder, end = _folder(file), time.monotonic() + 280
    while not (folder / "code").exists():
        assert time.monotonic() < end, f"{file} did not finish in Triton's interpreter"
        time.sleep(0.1)
    assert (folder / "code").read_text() == "0\n", (folder / "errors").read_text()
    return json.loads((folder / "out").read_text().splitlines()[-1])


def run_cases(cases: Sequence[Callable[[str], None]], check_bounds: bool = True) -> None:
    """For `_outcomes`; by hand on the GPU, for example under compute-sanitizer.

    check_bounds: not for kernels that read addresses from memory, which are none of their arguments.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if interpreted:
        faster_interpreter.install()
    if interpreted and check_bounds:
        bounds_checked.install()
    said = {}
    for case in cases:
        chosen = seed()
        try:
            case("cpu" if interpreted else "cuda")
            said[case.__name__] = "ok"
        except Exception:
            said[case.__name__] = f"seed {chosen}\n{traceback.format_exc()}"
    print(json.dumps(said))
    if not interpreted:
        sys.exit(any(word != "ok" for word in said.values()))
