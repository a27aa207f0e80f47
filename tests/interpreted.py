"""Triton kernels on the CPU, in Triton's interpreter.

The interpreter must be chosen before Triton is imported, so the cases of a test file run in a process of their own: the
file itself, as a program (`run_cases`), started once for all of its tests (`in_the_interpreter`).
"""

from __future__ import annotations

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

from conftest import seed

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
HAS_TRITON = importlib.util.find_spec("triton") is not None


def in_the_interpreter(file: str, cases: Sequence[Callable[[str], None]]) -> Callable[..., None]:
    """The test that each case of the file holds there."""

    @pytest.mark.skipif(not HAS_TRITON, reason="no triton")
    @pytest.mark.parametrize("case", [case.__name__ for case in cases])
    def test(case: str) -> None:
        said = _outcomes(file)[case]
        assert said == "ok", said

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
def _outcomes(file: str) -> dict[str, str]:
    """For each case of the test file "ok", or why not."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, file], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


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
