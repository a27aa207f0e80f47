"""The `staged` transport: an all-to-all through pinned host memory by copy engines alone, no kernel anywhere.

    device of the sender --copy engine--> slot in host memory --network--> slot --copy engine--> device of the receiver

Where all ranks are on one host, the slots lie in memory that they share: the sender copies into the very slot that the
receiver copies out of, and both signals are words beside it that the devices themselves write and wait for. No
process touches a byte or a signal. Across hosts, threads send the slots over gloo (staged_gloo.py). What a rank
sends to itself goes through the host too, so no part of it takes SMs.

Memory is bounded by `ring_bytes` per rank, allocated once; a sender whose slots are taken waits on its stream.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from freescale.compat import distributed
from freescale.kernels.transports import slot_rings
from freescale.kernels.transports.base import Transport, set_far
from freescale.kernels.transports.cuda_driver import CudaDriver
from freescale.kernels.transports.shared_segment import Presence, Segment, agree_on_segment, cpu_group
from freescale.kernels.transports.slot_rings import LEVELS, WORD_STRIDE, Lane, Step

log = logging.getLogger(__name__)

RING_BYTES = 256 << 20  # per rank
PIECE_BYTES = 8 << 20  # at most, per slot
NETWORKS = ("auto", "memory", "gloo")


class SharedMemory(Transport):
    """Ranks of one host. Lanes lie between every two ranks, a rank and itself included."""

    name = "staged"

    def __init__(
        self, group: dist.ProcessGroup, driver: Any, timeout: float | None, segment: Segment, sizes: slot_rings.Sizes
    ) -> None:
        super().__init__(group, driver, timeout)
        self.segment, self.sizes = segment, sizes
        self._resources.callback(segment.close)
        device = self._pin(segment.bytes)
        self._open_streams()
        self.presence = Presence(segment, self.rank, self.world)
        self._out = [[self._lane(p, level, True, device) for p in range(self.world)] for level in range(LEVELS)]
        self._in = [[self._lane(p, level, False, device) for p in range(self.world)] for level in range(LEVELS)]
        words = [lane.seen for side in (self._out, self._in) for lanes in side for lane in lanes]
        self._awaited = [w for w in words if w is not None]
        self._resources.callback(set_far, self._awaited)
        self.pinned_bytes = segment.nbytes  # of the host, not of each rank: all ranks pin the same memory
        self._start_watching()

    def _lane(self, peer: int, level: int, sends: bool, device: int) -> Lane:
        at = self.sizes.lane(self.rank, peer, level) if sends else self.sizes.lane(peer, self.rank, level)
        full, free = self.sizes.full_at(at), self.sizes.free_at(at)
        waits, tells = (free, full) if sends else (full, free)
        return Lane(
            peer=peer,
            sends=sends,
            slots=self.sizes.slots,
            piece=self.sizes.piece,
            data=self.segment.address + self.sizes.data_at(at),
            waits_at=device + waits,
            tells_at=device + tells,
            seen=self.segment.words(waits, self.sizes.slots, WORD_STRIDE),
        )

    def _steps(self, level: int, send: Sequence[int], recv: Sequence[int]) -> Iterable[Step]:
        lanes = self._in[level], self._out[level]
        for sends, peer, offset, nbytes in slot_rings.walk(self.rank, send, recv, self.sizes.piece):
            yield Step(lanes[sends][peer], offset, nbytes)

    def _lacking(self) -> set[int]:
        lanes = [lane for side in (self._out, self._in) for lanes in side for lane in lanes]
        return {x.peer for x in lanes if x.peer != self.rank and x.seen is not None and x.lacks(x.seen)}

    def _release(self) -> None:
        set_far(self._awaited)


def open_transport(
    group: dist.ProcessGroup,
    device: torch.device | None = None,
    ring_bytes: int = RING_BYTES,
    piece_bytes: int = PIECE_BYTES,
    network: str = "auto",
    timeout: float | None = None,
    driver: Any = None,
) -> Transport:
    """Make the group's transport. Collective: every rank calls it, with the same arguments."""
    from freescale.kernels.transports.staged_gloo import Relay

    if network not in NETWORKS:
        raise ValueError(f"freescale: staged: network is one of {', '.join(NETWORKS)}, found {network!r}")
    if network == "gloo":
        _refuse_gloo_without_caching()
    if driver is None:
        driver = CudaDriver(device if device is not None else torch.device("cuda", torch.cuda.current_device()))
    seconds = timeout if timeout is not None else distributed.timeout_of(group).total_seconds()
    side = cpu_group(group, seconds)
    if network != "gloo":
        sizes = slot_rings.fit(group.size(), ring_bytes, piece_bytes)
        segment, why_not = agree_on_segment(sizes.nbytes, group.rank(), side)
        if segment is not None:
            made = SharedMemory(group, driver, seconds, segment, sizes)
            dist.barrier(side)
            return made
        if network == "memory":
            raise RuntimeError(f"freescale: staged: the ranks cannot share memory: {why_not}")
        log.info("staged: over gloo, because %s", why_not)
        _refuse_gloo_without_caching()
    return Relay(group, driver, seconds, side, ring_bytes, piece_bytes)


def _refuse_gloo_without_caching() -> None:
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        raise RuntimeError(
            "freescale: staged over gloo cannot run with PYTORCH_NO_CUDA_MEMORY_CACHING set: to free a tensor "
            "would wait for the device while it holds the lock that the sending threads need"
        )
