"""Triton kernels on the CPU, in Triton's interpreter.

The interpreter must be chosen before Triton is imported, so the cases of a test file run in a process of their own: the
file itself, as a program (`run_cases`), started once for all of its tests (`in_the_interpreter`), when pytest has found
them: it takes its time while other tests run.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch

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


@cache
def start(file: str) -> subprocess.Popen[str]:
    """Run the cases of a test file, in the background and with the least priority."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [os.path.dirname(__file__), os.environ.get("PYTHONPATH")]))
    command = ["nice", "-n", "19", sys.executable, file]
    running = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    atexit.register(running.kill)
    return running


@cache
def _outcomes(file: str) -> dict[str, str]:
    """For each case of the test file "ok", or why not."""
    running = start(file)
    said, errors = running.communicate(timeout=280)
    assert running.returncode == 0, errors
    return json.loads(said.splitlines()[-1])


def run_cases(cases: Sequence[Callable[[str], None]]) -> None:
    """For `_outcomes`; by hand on the GPU, for example under compute-sanitizer."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
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
