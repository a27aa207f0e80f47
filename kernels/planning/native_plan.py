"""The functions of planning.c on CPU tensors of int64. What they compute is defined in exchange_plan.py.

None of them holds Python's lock while it works: planning takes place beside the training thread.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from freescale.kernels.native import build

_NO_MEMORY, _INVALID_ID = -1, -2
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_KNOWN = (torch.int32, torch.int64)  # types of ids
_SIGNATURES = {  # P: pointer, n: number, v: nothing; the result comes first
    "fs_new_workspace": "P",
    "fs_free_workspace": "vP",
    "fs_deduplicate": "nPPnPPP",
    "fs_request": "nPPPPPPnnnPPPnPnPPPPPPP",
    "fs_split_requests": "vPPPPPPPPPnPP",
    "fs_merge_inverse": "nPPnPnPnP",
    "fs_segment_entries": "nPPn",
    "fs_collide": "nPPnPPnPnPPP",
    "fs_split_batches": "nPPnPPPnPPPPP",
    "fs_pack": "vPPPnP",
}


@cache
def library() -> Any:
    """The compiled functions; None where they cannot be built."""
    functions = build.load("planning")
    if functions is not None:
        types = {"P": _POINTER, "n": _SIZE, "v": None}
        for name, kinds in _SIGNATURES.items():
            function = getattr(functions, name)
            function.restype, *function.argtypes = (types[kind] for kind in kinds)
    return functions


class _Workspace:
    """Memory that the functions keep from batch to batch; each thread has its own."""

    def __init__(self) -> None:
        self.address = library().fs_new_workspace()
        if not self.address:
            raise MemoryError(_NO_MEMORY_LEFT)
        weakref.finalize(self, library().fs_free_workspace, self.address)


_NO_MEMORY_LEFT = "freescale: no memory left to plan a batch"
_of_thread = threading.local()


def _workspace() -> int:
    try:
        return _of_thread.workspace.address
    except AttributeError:
        _of_thread.workspace = _Workspace()
        return _of_thread.workspace.address


# Buffers are NumPy's: every call of a torch op gives Python's lock away, and gets it back from a training thread that
# then has to wait for it. Arrays with more room than they need cost nothing: pages that nobody touches do not exist.


def _room(n: int) -> np.ndarray:
    return np.empty(n, dtype=np.int64)


def _tensor(array: np.ndarray, n: int) -> torch.Tensor:
    """The first n."""
    # An empty array may have stride 0, and a compiled graph would tell that from stride 1.
    return torch.from_numpy(array[:n]) if n else torch.empty(0, dtype=torch.int64)


def _checked(result: int) -> int:
    if result == _NO_MEMORY:
        raise MemoryError(_NO_MEMORY_LEFT)
    return result


def _address(x: np.ndarray) -> int:
    return x.__array_interface__["data"][0]


def deduplicate(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if values.dtype != torch.int64 or not values.is_contiguous():
        values = values.long().contiguous()
    n = values.shape[0]
    buffers = [_room(n) for _ in range(3)]
    distinct = library().fs_deduplicate(_workspace(), values.data_ptr(), n, *map(_address, buffers))
    sizes = _checked(distinct), n, distinct
    distinct_values, order, ends = map(_tensor, buffers, sizes)
    return distinct_values, order, ends


def own_requests(
    ids: Sequence[torch.Tensor],
    first_rows: Sequence[int],
    table_sizes: Sequence[int],
    bounds: torch.Tensor,
    shifts: torch.Tensor,
    starts: torch.Tensor,
) -> tuple[torch.Tensor, ...] | tuple[int, int]:
    """(keys, order, ends, inverse, rows at the owners, counts of the owners), or (feature, id) of an invalid id."""
    ids = [i if i.dtype in _KNOWN and i.is_contiguous() else i.long().contiguous() for i in ids]
    features, n, world = len(ids), sum(i.shape[0] for i in ids), starts.shape[0] - 1
    numbers = ctypes.c_int64 * features
    bound = max((first + size for first, size in zip(first_rows, table_sizes, strict=True)), default=0)
    shard_order = np.argsort(bounds.numpy() + shifts.numpy())
    buffers, invalid = [*(_room(n) for _ in range(5)), _room(world)], (ctypes.c_int64 * 2)()
    distinct = library().fs_request(
        _workspace(), numbers(*(i.data_ptr() for i in ids)), numbers(*(i.shape[0] for i in ids)),
        numbers(*(i.dtype == torch.int64 for i in ids)), numbers(*first_rows), numbers(*table_sizes),
        features, n, bound, bounds.data_ptr(), shifts.data_ptr(), _address(shard_order), bounds.shape[0],
        starts.data_ptr(), world, *map(_address, buffers), invalid,
    )  # fmt: skip
    if distinct == _INVALID_ID:
        return invalid[0], invalid[1]
    return tuple(map(_tensor, buffers, (_checked(distinct), n, distinct, n, distinct, world)))


def split_requests(
    urgent_keys: torch.Tensor,
    recv_counts: torch.Tensor,
    urgent_rows: torch.Tensor,
    rows: torch.Tensor,
    send_counts: torch.Tensor,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The fields of two chunks."""
    n_keys, n_rows, world = urgent_keys.shape[0], urgent_rows.shape[0], recv_counts.shape[0]
    urgent_index, other_index, urgent_out, other_out = _room(n_keys), _room(n_keys), _room(n_rows), _room(n_rows)
    counts, sizes = np.empty((4, world), dtype=np.int64), (ctypes.c_int64 * 2)()
    library().fs_split_requests(
        urgent_keys.data_ptr(), recv_counts.data_ptr(), _address(urgent_index), _address(other_index),
        urgent_rows.data_ptr(), rows.data_ptr(), send_counts.data_ptr(), _address(urgent_out), _address(other_out),
        world, _address(counts), sizes,
    )  # fmt: skip
    recv_urgent, recv_others, send_urgent, send_others = (torch.from_numpy(c.copy()) for c in counts)
    urgent = [_tensor(urgent_index, sizes[0]), recv_urgent, _tensor(urgent_out, sizes[1]), send_urgent]
    others = [_tensor(other_index, n_keys - sizes[0]), recv_others, _tensor(other_out, n_rows - sizes[1]), send_others]
    return urgent, others


