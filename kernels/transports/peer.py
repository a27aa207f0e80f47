"""The `peer` transport: a sender pushes its rows straight into the receiver's memory (torch symmetric memory).

Every rank has a window: for each priority and each peer two slabs, used in turn. A sender fills one while the receiver
empties the other, so the answer that a slab is free is long there when it is needed. Peers come in rotated order,
the flag follows its data on the same stream, and waits are stream waits on words of the own window: no kernel spins.

A slab that is smaller than what a peer sends is used several times over. Windows grow when batches need more: every
few launches the ranks agree, in the background, on the largest need, and all of them grow at the same later launch.

Proven correct with several ranks on one GPU, where a same-device copy is a kernel and takes SMs. Between GPUs the copy
engines do it; that has not been measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from freescale.compat import distributed
from freescale.kernels.transports import slot_rings
from freescale.kernels.transports.base import FAR, Message, Transport
from freescale.kernels.transports.cuda_driver import CudaDriver
from freescale.kernels.transports.shared_segment import LINE, Presence, agree_on_segment, cpu_group
from freescale.kernels.transports.slot_rings import LEVELS, WORD_STRIDE, Lane, Step

WINDOW_BYTES, MOST_BYTES = 1 << 20, 64 << 20  # of one slab: at first, and at most
AGREE_EVERY = 16  # launches
FLAGS = ("write", "copy")
_SLOTS = 2


class Peer(Transport):
    name = "peer"

    def __init__(
        self, group: dist.ProcessGroup, driver: Any, timeout: float, window_bytes: int, most_bytes: int, flag: str
    ) -> None:
        super().__init__(group, driver, timeout)
        self._copy_out = self._copy_in = driver.copy_across
        self._by_copy = flag == "copy"
        self._group = cpu_group(group, timeout)
        segment, _ = agree_on_segment(self.world * LINE, self.rank, self._group)
        if segment is not None:  # else a lost peer is noticed when the time-out has passed
            self._resources.callback(segment.close)
            self.presence = Presence(segment, self.rank, self.world)
        self._open_streams()
        self._aside = driver.new_stream(0)  # for what must not stand behind a waiting stream
        self._resources.callback(driver.drop_stream, self._aside)
        streams = [stream for outwards, inwards in self.streams for stream in (*outwards, *inwards)]
        self._scratch = torch.zeros(len(streams) * WORD_STRIDE, dtype=torch.uint8, device=driver.device)
        self._scratch_of = {stream: self._scratch.data_ptr() + i * WORD_STRIDE for i, stream in enumerate(streams)}
        self._most = most_bytes
        self._need = 0
        self._agreement: tuple[torch.Tensor, Any] | None = None
        self._open_window(window_bytes)
        self._start_watching()

    def _open_window(self, slab: int) -> None:
        """Collective; nothing of an older window may be in flight."""
        self.slab = -(-slab // 4096) * 4096
        self._flags_at = LEVELS * self.world * _SLOTS * self.slab
        flags = 2 * LEVELS * self.world * _SLOTS * WORD_STRIDE
        self.window_bytes = self._flags_at + flags
        try:
            self._window, self._bases = distributed.symmetric_buffer(self.window_bytes, self.driver.device, self.group)
        except RuntimeError as error:
            raise RuntimeError(
                f"freescale: peer: rank {self._me()} cannot share {self.window_bytes} bytes of its GPU with the other "
                f"ranks' GPUs ({error}); FREESCALE_TRANSPORT=staged needs no such memory"
            ) from error
        self._flags = self._window[self._flags_at :].view(torch.int32)
        self._flags.zero_()
        torch.cuda.synchronize(self.driver.device)
        dist.barrier(self._group)
        self._out = [[self._lane(p, level, True) for p in range(self.world)] for level in range(LEVELS)]
        self._in = [[self._lane(p, level, False) for p in range(self.world)] for level in range(LEVELS)]

    def _flag(self, full: bool, level: int, peer: int) -> int:
        return self._flags_at + ((full * LEVELS + level) * self.world + peer) * _SLOTS * WORD_STRIDE

    def _lane(self, peer: int, level: int, sends: bool) -> Lane:
        me, mine, theirs = self.rank, self._bases[self.rank], self._bases[peer]
        holder, source = (theirs, me) if sends else (mine, peer)
        return Lane(
            peer=peer,
            sends=sends,
            slots=_SLOTS,
            piece=self.slab,
            data=holder + (level * self.world + source) * _SLOTS * self.slab,
            waits_at=mine + self._flag(not sends, level, peer),
            tells_at=theirs + self._flag(sends, level, me),
        )

    def _steps(self, level: int, send: Sequence[int], recv: Sequence[int]) -> Iterable[Step]:
        lanes = self._in[level], self._out[level]
        for sends, peer, offset, nbytes in slot_rings.walk(self.rank, send, recv, self.slab):
            yield Step(lanes[sends][peer], offset, nbytes)

    def _tell(self, address: int, value: int, level: int, stream: int) -> None:
        if self._by_copy:
            scratch = self._scratch_of[stream]
            self.driver.write(scratch, value, stream)
            self.driver.copy_across(address, scratch, 4, stream)
        else:
            self.driver.write(address, value, stream)

    def _issue(
        self, x: torch.Tensor, out: torch.Tensor, send: list[int], recv: list[int], priority: int
    ) -> Message:
        self._need = max(self._need, *send, *recv)
        turn = self.launched % AGREE_EVERY
        if turn == AGREE_EVERY // 2:
            need = torch.tensor([self._need])
            self._agreement = need, dist.all_reduce(need, dist.ReduceOp.MAX, self._group, async_op=True)
        elif turn == 0 and self._agreement is not None:
            need, work = self._agreement
            work.wait()
            if min(int(need), self._most) > self.slab:
                self._grow(min(int(need), self._most))
        return super()._issue(x, out, send, recv, priority)

    def _grow(self, slab: int) -> None:
        """All ranks are at the same launch. This one does wait on the host; it happens a few times in a run."""
        self.settle()
        dist.barrier(self._group)
        self._open_window(slab)

    def _lacking(self) -> set[int]:
        with torch.cuda.stream(torch.cuda.ExternalStream(self._aside, self.driver.device)):
            words = self._flags.cpu().numpy().view(np.uint32)
        lacking = set()
        for lane in (lane for side in (self._out, self._in) for lanes in side for lane in lanes):
            first = (lane.waits_at - self._bases[self.rank] - self._flags_at) // 4
            seen = words[first : first + _SLOTS * WORD_STRIDE // 4 : WORD_STRIDE // 4]
            if lane.peer != self.rank and lane.lacks(seen):
                lacking.add(lane.peer)
        return lacking

    def _release(self) -> None:
        self.driver.fill(self._bases[self.rank] + self._flags_at, FAR, self._flags.numel(), self._aside)


def open_transport(
    group: dist.ProcessGroup,
    device: torch.device | None = None,
    window_bytes: int = WINDOW_BYTES,
    most_bytes: int = MOST_BYTES,
    flag: str = "copy",
    timeout: float | None = None,
) -> Peer:
    """Make the group's transport. Collective. `flag`: "copy" between GPUs; "write" may be refused there."""
    if flag not in FLAGS:
        raise ValueError(f"freescale: peer: flag is one of {', '.join(FLAGS)}, found {flag!r}")
    driver = CudaDriver(device if device is not None else torch.device("cuda", torch.cuda.current_device()))
    seconds = timeout if timeout is not None else distributed.timeout_of(group).total_seconds()
    return Peer(group, driver, seconds, window_bytes, most_bytes, flag)
