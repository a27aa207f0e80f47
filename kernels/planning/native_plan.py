"""The functions of planning.c on CPU tensors of int64. What they compute is defined in exchange_plan.py.

None of them holds Python's lock while it works: planning takes place beside the training thread. For whole batches,
with the other ranks, see native_batch.py.
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

from freescale.kernels.native import c_library

NO_MEMORY, INVALID_ID = -1, -2
_KNOWN = (torch.int32, torch.int64)  # types of ids
_SIGNATURES = {  # P: pointer, n: number, d: double, v: nothing; the result comes first
    "fs_new_workspace": "P",
    "fs_free_workspace": "vP",
    "fs_deduplicate": "nPPnPPP",
    "fs_request": "nPPPPPPPPPP",
    "fs_new_mesh": "PnnP",
    "fs_free_mesh": "vP",
    "fs_share_mesh": "nPPn",
    "fs_mesh_counts": "vPPP",
    "fs_box_bytes": "nnn",
    "fs_all_same": "nPPndP",
    "fs_new_batch_plan": "PPnnPn",
    "fs_free_batch_plan": "vP",
    "fs_plan_batch": "nPPdPPPPPn",
    "fs_request_and_plan": "nPnnPPdPPPPnPPPn",
    "fs_room_of_last": "nP",
    "fs_plan_last": "nPPPP",
}


RANK_LEFT = -3  # what a function returns where a rank has gone


@cache
def library() -> Any:
    """The compiled functions; None without the C library."""
    functions = c_library.load()
    if functions is not None:
        types = {"P": ctypes.c_void_p, "n": ctypes.c_int64, "d": ctypes.c_double, "v": None}
        for name, kinds in _SIGNATURES.items():
            function = getattr(functions, name)
            function.restype, *function.argtypes = (types[kind] for kind in kinds)
    return functions


def require_memory(address: int | None) -> int:
    if not address:
        raise MemoryError("freescale: no memory left to plan a batch")
    return address


def checked(result: int) -> int:
    require_memory(result != NO_MEMORY)
    return result


class _Workspace:
    """Memory that the functions keep from batch to batch; each thread has its own."""

    def __init__(self) -> None:
        self.address = require_memory(library().fs_new_workspace())
        weakref.finalize(self, library().fs_free_workspace, self.address)


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


def tensor(array: np.ndarray) -> torch.Tensor:
    # An empty array may have stride 0, and a compiled graph would tell that from stride 1.
    return torch.from_numpy(array) if array.size else torch.empty(0, dtype=torch.int64)


def address_of(x: np.ndarray) -> int:
    return x.__array_interface__["data"][0]


def deduplicate(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if values.dtype != torch.int64 or not values.is_contiguous():
        values = values.long().contiguous()
    n = values.shape[0]
    distinct_values, order, ends = buffers = [_room(n) for _ in range(3)]
    u = checked(library().fs_deduplicate(_workspace(), values.data_ptr(), n, *map(address_of, buffers)))
    return tensor(distinct_values[:u]), tensor(order), tensor(ends[:u])


class FeatureIds(ctypes.Structure):
    """The ids of some features. It does not keep them alive."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("ids", "lengths", "is_int64")]

    def __init__(self, ids: Sequence[torch.Tensor]) -> None:
        # Only what is of another type or layout is copied.
        ids = [i if i.dtype in _KNOWN and i.is_contiguous() else i.long().contiguous() for i in ids]
        self.tensors = ids
        numbers = ctypes.c_int64 * len(ids)
        self._arrays = (
            numbers(*(i.data_ptr() for i in ids)),
            numbers(*(i.shape[0] for i in ids)),
            numbers(*(i.dtype == torch.int64 for i in ids)),
        )
        super().__init__(*map(ctypes.addressof, self._arrays))


_OWNER_FIELDS = ("first_rows", "table_sizes", "bounds", "shifts", "shard_order", "starts")


class RowOwners(ctypes.Structure):
    """Where the rows of an exchange are: exchange_plan.OwnerMap, and the tables of its features."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("features", "shards", "world", "bound")),
        *((name, ctypes.c_void_p) for name in _OWNER_FIELDS),
    ]

    def __init__(
        self,
        first_rows: Sequence[int],
        table_sizes: Sequence[int],
        bounds: torch.Tensor,
        shifts: torch.Tensor,
        starts: torch.Tensor,
    ) -> None:
        bound = max((first + size for first, size in zip(first_rows, table_sizes, strict=True)), default=0)
        of_shards = [bounds.numpy(), shifts.numpy(), np.argsort(bounds.numpy() + shifts.numpy()), starts.numpy()]
        self._arrays = [np.array(x, dtype=np.int64) for x in (first_rows, table_sizes, *of_shards)]
        sizes = len(first_rows), bounds.shape[0], starts.shape[0] - 1, bound
        super().__init__(*sizes, *map(address_of, self._arrays))


def own_requests(
    ids: Sequence[torch.Tensor], owners: RowOwners
) -> tuple[torch.Tensor, ...] | tuple[int, int]:
    """(keys, order, ends, inverse, rows at the owners, counts of the owners), or (feature, id) of an invalid id."""
    features = FeatureIds(ids)
    n = sum(i.shape[0] for i in ids)
    order, ends, inverse, keys, rows = buffers = [_room(n) for _ in range(5)]
    counts, invalid = _room(owners.world), (ctypes.c_int64 * 2)()
    inputs, outputs = map(ctypes.addressof, (features, owners)), map(address_of, (*buffers, counts))
    u = library().fs_request(_workspace(), *inputs, *outputs, invalid)
    if u == INVALID_ID:
        return invalid[0], invalid[1]
    checked(u)
    return tuple(map(tensor, (keys[:u], order, ends[:u], inverse, rows[:u], counts)))
