"""The simulated cluster: presets, and TOML files. docs/simulate.md lists where each number of a preset comes from."""

from __future__ import annotations

import difflib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any


class InputError(ValueError):
    """Invalid user input; the message names it."""


def _bounded(low: float, high: float, doc: str, *, above: bool = False) -> Any:
    """A number from `low` (exclusive with `above`) to `high`."""
    return field(metadata={"low": low, "high": high, "above": above, "doc": doc})


@dataclass(frozen=True)
class Cluster:
    """One rank is one GPU. Link speeds are per rank and direction."""

    name: str = field(metadata={"doc": "description"})
    dim: int = _bounded(1, 1 << 16, "columns of a row, and width of the timed model")
    layers: int = _bounded(1, 1000, "blocks of the timed model")
    row_element_bytes: int = _bounded(1, 8, "bytes per element of a row, on the wire")
    ranks_per_host: int = _bounded(1, 4096, "ranks that share a host's internal link")
    seconds_per_token: float = _bounded(0, 1, "dense part, forward and backward, without attention")
    seconds_per_token_squared: float = _bounded(0, 1, "the same for attention")
    jitter: float = _bounded(0, 0.5, "relative standard deviation of a rank's compute per step")
    host_ms: float = _bounded(0, 1e5, "min step time: host time for its launches")
    host_ms_look_ahead: float = _bounded(0, 1e5, "additional host time with freescale's look-ahead")
    sm_tax: float = _bounded(0, 0.9, "slowdown of compute during a collective kernel")
    copy_tax: float = _bounded(0, 0.9, "the same during copy-engine transfers")
    inside_gb_per_s: float = _bounded(0, 1e5, "GB/s between ranks of a host", above=True)
    between_gb_per_s: float = _bounded(0, 1e5, "GB/s between hosts", above=True)
    copy_engine_gb_per_s: float = _bounded(0, 1e5, "GB/s between a GPU and host memory", above=True)
    latency_us: float = _bounded(0, 1e6, "latency of any collective")
    message_us: float = _bounded(0, 1e4, "additional time of a collective per peer")
    torchrec_link_share: float = _bounded(0, 1, "share of the link's speed that TorchRec's all-to-all has", above=True)


FIELDS = {f.name: f for f in fields(Cluster)}

# Measured with `simulate --calibrate` on an H200 (benchmarks/results/calibrate_h200.json), or by other benchmarks.
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
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if not path.suffix and not path.exists():
        raise InputError(f"no preset and no file {name!r}; presets: {', '.join(PRESETS)}")
    return read(path)


def read(path: Path) -> Cluster:
    try:
        import tomllib
    except ImportError:
        raise InputError(f"{path}: reading a cluster file requires Python 3.11 or newer (tomllib)") from None
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise InputError(f"{path}: cannot read the cluster file: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: the cluster file is not TOML: {error}") from None
    if (preset := values.pop("preset", None)) is not None:
        if preset not in list(PRESETS):
            raise InputError(f"{path}: preset must be one of {', '.join(PRESETS)}, found {preset!r}")
        values = asdict(PRESETS[preset]) | values
    return checked(values, str(path))


def checked(values: dict[str, Any], where: str) -> Cluster:
    """`values` as a Cluster. Errors name `where` and the field."""
    for name in values:
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, n=1)
            hint = f" Did you mean {near[0]}?" if near else f" Known: {', '.join(FIELDS)}"
            raise InputError(f"{where}: {name} is not a field of a cluster.{hint}")
    if missing := [name for name in FIELDS if name not in values]:
        inherit = f'preset = "{next(iter(PRESETS))}" (presets: {", ".join(PRESETS)})'
        raise InputError(f"{where}: missing: {', '.join(missing)}. Add them, or inherit them: {inherit}")
    return Cluster(**{name: _value(name, values[name], where) for name in FIELDS})


def _value(name: str, value: Any, where: str) -> Any:
    kind, limits = FIELDS[name].type, FIELDS[name].metadata
    if kind == "str":
        if not isinstance(value, str):
            raise InputError(f"{where}: {name} must be text, found {value!r}")
        return value
    if isinstance(value, bool) or not isinstance(value, int if kind == "int" else (int, float)):
        wanted = "an integer" if kind == "int" else "a number"
        raise InputError(f"{where}: {name} must be {wanted}, found {value!r}")
    low, high, above = limits["low"], limits["high"], limits["above"]
    if not low <= value <= high or above and value == low:
        least = f"more than {low:g}" if above else f"at least {low:g}"
        raise InputError(f"{where}: {name} must be {least} and at most {high:g}, found {value!r}")
    return int(value) if kind == "int" else float(value)


def to_toml(cluster: Cluster, comments: list[str]) -> str:
    lines = [f"# {line}" for line in comments]
    for name, value in asdict(cluster).items():
        text = '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"' if isinstance(value, str) else repr(value)
        lines.append(f"{name} = {text}  # {FIELDS[name].metadata['doc']}")
    return "\n".join(lines) + "\n"
