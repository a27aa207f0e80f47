"""ctypes signatures and argument types of the C planner (native/batch_plan.c, planning.c, mesh.c).

Its functions release the GIL, so planning runs concurrently with the training thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from freescale.kernels.native import c_library

NO_MEMORY = -1
_KNOWN = (torch.int32, torch.int64)  # id dtypes
_SIGNATURES = {  # P: pointer, n: integer, d: double, v: void; the result comes first
    "fs_new_mesh": "PnnPP",
    "fs_free_mesh": "vP",
    "fs_all_same": "nPPndP",
    "fs_give_up": "vP",
    "fs_new_batch_plan": "PPnnPn",
    "fs_free_batch_plan": "vP",
    "fs_plan_batch": "nPPdPPPPPn",
    "fs_request_and_plan": "nPnPPdPPPPnPPPn",
    "fs_room_of_last": "nP",
    "fs_plan_last": "nPPPP",
}


RANK_LEFT = -3  # returned if a rank disconnected


@cache
def library() -> Any:
    """Load the C library and declare its functions."""
    functions = c_library.require()
    types = {"P": ctypes.c_void_p, "n": ctypes.c_int64, "d": ctypes.c_double, "v": None}
    for name, kinds in _SIGNATURES.items():
        function = getattr(functions, name)
        function.restype, *function.argtypes = (types[kind] for kind in kinds)
    return functions


def require_memory(address: int | None) -> int:
    if not address:
        raise MemoryError("freescale: out of memory while planning a batch")
    return address


def checked(result: int) -> int:
    require_memory(result != NO_MEMORY)
    return result


def tensor(array: np.ndarray) -> torch.Tensor:
    # An empty array may have stride 0, and a compiled graph would specialize on that.
    return torch.from_numpy(array) if array.size else torch.empty(0, dtype=torch.int64)


def address_of(x: np.ndarray) -> int:
    return x.__array_interface__["data"][0]


class FeatureIds(ctypes.Structure):
    """The ids of some features. It does not keep them alive."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("ids", "lengths", "is_int64")]

    def __init__(self, ids: Sequence[torch.Tensor]) -> None:
        # Ids of another dtype or layout are copied.
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
    """Where the rows of an exchange are: owners.OwnerMap, and the tables of its features."""

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
