"""The functions of planning.c on CPU tensors of int64. What they compute is defined in exchange_plan.py.

None of them holds Python's lock while it works: planning takes place beside the training thread.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from freescale.kernels.native import build

_NO_MEMORY, _INVALID_ID = -1, -2
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_SIGNATURES = {  # P: pointer, n: number, v: nothing; the result comes first
    "fs_new_workspace": "P",
    "fs_free_workspace": "vP",
    "fs_deduplicate": "nPPn",
    "fs_deduplicated": "vPPPPP",
    "fs_request": "nPPPPPPnnnP",
    "fs_requested": "vPPPPnPnPPPPPP",
    "fs_intersect": "nPPnPnPP",
    "fs_count": "nPn",
    "fs_split": "vPPPnPPPP",
    "fs_merge_inverse": "nPPnPnPnP",
    "fs_segment_entries": "nPPn",
    "fs_interleave": "vPPPPnP",
    "fs_deinterleave": "vPPPnPP",
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


def _index(n: int) -> torch.Tensor:
    return torch.empty(n, dtype=torch.int64)


def _checked(result: int) -> int:
    if result == _NO_MEMORY:
        raise MemoryError(_NO_MEMORY_LEFT)
    return result


def deduplicate(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values, n, w = values.long().contiguous(), values.shape[0], _workspace()
    count = _checked(library().fs_deduplicate(w, values.data_ptr(), n))
    distinct, order, ends = _index(count), _index(n), _index(count)
    library().fs_deduplicated(w, values.data_ptr(), distinct.data_ptr(), order.data_ptr(), ends.data_ptr())
    return distinct, order, ends


def own_requests(
    ids: Sequence[torch.Tensor],
    first_rows: Sequence[int],
    table_sizes: Sequence[int],
    bounds: torch.Tensor,
    shifts: torch.Tensor,
    starts: torch.Tensor,
) -> tuple[torch.Tensor, ...] | tuple[int, int]:
    """(keys, order, ends, inverse, rows at the owners, counts of the owners), or (feature, id) of an invalid id."""
    w, known = _workspace(), (torch.int32, torch.int64)
    ids = [(i if i.dtype in known else i.long()).contiguous() for i in ids]
    features, n, world = len(ids), sum(i.shape[0] for i in ids), starts.shape[0] - 1
    numbers = ctypes.c_int64 * features
    bound = max((first + size for first, size in zip(first_rows, table_sizes, strict=True)), default=0)
    invalid = (ctypes.c_int64 * 2)()
    distinct = library().fs_request(
        w, numbers(*(i.data_ptr() for i in ids)), numbers(*(i.shape[0] for i in ids)),
        numbers(*(i.dtype == torch.int64 for i in ids)), numbers(*first_rows), numbers(*table_sizes),
        features, n, bound, invalid,
    )  # fmt: skip
    if distinct == _INVALID_ID:
        return invalid[0], invalid[1]
    keys, ends, rows = (_index(_checked(distinct)) for _ in range(3))
    order, inverse, counts = _index(n), _index(n), _index(world)
    shard_order = torch.argsort(bounds + shifts)
    library().fs_requested(
        w, bounds.data_ptr(), shifts.data_ptr(), shard_order.data_ptr(), bounds.shape[0], starts.data_ptr(), world,
        *(t.data_ptr() for t in (keys, order, ends, inverse, rows, counts)),
    )  # fmt: skip
    return keys, order, ends, inverse, rows, counts


def intersection_masks(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    in_y, in_x = (torch.empty(t.shape[0], dtype=torch.bool) for t in (x, y))
    sizes_and_addresses = x.data_ptr(), x.shape[0], y.data_ptr(), y.shape[0], in_y.data_ptr(), in_x.data_ptr()
    _checked(library().fs_intersect(_workspace(), *sizes_and_addresses))
    return in_y, in_x


def split(mask: torch.Tensor, values: torch.Tensor | None, counts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(chosen values, their counts, the other values, their counts); without `values`, indices."""
    n = mask.shape[0]
    n_chosen = library().fs_count(mask.data_ptr(), n)
    chosen, others = _index(n_chosen), _index(n - n_chosen)
    chosen_counts, other_counts = torch.empty_like(counts), torch.empty_like(counts)
    library().fs_split(
        mask.data_ptr(), None if values is None else values.data_ptr(), counts.data_ptr(), counts.shape[0],
        chosen.data_ptr(), others.data_ptr(), chosen_counts.data_ptr(), other_counts.data_ptr(),
    )  # fmt: skip
    return chosen, chosen_counts, others, other_counts


def merge_inverse(inverse: torch.Tensor, early: torch.Tensor, urgent: torch.Tensor) -> torch.Tensor:
    merged = torch.empty_like(inverse)
    _checked(
        library().fs_merge_inverse(
            _workspace(), inverse.data_ptr(), inverse.shape[0], early.data_ptr(), early.shape[0], urgent.data_ptr(),
            urgent.shape[0], merged.data_ptr(),
        )
    )  # fmt: skip
    return merged


def segment_entries(ends: torch.Tensor, indices: torch.Tensor) -> int:
    return library().fs_segment_entries(ends.data_ptr(), indices.data_ptr(), indices.shape[0])


Pair = tuple[torch.Tensor, torch.Tensor]


def interleave(parts: Pair, counts: Pair) -> torch.Tensor:
    message = torch.empty(parts[0].shape[0] + parts[1].shape[0], dtype=torch.uint8)
    library().fs_interleave(*(t.data_ptr() for t in (*parts, *counts)), counts[0].shape[0], message.data_ptr())
    return message


def deinterleave(message: torch.Tensor, counts: Pair) -> Pair:
    first, second = (torch.empty(int(c.sum()), dtype=torch.bool) for c in counts)
    library().fs_deinterleave(
        message.data_ptr(), *(c.data_ptr() for c in counts), counts[0].shape[0], first.data_ptr(), second.data_ptr()
    )
    return first, second
