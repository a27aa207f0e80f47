"""What a GPU result was measured on, how several ranks share that GPU, and how the result is written down."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch


def machine() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    asked = ["nvidia-smi", "--query-gpu=driver_version,pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader"]
    said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip().splitlines()
    return {
        "gpu": properties.name,
        "sms": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "driver, PCIe generation, lanes": said[0] if said else "unknown",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
    }


@contextmanager
def mps() -> Iterator[bool]:
    """The MPS server, for processes that start between here and the end. Yields whether it is there."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        with mock.patch.dict(os.environ, CUDA_MPS_PIPE_DIRECTORY=folder, CUDA_MPS_LOG_DIRECTORY=folder):
            try:
                started = subprocess.run(["nvidia-cuda-mps-control", "-d"], check=False).returncode == 0
            except FileNotFoundError:
                started = False
            try:
                yield started
            finally:
                if started:
                    subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, check=False)


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Median, and the quartiles around it."""
    q = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.5, 0.25, 0.75], dtype=torch.float64))
    return float(q[0]), float(q[1]), float(q[2])


def write(path: str | None, result: dict[str, Any]) -> None:
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(result, indent=1) + "\n")
