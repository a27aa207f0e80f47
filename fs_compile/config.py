"""Every setting of freescale, its legal values and its default. The only module that reads FREESCALE_* variables.

A field `name` is the variable FREESCALE_NAME and the key "name" of `options=`, which beats the variable. Settings
belong to a model's torch.compile call; code gets them from the model or the graph at hand (compat's options_of and
options_while_tracing). Two are process-wide: `dynamic` (Dynamo's settings are global) and `ring_mb` (pinned once).
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import Any

log = logging.getLogger(__name__)

PREFIX = "FREESCALE_"

# The passes, in the order in which they run. Each name is also a module and a function in freescale.passes.
PASS_ORDER = (
    "find_exchanges", "split_exchanges", "join_pieces", "gather_parts", "bucket_gradients", "compress_exchange",
    "overlap_attention", "lower_copies", "move_background",
)  # fmt: skip
# Passes that change numerics: not part of `all`, only run if named.
LOSSY_PASSES = ("compress_exchange",)
PASS_NAMES = tuple(name for name in PASS_ORDER if name not in LOSSY_PASSES)  # those in `all`

DENSE_CHOICES = ("off", "allreduce")
COMPRESS_FORM = "rows:SHARE, dense:SHARE or both, then which=background or which=all"
# Accepted until the next release; see Config._replace_deprecated.
DEPRECATED_WIRES = {"fp16,stochastic": "fp16", "bf16,stochastic": "bf16"}
DEPRECATED_ROWS = "rows:lossless"
DEPRECATED_TRANSPORTS = {"peer": "auto"}
DEPRECATED = {"wire": DEPRECATED_WIRES, "transport": DEPRECATED_TRANSPORTS}


class ConfigError(ValueError):
    """An unknown flag or option, or an illegal value."""


def _flag(default: Any, doc: str, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"doc": doc, "choices": choices})


@dataclass(frozen=True)
class Compression:
    """What FREESCALE_COMPRESS and FREESCALE_WIRE request."""

    rows: Fraction | None = None  # share of the bytes of rows and their gradients to send
    dense: Fraction | None = None  # share of the bytes of dense gradients
    which: str = "background"  # or "all": urgent rows and gradients too
    wire: str = "fp32"  # dtype in which rows and their gradients are sent

    @property
    def sends_less(self) -> bool:
        return self.rows is not None or self.dense is not None or self.wire != "fp32"


@dataclass(frozen=True)
class Config:
    passes: str = _flag(
        "all",
        "Passes to run: `all`, `none`, a list `a,b`, or all but some: `-a,-b`; `all` omits "
        "`compress_exchange`, which `all,compress_exchange` adds",
    )
    codegen: str = _flag(
        "inductor",
        "`eager` runs the same passes on the same graphs, and interprets the result without code generation",
        ("inductor", "eager"),
    )
    strict: bool = _flag(False, "Warnings (a pass or a table that freescale skips) become errors")
    dynamic: bool = _flag(True, "Batch sizes are symbolic from the first step; a size of 1 gets separate graphs")
    timeout: float = _flag(
        120.0, "Seconds that a rank waits for the other ranks to agree; longer while one is compiling"
    )

    dense: str = _flag(
        "off",
        "`allreduce`: the backward graph averages the gradients of dense parameters over the ranks, instead of "
        "DistributedDataParallel ([dense gradients](dense.md))",
        DENSE_CHOICES,
    )
    bucket_mb: float = _flag(25.0, "Maximum size of a dense gradient bucket in MiB")
    link_gbps: float = _flag(0.0, "Bandwidth of the link in Gbit/s; 0: measured once per group at start-up")
    transport: str = _flag(
        "auto",
        "Transport of launches; `auto`: `c10d` on the CPU; on GPUs the fastest one that every rank of the group "
        "supports, or one without SMs that is nearly as fast",
        ("auto", "c10d", "staged", "nixl"),
    )
    ring_mb: float = _flag(
        256.0, "Host memory in MiB that `staged` or `nixl` pins on each rank, once; larger messages wait for free slots"
    )
    min_bytes: float = _flag(64.0, "Minimum row size in bytes for splitting a plain all-to-all by consumer")
    compress: str = _flag(
        "",
        "For the pass `compress_exchange`: the share of bytes to send, `rows:0.05`, `dense:0.01` or both, and "
        "`which=all` for urgent rows and gradients too; empty: send everything ([compression](compress.md))",
    )
    wire: str = _flag(
        "fp32",
        "For the pass `compress_exchange`: the dtype in which rows and their gradients are sent, rounded to nearest; "
        "gradients in `fp8` use stochastic rounding",
        ("fp32", "fp16", "bf16", "fp8"),
    )
    progress: bool = _flag(True, "Rank 0 reports on standard error which graph is compiling, and how long it took")
    record: str = _flag("", "Folder for a recording, one file per rank, for `python -m freescale report`; empty: none")

    def __post_init__(self) -> None:
        self.enabled_passes()
        for name in ("link_gbps", "min_bytes"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{PREFIX}{name.upper()} must not be negative, found {getattr(self, name)}")
        for name in ("ring_mb", "bucket_mb"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{PREFIX}{name.upper()} must be more than 0, found {getattr(self, name)}")
        if not self.timeout > 0:
            raise ConfigError(f"{PREFIX}TIMEOUT must be more than 0 seconds, found {self.timeout}")
        self._check_compression()
        self._replace_deprecated()

    def _check_compression(self) -> None:
        asked, named = self.compression(), "compress_exchange" in self.enabled_passes()
        lossless = DEPRECATED_ROWS in _words(self.compress)
        if not named and (self.compress or self.wire != "fp32"):
            flag = f"{PREFIX}COMPRESS" if self.compress else f"{PREFIX}WIRE"
            also = "all" if self.passes.strip() == "all" else "..."
            raise ConfigError(
                f"{flag} is for the pass compress_exchange, which is opt-in: "
                f"set {PREFIX}PASSES={also},compress_exchange"
            )
        if named and self.strict and not (asked.sends_less or lossless):
            raise ConfigError(
                f"strict requires an explicit ratio for a lossy pass: set {PREFIX}COMPRESS or {PREFIX}WIRE, or "
                f"remove compress_exchange from {PREFIX}PASSES"
            )
        if (asked.rows is not None or lossless) and asked.wire != "fp32":
            raise ConfigError(
                f"{PREFIX}COMPRESS={self.compress} selects values of rows and {PREFIX}WIRE={self.wire} rounds them; "
                "use only one of the two"
            )
        if asked.dense is not None and self.dense == "off":
            raise ConfigError(
                f"{PREFIX}COMPRESS={self.compress}: dense gradients are only compressed if the graph averages them; "
                f"set {PREFIX}DENSE=allreduce"
            )

    def _replace_deprecated(self) -> None:
        """Cache keys contain the substitutes, and ranks compare them."""
        if (wire := DEPRECATED_WIRES.get(self.wire)) is not None:
            _say_deprecated(f"{PREFIX}WIRE={self.wire}", f"{wire}, rounded to nearest")
            object.__setattr__(self, "wire", wire)
        if (transport := DEPRECATED_TRANSPORTS.get(self.transport)) is not None:
            _say_deprecated(f"{PREFIX}TRANSPORT={self.transport}", transport)
            object.__setattr__(self, "transport", transport)
        if DEPRECATED_ROWS in (words := _words(self.compress)):
            _say_deprecated(f"{PREFIX}COMPRESS={DEPRECATED_ROWS}", "no compression of rows")
            words.remove(DEPRECATED_ROWS)
            object.__setattr__(self, "compress", ",".join(words))
            if not self.compression().sends_less:
                passes = [p for p in _words(self.passes) if p != "compress_exchange"]
                object.__setattr__(self, "passes", ",".join(passes) or "none")
                object.__setattr__(self, "compress", "")

    def compression(self) -> Compression:
        found: dict[str, Any] = {}
        for word in _words(self.compress):
            name, sign, value = word.replace("=", ":").partition(":")
            kind = "=" if "=" in word else ":"
            if name in found:
                raise ConfigError(f"{PREFIX}COMPRESS sets {name} twice: {self.compress!r}")
            if word == DEPRECATED_ROWS:
                found[name] = None
            elif sign and kind == ":" and name in ("rows", "dense"):
                found[name] = _share(value, word)
            elif kind == "=" and name == "which" and value in ("background", "all"):
                found[name] = value
            else:
                raise ConfigError(f"{PREFIX}COMPRESS must be {COMPRESS_FORM}, found {word!r}")
        return Compression(wire=self.wire, **found)

    def affecting_graphs(self) -> dict[str, Any]:
        """The settings that compiled code may depend on and that must be equal on all ranks."""
        reporting = ("progress", "record")
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in reporting}

    def enabled_passes(self) -> tuple[str, ...]:
        """In the order in which they run."""
        words = _words(self.passes)
        if words in ([], ["none"]):
            return ()
        minus = [w.startswith("-") for w in words]
        names = [w.lstrip("-") for w in words]
        for name in names:
            if name not in PASS_ORDER and name != "all":
                raise ConfigError(
                    f"{PREFIX}PASSES names an unknown pass {name!r}; the passes are {', '.join(PASS_ORDER)}"
                )
        if any(minus) and not all(minus):
            raise ConfigError(f"{PREFIX}PASSES mixes passes to run and passes to omit: {self.passes!r}")
        if "all" in names:
            if any(minus) or any(n in PASS_NAMES for n in names):
                raise ConfigError(f"{PREFIX}PASSES: all combines only with {', '.join(LOSSY_PASSES)}: {self.passes!r}")
            return tuple(p for p in PASS_ORDER if p in PASS_NAMES or p in names)
        if all(minus):
            return tuple(p for p in PASS_NAMES if p not in names)
        return tuple(p for p in PASS_ORDER if p in names)


def _words(text: str) -> list[str]:
    return [w for w in map(str.strip, text.split(",")) if w]


@cache
def _say_deprecated(given: str, instead: str) -> None:
    log.warning("%s is deprecated and will be an error in the next release; using %s", given, instead)


def _share(text: str, word: str) -> Fraction:
    try:
        share = Fraction(text).limit_denominator(10**6)
    except (ValueError, ZeroDivisionError):
        raise ConfigError(f"{PREFIX}COMPRESS: the share in {word!r} must be a number") from None
    if not 0 < share <= 1:
        raise ConfigError(f"{PREFIX}COMPRESS: the share in {word!r} must be more than 0 and at most 1")
    return share


FIELDS = {f.name: f for f in dataclasses.fields(Config)}


def _parse(name: str, value: Any, label: str) -> Any:
    f, default = FIELDS[name], FIELDS[name].default
    choices = f.metadata["choices"]
    if isinstance(default, bool):
        if isinstance(value, bool):
            return value
        known = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
        if str(value).lower() not in known:
            raise ConfigError(f"{label} must be 1 or 0, found {value!r}")
        return known[str(value).lower()]
    if isinstance(default, float):
        try:
            return float(value)
        except (TypeError, ValueError):
            raise ConfigError(f"{label} must be a number, found {value!r}") from None
    if isinstance(value, (list, tuple)):
        value = ",".join(map(str, value))
    if not isinstance(value, str):
        raise ConfigError(f"{label} must be text, found {value!r}")
    if choices and value not in choices and value not in DEPRECATED.get(name, ()):
        raise ConfigError(f"{label} must be one of {', '.join(choices)}, found {value!r}")
    return value


def _unknown(kind: str, name: str, legal: list[str]) -> ConfigError:
    bare = {n.removeprefix(PREFIX): n for n in legal}  # the shared prefix would make all flags look alike
    near = [bare[n] for n in difflib.get_close_matches(name.removeprefix(PREFIX), bare, n=1)]
    hint = f" Did you mean {near[0]}?" if near else ""
    return ConfigError(f"{name} is not {kind} of freescale.{hint} Known: {', '.join(legal)}")


def load(options: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Config:
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    flags = {PREFIX + name.upper(): name for name in FIELDS}
    for variable, text in environ.items():
        if variable.startswith(PREFIX):
            if variable not in flags:
                raise _unknown("a flag", variable, sorted(flags))
            values[flags[variable]] = _parse(flags[variable], text, variable)
    for name, value in (options or {}).items():
        if name not in FIELDS:
            raise _unknown("an option", name, sorted(FIELDS))
        values[name] = _parse(name, value, f"option {name!r}")
    return Config(**values)


def environment(**settings: str) -> dict[str, str]:
    """The environment of this process plus flags, for a subprocess."""
    return {**os.environ, **{PREFIX + name.upper(): value for name, value in settings.items()}}


def markdown_table() -> str:
    """The table of docs/flags.md; a test compares the two."""
    lines = ["| flag | default | meaning |", "|---|---|---|"]
    for name, f in FIELDS.items():
        default = int(f.default) if isinstance(f.default, bool) else f.default
        values = f" ({' or '.join(f.metadata['choices'])})" if f.metadata["choices"] else ""
        lines.append(f"| `{PREFIX}{name.upper()}` | `{default}` | {f.metadata['doc']}{values} |")
    return "\n".join(lines)
