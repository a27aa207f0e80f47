"""The functions of planning.c on CPU tensors of int64. What they compute is defined in exchange_plan.py.

None of them holds Python's lock while it works: planning takes place beside the training thread.
"""

from __future__ import annotations

import ctypes
import threading
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
    "fs_intersect": "nPPnPnPP",
    "fs_split_requests": "vPPPPPPPPPnPP",
    "fs_merge_inverse": "nPPnPnPnP",
    "fs_segment_entries": "nPPn",
    "fs_interleave": "vPPPPnP",
    "fs_deinterleave": "vPPPnPP",
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

    def __del__(self) -> None:
        library().fs_free_workspace(self.address)


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


def intersection_masks(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    in_y, in_x = (np.empty(t.shape[0], dtype=np.bool_) for t in (x, y))
    sizes_and_addresses = x.data_ptr(), x.shape[0], y.data_ptr(), y.shape[0], _address(in_y), _address(in_x)
    _checked(library().fs_intersect(_workspace(), *sizes_and_addresses))
    return torch.from_numpy(in_y), torch.from_numpy(in_x)


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


Pair = tuple[torch.Tensor, torch.Tensor]


def interleave(parts: Pair, counts: Pair) -> torch.Tensor:
    message = np.empty(parts[0].shape[0] + parts[1].shape[0], dtype=np.uint8)
    library().fs_interleave(*(t.data_ptr() for t in (*parts, *counts)), counts[0].shape[0], _address(message))
    return torch.from_numpy(message)


def deinterleave(message: torch.Tensor, counts: Pair) -> Pair:
    first, second = (np.empty(int(c.numpy().sum()), dtype=np.bool_) for c in counts)
    library().fs_deinterleave(
        message.data_ptr(), *(c.data_ptr() for c in counts), counts[0].shape[0], _address(first), _address(second)
    )
    return torch.from_numpy(first), torch.from_numpy(second)


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
