"""Batches of any structure: find the ids that the exchanges need, move everything to a device.

A batch is a tensor, a KeyedJaggedTensor, or a dict, list, tuple or dataclass of batches. A feature is a key of a
KeyedJaggedTensor, or a dict key or field name whose value is an integer tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch


def is_kjt(x: Any) -> bool:
    return type(x).__name__ == "KeyedJaggedTensor" and hasattr(x, "length_per_key")


def _children(x: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(x, Mapping):
        yield from ((str(k), v) for k, v in x.items())
    elif dataclasses.is_dataclass(x) and not isinstance(x, type):
        yield from ((f.name, getattr(x, f.name)) for f in dataclasses.fields(x))
    elif isinstance(x, tuple) and hasattr(x, "_fields"):
        yield from zip(x._fields, x, strict=True)
    elif isinstance(x, (list, tuple)):
        yield from ((str(i), v) for i, v in enumerate(x))


def features(batch: Any, wanted: Iterable[str]) -> dict[str, torch.Tensor]:
    """The ids of each wanted feature, on the CPU. An error names the feature that is missing or there twice."""
    wanted = list(dict.fromkeys(wanted))
    found: dict[str, torch.Tensor] = {}

    def keep(name: str, ids: torch.Tensor) -> None:
        if name in found:
            raise ValueError(f"freescale: feature {name!r} is in the batch twice; the look-ahead cannot tell which to plan")
        found[name] = ids.cpu()

    def walk(name: str, x: Any) -> None:
        if is_kjt(x):
            keys = x.keys()
            if any(k in wanted for k in keys):
                for key, ids in _split(x).items():
                    if key in wanted:
                        keep(key, ids)
        elif isinstance(x, torch.Tensor):
            if name in wanted and not x.dtype.is_floating_point:
                keep(name, x)
        else:
            for child_name, child in _children(x):
                walk(child_name, child)

    walk("", batch)
    missing = [w for w in wanted if w not in found]
    if missing:
        raise ValueError(
            f"freescale: the batch has no feature {', '.join(map(repr, missing))}, which the model looks up; "
            f"found {structure(batch)}"
        )
    return found


def _split(kjt: Any) -> dict[str, torch.Tensor]:
    """Values per key; also for a batch without samples, which KJT.to_dict refuses."""
    keys, lengths = kjt.keys(), kjt.lengths().cpu()
    counts = lengths.view(len(keys), lengths.shape[0] // len(keys)).sum(1).tolist()
    return dict(zip(keys, torch.split(kjt.values(), counts), strict=True))


def structure(x: Any) -> str:
    """What a batch is made of, in words; equal for batches of the same structure."""
    if is_kjt(x):
        return f"KeyedJaggedTensor({', '.join(x.keys())})"
    if isinstance(x, torch.Tensor):
        return f"{str(x.dtype).removeprefix('torch.')} tensor of {x.dim()} dimensions"
    inside = ", ".join(f"{name}: {structure(child)}" for name, child in _children(x))
    return f"{type(x).__name__}({inside})" if inside else type(x).__name__


def move(x: Any, device: torch.device) -> Any:
    """The batch on `device`, copied from pinned memory without waiting. On the CPU the batch itself."""
    if device.type == "cpu":
        return x
    if isinstance(x, torch.Tensor) or is_kjt(x):
        if x.device() == device if is_kjt(x) else x.device == device:
            return x
        return x.pin_memory().to(device, non_blocking=True)
    return _rebuild(x, lambda child: move(child, device))


def _rebuild(x: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(x, Mapping):
        return type(x)({k: change(v) for k, v in x.items()})  # type: ignore[call-arg]
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return dataclasses.replace(x, **{f.name: change(getattr(x, f.name)) for f in dataclasses.fields(x)})
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*map(change, x))
    if isinstance(x, (list, tuple)):
        return type(x)(map(change, x))
    return x
