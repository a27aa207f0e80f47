"""Values in a batch that are split by sample, one class per kind. Each converts to a column and back.

Rows stay on their device. Lengths are needed on the CPU: a leaf lists them in `lengths`, and the caller copies those of
all leaves at once.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from freescale.runtime import batch_structure
from freescale.runtime.balance.integer_problem import BalanceError
from freescale.runtime.samples.sample_columns import Column

Columns = Mapping["Leaf", Column]


class Leaf(ABC):
    """A value of a batch that is split by sample.

    path     its path in the batch, "" for the batch itself
    lengths  tensors that `column` needs on the CPU
    """

    lengths: Sequence[torch.Tensor] = ()

    def __init__(self, path: str) -> None:
        self.path = path

    @abstractmethod
    def column(self, lengths: Sequence[torch.Tensor]) -> Column:
        """The value as a column. `lengths`: CPU copies of self.lengths."""

    @abstractmethod
    def value(self, column: Column) -> Any:
        """The same kind of value from another column of the same schema."""

    def rebuild(self, columns: Columns) -> Any:
        return self.value(columns[self])

    def _dense(self, rows: torch.Tensor) -> Column:
        return Column(self.path or "batch", (_last_name(self.path),), None, (rows,), rows.shape[0])


class TensorLeaf(Leaf):
    """A tensor [samples, ...]."""

    def __init__(self, path: str, tensor: torch.Tensor) -> None:
        super().__init__(path)
        self.tensor = tensor

    def column(self, lengths: Sequence[torch.Tensor]) -> Column:
        return self._dense(self.tensor.detach())

    def value(self, column: Column) -> torch.Tensor:
        return column.rows[0]


class ArrayLeaf(Leaf):
    """A numeric NumPy array [samples, ...]."""

    def __init__(self, path: str, array: np.ndarray) -> None:
        super().__init__(path)
        self.array = array

    def column(self, lengths: Sequence[torch.Tensor]) -> Column:
        return self._dense(torch.from_numpy(np.ascontiguousarray(self.array)))

    def value(self, column: Column) -> np.ndarray:
        return column.rows[0].numpy()


class ObjectsLeaf(Leaf):
    """A list or tuple with one Python object per sample; they are sent pickled."""

    def __init__(self, path: str, objects: Sequence[Any]) -> None:
        super().__init__(path)
        self.objects = objects

    def column(self, lengths: Sequence[torch.Tensor]) -> Column:
        pickled = [np.frombuffer(pickle.dumps(o, pickle.HIGHEST_PROTOCOL), np.uint8) for o in self.objects]
        counts = np.array([[len(p) for p in pickled]], np.int64).reshape(1, len(pickled))
        data = torch.from_numpy(np.concatenate([np.empty(0, np.uint8), *pickled]))
        return Column(self.path or "batch", (_last_name(self.path),), counts, (data,), len(pickled))

    def value(self, column: Column) -> Sequence[Any]:
        ends = np.cumsum(column.counts()[0]).tolist()
        data = column.rows[0].numpy().tobytes()
        kind = tuple if isinstance(self.objects, tuple) else list
        return kind(pickle.loads(data[a:b]) for a, b in zip([0, *ends], ends, strict=False))


class KeyedJaggedLeaf(Leaf):
    """A KeyedJaggedTensor with at least one key."""

    def __init__(self, path: str, kjt: Any) -> None:
        super().__init__(path)
        self.kjt, self.keys = kjt, tuple(kjt.keys())
        self.lengths = (kjt.lengths(),)

    def column(self, lengths: Sequence[torch.Tensor]) -> Column:
        (flat,) = lengths
        described = ", ".join(map(repr, self.keys))
        if flat.shape[0] % len(self.keys):
            raise BalanceError(
                f"freescale: the features {described} of a KeyedJaggedTensor must have equally many samples; found "
                f"{flat.shape[0]} lengths for {len(self.keys)} features"
            )
        samples = flat.shape[0] // len(self.keys)
        counts = flat.view(len(self.keys), samples).numpy().astype(np.int64)
        rows = tuple(t.detach() for t in (self.kjt.values(), self.kjt.weights_or_none()) if t is not None)
        _check_lengths(described, counts, rows[0])
        return Column(self.path or "batch", self.keys, counts, rows, samples, is_jagged=True)

    def value(self, column: Column) -> Any:
        lengths = _integers_as(self.lengths[0], column.counts().ravel())
        weights = {"weights": column.rows[1]} if len(column.rows) > 1 else {}
        return type(self.kjt)(keys=list(self.keys), values=column.rows[0], lengths=lengths, **weights)


class JaggedLeaf(Leaf):
    """A feature's 1-D tensor with its lengths or offsets, or both, in sibling fields: `beside` by name."""

    def __init__(self, path: str, feature: str, values: torch.Tensor, beside: Mapping[str, torch.Tensor]) -> None:
        super().__init__(path)
        self.feature, self.values, self.beside = feature, values, beside
        self.lengths = tuple(beside.values())

    def column(self, lengths: Sequence[torch.Tensor]) -> Column:
        counts = None
        for name, tensor in zip(self.beside, lengths, strict=True):
            numbers = tensor.numpy().astype(np.int64)
            if _is_offsets(name):
                if len(numbers) == 0 or numbers[0] != 0:
                    first = numbers[:1].tolist() or "nothing"
                    raise BalanceError(f"freescale: {name!r} must start with 0; found {first}")
                numbers = np.diff(numbers)
            if counts is not None and not np.array_equal(counts, numbers):
                raise BalanceError(f"freescale: the lengths and the offsets of feature {self.feature!r} do not match")
            counts = numbers
        assert counts is not None
        _check_lengths(repr(self.feature), counts[None], self.values)
        return Column(self.path, (self.feature,), counts[None], (self.values.detach(),), len(counts), is_jagged=True)

    def value(self, column: Column) -> torch.Tensor:
        return column.rows[0]


class LengthsOfJagged:
    """The lengths or offsets next to a JaggedLeaf. Not a leaf: they are computed from its column."""

    def __init__(self, leaf: JaggedLeaf, name: str) -> None:
        self.leaf, self.name = leaf, name

    def rebuild(self, columns: Columns) -> torch.Tensor:
        lengths = columns[self.leaf].counts()[0]
        numbers = np.concatenate(([0], np.cumsum(lengths))) if _is_offsets(self.name) else lengths
        return _integers_as(self.leaf.beside[self.name], numbers)


def _is_offsets(name: str) -> bool:
    return name.endswith("_offsets")


def _last_name(path: str) -> str:
    return path.rpartition(".")[2] or "batch"


def _integers_as(template: torch.Tensor, numbers: np.ndarray) -> torch.Tensor:
    """The numbers with the dtype and device of `template`."""
    return batch_structure.to_device(torch.from_numpy(numbers.copy()).to(template.dtype), template.device)


def _check_lengths(described: str, counts: np.ndarray, values: torch.Tensor) -> None:
    if counts.size and counts.min() < 0:
        raise BalanceError(f"freescale: the lengths of {described} must not be negative; found {counts.min()}")
    if int(counts.sum()) != values.shape[0]:
        raise BalanceError(
            f"freescale: the lengths of {described} add up to {int(counts.sum())}, "
            f"but there are {values.shape[0]} values"
        )
