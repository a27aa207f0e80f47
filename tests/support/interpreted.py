"""Triton kernels on the CPU, in Triton's interpreter with bounds checks (bounds_checked.py).

The interpreter must be selected before Triton is imported, so the cases of a test file run in a separate process: the
file itself as a program (`run_cases`), once for all of its tests (`in_the_interpreter`) and for all pytest-xdist
workers. After collection, one process loads torch and Triton and is forked for each file, while other tests run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
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


def in_the_interpreter(
    file: str, cases: Sequence[Callable[[str], None]], thorough: Collection[Callable[[str], None]] = ()
) -> Callable[..., None]:
    """A test per case of the file. `thorough`: cases with that mark."""

    @pytest.mark.skipif(not HAS_TRITON, reason="no triton")
    @pytest.mark.parametrize(
        "case", [pytest.param(c.__name__, marks=[pytest.mark.thorough] if c in thorough else []) for c in cases]
    )
    def test(case: str) -> None:
        said = _outcomes(file)[case]
        assert said == "ok", said

    test.in_the_interpreter = file
    return test


def on_a_gpu(cases: Sequence[Callable[[str], None]]) -> Callable[..., None]:
    """A test per case, on a GPU."""

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    @pytest.mark.parametrize("case", cases, ids=lambda c: c.__name__)
    def test(case: Callable[[str], None]) -> None:
        case("cuda")

    return test


def _folder(file: str = "") -> Path:
    return session_folder.path() / "interpreted" / Path(file).stem


def start(wanted: dict[str, list[str]]) -> None:
    """Run cases of test files in the background, unless another worker has started them."""
    try:
        _folder().mkdir()
    except FileExistsError:
        return
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [os.path.dirname(__file__), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, os.path.abspath(__file__), json.dumps(wanted)]
    running = subprocess.Popen(command, env=env, cwd=_folder(), start_new_session=True)
    (_folder() / "pid").write_text(str(running.pid))
    running.returncode = 0  # not waited for here: the files in the folder count


def stop_all() -> None:
    """Stop what is still running when the tests are over."""
    if (_folder() / "pid").exists() and not (_folder() / "done").exists():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int((_folder() / "pid").read_text()), signal.SIGKILL)


def _run_files(wanted: dict[str, list[str]]) -> None:
    """Runs in the process that `start` starts. With two cores, one file at a time, to leave the rest to other tests."""
    left, running = list(wanted.items()), {}
    while left or running:
        while left and len(running) < max(1, (os.cpu_count() or 1) // 2):
            file, cases = left.pop(0)
            _folder(file).mkdir()
            child = os.fork()
            if child == 0:
                _run_file(file, cases)
            running[child] = file
        child, status = os.wait()
        part = _folder(running.pop(child)) / "code.part"
        part.write_text(str(os.waitstatus_to_exitcode(status)))
        part.rename(part.with_suffix(""))


def _run_file(file: str, cases: list[str]) -> None:
    for name, descriptor in (("out", 1), ("errors", 2)):
        os.dup2(os.open(_folder(file) / name, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.argv, code = [file, *cases], 1
    try:
        runpy.run_path(file, run_name="__main__")
        code = 0
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


@cache
def _outcomes(file: str) -> dict[str, str]:
    """For each case of the test file "ok", or the error."""
    folder, end = _folder(file), time.monotonic() + 280
    while not (folder / "code").exists():
        assert not (_folder() / "done").exists() or (folder / "code").exists(), "Triton's interpreter did not start"
        assert time.monotonic() < end, f"{file} did not finish in Triton's interpreter"
        time.sleep(0.1)
    assert (folder / "code").read_text() == "0", (folder / "errors").read_text()
    return json.loads((folder / "out").read_text().splitlines()[-1])


def run_cases(cases: Sequence[Callable[[str], None]], check_bounds: bool = True) -> None:
    """Run the cases named on the command line, for `_outcomes`; without names (manually, on a GPU), all of them.

    check_bounds: False for kernels that read addresses from memory, outside their arguments.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if interpreted:
        faster_interpreter.install()
    if interpreted and check_bounds:
        bounds_checked.install()
    said = {}
    for case in (c for c in cases if c.__name__ in sys.argv[1:] or len(sys.argv) == 1):
        chosen = seed()
        try:
            case("cpu" if interpreted else "cuda")
            said[case.__name__] = "ok"
        except Exception:
            said[case.__name__] = f"seed {chosen}\n{traceback.format_exc()}"
    print(json.dumps(said))
    if not interpreted:
        sys.exit(any(word != "ok" for word in said.values()))


if __name__ == "__main__":
    try:

        import freescale.kernels.row_kernels  # noqa: F401

        _run_files(json.loads(sys.argv[1]))
    finally:
        (_folder() / "done").touch()
