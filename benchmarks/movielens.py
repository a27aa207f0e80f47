"""MovieLens-100K (GroupLens, University of Minnesota): real histories, out of the `recbole` package on PyPI.

The file is taken from the installed package, or from its wheel, which pip downloads into the user's cache folder. It is
not a part of this repository and is never copied into it.
"""

from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np

CACHE = Path.home() / ".cache" / "freescale"
INSIDE = "recbole/dataset_example/ml-100k/ml-100k.inter"


def histories(cache: Path = CACHE) -> Path | None:
    """A file for `simulate --histories`: each user's items in the order of time. None, and a sentence, without it."""
    path = cache / "movielens-100k.npz"
    if not path.exists():
        text = _interactions(cache)
        if text is None:
            print("MovieLens-100K cannot be had here (pip download recbole); going on with synthetic ids alone")
            return None
        lengths, ids = by_user(text)
        np.savez(path, lengths=lengths, ids=ids)
    return path


def by_user(text: str) -> tuple[np.ndarray, np.ndarray]:
    """Of lines `user item rating timestamp`, under a head: the lengths of histories and their ids, from 0."""
    table = np.loadtxt(io.StringIO(text), delimiter="\t", skiprows=1, dtype=np.float64)
    user, item, when = table[:, 0].astype(np.int64), table[:, 1].astype(np.int64), table[:, 3]
    order = np.lexsort((item, when, user))
    _, lengths = np.unique(user, return_counts=True)
    return lengths, np.unique(item, return_inverse=True)[1][order]


def _interactions(cache: Path) -> str | None:
    package = find_spec("recbole")
    if package is not None and package.submodule_search_locations:
        found = Path(package.submodule_search_locations[0]).parent / INSIDE
        if found.is_file():
            return found.read_text()
    cache.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq", "download", "--no-deps", "recbole"]
    try:
        subprocess.run([*command, "-d", str(cache)], check=True, capture_output=True, timeout=120)
        (wheel, *_) = sorted(cache.glob("recbole-*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(INSIDE).decode()
    except (subprocess.SubprocessError, OSError, ValueError, KeyError, zipfile.BadZipFile):
        return None
