"""The transports that this process has open, one per group and name, and the launch ops that go over them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from freescale.compat import distributed, dynamo
from freescale.kernels.ops import table_registry
from freescale.kernels.ops.schemas import COPY_TRANSPORTS, lib
from freescale.kernels.transports import launch_record

options: dict[str, dict[str, Any]] = {name: {} for name in COPY_TRANSPORTS}  # to open one with; from the flags
_open: dict[tuple[str, str], tuple[Any, Any]] = {}  # names of transport and group: the group, its transport


def transport_for(name: str, group: Any, device: torch.device) -> Any:
    """The group's transport of that name, opened on first use; collective then."""
    known = _open.get((name, group.group_name))
    if known is not None and known[0] is group:
        return known[1]
    if known is not None:
        known[1].close()  # of a group that had the same name
    transport = import_module(f"freescale.kernels.transports.{name}").open_transport(group, device, **options[name])
    _open[name, group.group_name] = group, transport
    return transport


def names() -> list[str]:
    """Of the transports that have been used."""
    return sorted({name for name, _ in _open})


def check() -> None:
    """Raise if a transfer of any group has failed: a device that was released computes garbage until somebody asks."""
    for _, transport in _open.values():
        transport.check()


def drain(*_: Any) -> None:
    """Before tables are read for a checkpoint: wait until nothing is in flight, and raise if a transfer has failed.

    Otherwise what is read could wait for a stream that a failure releases, and be garbage without an error. Takes
    whatever a hook is called with.
    """
    for _group, transport in list(_open.values()):
        transport.drain()


def close() -> None:
    """Give all pinned memory, windows and streams back."""
    while _open:
        _open.popitem()[1][1].close()


def _implement_launches(name: str) -> None:
    def launch(what, x, send_counts, recv_counts, n_recv, priority, table, group_name):
        group = distributed.group_by_name(group_name)
        label = launch_record.launch_label(what, priority, table)
        with launch_record.profiler_range("launch", label):
            transport = transport_for(name, group, x.device)
            out, message = transport.start(x, send_counts, recv_counts, n_recv, priority)
        work = launch_record.RecordedMessage(transport, message, label, out, group)
        distributed.register_work(out, work)
        return out

    def all_to_all_launch(x, send_counts, recv_counts, n_recv, priority, table, group_name):
        return launch("gradients", x, send_counts, recv_counts, n_recv, priority, table, group_name)

    def all_to_all_rows_launch(token, rows, send_counts, recv_counts, n_recv, priority, table, group_name):
        packed = table_registry.gather_rows(table, rows)
        return launch("rows", packed, send_counts, recv_counts, n_recv, priority, table, group_name)

    for fn in (all_to_all_launch, all_to_all_rows_launch):
        lib.impl(f"{fn.__name__}_{name}", dynamo.untraced(fn), "CompositeExplicitAutograd")


for _name in COPY_TRANSPORTS:
    _implement_launches(_name)
