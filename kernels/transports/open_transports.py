"""The transports that this process has open, one per group and name, and the launch ops that go over them.

One that was asked for by name proves itself (proof.py), or it is an error. `auto` opens what the group's ranks can use
(selection.py), best first, until one proves itself; measures that and the group's own all-to-all (transport_speed.py);
and keeps one of them. All of this is collective, and so is the same on every rank.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch

from freescale.compat import distributed
from freescale.kernels.ops import table_registry
from freescale.kernels.ops.schemas import COPY_TRANSPORTS, LAUNCH_SUFFIXES, implement
from freescale.kernels.planning.batch_plan import unless_nobody_sends
from freescale.kernels.transports import c10d, launch_record, proof, rank_view, selection, transport_speed

log = logging.getLogger(__name__)

options: dict[str, dict[str, Any]] = {name: {} for name in COPY_TRANSPORTS}  # to open one with; from the flags
# Names of transport, or "auto", and group: the group, and its transport; None: c10d.
_open: dict[tuple[str, str], tuple[Any, Any]] = {}


def transport_for(name: str, group: Any, x: torch.Tensor, n_recv: int) -> Any:
    """What carries launches of the group under that name, None for c10d; found on first use, which is collective.

    `x`, `n_recv`: what this launch sends, and how many such rows it receives.
    """
    known = _open.get((name, group.group_name))
    if known is not None and known[0] is group:
        return known[1]
    if name == "auto":
        row_bytes = math.prod(x.shape[1:]) * x.element_size()
        transport = _choose(group, x.device, max(len(x), n_recv) * row_bytes)
        _open[name, group.group_name] = group, transport
        return transport
    try:
        return _open_proven(name, group, x.device)
    except proof.NotProven as error:
        message = f"freescale: FREESCALE_TRANSPORT={name} cannot be met: {error}"
        raise selection.UnsupportedTransport(message) from error


def _open_proven(name: str, group: Any, device: torch.device) -> Any:
    """The group's transport of that name. Collective. Raises NotProven."""
    known = _open.get((name, group.group_name))
    if known is not None and known[0] is group:
        return known[1]
    if known is not None:
        known[1].close()  # of a group that had the same name
    module = import_module(f"freescale.kernels.transports.{name}")
    seconds = distributed.timeout_of(group).total_seconds()
    opening = partial(module.open_transport, group, device, **options[name])
    transport = proof.open_proven(opening, group, device, seconds)
    _open[name, group.group_name] = group, transport
    return transport


def _choose(group: Any, device: torch.device, nbytes: int) -> Any:
    """What `auto` takes; None: c10d. Collective. One sentence in the log says what, and why."""
    views, nbytes = rank_view.gather(group, device, nbytes)
    candidates = selection.candidates(views)
    open_before = {name for name, of_group in _open if of_group == group.group_name}
    transport, reason = _open_first(candidates.without_sms, group, device), candidates.reason
    if transport is not None and candidates.compare:
        seconds = transport_speed.measure({transport.name: transport, "c10d": None}, nbytes, group, device)
        reason = f"{selection.figures(seconds, transport_speed.size_of(nbytes))}; {reason}"
        if selection.fastest(seconds) == "c10d":
            if transport.name not in open_before:
                del _open[transport.name, group.group_name]
                transport.close(grace_seconds=1.0)
            transport = None
    if group.rank() == 0:
        name = "c10d" if transport is None else transport.name
        log.info("auto: the launches of group %s go over %s: %s", group.group_name, name, reason)
    return transport


def _open_first(names: Sequence[str], group: Any, device: torch.device) -> Any:
    """The first that proves itself; None if none does."""
    for name, other in pairwise((*names, "c10d")):
        try:
            return _open_proven(name, group, device)
        except proof.NotProven as error:
            if group.rank() == 0:
                log.warning("freescale: launches go over %s instead of %s: %s", other, name, error)
    return None


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
            transport = transport_for(name, group, x, n_recv)
            if transport is None:
                return _launch_over_c10d(x, send_counts, recv_counts, n_recv, label, group)
            out, message = transport.start(x, send_counts, recv_counts, n_recv, priority)
        work = launch_record.RecordedMessage(transport, message, label, out, group)
        distributed.register_work(out, work)
        return out

    @unless_nobody_sends
    def all_to_all_launch(x, send_counts, recv_counts, n_recv, priority, table, group_name):
        return launch("gradients", x, send_counts, recv_counts, n_recv, priority, table, group_name)

    @unless_nobody_sends
    def all_to_all_rows_launch(token, rows, send_counts, recv_counts, n_recv, priority, table, group_name):
        packed = table_registry.gather_rows(table, rows)
        return launch("rows", packed, send_counts, recv_counts, n_recv, priority, table, group_name)

    for fn in (all_to_all_launch, all_to_all_rows_launch):
        implement(f"{fn.__name__}_{name}", fn)


for _name in LAUNCH_SUFFIXES:
    _implement_launches(_name)