def merge_inverse(inverse: torch.Tensor, early: torch.Tensor, urgent: torch.Tensor) -> torch.Tensor:
    merged = _room(inverse.shape[0])
    _checked(
        library().fs_merge_inverse(
            _workspace(), inverse.data_ptr(), inverse.shape[0], early.data_ptr(), early.shape[0], urgent.data_ptr(),
            urgent.shape[0], _address(merged),
        )
    )  # fmt: skip
    return _tensor(merged, merged.shape[0])


def segment_entries(ends: torch.Tensor, indices: torch.Tensor) -> int:
    return library().fs_segment_entries(ends.data_ptr(), indices.data_ptr(), indices.shape[0])


def collide(
    before: torch.Tensor, before_counts: torch.Tensor, after: torch.Tensor, after_counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(mask of `before`, mask of `after`, message to the requesters)"""
    sizes = before.shape[0], after.shape[0]
    mask_before, mask_after, message = (np.empty(n, dtype=np.bool_) for n in (*sizes, sum(sizes)))
    result = library().fs_collide(
        _workspace(), before.data_ptr(), sizes[0], before_counts.data_ptr(), after.data_ptr(), sizes[1],
        after_counts.data_ptr(), before_counts.shape[0], *map(_address, (mask_before, mask_after, message)),
    )  # fmt: skip
    _checked(result)
    return torch.from_numpy(mask_before), torch.from_numpy(mask_after), torch.from_numpy(message.view(np.uint8))


class _Batch(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("recv_counts", "rows", "send_counts", "row_mask")),
        *((name, ctypes.c_int64) for name in ("n_keys", "n_rows")),
        *((f, ctypes.c_void_p) for f in ("urgent_index", "other_index", "urgent_rows", "other_rows", "counts")),
        *((name, ctypes.c_int64) for name in ("n_urgent_keys", "n_urgent_rows")),
    ]


class _Grouped(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_void_p) for name in ("values", "order", "ends")), ("distinct", ctypes.c_int64)]


class _SplitBatch:
    """One batch, with room for what fs_split_batches makes of it."""

    def __init__(
        self, n_keys: int, recv_counts: torch.Tensor, rows: torch.Tensor, send_counts: torch.Tensor, mask: torch.Tensor
    ) -> None:
        sizes = n_keys, n_keys, rows.shape[0], rows.shape[0]
        self._buffers = [_room(n) for n in sizes]
        self._counts = np.empty((4, recv_counts.shape[0]), dtype=np.int64)
        inputs = (t.data_ptr() for t in (recv_counts, rows, send_counts, mask))
        outputs = map(_address, (*self._buffers, self._counts))
        self.argument = _Batch(*inputs, n_keys, rows.shape[0], *outputs)

    def chunks(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The fields of two chunks: urgent, others."""
        a, (urgent_index, other_index, urgent_rows, other_rows) = self.argument, self._buffers
        recv_urgent, recv_others, send_urgent, send_others = (torch.from_numpy(c.copy()) for c in self._counts)
        keys, rows = a.n_urgent_keys, a.n_urgent_rows
        urgent = [_tensor(urgent_index, keys), recv_urgent, _tensor(urgent_rows, rows), send_urgent]
        keys, rows = a.n_keys - keys, a.n_rows - rows
        return urgent, [_tensor(other_index, keys), recv_others, _tensor(other_rows, rows), send_others]


class _GroupedRows:
    def __init__(self, n: int) -> None:
        self._buffers = [_room(n) for _ in range(3)]
        self.argument = _Grouped(*map(_address, self._buffers), 0)

    def fields(self, n: int) -> list[torch.Tensor]:
        distinct = self.argument.distinct
        return list(map(_tensor, self._buffers, (distinct, n, distinct)))


def split_batches(
    message: torch.Tensor, before: tuple[Any, ...], after: tuple[Any, ...], inverse: torch.Tensor, ends: torch.Tensor
) -> tuple[Any, ...]:
    """What exchange_plan.split_batches returns, as fields. `before`, `after`: the arguments of _SplitBatch."""
    first, second = _SplitBatch(*before), _SplitBatch(*after)
    n, n_rows, world = inverse.shape[0], before[2].shape[0], before[1].shape[0]
    merged, entries = _room(n), ctypes.c_int64()
    urgent, late = _GroupedRows(n_rows), _GroupedRows(n_rows)
    result = library().fs_split_batches(
        _workspace(), message.data_ptr(), world, *map(ctypes.addressof, (first.argument, second.argument)),
        inverse.data_ptr(), n, ends.data_ptr(), _address(merged),
        *map(ctypes.addressof, (entries, urgent.argument, late.argument)),
    )  # fmt: skip
    _checked(result)
    n_urgent = first.argument.n_urgent_rows
    updates = urgent.fields(n_urgent), late.fields(n_rows - n_urgent)
    return first.chunks(), second.chunks(), _tensor(merged, n), entries.value, *updates


def pack(tensors: Sequence[torch.Tensor], rooms: Sequence[int], out: torch.Tensor) -> None:
    """Copy each of the 1-D int64 tensors into `out`, which has so many elements of room for it."""
    if library() is None:
        for t, place in zip(tensors, out.split_with_sizes(list(rooms)), strict=True):
            place[: t.shape[0]] = t
        return
    tensors = [t.contiguous() for t in tensors]
    numbers = ctypes.c_int64 * len(tensors)
    addresses, sizes = numbers(*(t.data_ptr() for t in tensors)), numbers(*(t.shape[0] for t in tensors))
    library().fs_pack(addresses, sizes, numbers(*rooms), len(tensors), out.data_ptr())
