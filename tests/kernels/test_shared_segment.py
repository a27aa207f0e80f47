"""Memory that ranks share: none is reserved before it is known that they are on one host and that there is room."""

from __future__ import annotations

import contextlib
import logging
import os
import pkgutil
import signal
import socket
import struct
import sys
import tempfile
from unittest import mock

import pytest
import torch.distributed as dist

from freescale.kernels.transports import shared_segment
from listening import listen, with_level
from ranks import run_ranks


def _share(nbytes, host_of_rank, free=None):
    """Whether memory is shared, why not, how much was reserved on the way, and what was said."""
    reserved, said = [], listen(level=logging.NOTSET, as_=with_level)
    rank, allocate = dist.get_rank(), os.posix_fallocate

    def count(file, offset, size):
        reserved.append(size)
        allocate(file, offset, size)

    with mock.patch.object(os, "posix_fallocate", count):
        if host_of_rank is not None:
            mock.patch.object(shared_segment, "host_id", lambda: host_of_rank[rank]).start()
        if free is not None:
            mock.patch.object(shared_segment, "_free_bytes", lambda: free).start()
        segment, reason = shared_segment.share_segment(nbytes, rank, dist.group.WORLD)
    return segment is not None, reason, reserved, said


def test_ranks_of_one_host_reserve_once():
    found = run_ranks(_share, 3, 1 << 16, None)
    assert found == [(True, "", [1 << 16], []), (True, "", [], []), (True, "", [], [])]


def test_nothing_is_reserved_where_the_ranks_are_on_several_hosts():
    reason = "the ranks are on 2 hosts, or in containers that do not share /dev/shm"
    assert run_ranks(_share, 3, 63 << 30, ("a", "a", "b")) == [(False, reason, [], [])] * 3


def test_a_dev_shm_that_is_too_small_is_one_warning_with_both_sizes():
    found = run_ranks(_share, 2, 512 << 20, None, 64 << 20)
    reason = "/dev/shm has 64.0 MiB free, but the ranks of this host need 512.0 MiB"
    assert [(shared, why, reserved) for shared, why, reserved, _ in found] == [(False, reason, [])] * 2
    words = f"freescale: {reason}; transport staged is disabled (in a container, raise --shm-size)"
    assert [said for *_, said in found] == [[("WARNING", words)], []]


def _others_send_files_too():
    place, rank = shared_segment._place, dist.get_rank()

    def and_get_one(inbox):
        host, address = place(inbox)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other, tempfile.TemporaryFile() as file:
            for _ in range(3):
                other.sendmsg([b"file"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", file.fileno()))], 0, address)
        return host, address

    open_files = len(os.listdir("/proc/self/fd"))
    with mock.patch.object(shared_segment, "_place", and_get_one):
        segment, reason = shared_segment.share_segment(1 << 16, rank, dist.group.WORLD)
    segment.bytes[rank] = 10 + rank
    dist.barrier()
    seen, opened = segment.bytes[:3].tolist(), len(os.listdir("/proc/self/fd")) - open_files
    assert os.get_inheritable(segment.file) is False
    dist.barrier()
    return reason, seen, opened


def test_a_file_that_another_process_sends_is_not_taken():
    assert run_ranks(_others_send_files_too, 3) == [("", [10, 11, 12], 2)] * 3  # the file, and its mapping's


def test_a_host_is_a_running_kernel_and_a_dev_shm(monkeypatch, tmp_path):
    here = shared_segment.host_id()
    assert here == shared_segment.host_id()
    monkeypatch.setattr(shared_segment, "_FOLDER", "/proc")
    assert shared_segment.host_id() != here
    monkeypatch.undo()
    (tmp_path / "boot_id").write_text("another\n")
    monkeypatch.setattr(shared_segment, "_BOOT_ID", str(tmp_path / "boot_id"))
    assert shared_segment.host_id().split()[0] == "another"
    monkeypatch.setattr(shared_segment, "_FOLDER", str(tmp_path / "missing"))
    assert shared_segment.host_id() != shared_segment.host_id()  # shares with nobody


NBYTES = (3 << 20) + 8192  # as no other file in /dev/shm


def _killed(victim, where):
    """`where`: after which call a rank is killed while it opens a segment, or at which line of the module."""
    lines = 0

    def kill(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    def at_line(frame, event, _):
        nonlocal lines
        if frame.f_code.co_filename != shared_segment.__file__:
            return None
        lines += event == "line"
        return kill() if lines == where else at_line

    dist.barrier()
    if dist.get_rank() == victim and isinstance(where, int):
        sys.settrace(at_line)
    elif dist.get_rank() == victim:
        call = pkgutil.resolve_name(where)
        mock.patch(where, lambda *args: (call(*args), kill())).start()
    shared_segment.share_segment(NBYTES, dist.get_rank(), dist.group.WORLD)
    sys.settrace(None)
    raise RuntimeError(f"opened after {lines} lines")


def _left_behind():
    with os.scandir("/dev/shm") as files:
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                if "freescale" in file.name or file.stat().st_size == NBYTES:
                    yield file.name


@pytest.mark.parametrize("victim, where", ((0, "os.posix_fallocate"), (1, "fcntl.lockf")))
def test_a_rank_that_is_killed_while_it_opens_memory_leaves_none(victim, where):
    died = run_ranks(_killed, 2, victim, where, expect_errors=True, timeout=60)
    assert [error == "died" for error in died] == [rank == victim for rank in range(2)]
    assert "did not finish in time" not in died and [*_left_behind()] == []


@pytest.mark.thorough
@pytest.mark.parametrize("victim", range(2))
def test_a_rank_that_is_killed_at_any_line_leaves_no_memory(victim):
    line, died = 0, [""] * 2
    while "opened" not in died[victim]:
        line += 1
        died = run_ranks(_killed, 2, victim, line, expect_errors=True, timeout=60)
        assert died[victim] == "died" or "opened" in died[victim]
        assert "did not finish in time" not in died and [*_left_behind()] == []
    assert line > 15
