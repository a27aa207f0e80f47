"""What is simulated on: the speed of a rank and of its links. Presets, and TOML files of your own.

Where each number of a preset comes from stands in docs/simulate.md.
"""

from __future__ import annotations

import difflib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any


class InputError(ValueError):
    """Something that a user gave cannot be used: a sentence that names it."""


def _bounded(low: float, high: float, doc: str, *, above: bool = False) -> Any:
    """A number from `low` (if `above`, more than that) to `high`."""
    return field(metadata={"low": low, "high": high, "above": above, "doc": doc})


@dataclass(frozen=True)
class Cluster:
    """One rank is one GPU. Speeds of links are per rank and direction."""

    name: str = field(metadata={"doc": "in words"})
    dim: int = _bounded(1, 1 << 16, "columns of a row; the model that was timed is as wide")
    layers: int = _bounded(1, 1000, "blocks of the model that was timed")
    row_element_bytes: int = _bounded(1, 8, "bytes of a number in a row, on the wire")
    ranks_per_host: int = _bounded(1, 4096, "ranks that share the link inside a host")
    seconds_per_token: float = _bounded(0, 1, "of the dense part, forward and backward; matrix products and the rest")
    seconds_per_token_squared: float = _bounded(0, 1, "the same; attention")
    jitter: float = _bounded(0, 0.5, "standard deviation of a rank's compute in a step, as a share of it")
    host_ms: float = _bounded(0, 1e5, "a step takes at least as long: what its launches take on the host")
    host_ms_look_ahead: float = _bounded(0, 1e5, "the same, more, with freescale's look-ahead")
    sm_tax: float = _bounded(0, 0.9, "share of its speed that compute loses beside a collective that is a kernel")
    copy_tax: float = _bounded(0, 0.9, "the same beside copy engines")
    inside_gb_per_s: float = _bounded(0, 1e5, "GB/s between ranks of a host", above=True)
    between_gb_per_s: float = _bounded(0, 1e5, "GB/s between hosts", above=True)
    copy_engine_gb_per_s: float = _bounded(0, 1e5, "GB/s between a GPU and host memory", above=True)
    latency_us: float = _bounded(0, 1e6, "of any collective")
    message_us: float = _bounded(0, 1e4, "that each peer's message adds to the time of a collective")
    torchrec_link_share: float = _bounded(0, 1, "share of a link that TorchRec's all-to-all reaches", above=True)


FIELDS = {f.name: f for f in fields(Cluster)}

# Measured with `simulate --calibrate` on an H200 (benchmarks/results/calibrate_h200.json), or by the benchmarks named.
_HOPPER: dict[str, Any] = {
    "dim": 512, "layers": 4, "row_element_bytes": 4, "ranks_per_host": 8,
    "seconds_per_token": 1.64e-7, "seconds_per_token_squared": 4.0e-11, "jitter": 0.009,
    "host_ms": 12.3, "host_ms_look_ahead": 4.9,
    "sm_tax": 0.09, "copy_tax": 0.016,
    "inside_gb_per_s": 450.0, "copy_engine_gb_per_s": 46.8, "latency_us": 30.0, "message_us": 1.0,
    "torchrec_link_share": 1.0,
}  # fmt: skip

PRESETS = {
    "h100": Cluster(name="H100 SXM, 8 x 200 Gb/s per host", between_gb_per_s=25.0, **_HOPPER),
    "h200": Cluster(name="H200 SXM, 8 x 400 Gb/s per host", between_gb_per_s=50.0, **_HOPPER),
    "nvlink": Cluster(
        name="H200 SXM, one NVLink domain", between_gb_per_s=50.0, **{**_HOPPER, "ranks_per_host": 4096}
    ),
}


def find(name: str) -> Cluster:
    """A preset, or what a TOML file describes."""
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if not path.suffix and not path.exists():
        raise InputError(f"there is no preset {name!r}, and no such file; presets: {', '.join(PRESETS)}")
    return read(path)


def read(path: Path) -> Cluster:
    try:
        import tomllib
    except ImportError:
        raise InputError(f"{path}: reading a cluster file needs Python 3.11 or newer (tomllib)") from None
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise InputError(f"{path}: the cluster file cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: the cluster file is not TOML: {error}") from None
    return checked(values, str(path))


def checked(values: dict[str, Any], where: str) -> Cluster:
    """`values` as a Cluster; an error names `where` and the field."""
    for name in values:
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, n=1)
            hint = f" Did you mean {near[0]}?" if near else f" Known: {', '.join(FIELDS)}"
            raise InputError(f"{where}: {name} is not a field of a cluster.{hint}")
    for name in FIELDS:
        if name not in values:
            raise InputError(f"{where}: the field {name} is missing ({FIELDS[name].metadata['doc']})")
    return Cluster(**{name: _value(name, values[name], where) for name in FIELDS})


def _value(name: str, value: Any, where: str) -> Any:
    kind, limits = FIELDS[name].type, FIELDS[name].metadata
    if kind == "str":
        if not isinstance(value, str):
            raise InputError(f"{where}: {name} must be text, found {value!r}")
        return value
    if isinstance(value, bool) or not isinstance(value, int if kind == "int" else (int, float)):
        wanted = "a whole number" if kind == "int" else "a number"
        raise InputError(f"{where}: {name} must be {wanted}, found {value!r}")
    low, high, above = limits["low"], limits["high"], limits["above"]
    if not low <= value <= high or above and value == low:
        least = f"more than {low:g}" if above else f"at least {low:g}"
        raise InputError(f"{where}: {name} must be {least} and at most {high:g}, found {value!r}")
    return int(value) if kind == "int" else float(value)


def to_toml(cluster: Cluster, comments: list[str]) -> str:
    """A file that `read` takes."""
    lines = [f"# {line}" for line in comments]
    for name, value in asdict(cluster).items():
        text = '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"' if isinstance(value, str) else repr(value)
        lines.append(f"{name} = {text}  # {FIELDS[name].metadata['doc']}")
    return "\n".join(lines) + "\n"
