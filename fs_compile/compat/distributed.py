"""Private names of torch.distributed: groups, stores, Works."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def register_work(tensor: torch.Tensor, work: dist.Work) -> None:
    """Make `_c10d_functional.wait_tensor(tensor)` wait for `work`."""
    torch._C._distributed_c10d._register_work(tensor, work)


def group_by_name(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def is_alive(group: dist.ProcessGroup) -> bool:
    return group in dist.distributed_c10d._world.pg_map


def default_store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def store_host() -> str | None:
    """The host of the default store, if that store listens on a host."""
    store: Any = default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None)


def devices_of_group(group: dist.ProcessGroup) -> tuple[str, ...]:
    """Device types that the group can send from, such as ("cpu", "cuda")."""
    return tuple(d.type for d in group._device_types)


def gather_ints(mine: Sequence[int], group: dist.ProcessGroup, timeout: timedelta = timedelta(0)) -> list[list[int]]:
    """In rank order. `timeout`: if different from the group's."""
    said, heard = np.array(mine, dtype=np.int64), np.empty((group.size(), len(mine)), dtype=np.int64)
    group._allgather_base(torch.from_numpy(heard.reshape(-1)), torch.from_numpy(said)).wait(timeout)
    return heard.tolist()


def gather_objects(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """Over a CPU group, in rank order."""
    objects: list[Any] = [None] * group.size()
    dist.all_gather_object(objects, mine, group=group)
    return objects


def broadcast(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    dist._broadcast_coalesced(group, tensors, 25 << 20, 0)


def all_to_all(out: torch.Tensor, x: torch.Tensor, recv: list[int], send: list[int], group: dist.ProcessGroup) -> None:
    """dist.all_to_all_single without its overhead, which takes as long as a small message."""
    group.alltoall_base(out, x, recv, send).wait()


def around_end_of_backward(begin: Callable[[], Callable[[], None]]) -> None:
    """Call this in a backward pass. After its last gradient, `begin` is called, DDP finishes its averages, and then
    what `begin` returned is called."""
    engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
    engine.queue_callback(lambda: engine.queue_callback(begin()))


def start_all_gather(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """All-gather under one name for every torch: the public one changed in 2.14."""
    return group._allgather_base(out, x)


def hang_up(group: dist.ProcessGroup) -> None:
    """Close this rank's connections of a gloo group, so pending operations fail at once on all ranks. Never raises.
    Gloo cannot abort a group, but it closes one in which a receive timed out; so this receives what is never sent."""
    if group.size() > 1:
        with contextlib.suppress(Exception):
            nobody = group.recv([torch.empty(1)], (group.rank() + 1) % group.size(), _NEVER_SENT)
            nobody.wait(timedelta(milliseconds=1))


_NEVER_SENT = 2**31 - 1  # a tag


def is_gloo(group: dist.ProcessGroup) -> bool:
    if "cpu" not in devices_of_group(group):
        return False
    return isinstance(group._get_backend(torch.device("cpu")), getattr(dist, "ProcessGroupGloo", ()))


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError, AttributeError):
            return group._get_backend(torch.device(device)).options._timeout  # type: ignore[no-any-return]
    return dist.default_pg_timeout
