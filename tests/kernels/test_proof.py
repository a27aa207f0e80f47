"""A transport that brings wrong bytes, or none, is found out when it opens, on every rank."""

from __future__ import annotations

import ctypes
import logging
import time

import pytest
import torch
import torch.distributed as dist

from freescale.compat import nixl
from freescale.kernels.transports import open_transports, proof
from host_device import HostDriver
from ranks import run_ranks

ops = torch.ops.freescale
COUNTS = [[3, 0, 700], [1, 2, 0], [90, 5, 1]]


class SwapsTwoBytes(HostDriver):
    """Now and then, in what it copies to the device."""

    copies = 0

    def copy_to_device(self, to, data, nbytes, stream):
        self._copy(to, data, nbytes, stream)
        self.copies += 1
        if nbytes > 16 and self.copies % 5 == 0:
            both = (ctypes.c_uint8 * 2).from_address(to + nbytes // 2)
            self.queues[stream].put(lambda: both.__setitem__(slice(0, 2), bytes(both)[::-1]))


class StandsStill(HostDriver):
    """Never copies anything to the device."""

    def copy_to_device(self, to, data, nbytes, stream):
        self.queues[stream].put(lambda: time.sleep(20))


def _launch(drivers, name):
    """An all-to-all by the op that a graph has; `drivers`: of each rank. Also returned: what was said, what was open."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append((record.levelname, record.getMessage()))
    logging.getLogger("freescale").addHandler(handler)
    rank, world = dist.get_rank(), dist.get_world_size()
    open_transports.options[name] = {"driver": drivers[rank](), "ring_bytes": 1 << 20, "piece_bytes": 8192}
    counts = torch.tensor([row[:world] for row in COUNTS[:world]])
    send, recv = counts[rank].clone(), counts[:, rank].clone()
    x, out = torch.randn(int(send.sum()), 8), []
    for _ in range(2):
        launched = getattr(ops, f"all_to_all_launch_{name}")(x, send, recv, int(recv.sum()), 0, "t", dist.group.WORLD.group_name)
        out.append(torch.ops._c10d_functional.wait_tensor(launched).clone())
    expected = torch.empty_like(out[0])
    dist.all_to_all_single(expected, x, recv.tolist(), send.tolist())
    used = open_transports.names()
    open_transports.drain()
    open_transports.check()
    open_transports.close()
    return all(torch.equal(o, expected) for o in out), used, said


@pytest.mark.parametrize("name", ("staged", pytest.param("nixl", marks=pytest.mark.skipif(bool(nixl.missing_reason()), reason="no NIXL"))))
def test_one_that_brings_the_right_bytes_is_used(name):
    assert run_ranks(_launch, 3, [HostDriver] * 3, name) == [(True, [name], [])] * 3


def test_one_that_swaps_two_bytes_is_replaced_on_every_rank_with_one_warning():
    found = run_ranks(_launch, 3, [HostDriver, SwapsTwoBytes, HostDriver], "staged")
    assert [(same, used) for same, used, _ in found] == [(True, [])] * 3  # over c10d
    warnings = [text for _, _, said in found for level, text in said if level == "WARNING"]
    assert len(warnings) == 1, found
    words = "freescale: launches go over c10d instead of staged: rank 1: staged brought 2 of "
    assert warnings[0].startswith(words) and " bytes wrong from rank " in warnings[0]


def _asked_for(drivers):
    open_transports.asked_for.add("staged")
    return _launch(drivers, "staged")


def test_one_that_was_asked_for_by_name_is_an_error_on_every_rank():
    for said in run_ranks(_asked_for, 2, [SwapsTwoBytes, HostDriver], expect_errors=True):
        words = "freescale: FREESCALE_TRANSPORT=staged cannot be met: rank 0: staged brought 2 of "
        assert said.startswith(f"UnsupportedTransport: {words}") and len(said.splitlines()) == 1, said


def _stands_still():
    proof.SECONDS = 1.0
    return _launch([HostDriver, StandsStill], "staged")


def test_one_that_stands_still_is_replaced_in_time():
    for same, used, _ in run_ranks(_stands_still, 2, timeout=100):
        assert same and used == []


def _cannot_open():
    class NoPinnedMemory(HostDriver):
        def pin(self, address, nbytes):
            raise RuntimeError("freescale: no memory can be pinned")

    return _launch([HostDriver, NoPinnedMemory], "staged")


def test_one_that_does_not_open_on_a_rank_is_replaced_on_every_rank():
    found = run_ranks(_cannot_open, 2, group_timeout=5)
    assert [(same, used) for same, used, _ in found] == [(True, [])] * 2
    assert any("rank 1: no memory can be pinned" in text for _, _, said in found for _, text in said), found
