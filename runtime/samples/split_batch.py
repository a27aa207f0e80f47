"""Split a batch into columns of samples, and build a batch of the same structure from other columns.

Split by sample: KeyedJaggedTensors, tensors and numeric arrays [samples, ...], lists and tuples of other Python
objects, one per sample (pickled), and a 1-D tensor `x` next to `x_lengths` [samples] or `x_offsets` [samples + 1] in a
dict, dataclass or named tuple. Numbers, strings, None, 0-D tensors and fields that the user lists belong to the whole
batch and stay. Anything else is an error that names it.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from freescale.compat import distributed
from freescale.runtime import batch_structure
from freescale.runtime.balance.integer_problem import BalanceError
from freescale.runtime.samples import batch_leaves, sample_columns
from freescale.runtime.samples.batch_leaves import Leaf, Path
from freescale.runtime.samples.sample_columns import Column

_OF_THE_WHOLE_BATCH = (
    bool, int, float, complex, str, bytes, np.generic, torch.dtype, torch.device, enum.Enum, type(None),
)  # fmt: skip


@dataclass(frozen=True)
class SplitBatch:
    """A batch as columns, one per leaf. `shared`: paths of values that belong to the whole batch."""

    batch: Any
    shared: Sequence[str]
    leaves: list[Leaf]
    columns: list[Column]
    samples: int

    def schema(self) -> str:
        return "; ".join(c.schema() for c in self.columns)

    def lengths(self, features: Sequence[str]) -> dict[str, np.ndarray]:
        """Number of ids per sample, for those of the features that are present."""
        lengths = {}
        for c in sorted(self.columns, key=lambda c: c.is_jagged):  # a label may be named like a feature
            counts = c.counts()
            lengths.update({key: counts[i] for i, key in enumerate(c.keys) if key in features})
        return {name: lengths[name] for name in dict.fromkeys(features) if name in lengths}

    def rebuild(self, columns: Sequence[Column]) -> Any:
        """A batch of the same structure, from columns of the same schema."""
        pairs = zip(self.leaves, columns, strict=True)
        return self._replaced((), self.batch, {p: v for leaf, c in pairs for p, v in leaf.values(c).items()})

    def _replaced(self, path: Path, x: Any, values: dict[Path, Any]) -> Any:
        if path in values:
            return values[path]
        if isinstance(x, _OF_THE_WHOLE_BATCH) or ".".join(path) in self.shared:
            return x
        names = iter([name for name, _ in batch_structure.children(x)])
        return batch_structure.map_children(x, lambda child: self._replaced((*path, next(names)), child, values))


def split(batch: Any, shared: Sequence[str] = ()) -> SplitBatch:
    """Raises if a field cannot be split by sample, or has a different number of samples than the rest of the batch.
    `shared`: paths of fields that belong to the whole batch."""
    missing = dict.fromkeys(shared, True)
    leaves = list(_leaves((), batch, missing))
    if any(missing.values()):
        name = next(path for path, is_missing in missing.items() if is_missing)
        raise BalanceError(
            f"freescale: the batch has no field {name!r}, which BalanceOptions(shared=...) lists; found "
            f"{batch_structure.describe_structure(batch)}"
        )
    if not leaves:
        raise BalanceError(
            "freescale: the batch has nothing to split by sample; found "
            f"{batch_structure.describe_structure(batch)}"
        )
    on_host = iter(batch_structure.to_host([t for leaf in leaves for t in leaf.lengths]))
    columns = [leaf.column([next(on_host) for _ in leaf.lengths]) for leaf in leaves]
    return SplitBatch(batch, shared, leaves, columns, _common_samples(columns))


def _leaves(path: Path, x: Any, shared: dict[str, bool]) -> Iterator[Leaf]:
    """The leaves of a batch, or of its part at `path`. `shared`: as in `split`, each True until found."""
    name = ".".join(path)
    if name in shared:
        shared[name] = False
    elif isinstance(x, _OF_THE_WHOLE_BATCH):
        return
    elif batch_structure.is_kjt(x):
        _require_separable(x)
        if x.keys():
            yield batch_leaves.KeyedJaggedLeaf(path, x)
    elif isinstance(x, torch.Tensor):
        if x.is_nested or x.layout != torch.strided:
            raise BalanceError(f"freescale: {_described(name)} is a tensor of layout {x.layout}, which cannot be split")
        if x.dim():
            yield batch_leaves.TensorLeaf(path, x)
    elif isinstance(x, np.ndarray):
        if x.dtype.kind not in "biufc":
            raise BalanceError(f"freescale: {_described(name)} is an array of {x.dtype}; expected numbers, or a list")
        if x.ndim:
            yield batch_leaves.ArrayLeaf(path, x)
    elif type(x) in (list, tuple) and not any(True for _ in batch_structure.leaves(x)):
        yield batch_leaves.ObjectsLeaf(path, x)
    else:
        yield from _leaves_inside(path, x, shared)


def _require_separable(kjt: Any) -> None:
    for method, what in (("variable_stride_per_key", "batch sizes that differ by feature"),
                         ("inverse_indices_or_none", "inverse indices")):  # fmt: skip
        value = getattr(kjt, method, lambda: None)()
        if value is not None and value is not False:
            keys = ", ".join(map(repr, kjt.keys()))
            raise BalanceError(f"freescale: the KeyedJaggedTensor of {keys} has {what} and cannot be split by sample")


def _leaves_inside(path: Path, x: Any, shared: dict[str, bool]) -> Iterator[Leaf]:
    children = list(batch_structure.children(x))
    if not children and not isinstance(x, Mapping):
        raise BalanceError(
            f"freescale: {_described('.'.join(path))} is a {type(x).__name__}, which cannot be split by sample; "
            "expected tensors, KeyedJaggedTensors, lists of one object per sample, or dicts, tuples, dataclasses of "
            "them"
        )
    split = {} if isinstance(x, list) else {n: c for n, c in children if ".".join((*path, n)) not in shared}
    found: set[str] = set()
    for name, child in split.items():
        beside = {n: split[n] for n in (f"{name}_lengths", f"{name}_offsets") if _may_be_lengths(split.get(n))}
        if beside and isinstance(child, torch.Tensor) and child.dim() == 1:
            yield batch_leaves.JaggedLeaf((*path, name), child, beside)
            found |= {name, *beside}
    for name, child in children:
        if name not in found:
            yield from _leaves((*path, name), child, shared)


def _may_be_lengths(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() == 1 and x.dtype in batch_structure.INTEGERS


def _common_samples(columns: Sequence[Column]) -> int:
    """The number of samples, which all columns must share. (A dense tensor may be values without lengths.)"""
    certain = [c.samples for c in columns if c.is_jagged]
    usual = certain[0] if certain else Counter(c.samples for c in columns).most_common(1)[0][0]
    wrong = [c for c in columns if c.samples != usual]
    if not wrong:
        return usual
    right = next(c for c in columns if c.samples == usual)
    others = ", ".join(f"{_described(c.name)} has {c.samples}" for c in wrong)
    raise BalanceError(
        f"freescale: the features of a batch must have equally many samples; {_described(right.name)} has {usual}, "
        f"but {others}. Fields with several values per sample need lengths: use a KeyedJaggedTensor, or add "
        f"{wrong[0].keys[0] + '_lengths'!r}. List fields that are not per sample in BalanceOptions(shared=...)"
    )


def _described(path: str) -> str:
    return f"feature {path!r}" if path else "the batch"


def restore_outputs(outputs: Any, origin: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Per-sample outputs, a batch of any structure, at the rank and in the order that the samples came from."""
    split, error = _try_split(outputs, len(origin))
    home, position = origin.numpy().T if len(origin) else np.zeros((2, 0), np.int64)
    leaving = np.bincount(home, minlength=group.size())
    text = str(error) if split is None else split.schema()
    headers = distributed.gather_ints([int(split is not None), sample_columns.digest(text), *leaving.tolist()], group)
    if split is None or len({(splits, digest) for splits, digest, *_ in headers}) > 1:
        _raise_on_every_rank(headers, text, error, group)
    assert split is not None
    arriving = np.array([header[2 + group.rank()] for header in headers])
    positions = Column("position", ("position",), None, (torch.from_numpy(position.copy()),), split.samples)
    *arrived, positions = sample_columns.exchange([*split.columns, positions], home, arriving, group)
    order = np.argsort(positions.rows[0].numpy(), kind="stable")
    return split.rebuild([sample_columns.select(c, order) for c in arrived])


def _try_split(outputs: Any, samples: int) -> tuple[SplitBatch | None, Exception | None]:
    try:
        found = split(outputs)
        if found.samples != samples:
            raise BalanceError(
                f"freescale: restore expects one output for each of the {samples} samples of the last batch; "
                f"found {found.samples}"
            )
    except Exception as error:  # noqa: BLE001  (reported to the other ranks)
        return None, error
    return found, None


def _raise_on_every_rank(
    headers: list[list[int]], text: str, error: Exception | None, group: dist.ProcessGroup
) -> None:
    texts = distributed.gather_objects(text, group)
    if error is not None:
        raise error
    failed = next((rank for rank, (splits, *_) in enumerate(headers) if not splits), None)
    if failed is not None:
        raise RuntimeError(f"freescale: restore failed on rank {failed}: {texts[failed]}")
    other = next(rank for rank, t in enumerate(texts) if t != texts[0])
    raise BalanceError(
        "freescale: restore expects outputs of the same structure on all ranks; "
        f"rank 0 has {texts[0]!r}, rank {other} has {texts[other]!r}"
    )
