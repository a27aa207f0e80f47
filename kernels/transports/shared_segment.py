"""Memory that all ranks of one host share: a file in /dev/shm that has no name any more once everyone has it.

Each rank holds a lock on one byte of the file. The kernel drops it when the process ends, however it ends, so the
others can see who is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import struct
from datetime import timedelta

import numpy as np
import torch.distributed as dist

from freescale.kernels.transports.slot_rings import at_least

LINE = 64  # bytes of a cache line
_FOLDER = "/dev/shm"
_LOCK = "hhqqi4x"  # struct flock


def agree_on_segment(nbytes: int, rank: int, group: dist.ProcessGroup) -> tuple[Segment | None, str]:
    """A segment that every rank of the group has mapped, or none and why not. Collective over a CPU group."""
    token = secrets.token_hex(8)
    said: list[str | None] = [None]
    segment, reason = None, ""
    if rank == 0:
        try:
            segment = Segment(f"{_FOLDER}/freescale-{token}", nbytes, rank, create=True)
            said[0] = segment.path
        except OSError as error:
            reason = f"rank 0 cannot make {nbytes} bytes in {_FOLDER}: {error}"
    dist.broadcast_object_list(said, group=group, group_src=0)
    if rank != 0 and said[0] is not None:
        try:
            segment = Segment(said[0], nbytes, rank, create=False)
        except OSError:
            reason = f"rank {rank} does not share {_FOLDER} with rank 0"
    reasons = _gather(reason or ("" if segment is not None else "rank 0 has none"), group)
    if rank == 0 and segment is not None:
        os.unlink(segment.path)  # nothing is left behind, whatever happens from here on
    if all(not r for r in reasons):
        return segment, ""
    if segment is not None:
        segment.close()
    return None, next(r for r in reasons if r)


def _gather(mine: str, group: dist.ProcessGroup) -> list[str]:
    heard: list[str] = [""] * group.size()
    dist.all_gather_object(heard, mine, group=group)
    return heard


class Segment:
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
        except BaseException:
            os.close(self._file)
            if create:
                with contextlib.suppress(OSError):
                    os.unlink(path)
            raise

    @property
    def address(self) -> int:
        return self.bytes.ctypes.data

    def words(self, at: int, count: int, stride: int) -> np.ndarray:
        """`count` 32-bit words, `stride` bytes apart."""
        return self.bytes.view(np.uint32)[at // 4 : (at + count * stride) // 4 : stride // 4]

    def holds_on(self, rank: int) -> bool:
        """Whether that rank, not this one, still has the segment."""
        asked = struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0)
        kind = struct.unpack(_LOCK, fcntl.fcntl(self._file, fcntl.F_GETLK, asked))[0]
        return kind != fcntl.F_UNLCK

    def close(self) -> None:
        """Let go: the others see it. The mapping itself ends with the last array that looks into it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Presence:
    """Which ranks are still there and how far each is: one line of words per rank at the start of a segment."""

    def __init__(self, segment: Segment, rank: int, world: int) -> None:
        self._segment, self._rank = segment, rank
        self._others = [p for p in range(world) if p != rank]
        self._reports = segment.words(0, world, LINE)
        self._launched = segment.words(4, world, LINE)

    def gone(self) -> dict[int, int]:
        """Peers that will send nothing more, and for each the one to name: itself, or whom it reported."""
        left = {p: p for p in self._others if not self._segment.holds_on(p)}
        return {**left, **{p: int(self._reports[p]) - 1 for p in self._others if self._reports[p]}}

    def report(self, culprits: set[int]) -> None:
        if culprits:
            self._reports[self._rank] = 1 + min(culprits)

    def has_launched(self, messages: int) -> None:
        self._launched[self._rank] = messages & 0xFFFFFFFF

    def behind(self, messages: int) -> set[int]:
        """Peers that have launched fewer."""
        return {p for p in self._others if not at_least(int(self._launched[p]), messages)}


_sides: dict[tuple[str, int, float], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def cpu_group(group: dist.ProcessGroup, timeout: float, number: int = 0) -> dist.ProcessGroup:
    """A gloo group of the same ranks. Collective on first use.

    Kept for as long as `group`: a group made anew after one was destroyed would get its name, and find its addresses.
    """
    key = group.group_name, number, timeout
    known = _sides.get(key)
    if known is not None and known[0] is group:
        return known[1]
    made = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=timedelta(seconds=timeout),
        backend="gloo",
        use_local_synchronization=True,
    )
    assert isinstance(made, dist.ProcessGroup)
    _sides[key] = group, made
    return made
