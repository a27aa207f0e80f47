"""Self-test of a transport: before first use, the ranks exchange random bytes at every priority, in messages of uneven
sizes, several in flight, and compare them. So a driver, network or memory on which it does not work shows here."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from freescale.compat import distributed
from freescale.kernels.transports.shared_segment import cpu_group
from freescale.kernels.transports.slot_rings import PRIORITY_LEVELS

SECONDS = 60.0  # per priority; a slower transport fails the test
_MESSAGES = 3  # per priority
_ROW_BYTES = 16
_ROWS = (0, 1, 37, 1000, 4096)


class NotProven(RuntimeError):
    """The transport did not open, or did not deliver the bytes that were sent. The same on every rank."""


def open_proven(open_transport: Any, group: dist.ProcessGroup, device: torch.device, timeout: float) -> Any:
    """Open a transport and test it on every rank; raise NotProven if it fails. Collective."""
    verdicts = cpu_group(group, 2 * timeout + SECONDS * PRIORITY_LEVELS, -1)  # used only here
    transport, problem, begin = None, "", time.monotonic()
    try:
        transport = open_transport()
        problem = find_problem(transport, group, device)
    except Exception as error:  # noqa: BLE001  (reported to the other ranks)
        problem = str(error).removeprefix("freescale: ") or type(error).__name__
    reports = distributed.gather_objects((problem, time.monotonic() - begin), verdicts)
    # The first rank to fail did not fail because of another.
    failed = [(seconds, rank, words) for rank, (words, seconds) in enumerate(reports) if words]
    if not failed:
        return transport
    if transport is not None:
        transport.close(grace_seconds=1.0)
    _, rank, words = min(failed)
    raise NotProven(f"rank {dist.get_process_group_ranks(group)[rank]}: {words}")


def find_problem(transport: Any, group: dist.ProcessGroup, device: torch.device) -> str:
    """Describe what is wrong with the data received by this rank; empty if nothing is. Wrong bytes do not end the test:
    other ranks wait for this rank's data."""
    problem = ""
    for priority in range(PRIORITY_LEVELS):
        arriving = [_send(transport, group, device, priority, number) for number in range(_MESSAGES)]
        end = time.monotonic() + SECONDS
        for work, out, expected in arriving:
            while not work.is_completed():
                transport.check()
                if time.monotonic() > end:
                    return f"{transport.name} did not deliver {out.nbytes} bytes within {SECONDS:g} s"
                time.sleep(1e-4)
            work.wait()
            transport.check()
            problem = problem or _compare(transport.name, group, out.cpu(), expected)
    return problem


def _send(transport: Any, group: dist.ProcessGroup, device: torch.device, priority: int, number: int) -> tuple:
    """The Work of a message, its output, and the expected bytes from each rank."""
    rank, world = group.rank(), group.size()
    parts = [_bytes(rank, to, priority, number, world) for to in range(world)]
    expected = [_bytes(source, rank, priority, number, world) for source in range(world)]
    send, recv = (torch.tensor([len(p) for p in ps]) for ps in (parts, expected))
    out, work = transport.start(torch.cat(parts).to(device), send, recv, int(recv.sum()), priority)
    return work, out, expected


def _compare(name: str, group: dist.ProcessGroup, out: torch.Tensor, expected: list[torch.Tensor]) -> str:
    for source, (part, got) in enumerate(zip(expected, out.split([len(p) for p in expected]), strict=True)):
        if wrong := int((part != got).sum()):
            rank = dist.get_process_group_ranks(group)[source]
            return f"{name} corrupted {wrong} of {part.nbytes} bytes from rank {rank}"
    return ""


def _bytes(source: int, to: int, priority: int, number: int, world: int) -> torch.Tensor:
    """The bytes that one rank sends another; both can generate them."""
    rows = _ROWS[(source + 2 * to + number) % len(_ROWS)]
    rows = min(rows, max(1, _ROWS[-1] * 8 // world)) if rows else 0  # fewer per rank for large groups
    seed = ((source * world + to) * PRIORITY_LEVELS + priority) * _MESSAGES + number
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, _ROW_BYTES), dtype=torch.uint8, generator=generator)
