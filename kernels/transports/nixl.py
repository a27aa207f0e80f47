"""The `nixl` transport: an all-to-all through pinned host memory, carried between hosts by NVIDIA's NIXL, no kernel.

    sender's device --copy engine--> slot --one-sided write--> slot --copy engine--> receiver's device

For each priority, every rank has send and receive slots for every other rank, and a thread that drives NIXL
(nixl_relay.py). Device copies and signals work as in `staged`.
"""

from __future__ import annotations

import contextlib
import mmap
import secrets
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from freescale.compat import cuda, distributed, nixl
from freescale.kernels.transports.base import CopyTransport, release_words
from freescale.kernels.transports.cuda_driver import CudaDriver
from freescale.kernels.transports.nixl_relay import NixlRelay, PeerReports, PeerSlots
from freescale.kernels.transports.shared_segment import cpu_group
from freescale.kernels.transports.slot_rings import PRIORITY_LEVELS, WORD_STRIDE, Lane, fit_slots

RING_BYTES = 256 << 20  # per rank
PIECE_BYTES = 4 << 20  # maximum, per slot
_CLOSE_SECONDS = 5.0
_OPEN_SECONDS = 60.0  # minimum: UCX probes networks for each priority
_OUT_FULL, _OUT_FREE, _IN_FULL, _IN_FREE = range(4)


@dataclass(frozen=True)
class HostLayout:
    """Layout of a rank's slots in memory, followed by their words: by priority, then direction, then peer."""

    world: int
    slots: int
    piece_bytes: int

    @classmethod
    def fitting(cls, world: int, ring_bytes: int, piece_bytes: int) -> HostLayout:
        return cls(world, *fit_slots("nixl", world, 2 * PRIORITY_LEVELS, ring_bytes, piece_bytes))

    @property
    def level_bytes(self) -> int:
        return 2 * self.world * self.slots * self.piece_bytes

    def data_offset(self, level: int, is_in: bool, peer: int) -> int:
        return level * self.level_bytes + (is_in * self.world + peer) * self.slots * self.piece_bytes

    def words_offset(self, level: int, kind: int, peer: int) -> int:
        row = (level * 4 + kind) * self.world + peer
        return PRIORITY_LEVELS * self.level_bytes + row * self.slots * WORD_STRIDE

    @property
    def nbytes(self) -> int:
        return self.words_offset(PRIORITY_LEVELS, 0, 0)


