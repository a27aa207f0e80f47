"""The transports that this process has open, one per group and name, and the launch ops that go over them.

A transport that does not prove itself (proof.py) is replaced on every rank by the one that `auto` would take next, with
a warning; unless it was asked for by name, which is then an error.
"""

from __future__ import annotations

import logging
from functools import partial
from importlib import import_module
from typing import Any

import torch

from freescale.compat import distributed, dynamo
from freescale.kernels.ops import table_registry
from freescale.kernels.ops.schemas import COPY_TRANSPORTS, lib
from freescale.kernels.transports import c10d, launch_record, proof, selection

log = logging.getLogger(__name__)

options: dict[str, dict[str, Any]] = {name: {} for name in COPY_TRANSPORTS}  # to open one with; from the flags
asked_for: set[str] = set()  # names that were set as FREESCALE_TRANSPORT, or as the option of a model
# Names of transport and group: the group, and its transport, or what takes its place; None: c10d does.
_open: dict[tuple[str, str], tuple[Any, Any]] = {}


def transport_for(name: str, group: Any, device: torch.device) -> Any:
    """The group's transport of that name, opened on first use; collective then. None if c10d takes its place."""
    known = _open.get((name, group.group_name))
    if known is not None and known[0] is group:
        return known[1]
    if known is not None and known[1] is not None:
        known[1].close()  # of a group that had the same name
    transport = _open_or_replace(name, group, device)
    _open[name, group.group_name] = group, transport
    return transport


def _open_or_replace(name: str, group: Any, device: torch.device) -> Any:
    module = import_module(f"freescale.kernels.transports.{name}")
    seconds = distributed.timeout_of(group).total_seconds()
    try:
        return proof.open_proven(partial(module.open_transport, group, device, **options[name]), group, device, seconds)
    except proof.NotProven as error:
        if name in asked_for:
            message = f"freescale: FREESCALE_TRANSPORT={name} cannot be met: {error}"
            raise selection.UnsupportedTransport(message) from error
        other = "staged" if name == "peer" else "c10d"
        if group.rank() == 0:
            log.warning("freescale: launches go over %s instead of %s: %s", other, name, error)
        return None if other == "c10d" else transport_for(other, group, device)


def _transports() -> list[Any]:
    return [transport for _, transport in _open.values() if transport is not None]


def names() -> list[str]:
    """Of the transports that have been used."""
    return sorted({transport.name for transport in _transports()})


def check() -> None:
    """Raise if a transfer of any group has failed: a device that was released computes garbage until somebody asks."""
    for transport in _transports():
        transport.check()


def drain(*_: Any) -> None:
    """Before tables are read for a checkpoint: wait until nothing is in flight, and raise if a transfer has failed.

    Otherwise what is read could wait for a stream that a failure releases, and be garbage without an error. Takes
    whatever a hook is called with.
    """
    for transport in _transports():
        transport.drain()


def close() -> None:
    """Give all pinned memory, windows and streams back."""
    for transport in _transports():
        transport.close()
    _open.clear()


def _launch_over_c10d(x, send_counts, recv_counts, n_recv, label, group):
    """As reference.py does."""
    out = x.new_empty((n_recv, *x.shape[1:]))
    work = c10d.start_all_to_all(out, x.contiguous(), recv_counts.tolist(), send_counts.tolist(), group)
    return launch_record.register_launch(work, label, out, group)


def _implement_launches(name: str) -> None:
    def launch(what, x, send_counts, recv_counts, n_recv, priority, table, group_name):
        group = distributed.group_by_name(group_name)
        label = launch_record.launch_label(what, priority, table)
        with launch_record.profiler_range("launch", label):
            transport = transport_for(name, group, x.device)
            if transport is None:
                return _launch_over_c10d(x, send_counts, recv_counts, n_recv, label, group)
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
