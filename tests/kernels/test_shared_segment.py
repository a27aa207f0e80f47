"""Memory that ranks share: none is reserved before it is known that they are on one host and that there is room."""

from __future__ import annotations

import logging
import os
from unittest import mock

import torch.distributed as dist

from freescale.kernels.transports import shared_segment
from ranks import run_ranks


def _share(nbytes, host_of_rank, free=None):
    """Whether memory is shared, why not, how much was reserved on the way, and what was said."""
    reserved, said = [], []
    handler = logging.Handler()
    handler.emit = lambda record: said.append((record.levelname, record.getMessage()))
    logging.getLogger("freescale").addHandler(handler)
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
    reason = "/dev/shm has 64.0 MiB free, and the ranks of this host need 512.0 there"
    assert [(shared, why, reserved) for shared, why, reserved, _ in found] == [(False, reason, [])] * 2
    words = f"freescale: {reason}; they do without, more slowly (containers: --shm-size makes it larger)"
    assert [said for *_, said in found] == [[("WARNING", words)], []]


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
