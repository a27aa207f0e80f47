"""How long an urgent all-to-all takes while a large one is under way: same group, another group, cut into chunks.

A part of benchmarks/overlap.py (`--priority` runs it alone). Needs ranks behind shaped links; uses plain
torch.distributed, nothing of freescale, so it says what any schedule of launches can expect of the transport.

Each case is measured with the group's all-to-all and with sends and receives whose receives are posted first. Gloo
starts to send when the receiver has said that it is ready, and says so on the connection that carries the data: a rank
that begins to send before it has said so makes its peer wait for all of it, and the two directions take turns. The
group's all-to-all does that now and then, depending on who comes first; posting receives first never does.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import netlab

LEAD = 0.25  # the urgent one starts when this share of the bulk should be through
Wait = Callable[[], None]


def launch(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup, receives_first: bool, tag: int = 0) -> Wait:
    """Start an all-to-all with equal parts; returns what waits for it."""
    if not receives_first:
        works = [dist.all_to_all_single(out, x, group=group, async_op=True)]
    else:
        world, rank = group.size(), group.rank()
        to, fro = x.view(world, -1), out.view(world, -1)
        peers = [(rank + i) % world for i in range(1, world)]
        works = [dist.irecv(fro[p], p, group, tag) for p in peers]
        works += [dist.isend(to[p], p, group, tag) for p in peers]
        fro[rank].copy_(to[rank])

    def wait() -> None:
        for work in works:
            work.wait()

    return wait


class Bulk:
    """`size` bytes to the other ranks, in pieces of `chunk` bytes: one after the other, or all launched at once."""

    def __init__(self, size: int, chunk: int, group: dist.ProcessGroup, at_once: bool, receives_first: bool) -> None:
        pieces = [min(chunk, size - at) for at in range(0, size, chunk)]
        self.group, self.at_once, self.receives_first = group, at_once, receives_first
        self.buffers = [(_buffer(n), _buffer(n)) for n in pieces]

    def start(self) -> Wait:
        """Returns what waits for the end."""
        if not self.at_once:
            thread = threading.Thread(target=self._one_after_the_other, daemon=True)
            thread.start()
            return thread.join
        waits = [self._launch(i) for i in range(len(self.buffers))]
        return lambda: [wait() for wait in waits].clear()

    def _launch(self, i: int) -> Wait:
        return launch(*self.buffers[i], self.group, self.receives_first, tag=1 + i)

    def _one_after_the_other(self) -> None:
        for i in range(len(self.buffers)):
            self._launch(i)()


def _buffer(to_others: int) -> torch.Tensor:
    """For an all-to-all that sends so many bytes to the other ranks together."""
    world = dist.get_world_size()
    return torch.zeros(max(to_others // max(world - 1, 1), 1) * world, dtype=torch.uint8)


def measure(
    urgent: int, bulk: Bulk | None, lead: float, repeats: int, receives_first: bool
) -> tuple[list[float], list[float]]:
    """Milliseconds of the urgent all-to-all, and until the bulk is through as well."""
    x, out, group = _buffer(urgent), _buffer(urgent), dist.group.WORLD
    assert group is not None
    times, totals = [], []
    for _ in range(repeats + 1):
        dist.barrier()
        began = time.perf_counter()
        finish = bulk.start() if bulk is not None else None
        if finish is not None:
            time.sleep(lead)
        at = time.perf_counter()
        launch(out, x, group, receives_first)()
        times.append((time.perf_counter() - at) * 1e3)
        if finish is not None:
            finish()
        totals.append((time.perf_counter() - began) * 1e3)
    return times[1:], totals[1:]


def cases(
    size: int, chunks: list[int], groups: dict[str, dist.ProcessGroup], first: bool
) -> list[tuple[str, int | None, Bulk | None]]:
    found: list[tuple[str, int | None, Bulk | None]] = [("alone", None, None)]
    found += [(f"{name} group", None, Bulk(size, size, group, True, first)) for name, group in groups.items()]
    for chunk in (c for c in chunks if c < size):
        for name, group in groups.items():
            found.append((f"{name} group, all at once", chunk, Bulk(size, chunk, group, True, first)))
        # Not on the same group: ranks would start the chunks and the urgent one in different orders.
        found.append(("other group, one after the other", chunk, Bulk(size, chunk, groups["other"], False, first)))
    return found


def section_priority(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Rows of `transport, case, chunk, urgent_ms, total_ms`, and what the two would take by their bytes alone."""
    other, world = dist.new_group(backend="gloo"), dist.group.WORLD
    assert world is not None
    netlab.set_rate(args.rate)
    urgent, size = int(args.urgent_bytes), int(args.bulk_bytes)
    lead = LEAD * size * 8 / args.rate
    rows = []
    for transport, first in (("all-to-all", False), ("receives first", True)):
        for case, chunk, bulk in cases(size, args.chunks, {"same": world, "other": other}, first):
            times, totals = measure(urgent, bulk, lead, args.repeats, first)
            gathered: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, (times, totals))
            every = [t for mine, _ in gathered for t in mine]
            low, middle, high = np.percentile(every, [25, 50, 75]).tolist()
            total = float(np.median([t for _, mine in gathered for t in mine]))
            rows.append(
                {"transport": transport, "case": case, "chunk": chunk, "urgent_ms": middle,
                 "urgent_ms_iqr": high - low, "total_ms": total}
            )  # fmt: skip
        say(f"{transport}: {len(rows)} cases")
    return {
        "urgent_bytes": urgent,
        "bulk_bytes": size,
        "bits_per_second": args.rate,
        "urgent_wire_ms": urgent * 8e3 / args.rate,
        "both_wire_ms": (urgent + size) * 8e3 / args.rate,
        "rows": rows,
    }
