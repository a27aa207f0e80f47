"""Memory that all ranks of one host share: a file in /dev/shm that is unlinked once everyone has it open.

Ranks first tell each other where they are; memory is reserved only where all of them are on one host.
Each rank holds a lock on one byte of the file. The kernel drops it when the process ends, however it ends, so the
others can see who is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import secrets
import socket
import struct
from datetime import timedelta

import numpy as np
import torch.distributed as dist

from freescale.kernels.transports.slot_rings import WORD_STRIDE, at_least

log = logging.getLogger(__name__)

_FOLDER = "/dev/shm"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_FLOCK_FORMAT = "hhqqi4x"  # struct flock


def host_id() -> str:
    """The same for processes that can share memory: of one running kernel, and with the same /dev/shm."""
    try:
        with open(_BOOT_ID) as file:
            kernel = file.read().strip()
    except OSError:
        kernel = socket.gethostname()
    try:
        return f"{kernel} {os.stat(_FOLDER).st_dev}"
    except OSError:
        return f"{kernel} {secrets.token_hex(8)}"  # with nobody


def share_segment(nbytes: int, rank: int, group: dist.ProcessGroup) -> tuple[SharedSegment | None, str]:
    """A segment that every rank of the group has mapped, or none and why not. Collective over a CPU group."""
    hosts = len(set(_all_gather(host_id(), group)))
    if hosts > 1:
        return None, f"the ranks are on {hosts} hosts, or in containers that do not share {_FOLDER}"
    path: list[str | None] = [None]
    segment, reason = None, ""
    if rank == 0:
        segment, reason = _make_segment(nbytes)
        path[0] = segment.path if segment is not None else None
    dist.broadcast_object_list(path, group=group, group_src=0)
    if rank != 0 and path[0] is not None:
        try:
            segment = SharedSegment(path[0], nbytes, rank, create=False)
        except OSError:
            reason = f"rank {rank} does not share {_FOLDER} with rank 0"
    reasons = _all_gather(reason or ("" if segment is not None else "rank 0 has none"), group)
    if rank == 0 and segment is not None:
        os.unlink(segment.path)  # nothing is left behind, whatever happens from here on
    if all(not r for r in reasons):
        return segment, ""
    if segment is not None:
        segment.close()
    return None, next(r for r in reasons if r)


def _make_segment(nbytes: int) -> tuple[SharedSegment | None, str]:
    """That of rank 0; or none, a warning, and why not."""
    try:
        free = _free_bytes()
        if free >= nbytes:
            return SharedSegment(f"{_FOLDER}/freescale-{secrets.token_hex(8)}", nbytes, 0, create=True), ""
        there, needed = free / 2**20, nbytes / 2**20
        reason = f"{_FOLDER} has {there:.1f} MiB free, and the ranks of this host need {needed:.1f} there"
    except OSError as error:
        reason = f"rank 0 cannot make {nbytes / 2**20:.1f} MiB in {_FOLDER}: {error}"
    log.warning("freescale: %s; they do without, more slowly (containers: --shm-size makes it larger)", reason)
    return None, reason


def _free_bytes() -> int:
    found = os.statvfs(_FOLDER)
    return found.f_bavail * found.f_frsize


def _all_gather(text: str, group: dist.ProcessGroup) -> list[str]:
    texts: list[str] = [""] * group.size()
    dist.all_gather_object(texts, text, group=group)
    return texts


class SharedSegment:
    """One rank's view of the shared file."""

    def __init__(self, path: str, nbytes: int, rank: int, create: bool) -> None:
        self.path, self.nbytes = path, nbytes
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        self._file = os.open(path, flags, 0o600)
        try:
            if create:
                os.posix_fallocate(self._file, 0, nbytes)  # else a full /dev/shm would kill us at the first touch
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
            self.bytes = np.frombuffer(mmap.mmap(self._file, nbytes), np.uint8)
            self.address: int = self.bytes.ctypes.data
        except BaseException:
            os.close(self._file)
            if create:
                with contextlib.suppress(OSError):
                    os.unlink(path)
            raise

    def words(self, offset: int, count: int) -> np.ndarray:
        """`count` 32-bit words, a cache line each."""
        return self.bytes.view(np.uint32)[offset // 4 : (offset + count * WORD_STRIDE) // 4 : WORD_STRIDE // 4]

    def is_held_by(self, rank: int) -> bool:
        """Whether that rank, not this one, still has the segment."""
        query = struct.pack(_FLOCK_FORMAT, fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0)
        kind = struct.unpack(_FLOCK_FORMAT, fcntl.fcntl(self._file, fcntl.F_GETLK, query))[0]
        return kind != fcntl.F_UNLCK

    def close(self) -> None:
        """Let go: the others see it. The mapping itself ends with the last array that looks into it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class PeerLiveness:
    """Which ranks are alive and how many messages each has launched: a cache line per rank at the segment's start."""

    nbytes_per_rank = WORD_STRIDE

    def __init__(self, segment: SharedSegment, rank: int, world: int) -> None:
        self._segment, self._rank = segment, rank
        self._peers = [p for p in range(world) if p != rank]
        self._failure_reports = segment.words(0, world)  # 0, or one more than the rank to name
        self._launched = segment.words(4, world)

    def lost_peers(self) -> dict[int, int]:
        """Peers that will send nothing more, and for each the one to name: itself, or the one that it reported."""
        exited = {p: p for p in self._peers if not self._segment.is_held_by(p)}
        return {**exited, **{p: int(self._failure_reports[p]) - 1 for p in self._peers if self._failure_reports[p]}}

    def report_failure(self, culprits: set[int]) -> None:
        if culprits:
            self._failure_reports[self._rank] = 1 + min(culprits)

    def set_launched(self, messages: int) -> None:
        self._launched[self._rank] = messages & 0xFFFFFFFF

    def peers_behind(self, messages: int) -> set[int]:
        """Peers that have launched fewer."""
        return {p for p in self._peers if not at_least(int(self._launched[p]), messages)}


_cpu_groups: dict[tuple[str, int, float], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def cpu_group(group: dist.ProcessGroup, timeout: float, number: int = 0) -> dist.ProcessGroup:
    """A gloo group of the same ranks. Collective on first use.

    Kept for as long as `group`: a new group that gets the name of a destroyed one would find the old one's addresses.
    """
    key = group.group_name, number, timeout
    known = _cpu_groups.get(key)
    if known is not None and known[0] is group:
        return known[1]
    gloo_group = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=timedelta(seconds=timeout),
        backend="gloo",
        use_local_synchronization=True,
    )
    assert isinstance(gloo_group, dist.ProcessGroup)
    _cpu_groups[key] = group, gloo_group
    return gloo_group