class NixlTransport(CopyTransport):
    name = "nixl"

    def __init__(
        self, group: dist.ProcessGroup, driver: Any, timeout: float, gloo_group: dist.ProcessGroup, layout: HostLayout
    ) -> None:
        super().__init__(group, driver, timeout)
        self.layout, self.pinned_bytes = layout, layout.nbytes
        self._memory = np.frombuffer(mmap.mmap(-1, layout.nbytes), np.uint8)
        self._mapped = self._resources.pin(self._memory)
        self._open_channels(self._lane, layout.piece_bytes)
        self._stop_threads, self._released = threading.Event(), threading.Event()
        self._agents: list[nixl.Agent] = []
        self._threads: list[NixlRelay] = []
        self.liveness = self._reports = PeerReports(self._threads)
        self._resources.on_close(_close_agents, self._agents)
        self._resources.on_close(
            _stop_relaying, self._threads, gloo_group, self._wait_words, self._stop_threads, self._released
        )
        self._threads += self._connect(gloo_group)
        for thread in self._threads:
            thread.start()
        self._start_watching()

    def _words(self, level: int, kind: int, peer: int) -> np.ndarray:
        begin = self.layout.words_offset(level, kind, peer)
        return self._memory[begin : begin + self.layout.slots * WORD_STRIDE].view(np.uint32)[:: WORD_STRIDE // 4]

    def _lane(self, peer: int, level: int, sends: bool) -> Lane:
        # A rank's lane to itself is one ring: both ends see the same slots and words.
        out = sends or peer == self.rank
        full, free = (_OUT_FULL, _OUT_FREE) if out else (_IN_FULL, _IN_FREE)
        waits, signals = (free, full) if sends else (full, free)
        return Lane(
            peer=peer,
            sends=sends,
            slots=self.layout.slots,
            piece_bytes=self.layout.piece_bytes,
            data_address=self._memory.ctypes.data + self.layout.data_offset(level, not out, peer),
            wait_address=self._mapped + self.layout.words_offset(level, waits, peer),
            signal_address=self._mapped + self.layout.words_offset(level, signals, peer),
            wait_words=self._words(level, waits, peer),
        )

    def _connect(self, gloo_group: dist.ProcessGroup) -> list[NixlRelay]:
        """Create one agent per priority and exchange their metadata with all ranks. Collective."""
        address, layout = self._memory.ctypes.data, self.layout
        agents, problem = self._agents, ""
        try:
            for level in range(PRIORITY_LEVELS):
                name = f"freescale-{secrets.token_hex(8)}"  # included in notifications
                agents.append(nixl.Agent(name, address + layout.data_offset(level, False, 0), layout.level_bytes))
        except Exception as error:  # noqa: BLE001  (reported to the other ranks)
            problem = f"{type(error).__name__}: {error}"
        places = distributed.gather_objects((problem, address, [(a.name, a.metadata()) for a in agents]), gloo_group)
        _raise_first(self.ranks, [problem for problem, _, _ in places])
        others = [p for p in range(self.world) if p != self.rank]
        try:
            for level, agent in enumerate(agents):
                for peer in others:
                    agent.connect(*places[peer][2][level])
        except Exception as error:  # noqa: BLE001
            problem = f"{type(error).__name__}: {error}"
        _raise_first(self.ranks, distributed.gather_objects(problem, gloo_group))
        return [
            self._relay(level, agent, [p[2][level][0] for p in places], {p: places[p][1] for p in others})
            for level, agent in enumerate(agents)
        ]

    def _relay(self, level: int, agent: nixl.Agent, names: Sequence[str], addresses: dict[int, int]) -> NixlRelay:
        layout, transport_ref = self.layout, weakref.ref(self)
        slots = {
            peer: PeerSlots(
                self._memory.ctypes.data + layout.data_offset(level, False, peer),
                *(self._words(level, kind, peer) for kind in (_OUT_FULL, _OUT_FREE, _IN_FULL, _IN_FREE)),
            )
            for peer in addresses
        }
        remote = {peer: begin + layout.data_offset(level, True, self.rank) for peer, begin in addresses.items()}

        def on_failure(text: str) -> None:
            if (transport := transport_ref()) is not None:
                transport.fail(f"rank {transport.global_rank} cannot continue: {text}", {transport.rank})

        return NixlRelay(
            self.rank, agent, names, slots, remote, layout.piece_bytes, self._reports, self._stop_threads, on_failure
        )

    def _issued(self, level: int, send_counts: torch.Tensor, recv_counts: torch.Tensor, row_bytes: int) -> None:
        send, recv = ([n * row_bytes for n in counts.tolist()] for counts in (send_counts, recv_counts))
        self._threads[level].enqueue(send, recv)

    def missing_peers(self) -> set[int]:
        return set().union(*(thread.awaited_peers() for thread in self._threads))

    def _host_is_sending(self) -> bool:
        return any(thread.busy for thread in self._threads)

    def release_waits(self) -> None:
        self._released.set()
        super().release_waits()


def _raise_first(ranks: Sequence[int], problems: Sequence[str]) -> None:
    for rank, problem in zip(ranks, problems, strict=True):
        if problem:
            raise RuntimeError(f"freescale: nixl: rank {rank} cannot open the transport: {problem}")


def _stop_relaying(
    threads: Sequence[NixlRelay], gloo_group: dist.ProcessGroup, wait_words: list[np.ndarray], stop: threading.Event,
    released: threading.Event,
) -> None:  # fmt: skip
    """Let `busy` threads finish, unless one of them stopped them all or a failure `released` their streams; then stop
    the threads and synchronize the ranks."""
    end = time.monotonic() + _CLOSE_SECONDS
    while any(t.busy for t in threads) and not (stop.is_set() or released.is_set()) and time.monotonic() < end:
        time.sleep(0.001)
    stop.set()
    release_words(wait_words)
    for thread in threads:
        if thread.ident is not None and thread is not threading.current_thread():
            thread.join(max(0.0, end - time.monotonic()))
    if not threads or any(t.is_alive() or t.broken or t.busy for t in threads) or not dist.is_initialized():
        return
    # Data from this rank may still be in flight to a peer: keep connections and agents until all ranks are here.
    with contextlib.suppress(RuntimeError):
        work = dist.barrier(gloo_group, async_op=True)
        assert work is not None
        work.wait(timedelta(seconds=_CLOSE_SECONDS))


def _close_agents(agents: list[nixl.Agent]) -> None:
    while agents:
        agents.pop().close()


def open_transport(
    group: dist.ProcessGroup,
    device: torch.device | None = None,
    ring_bytes: int = RING_BYTES,
    piece_bytes: int = PIECE_BYTES,
    timeout: float | None = None,
    driver: Any = None,
) -> CopyTransport:
    """Open the group's transport. Collective: every rank passes the same arguments."""
    if cuda.cuda_caching_disabled():
        raise RuntimeError(
            "freescale: nixl cannot run with PYTORCH_NO_CUDA_MEMORY_CACHING set: freeing a tensor would wait for the "
            "device while holding the GIL, which the sending threads need"
        )
    if driver is None:
        driver = CudaDriver(device if device is not None else torch.device("cuda", torch.cuda.current_device()))
    seconds = timeout if timeout is not None else distributed.timeout_of(group).total_seconds()
    gloo_group = cpu_group(group, max(seconds, _OPEN_SECONDS))
    _raise_first(dist.get_process_group_ranks(group), distributed.gather_objects(nixl.missing_reason(), gloo_group))
    return NixlTransport(group, driver, seconds, gloo_group, HostLayout.fitting(group.size(), ring_bytes, piece_bytes))
