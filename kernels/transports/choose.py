"""Which transport carries a launch, and the ops that stand for it in a graph.

    c10d     the group's own all-to-all: all_to_all_launch, all_to_all_rows_launch (reference.py)
    staged   copy engines and host memory, no SM: all_to_all_launch_staged, all_to_all_rows_launch_staged
    peer     symmetric memory, push into the receiver's window: ..._peer

The choice follows from the request and from `surroundings`: alike on machines of one kind, so alike on every rank.
(The text that ranks compare before the first launch names the transport.) A compiled graph has the choice in it, so
the surroundings belong to the key of torch's caches.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from freescale.compat import distributed
from freescale.kernels.ops import table_registry
from freescale.kernels.ops.schemas import COPY_TRANSPORTS, PRIORITY_NAMES, lib
from freescale.kernels.transports import launch_record

NAMES = ("c10d", *COPY_TRANSPORTS)


class CannotCarry(ValueError):
    """A transport was asked for by name and cannot serve here."""


def choose(wanted: str, group_name: str, device_type: str) -> tuple[str, str]:
    """(transport, why). `wanted` is "auto" or a name; a name that cannot serve is an error."""
    if wanted in ("auto", "c10d"):
        if wanted == "c10d":
            return "c10d", "it was asked for"
        return _best(group_name, device_type)
    why_not = _why_not(wanted, device_type)
    if why_not:
        raise CannotCarry(f"freescale: FREESCALE_TRANSPORT={wanted} cannot be met: {why_not}")
    return wanted, "it was asked for"


def _best(group_name: str, device_type: str) -> tuple[str, str]:
    if device_type != "cuda":
        return "c10d", f"the rows are on the {device_type}"
    ranks = dist.get_process_group_ranks(distributed.group_by_name(group_name))
    local = _ranks_of_a_host()
    if local and len({rank // local for rank in ranks}) > 1:
        return "staged", "the ranks are on several hosts"
    if 1 < len(ranks) <= joined_gpus():
        return "peer", "every rank's GPU can write into every other's"
    return "staged", "the ranks' GPUs cannot all reach each other"


def _why_not(name: str, device_type: str) -> str:
    if device_type != "cuda":
        return f"{name} copies between GPUs and the rows are on the {device_type}"
    return ""


def surroundings() -> str:
    """What `auto` looks at, beside the group and the rows."""
    if not (torch.cuda.is_initialized() and dist.is_initialized()):  # then no rows of ours are on a GPU
        return ""
    return f"{dist.get_world_size()} ranks, {_ranks_of_a_host()} of a host, {joined_gpus()} joined GPUs"


def _ranks_of_a_host() -> int:
    """As torchrun says; 0 where nobody does."""
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(said) if said.isdecimal() else 0


@cache
def joined_gpus() -> int:
    """How many of this host's GPUs, from the first one on, can all write into each other's memory."""
    n = 0
    while n < torch.cuda.device_count() and all(
        torch.cuda.can_device_access_peer(a, b) for pair in range(n) for a, b in ((pair, n), (n, pair))
    ):
        n += 1
    return n


def op_of(op: Any, name: str) -> Any:
    """The op of transport `name` that does what the launch `op` of c10d does."""
    return op if name == "c10d" else getattr(torch.ops.freescale, f"{op._schema.name.split('::')[1]}_{name}").default


ARGUMENTS: dict[str, dict[str, Any]] = {name: {} for name in COPY_TRANSPORTS}  # to open one with; the backend's flags fill it
_open: dict[tuple[str, str], tuple[Any, Any]] = {}  # names of transport and group: the group, its transport


def of(name: str, group: Any, device: torch.device) -> Any:
    """The group's transport of that name, made on first use; collective then."""
    known = _open.get((name, group.group_name))
    if known is not None and known[0] is group:
        return known[1]
    if known is not None:
        known[1].close()  # of a group that had the same name
    transport = import_module(f"freescale.kernels.transports.{name}").open_transport(group, device, **ARGUMENTS[name])
    _open[name, group.group_name] = group, transport
    return transport


def opened() -> list[str]:
    """The names of the transports that have been used."""
    return sorted({name for name, _ in _open})


def check() -> None:
    """Raise if a transfer of any group has failed: a device that was released computes garbage until somebody asks."""
    for _, transport in _open.values():
        transport.check()


def settle(*_: Any) -> None:
    """Before tables are read for a checkpoint: wait until nothing is in flight, and raise if a transfer has failed.

    Otherwise what is read could wait for a stream that a failure releases, and be garbage without an error. Takes
    whatever a hook is called with.
    """
    for _group, transport in list(_open.values()):
        transport.settle()


def close() -> None:
    """Give all pinned memory, windows and streams back."""
    while _open:
        _open.popitem()[1][1].close()


def _implement(name: str) -> None:
    def launch(what, x, send_counts, recv_counts, n_recv, priority, group_name):
        group = distributed.group_by_name(group_name)
        with launch_record.label(f"launch {PRIORITY_NAMES[priority]} {what}"):
            out, work = of(name, group, x.device).start(x, send_counts, recv_counts, n_recv, priority)
        return launch_record.started(work, what, priority, out, group)

    def all_to_all_launch(x, send_counts, recv_counts, n_recv, priority, table, group_name):
        return launch(f"gradients of {table}", x, send_counts, recv_counts, n_recv, priority, group_name)

    def all_to_all_rows_launch(token, rows, send_counts, recv_counts, n_recv, priority, table, group_name):
        sent = table_registry.gather_rows(table, rows)
        return launch(f"rows of {table}", sent, send_counts, recv_counts, n_recv, priority, group_name)

    for fn in (all_to_all_launch, all_to_all_rows_launch):
        lib.impl(f"{fn.__name__}_{name}", torch.compiler.disable(fn), "CompositeExplicitAutograd")


for _name in COPY_TRANSPORTS:
    _implement(_name)
