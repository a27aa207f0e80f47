"""A temporary folder for one run of pytest, shared by its workers (pytest-xdist) and their ranks."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path

_VARIABLE = "TESTS_OF_FREESCALE_FOLDER"  # (config.py rejects unknown FREESCALE_<NAME> variables)


@cache
def create() -> tempfile.TemporaryDirectory[str]:
    """Called by the process that starts the run: workers and ranks inherit its environment."""
    folder = tempfile.TemporaryDirectory(prefix="freescale-tests-", ignore_cleanup_errors=True)
    os.environ[_VARIABLE] = folder.name
    return folder


def path() -> Path:
    if _VARIABLE not in os.environ:
        create()
    return Path(os.environ[_VARIABLE])
