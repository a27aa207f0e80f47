"""The `staged` transport: an all-to-all through pinned host memory by copy engines alone, no kernel.

    sender's device --copy engine--> slot in host memory --copy engine--> receiver's device

The ranks of one host share the slots. The signals are words next to them that the devices write and wait for; no
process touches data or signals. Memory is bounded by `ring_bytes` per rank, allocated once; a sender without a free
slot waits on its stream.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from freescale.compat import distributed
from freescale.kernels.transports.base import CopyTransport, release_words
from freescale.kernels.transports.cuda_driver import CudaDriver
from freescale.kernels.transports.shared_segment import PeerLiveness, SharedSegment, cpu_group, share_segment
from freescale.kernels.transports.slot_rings import Lane, SharedLayout

RING_BYTES = 256 << 20  # per rank
PIECE_BYTES = 8 << 20  # maximum, per slot


class SharedMemoryTransport(CopyTransport):
    """Ranks of one host. There is a lane for every pair of ranks, including each rank with itself."""

    name = "staged"

    def __init__(
        self, group: dist.ProcessGroup, driver: Any, timeout: float | None, segment: SharedSegment, layout: SharedLayout
    ) -> None:
        super().__init__(group, driver, timeout)
        self.segment, self.layout = segment, layout
        self._resources.on_close(segment.close)
        self._mapped = self._resources.pin(segment.bytes)
        self.liveness = PeerLiveness(segment, self.rank, self.world)
        self._open_channels(self._lane, layout.piece_bytes)
        self._resources.on_close(release_words, self._wait_words)
        self.pinned_bytes = segment.nbytes  # per host, not per rank: all ranks pin the same memory
        self._start_watching()

    def _lane(self, peer: int, level: int, sends: bool) -> Lane:
        lane = self.layout.lane(self.rank, peer, level) if sends else self.layout.lane(peer, self.rank, level)
        full, free = self.layout.full_offset(lane), self.layout.free_offset(lane)
        waits, signals = (free, full) if sends else (full, free)
        return Lane(
            peer=peer,
            sends=sends,
            slots=self.layout.slots,
            piece_bytes=self.layout.piece_bytes,
            data_address=self.segment.address + self.layout.data_offset(lane),
            wait_address=self._mapped + waits,
            signal_address=self._mapped + signals,
            wait_words=self.segment.words(waits, self.layout.slots),
        )

    def missing_peers(self) -> set[int]:
        return {lane.peer for lane in self.lanes if lane.peer != self.rank and lane.is_blocked()}


def open_transport(
    group: dist.ProcessGroup,
    device: torch.device | None = None,
    ring_bytes: int = RING_BYTES,
    piece_bytes: int = PIECE_BYTES,
    timeout: float | None = None,
    driver: Any = None,
) -> SharedMemoryTransport:
    """Open the group's transport. Collective: every rank passes the same arguments."""
    if driver is None:
        driver = CudaDriver(device if device is not None else torch.device("cuda", torch.cuda.current_device()))
    seconds = timeout if timeout is not None else distributed.timeout_of(group).total_seconds()
    gloo_group = cpu_group(group, seconds)
    layout = SharedLayout.fitting(group.size(), ring_bytes, piece_bytes)
    segment, reason = share_segment(layout.nbytes, group.rank(), gloo_group)
    if segment is None:
        raise RuntimeError(f"freescale: staged: the ranks cannot share memory: {reason}")
    transport = SharedMemoryTransport(group, driver, seconds, segment, layout)
    dist.barrier(gloo_group)
    return transport
