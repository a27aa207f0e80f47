"""Values in a batch that are split by sample, one class per kind. Each converts to a column and back. Rows stay on
their device. Lengths are needed on the CPU, and the caller copies those of all leaves at once."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from freescale.runtime import batch_structure
from freescale.runtime.balance.integer_problem import BalanceError
from freescale.runtime.samples.sample_columns import Column

Path = tuple[str, ...]  # names of fields, from the batch inwards


@dataclass(eq=False)
class Leaf(ABC):
    """A value of a batch that is split by sample."""

    path: Path

    @property
    def name(self) -> str:
        return ".".join(self.path) or "batch"

    @property
    def lengths(self) -> tuple[torch.Tensor, ...]:
        """Tensors that `column` needs on the CPU."""
        return ()

    @abstractmethod
    def column(self, lengths: Sequence[torch.Tensor]) -> Column:
        """The value as a column. `lengths`: CPU copies of self.lengths."""

    @abstractmethod
    def value(self, column: Column) -> Any:
        """The same kind of value from another column of the same schema."""

    def values(self, column: Column) -> dict[Path, Any]:
        """The same, by path, and what else follows from the column."""
        return {self.path: self.value(column)}

    def _dense(self, rows: torch.Tensor, counts: np.ndarray | None = None) -> Column:
        samples = rows.shape[0] if counts is None else counts.shape[1]
        return Column(self.name, (self.path[-1] if self.path else "batch",), counts, (rows,), samples)


@dataclass(eq=False)
class TensorLeaf(Leaf):
    tensor: torch.Tensor

    def column(self, lengths: Sequence[torch.Tensor]) -> Column:
        return self._dense(self.tensor.detach())

    def value(self, column: Column) -> torch.Tensor:
        return column.rows[0]


@dataclass(eq=False)
class ArrayLeaf(Leaf):
    array: np.ndarray

    def column(self, lengths: Sequence[torch.Tensor]) -> Column:
        return self._dense(torch.from_numpy(np.ascontiguousarray(self.array)))

    def value(self, column: Column) -> np.ndarray:
        return column.rows[0].numpy()


@dataclass(eq=False)
class ObjectsLeaf(Leaf):
    """A list or tuple with one Python object per sample; they are sent pickled."""

    objects: Sequence[Any]

    def column(self, lengths: Sequence[torch.Tensor]) -> Column:
        pickled = [np.frombuffer(pickle.dumps(o, pickle.HIGHEST_PROTOCOL), np.uint8) for o in self.objects]
        counts = np.array([[len(p) for p in pickled]], np.int64).reshape(1, len(pickled))
        return self._dense(torch.from_numpy(np.concatenate([np.empty(0, np.uint8), *pickled])), counts)

    def value(self, column: Column) -> Sequence[Any]:
        ends = np.cumsum(column.counts()[0]).tolist()
        data = column.rows[0].numpy().tobytes()
        kind = tuple if isinstance(self.objects, tuple) else list
        return kind(pickle.loads(data[a:b]) for a, b in zip([0, *ends], ends, strict=False))


@dataclass(eq=False)
class KeyedJaggedLeaf(Leaf):
    """A KeyedJaggedTensor with at least one key."""

    kjt: Any

    @property
    def lengths(self) -> tuple[torch.Tensor, ...]:
        return (self.kjt.lengths(),)

    def column(self, lengths: Sequence[torch.Tensor]) -> Column:
        (flat,), keys = lengths, tuple(self.kjt.keys())
        described = ", ".join(map(repr, keys))
        if flat.shape[0] % len(keys):
            raise BalanceError(
                f"freescale: the features {described} of a KeyedJaggedTensor must have equally many samples; found "
                f"{flat.shape[0]} lengths for {len(keys)} features"
            )
        samples = flat.shape[0] // len(keys)
        counts = flat.view(len(keys), samples).numpy().astype(np.int64)
        rows = tuple(t.detach() for t in (self.kjt.values(), self.kjt.weights_or_none()) if t is not None)
        _check_lengths(described, counts, rows[0])
        return Column(self.name, keys, counts, rows, samples, is_jagged=True)

    def value(self, column: Column) -> Any:
        lengths = _integers_as(self.kjt.lengths(), column.counts().ravel())
        weights = {"weights": column.rows[1]} if len(column.rows) > 1 else {}
        return type(self.kjt)(keys=list(column.keys), values=column.rows[0], lengths=lengths, **weights)


@dataclass(eq=False)
class JaggedLeaf(Leaf):
    """A feature's 1-D tensor with its lengths or offsets, or both, in sibling fields: `beside` by name."""

    tensor: torch.Tensor
    beside: Mapping[str, torch.Tensor]

    @property
    def lengths(self) -> tuple[torch.Tensor, ...]:
        return tuple(self.beside.values())

    def column(self, lengths: Sequence[torch.Tensor]) -> Column:
        counts, feature = None, self.path[-1]
        for name, tensor in zip(self.beside, lengths, strict=True):
            numbers = tensor.numpy().astype(np.int64)
            if _is_offsets(name):
                if len(numbers) == 0 or numbers[0] != 0:
                    first = numbers[:1].tolist() or "nothing"
                    raise BalanceError(f"freescale: {name!r} must start with 0; found {first}")
                numbers = np.diff(numbers)
            if counts is not None and not np.array_equal(counts, numbers):
                raise BalanceError(f"freescale: the lengths and the offsets of feature {feature!r} do not match")
            counts = numbers
        assert counts is not None
        _check_lengths(repr(feature), counts[None], self.tensor)
        return Column(self.name, (feature,), counts[None], (self.tensor.detach(),), len(counts), is_jagged=True)

    def value(self, column: Column) -> torch.Tensor:
        return column.rows[0]

    def values(self, column: Column) -> dict[Path, Any]:
        lengths, found = column.counts()[0], super().values(column)
        for name, tensor in self.beside.items():
            numbers = np.concatenate(([0], np.cumsum(lengths))) if _is_offsets(name) else lengths
            found[(*self.path[:-1], name)] = _integers_as(tensor, numbers)
        return found


def _is_offsets(name: str) -> bool:
    return name.endswith("_offsets")


def _integers_as(template: torch.Tensor, numbers: np.ndarray) -> torch.Tensor:
    return batch_structure.to_device(torch.from_numpy(numbers.copy()).to(template.dtype), template.device)


def _check_lengths(described: str, counts: np.ndarray, values: torch.Tensor) -> None:
    if counts.size and counts.min() < 0:
        raise BalanceError(f"freescale: the lengths of {described} must not be negative; found {counts.min()}")
    if int(counts.sum()) != values.shape[0]:
        raise BalanceError(
            f"freescale: the lengths of {described} add up to {int(counts.sum())}, "
            f"but there are {values.shape[0]} values"
        )
