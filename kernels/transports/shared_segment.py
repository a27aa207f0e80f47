"""Memory shared by all ranks of one host: an unnamed file in /dev/shm, which the kernel frees with the last process
that has it open. Rank 0 passes it to the others over Unix sockets with abstract addresses. Each rank locks one byte of
it; the kernel releases the lock when the process ends, so the others can detect it."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import torch.distributed as dist

from freescale.compat.distributed import gather_objects
from freescale.kernels.transports.slot_rings import WORD_STRIDE, at_least

log = logging.getLogger(__name__)

_FOLDER = "/dev/shm"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_FLOCK_FORMAT = "hhqqi4x"  # struct flock


def host_id() -> str:
    """An id that is equal for processes that can share memory: same running kernel, same /dev/shm."""
    try:
        with open(_BOOT_ID) as file:
            kernel = file.read().strip()
    except OSError:
        kernel = socket.gethostname()
    try:
        return f"{kernel} {os.stat(_FOLDER).st_dev}"
    except OSError:
        return f"{kernel} {secrets.token_hex(8)}"  # unique: shares with no other process


def share_segment(nbytes: int, rank: int, group: dist.ProcessGroup) -> tuple[SharedSegment | None, str]:
    """A segment mapped by every rank of the group, or None and the reason. Collective over a CPU group."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox, contextlib.ExitStack() as undo:
        places = gather_objects(_place(inbox), group)
        hosts = len({host for host, _ in places})
        if hosts > 1:
            return None, f"the ranks are on {hosts} hosts, or in containers that do not share {_FOLDER}"
        identity: list[tuple[int, int] | None] = [None]
        segment, reason = None, ""
        if rank == 0:
            segment, reason = _make_segment(nbytes)
            if segment is not None:
                segment.send(inbox, [address for _, address in places[1:]])
                identity[0] = _identity(segment.file)
        dist.broadcast_object_list(identity, group=group, group_src=0)
        if rank != 0 and identity[0] is not None:
            try:
                segment = SharedSegment(_receive_file(inbox, identity[0]), nbytes, rank)
            except OSError:
                reason = f"rank {rank} did not receive the memory of rank 0 (do their containers share a network?)"
        if segment is not None:
            undo.callback(segment.close)
        reasons = gather_objects(reason or ("" if segment is not None else "rank 0 has none"), group)
        if any(reasons):
            return None, next(r for r in reasons if r)
        undo.pop_all()
        return segment, ""


def _place(inbox: socket.socket) -> tuple[str, bytes]:
    """This rank's location, and the address of its inbox, an abstract Unix socket."""
    try:
        inbox.setblocking(False)
        inbox.bind(f"\0freescale-{secrets.token_hex(16)}")
        return host_id(), inbox.getsockname()
    except OSError:
        return secrets.token_hex(8), b""  # shares with no other rank


def _identity(file: int) -> tuple[int, int]:
    found = os.fstat(file)
    return found.st_dev, found.st_ino


def _receive_file(inbox: socket.socket, identity: tuple[int, int]) -> int:
    """Receive the file sent by rank 0. Files sent by other processes are closed."""
    while True:
        _, files, *_ = socket.recv_fds(inbox, 1, 1)
        for file in files:
            if _identity(file) == identity:
                os.set_inheritable(file, False)
                return file
            os.close(file)


def _make_segment(nbytes: int) -> tuple[SharedSegment | None, str]:
    """Create rank 0's segment. If that fails: None, a warning, and the reason."""
    try:
        free = _free_bytes()
        if free >= nbytes:
            return SharedSegment(_file_without_name(), nbytes, 0, reserve=True), ""
        there, needed = free / 2**20, nbytes / 2**20
        reason = f"{_FOLDER} has {there:.1f} MiB free, but the ranks of this host need {needed:.1f} MiB"
    except OSError as error:
        reason = f"rank 0 cannot allocate {nbytes / 2**20:.1f} MiB in {_FOLDER}: {error}"
    log.warning("freescale: %s; transport staged is disabled (in a container, raise --shm-size)", reason)
    return None, reason


def _file_without_name() -> int:
    try:
        return os.open(_FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:  # a file system without unnamed files (gVisor's)
        return os.memfd_create("freescale", os.MFD_CLOEXEC)


def _free_bytes() -> int:
    found = os.statvfs(_FOLDER)
    return found.f_bavail * found.f_frsize


class SharedSegment:
    def __init__(self, file: int, nbytes: int, rank: int, reserve: bool = False) -> None:
        """Takes ownership of the open `file`."""
        self.file, self.nbytes = file, nbytes
        try:
            if reserve:
                os.posix_fallocate(file, 0, nbytes)  # otherwise a full /dev/shm would raise SIGBUS at the first touch
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
            self.bytes = np.frombuffer(mmap.mmap(file, nbytes), np.uint8)
            self.address: int = self.bytes.ctypes.data
        except BaseException:
            self.close()
            raise

    def send(self, sender: socket.socket, addresses: Sequence[bytes]) -> None:
        """Send the file. A rank that does not receive it reports that later."""
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", self.file))]
        for address in addresses:
            with contextlib.suppress(OSError):
                sender.sendmsg([b"file"], ancillary, 0, address)

    def words(self, offset: int, count: int) -> np.ndarray:
        """`count` 32-bit words, one per cache line."""
        return self.bytes.view(np.uint32)[offset // 4 : (offset + count * WORD_STRIDE) // 4 : WORD_STRIDE // 4]

    def is_held_by(self, rank: int) -> bool:
        """Whether that rank (not this one) still has the segment open."""
        query = struct.pack(_FLOCK_FORMAT, fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0)
        kind = struct.unpack(_FLOCK_FORMAT, fcntl.fcntl(self.file, fcntl.F_GETLK, query))[0]
        return kind != fcntl.F_UNLCK

    def close(self) -> None:
        """Release the lock, which the others can see. The mapping ends with the last array on it."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


class PeerLiveness:
    """Which ranks are alive and how many messages each has launched: one cache line per rank at the segment's start."""

    def __init__(self, segment: SharedSegment, rank: int, world: int) -> None:
        self._segment, self._rank = segment, rank
        self._peers = [p for p in range(world) if p != rank]
        self._failure_reports = segment.words(0, world)  # 0, or 1 + the rank to name
        self._launched = segment.words(4, world)

    def lost_peers(self) -> dict[int, int]:
        exited = {p: p for p in self._peers if not self._segment.is_held_by(p)}
        return {**exited, **{p: int(self._failure_reports[p]) - 1 for p in self._peers if self._failure_reports[p]}}

    def report_failure(self, culprits: set[int]) -> None:
        if culprits:
            self._failure_reports[self._rank] = 1 + min(culprits)

    def set_launched(self, messages: int) -> None:
        self._launched[self._rank] = messages & 0xFFFFFFFF

    def peers_behind(self, messages: int) -> set[int]:
        return {p for p in self._peers if not at_least(int(self._launched[p]), messages)}


_cpu_groups: dict[tuple[str, int, float], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def cpu_group(group: dist.ProcessGroup, timeout: float, number: int = 0) -> dist.ProcessGroup:
    """A gloo group of the same ranks. Collective on first use. Kept as long as `group`: a new group that reuses a
    destroyed group's name would find the old addresses."""
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
