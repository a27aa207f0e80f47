"""Cut a batch into columns of samples, and build a batch of the same structure from other columns.

Cut by sample are KeyedJaggedTensors, tensors and numeric arrays [samples, ...], and lists and tuples of other Python
objects, one per sample (words, dicts; these are pickled). A tensor of 1 dimension `x` beside `x_lengths` [samples] or
`x_offsets` [samples + 1] in a dict, dataclass or named tuple is jagged. Numbers, words, None and tensors of 0
dimensions say something of the batch as a whole and stay as they are. Anything else is an error that names it.

Rows stay on their device, lengths come to the CPU; each part of the new batch is on the device where the old one was.
"""

from __future__ import annotations

import enum
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from freescale.runtime import batch_structure
from freescale.runtime.balance.integer_problem import BalanceError
from freescale.runtime.samples.sample_columns import Column

Build = Callable[[Sequence[Column]], Any]
# What may be lengths or offsets, by its id(), with its copy on the CPU: all come from the device at once.
_OnHost = dict[int, tuple[torch.Tensor, torch.Tensor]]
_KEPT = (bool, int, float, complex, str, bytes, np.generic, torch.dtype, torch.device, enum.Enum, type(None))
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class Cut:
    """A batch as columns. `build` makes a batch of the same structure from columns of the same schema."""

    samples: int
    columns: list[Column]
    build: Build

    def schema(self) -> str:
        return "; ".join(c.schema() for c in self.columns)


def cut(batch: Any) -> Cut:
    """An error names what is not cut by sample, or has more or fewer samples than the rest of the batch."""
    reading = _Reading(_lengths_on_host(batch))
    build = reading.read("", batch)
    if not reading.columns:
        raise BalanceError(
            "freescale: the batch holds nothing that could be cut into samples; found "
            f"{batch_structure.describe_structure(batch)}"
        )
    return Cut(reading.samples(), reading.columns, build)


def lengths_of(found: Cut, features: Sequence[str]) -> dict[str, np.ndarray]:
    """How many ids each sample has of each feature."""
    lengths = {}
    for c in found.columns:
        counts = c.counts()
        lengths.update({key: counts[i] for i, key in enumerate(c.keys) if key in features})
    return {name: lengths[name] for name in dict.fromkeys(features) if name in lengths}


