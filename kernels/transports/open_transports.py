"""The open transports of this process, one per name and set of ranks: the training's group and the background group
share one, in which each priority has its own streams and slots.

A transport requested by name must pass its self-test (proof.py), else it is an error. `auto` opens the SM-free
transport that the group's ranks can use (selection.py), measures it against the group's own all-to-all (link_speed.py),
and keeps one of them. All of this is collective, so every rank chooses the same.
"""

from __future__ import annotations

import logging
import math
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from freescale.compat import distributed
from freescale.kernels.transports import link_speed, proof, selection

log = logging.getLogger(__name__)

options: dict[str, dict[str, Any]] = {name: {} for name in selection.SM_FREE}  # constructor arguments, from the flags
# (name or "auto", group name) -> the group, and its transport (None: c10d)
_open: dict[tuple[str, str], tuple[Any, Any]] = {}


def _known(name: str, group: Any) -> tuple[Any, Any] | None:
    """The entry of this group, or of another one with the same ranks."""
    key = name, group.group_name
    known = _open.get(key)
    if known is not None and known[0] is group:
        return known
    if known is not None and known[1] is not None:
        known[1].close()  # of an earlier group with the same name
    _open.pop(key, None)
    ranks = dist.get_process_group_ranks(group)
    for (of_name, _), (other, transport) in list(_open.items()):
        if of_name == name and distributed.is_alive(other) and dist.get_process_group_ranks(other) == ranks:
            _open[key] = group, transport
            return _open[key]
    return None


def transport_for(name: str, group: Any, x: torch.Tensor, n_recv: int) -> Any:
    """The transport for launches of the group under that name, None for c10d. Opened on first use, which is collective.
    `x`, `n_recv`: the rows that this launch sends, and how many it receives."""
    known = _known(name, group)
    if known is not None:
        return known[1]
    if name == "auto":
        row_bytes = math.prod(x.shape[1:]) * x.element_size()
        transport = _choose(group, x.device, max(len(x), n_recv) * row_bytes)
        _open[name, group.group_name] = group, transport
        return transport
    try:
        return _open_proven(name, group, x.device)
    except proof.NotProven as error:
        message = f"freescale: FREESCALE_TRANSPORT={name} is not supported here: {error}"
        raise selection.UnsupportedTransport(message) from error


def _open_proven(name: str, group: Any, device: torch.device) -> Any:
    """The group's transport of that name. Collective. Raises NotProven."""
    known = _known(name, group)
    if known is not None:
        return known[1]
    module = import_module(f"freescale.kernels.transports.{name}")
    seconds = distributed.timeout_of(group).total_seconds()
    opening = partial(module.open_transport, group, device, **options[name])
    transport = proof.open_proven(opening, group, device, seconds)
    _open[name, group.group_name] = group, transport
    return transport


def _choose(group: Any, device: torch.device, nbytes: int) -> Any:
    """The choice of `auto`; None: c10d. Collective. Logs one line with the reason."""
    views, nbytes = selection.gather_views(group, device, nbytes)
    candidates = selection.candidates(views)
    open_before = {name for name in selection.SM_FREE if _known(name, group) is not None}
    transport, reason = _open_candidate(candidates, group, device), candidates.reason
    if transport is not None and candidates.has_c10d and group.size() > 1:
        seconds = link_speed.measure_transports({transport.name: transport, "c10d": None}, nbytes, group, device)
        reason = f"{selection.figures(seconds, link_speed.size_of(nbytes))}; {reason}"
        if selection.fastest(seconds) == "c10d":
            if transport.name not in open_before:
                del _open[transport.name, group.group_name]
                transport.close(grace_seconds=1.0)
            transport = None
    if group.rank() == 0:
        name = "c10d" if transport is None else transport.name
        log.info("auto: group %s uses %s: %s", group.group_name, name, reason)
    return transport


def _open_candidate(candidates: selection.Candidates, group: Any, device: torch.device) -> Any:
    """The SM-free candidate if it passes its self-test, else None for c10d. An error if c10d cannot carry the rows."""
    problem = candidates.reason
    if candidates.sm_free:
        try:
            return _open_proven(candidates.sm_free, group, device)
        except proof.NotProven as error:
            problem = str(error)
            if candidates.has_c10d and group.rank() == 0:
                log.warning("freescale: launches use c10d instead of %s: %s", candidates.sm_free, error)
    if not candidates.has_c10d:
        raise selection.UnsupportedTransport(
            f"freescale: no transport can carry the rows of group {group.group_name}: {problem}; "
            f"{candidates.no_c10d}"
        )
    return None


def _transports() -> list[Any]:
    return list({id(transport): transport for _, transport in _open.values() if transport is not None}.values())


def names() -> list[str]:
    return sorted({transport.name for transport in _transports()})


def check() -> None:
    """Raise if a transfer of any group failed: a released device computes garbage until it is checked."""
    for transport in _transports():
        transport.check()


def drain(*_: Any) -> None:
    """Called before tables are read for a checkpoint (arguments of hooks are ignored): wait until nothing is in flight.
    Otherwise the read could wait for a stream that a failure releases, and return garbage without an error."""
    for transport in _transports():
        transport.drain()


def close() -> None:
    for transport in _transports():
        transport.close()
    _open.clear()
