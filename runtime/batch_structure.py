"""Batches of any structure: find the ids that the exchanges need, and move tensors to a device or to the host. A batch
is a tensor, a KeyedJaggedTensor, or a dict, list, tuple or dataclass of batches. A feature is a key of a
KeyedJaggedTensor, or a dict key or field name whose value is an integer tensor."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from freescale.compat import dynamo
from freescale.kernels.planning import row_requests

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def is_kjt(x: Any) -> bool:
    return type(x).__name__ == "KeyedJaggedTensor" and hasattr(x, "length_per_key")


def children(x: Any) -> Iterator[tuple[str, Any]]:
    if type(x) is dict or isinstance(x, Mapping):
        yield from ((str(k), v) for k, v in x.items())
    elif dataclasses.is_dataclass(x) and not isinstance(x, type):
        yield from ((f.name, getattr(x, f.name)) for f in dataclasses.fields(x))
    elif isinstance(x, tuple) and hasattr(x, "_fields"):
        yield from zip(x._fields, x, strict=True)
    elif isinstance(x, (list, tuple)):
        yield from ((str(i), v) for i, v in enumerate(x))


def _named_leaves(name: str, x: Any) -> Iterator[tuple[str, Any]]:
    if is_kjt(x) or isinstance(x, torch.Tensor):
        yield name, x
    else:
        for child_name, child in children(x):
            yield from _named_leaves(child_name, child)


def _find_features(batch: Any, wanted: Collection[str]) -> Iterator[tuple[str, Any]]:
    """(feature, tensor or KeyedJaggedTensor with its ids) for each occurrence of a wanted feature. A tensor with the
    same name as a key of a KeyedJaggedTensor is not that feature: it may be a label."""
    named, wanted = list(_named_leaves("", batch)), set(wanted)
    keys = {key for _, x in named if is_kjt(x) for key in x.keys()}
    for name, x in named:
        if is_kjt(x):
            yield from ((key, x) for key in x.keys() if key in wanted)
        elif name in wanted and name not in keys and x.dtype in INTEGERS:
            yield name, x


def id_holders(batch: Any, wanted: Sequence[str]) -> list[Any]:
    return list({id(x): x for _, x in _find_features(batch, wanted)}.values())


def leaves(x: Any) -> Iterator[Any]:
    if isinstance(x, torch.Tensor) or is_kjt(x):
        yield x
    else:
        if type(x) is dict:
            parts: Iterable[Any] = x.values()
        else:
            parts = x if type(x) in (list, tuple) else (child for _, child in children(x))
        for part in parts:
            yield from leaves(part)


def feature_ids_and_counts(batch: Any, wanted: Collection[str]) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """The ids of each wanted feature, on the CPU, and the number of values per key of the KeyedJaggedTensors with ids,
    unless two of these differ. Raises if a feature is missing, or in the batch several times with different ids."""
    ids: dict[str, torch.Tensor] = {}
    places = list(_find_features(batch, wanted))
    host = _ids_on_host([x for _, x in places])
    splits = {id(x): _split(x.keys(), *host[id(x)]) for x in {id(x): x for _, x in places if is_kjt(x)}.values()}
    for name, x in places:
        if not is_kjt(x) and x.dim() != 1:
            raise not_flat(name, x)
        found = splits[id(x)][name] if is_kjt(x) else host[id(x)][0]
        if name in ids and not torch.equal(ids[name], found):
            raise ValueError(
                f"freescale: feature {name!r} is in the batch twice, with different ids: cannot tell which to plan"
            )
        ids[name] = found
    missing = [w for w in dict.fromkeys(wanted) if w not in ids]
    if missing:
        raise ValueError(
            f"freescale: the batch has no feature {', '.join(map(repr, missing))}, which the model looks up; "
            f"found {describe_structure(batch)}"
        )
    sizes = [(key, part.shape[0]) for of_keys in splits.values() for key, part in of_keys.items()]
    ambiguous = Counter(key for key, _ in dict.fromkeys(sizes))
    return ids, {key: n for key, n in sizes if ambiguous[key] == 1}


def not_flat(feature: str, ids: torch.Tensor) -> ValueError:
    return ValueError(
        f"freescale: feature {feature!r} must be a tensor of 1 dimension, found {ids.dim()}. Flatten padded ids before "
        "the lookup (ids.flatten(), or ids[mask] without the padding), and reshape the rows after it"
    )


def _ids_on_host(holders: Sequence[Any]) -> dict[int, list[torch.Tensor]]:
    """Ids per holder, keyed by id(holder); for a KeyedJaggedTensor also its lengths, and offsets if it has them."""
    parts = {id(x): [x.values(), x.lengths(), x.offsets_or_none()] if is_kjt(x) else [x] for x in holders}
    host = iter(to_host([t for tensors in parts.values() for t in tensors if t is not None]))
    return {key: [next(host) for t in tensors if t is not None] for key, tensors in parts.items()}


def _split(
    keys: Sequence[str], values: torch.Tensor, lengths: torch.Tensor, offsets: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Values per key. Unlike KJT.to_dict, supports a batch without samples."""
    fault = row_requests.find_fault(len(keys), row_requests.are_unique(keys), lengths, offsets, values.shape[0])
    if fault.kind:
        raise ValueError(f"freescale: {fault.describe()}")
    counts = lengths.view(len(keys), lengths.shape[0] // len(keys)).sum(1).tolist()
    return dict(zip(keys, torch.split(values, counts), strict=True))


def describe_structure(x: Any) -> str:
    """Description of a batch, equal for batches of the same structure. Values without tensors may differ."""
    if is_kjt(x):
        return f"KeyedJaggedTensor({', '.join(x.keys())})"
    if isinstance(x, torch.Tensor):
        return f"{str(x.dtype).removeprefix('torch.')} tensor of {x.dim()} dimensions"
    if not any(True for _ in leaves(x)):
        return "no tensors"
    inside = ", ".join(f"{name}: {describe_structure(child)}" for name, child in children(x))
    return f"{type(x).__name__}({inside})"


def to_device(x: Any, device: torch.device) -> Any:
    """The batch on `device`, copied asynchronously from pinned memory. On the CPU, the batch itself."""

    def copied(leaf: Any) -> Any:
        current = leaf.device() if is_kjt(leaf) else leaf.device
        if current == device:
            return leaf
        return (leaf.pin_memory() if current.type == "cpu" else leaf).to(device, non_blocking=True)

    return x if device.type == "cpu" else map_leaves(x, copied)


def to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors on the CPU. Synchronizes once per device, with its current stream."""
    host, streams = [], {}
    for t in tensors:
        if t.is_cuda:
            streams[t.device] = torch.cuda.current_stream(t.device)
            t = torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t.detach(), non_blocking=True)
        host.append(t if t.is_cpu else t.cpu())
    for stream in streams.values():
        stream.synchronize()
    return host


class BatchEvent:
    """The end of the work of one thread's streams on a batch. Another thread calls `wait` before it uses the batch."""

    def __init__(self, batch: Any) -> None:
        self._tensors = [t for t in _tensors(batch) if t.is_cuda]
        self._streams = {t.device: torch.cuda.current_stream(t.device) for t in self._tensors}
        self._events = {device: stream.record_event() for device, stream in self._streams.items()}

    def wait(self) -> None:
        for device, event in self._events.items():
            current = torch.cuda.current_stream(device)
            if current != self._streams[device]:
                current.wait_event(event)
                for t in self._tensors:
                    if t.device == device:
                        t.record_stream(current)


def versions(holders: Iterable[Any]) -> list[int]:
    """Versions of tensors, and of values and lengths of KeyedJaggedTensors. An in-place write increments one."""
    parts = ([x.values(), x.lengths()] if is_kjt(x) else [x] for x in holders)
    return [dynamo.version_of(t) for tensors in parts for t in tensors]


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    for x in leaves(batch):
        if is_kjt(x):
            yield from (t for t in (x.values(), x.lengths(), x.weights_or_none()) if t is not None)
        else:
            yield x


def map_leaves(x: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of the batch with `change(leaf)` for each of its `leaves`, in their order."""
    if isinstance(x, torch.Tensor) or is_kjt(x):
        return change(x)
    return map_children(x, lambda child: map_leaves(child, change))


def map_children(x: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(x, MutableMapping):
        new = copy.copy(x)
        new.update({k: change(v) for k, v in x.items()})
        return new
    if isinstance(x, Mapping):
        return type(x)({k: change(v) for k, v in x.items()})  # type: ignore[call-arg]
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        twin: Any = copy.copy(x)
        for f in dataclasses.fields(x):
            object.__setattr__(twin, f.name, change(getattr(x, f.name)))  # frozen ones too
        return twin
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*map(change, x))
    if isinstance(x, (list, tuple)):
        return type(x)(map(change, x))
    return x