class _Reading:
    """Columns of a batch while it is walked through; `read` returns how to build its twin."""

    def __init__(self, lengths: _OnHost) -> None:
        self._lengths = lengths
        self.columns: list[Column] = []
        self._certain: list[int] = []  # columns that say themselves how many samples there are

    def read(self, name: str, x: Any) -> Build:
        if batch_structure.is_kjt(x):
            return self._kjt(name, x)
        if isinstance(x, torch.Tensor):
            return self._tensor(name, x)
        if isinstance(x, np.ndarray):
            return self._array(name, x)
        if isinstance(x, _KEPT):
            return lambda columns: x
        if type(x) in (list, tuple) and not any(True for _ in batch_structure.leaves(x)):
            return self._objects(name, x)
        parts = list(batch_structure.children(x))
        if not parts and not isinstance(x, Mapping):
            raise BalanceError(
                f"freescale: {_shown(name)} is a {type(x).__name__}, which cannot be cut into samples; expected "
                "tensors, KeyedJaggedTensors, lists of one object per sample, or dicts, tuples, dataclasses of them"
            )
        return self._container(name, x, parts)

    def samples(self) -> int:
        """The one number of samples that all columns have."""
        counts = [c.samples for c in self.columns]
        usual = counts[self._certain[0]] if self._certain else Counter(counts).most_common(1)[0][0]
        wrong = [c for c in self.columns if c.samples != usual]
        if not wrong:
            return usual
        right = next(c for c in self.columns if c.samples == usual)
        found = ", ".join(f"{_shown(c.name)} has {c.samples}" for c in wrong)
        raise BalanceError(
            f"freescale: the features of a batch must have equally many samples; {_shown(right.name)} has {usual}, "
            f"but {found}. Ids or values of which a sample has several need their lengths: a KeyedJaggedTensor, or "
            f"{wrong[0].keys[0] + '_lengths'!r} beside them"
        )

    def _on_host(self, lengths: torch.Tensor) -> torch.Tensor:
        _, found = self._lengths.get(id(lengths), (lengths, None))
        return lengths.detach().cpu() if found is None else found

    # -- kinds of leaves -----------------------------------------------------------------------------------------

    def _add(self, column: Column, certain: bool = False) -> int:
        if certain:
            self._certain.append(len(self.columns))
        self.columns.append(column)
        return len(self.columns) - 1

    def _kjt(self, name: str, x: Any) -> Build:
        keys, given = tuple(x.keys()), x.lengths()
        lengths = self._on_host(given)
        shown = ", ".join(map(repr, keys))
        for method, what in (("variable_stride_per_key", "batch sizes that differ by feature"),
                             ("inverse_indices_or_none", "inverse indices")):  # fmt: skip
            value = getattr(x, method, lambda: None)()
            if value is not None and value is not False:
                raise BalanceError(
                    f"freescale: the KeyedJaggedTensor of {shown} has {what} and cannot be cut into samples"
                )
        if not keys:
            return lambda columns: x
        if lengths.shape[0] % len(keys):
            raise BalanceError(
                f"freescale: the features {shown} of a KeyedJaggedTensor must have equally many samples; found "
                f"{lengths.shape[0]} lengths for {len(keys)} features"
            )
        samples = lengths.shape[0] // len(keys)
        counts = lengths.view(len(keys), samples).numpy().astype(np.int64)
        weights = x.weights_or_none()
        rows = tuple(t.detach() for t in (x.values(), weights) if t is not None)
        _must_add_up(shown, counts, rows[0])
        at = self._add(Column(name or "batch", keys, counts, rows, samples), certain=True)

        def build(columns: Sequence[Column]) -> Any:
            c = columns[at]
            new = _like(given, c.counts().ravel())
            more = {} if weights is None else {"weights": c.rows[1]}
            return type(x)(keys=list(keys), values=c.rows[0], lengths=new, **more)

        return build

    def _tensor(self, name: str, x: torch.Tensor) -> Build:
        if x.is_nested or x.layout != torch.strided:
            raise BalanceError(f"freescale: {_shown(name)} is a tensor of layout {x.layout}, which cannot be cut")
        if x.dim() == 0:
            return lambda columns: x
        at = self._add(Column(name or "batch", (_last(name),), None, (x.detach(),), x.shape[0]))
        return lambda columns: columns[at].rows[0]

    def _array(self, name: str, x: np.ndarray) -> Build:
        if x.dtype.kind not in "biufc":
            raise BalanceError(f"freescale: {_shown(name)} is an array of {x.dtype}; expected numbers, or a list")
        if x.ndim == 0:
            return lambda columns: x
        build = self._tensor(name, torch.from_numpy(np.ascontiguousarray(x)))
        return lambda columns: build(columns).numpy()

    def _objects(self, name: str, x: Sequence[Any]) -> Build:
        """A list with one Python object per sample."""
        pickled = [np.frombuffer(pickle.dumps(o, pickle.HIGHEST_PROTOCOL), np.uint8) for o in x]
        counts = np.array([[len(p) for p in pickled]], np.int64).reshape(1, len(x))
        data = torch.from_numpy(np.concatenate([np.empty(0, np.uint8), *pickled]))
        at = self._add(Column(name or "batch", (_last(name),), counts, (data,), len(x)))

        def build(columns: Sequence[Column]) -> Any:
            c = columns[at]
            ends = np.cumsum(c.counts()[0]).tolist()
            whole = c.rows[0].numpy().tobytes()
            kind = tuple if isinstance(x, tuple) else list
            return kind(pickle.loads(whole[a:b]) for a, b in zip([0, *ends], ends, strict=False))

        return build

    # -- containers ----------------------------------------------------------------------------------------------

    def _container(self, name: str, x: Any, parts: list[tuple[str, Any]]) -> Build:
        by_name = dict(parts) if not isinstance(x, list) else {}
        builds: dict[str, Build] = {}
        for part, child in parts:
            beside = [s for s in (f"{part}_lengths", f"{part}_offsets") if _whole(by_name.get(s))]
            if beside and isinstance(child, torch.Tensor) and child.dim() == 1:
                builds.update(self._jagged(_path(name, part), part, child, {s: by_name[s] for s in beside}))
        for part, child in parts:
            if part not in builds:
                builds[part] = self.read(_path(name, part), child)

        def build(columns: Sequence[Column]) -> Any:
            made = iter([builds[part](columns) for part, _ in parts])
            return batch_structure.map_children(x, lambda child: next(made))

        return build

    def _jagged(self, path: str, part: str, x: torch.Tensor, beside: dict[str, torch.Tensor]) -> dict[str, Build]:
        """A tensor with its lengths or offsets, or both, beside it."""
        builds: dict[str, Build] = {}
        counts = None
        for name, t in beside.items():
            given = self._on_host(t).numpy().astype(np.int64)
            offsets = name.endswith("_offsets")
            if offsets and (len(given) == 0 or given[0] != 0):
                raise BalanceError(f"freescale: {name!r} must begin with 0; found {given[:1].tolist() or 'nothing'}")
            mine = np.diff(given) if offsets else given
            if counts is not None and not np.array_equal(counts, mine):
                raise BalanceError(f"freescale: the lengths and the offsets of feature {part!r} disagree")
            counts = mine
        assert counts is not None
        _must_add_up(repr(part), counts[None], x)
        at = self._add(Column(path, (part,), counts[None], (x.detach(),), len(counts)), certain=True)
        builds[part] = lambda columns: columns[at].rows[0]
        for name, t in beside.items():
            builds[name] = _lengths_like(t, at, name.endswith("_offsets"))
        return builds


