"""The `peer` transport: a sender pushes its rows straight into the receiver's memory (torch symmetric memory).

Every rank has a window: for each priority and each peer two slabs, used in turn. A sender fills one while the receiver
empties the other, so the signal that a slab is free is long there when it is needed. Peers come in rotated order,
the flag follows its data on the same stream, and waits are stream waits on words of the own window: no kernel spins.

A slab that is smaller than what a peer sends is used several times over. Windows grow when batches need more: every
few launches the ranks agree, in the background, on the largest need, and all of them grow at the same later launch.

Proven correct with several ranks on one GPU, where a same-device copy is a kernel and takes SMs. Between GPUs the copy
engines do it; that has not been measured.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from freescale.compat import distributed
from freescale.kernels.transports.base import RELEASED, CopyTransport
from freescale.kernels.transports.channel import Channel
from freescale.kernels.transports.cuda_driver import CudaDriver
from freescale.kernels.transports.shared_segment import PeerLiveness, cpu_group, share_segment
from freescale.kernels.transports.slot_rings import PAGE_BYTES, PRIORITY_LEVELS, WORD_STRIDE, Lane

WINDOW_BYTES, MAX_BYTES = 1 << 20, 64 << 20  # of one slab: at first, and at most
AGREE_EVERY = 16  # launches
FLAG_MODES = ("write", "copy")
_SLOTS = 2


class PeerTransport(CopyTransport):
    """Ranks whose GPUs can write into each other's memory."""

    name = "peer"

    def __init__(
        self, group: dist.ProcessGroup, driver: Any, timeout: float, window_bytes: int, max_bytes: int, flag: str
    ) -> None:
        super().__init__(group, driver, timeout)
        self._gloo_group = cpu_group(group, timeout)
        segment, _ = share_segment(self.world * PeerLiveness.nbytes_per_rank, self.rank, self._gloo_group)
        if segment is not None:  # else a lost peer is noticed when the time-out has passed
            self._resources.on_close(segment.close)
            self.liveness = PeerLiveness(segment, self.rank, self.world)
        self.streams = self._resources.open_streams()
        self._side_stream = self._resources.open_stream(0)  # for what must not stand behind a waiting stream
        streams = [stream for outwards, inwards in self.streams for stream in (*outwards, *inwards)]
        self._scratch = torch.zeros(len(streams) * WORD_STRIDE, dtype=torch.uint8, device=driver.device)
        scratch_of_stream = {s: self._scratch.data_ptr() + i * WORD_STRIDE for i, s in enumerate(streams)}
        self._scratch_of_stream = scratch_of_stream if flag == "copy" else {}
        self._max_bytes = max_bytes
        self._largest_transfer = 0  # bytes between this rank and one peer, in any message so far
        self._pending_agreement: tuple[torch.Tensor, Any] | None = None  # largest transfer of any rank, and the Work
        self._open_window(window_bytes)
        self._start_watching()

    def _open_window(self, slab_bytes: int) -> None:
        """Collective; nothing of an older window may be in flight."""
        self.slab_bytes = -(-slab_bytes // PAGE_BYTES) * PAGE_BYTES
        self._flags_begin = PRIORITY_LEVELS * self.world * _SLOTS * self.slab_bytes
        flag_bytes = 2 * PRIORITY_LEVELS * self.world * _SLOTS * WORD_STRIDE
        self.window_bytes = self._flags_begin + flag_bytes
        try:
            self._window, self._bases = distributed.symmetric_buffer(self.window_bytes, self.driver.device, self.group)
        except RuntimeError as error:
            raise RuntimeError(
                f"freescale: peer: rank {self.global_rank} cannot share {self.window_bytes} bytes of its GPU with the "
                f"other ranks' GPUs ({error}); FREESCALE_TRANSPORT=staged needs no such memory"
            ) from error
        self._flags = self._window[self._flags_begin :].view(torch.int32)
        self._flags.zero_()
        torch.cuda.synchronize(self.driver.device)
        dist.barrier(self._gloo_group)
        levels, peers = range(PRIORITY_LEVELS), range(self.world)
        self._lanes_out = [[self._lane(peer, level, True) for peer in peers] for level in levels]
        self._lanes_in = [[self._lane(peer, level, False) for peer in peers] for level in levels]
        self._open_channels([self._channel(level) for level in levels])

    def _flag_offset(self, full: bool, level: int, peer: int) -> int:
        return self._flags_begin + ((full * PRIORITY_LEVELS + level) * self.world + peer) * _SLOTS * WORD_STRIDE

    def _lane(self, peer: int, level: int, sends: bool) -> Lane:
        own_window, peer_window = self._bases[self.rank], self._bases[peer]
        window, sender = (peer_window, self.rank) if sends else (own_window, peer)
        return Lane(
            peer=peer,
            sends=sends,
            slots=_SLOTS,
            piece_bytes=self.slab_bytes,
            data_address=window + (level * self.world + sender) * _SLOTS * self.slab_bytes,
            wait_address=own_window + self._flag_offset(not sends, level, peer),
            signal_address=peer_window + self._flag_offset(sends, level, self.rank),
        )

    def _channel(self, level: int) -> Channel:
        return Channel(
            self.rank,
            *self.streams[level],
            self._lanes_out[level],
            self._lanes_in[level],
            self.slab_bytes,
            between_devices=True,
            scratch_of_stream=self._scratch_of_stream,
        )

    def _prepare(self, largest_bytes: int) -> None:
        self._largest_transfer = max(self._largest_transfer, largest_bytes)
        turn = self.launched % AGREE_EVERY
        if turn == AGREE_EVERY // 2:
            largest = torch.tensor([self._largest_transfer])
            work = dist.all_reduce(largest, dist.ReduceOp.MAX, self._gloo_group, async_op=True)
            self._pending_agreement = largest, work
        elif turn == 0 and self._pending_agreement is not None:
            largest, work = self._pending_agreement
            work.wait()
            if min(int(largest), self._max_bytes) > self.slab_bytes:
                self._grow(min(int(largest), self._max_bytes))

    def _grow(self, slab_bytes: int) -> None:
        """All ranks are at the same launch. This one does wait on the host; it happens a few times in a run."""
        self.drain()
        dist.barrier(self._gloo_group)
        self._open_window(slab_bytes)

    def missing_peers(self) -> set[int]:
        with torch.cuda.stream(torch.cuda.ExternalStream(self._side_stream, self.driver.device)):
            words = self._flags.cpu().numpy().view(np.uint32)
        missing = set()
        for lane in (lane for lanes in (*self._lanes_out, *self._lanes_in) for lane in lanes):
            first = (lane.wait_address - self._bases[self.rank] - self._flags_begin) // 4
            wait_words = words[first : first + _SLOTS * WORD_STRIDE // 4 : WORD_STRIDE // 4]
            if lane.peer != self.rank and lane.is_blocked(wait_words):
                missing.add(lane.peer)
        return missing

    def release_waits(self) -> None:
        own_flags = self._bases[self.rank] + self._flags_begin
        self.driver.fill_words(own_flags, RELEASED, self._flags.numel(), self._side_stream)


def open_transport(
    group: dist.ProcessGroup,
    device: torch.device | None = None,
    window_bytes: int = WINDOW_BYTES,
    max_bytes: int = MAX_BYTES,
    flag: str = "copy",
    timeout: float | None = None,
) -> PeerTransport:
    """Make the group's transport. Collective. `flag`: "copy" between GPUs; "write" may be refused there."""
    if flag not in FLAG_MODES:
        raise ValueError(f"freescale: peer: flag is one of {', '.join(FLAG_MODES)}, found {flag!r}")
    driver = CudaDriver(device if device is not None else torch.device("cuda", torch.cuda.current_device()))
    seconds = timeout if timeout is not None else distributed.timeout_of(group).total_seconds()
    return PeerTransport(group, driver, seconds, window_bytes, max_bytes, flag)