def _lengths_like(t: torch.Tensor, at: int, offsets: bool) -> Build:
    def build(columns: Sequence[Column]) -> torch.Tensor:
        new = columns[at].counts()[0]
        return _like(t, np.concatenate(([0], np.cumsum(new))) if offsets else new)

    return build


def _like(t: torch.Tensor, numbers: np.ndarray) -> torch.Tensor:
    """Whole numbers, of the type and on the device of t."""
    return batch_structure.to_device(torch.from_numpy(numbers.copy()).to(t.dtype), t.device)


def _lengths_on_host(batch: Any) -> _OnHost:
    found = list(_may_be_lengths("", batch))
    return {id(t): (t, host) for t, host in zip(found, batch_structure.to_host(found), strict=True)}


def _may_be_lengths(name: str, x: Any) -> Iterator[torch.Tensor]:
    if batch_structure.is_kjt(x):
        yield x.lengths()
    elif _whole(x):
        if name.endswith(("_lengths", "_offsets")):
            yield x
    else:
        for part, child in batch_structure.children(x):
            yield from _may_be_lengths(part, child)


def _must_add_up(shown: str, counts: np.ndarray, values: torch.Tensor) -> None:
    if counts.size and counts.min() < 0:
        raise BalanceError(f"freescale: the lengths of {shown} must not be negative; found {counts.min()}")
    if int(counts.sum()) != values.shape[0]:
        raise BalanceError(
            f"freescale: the lengths of {shown} add up to {int(counts.sum())}, but there are {values.shape[0]} values"
        )


def _whole(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() == 1 and x.dtype in _INTEGERS


def _path(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part


def _last(name: str) -> str:
    return name.rpartition(".")[2] or "batch"


def _shown(name: str) -> str:
    return f"feature {name!r}" if name else "the batch"
