"""A transport that brings wrong bytes, or none, is found out when it opens, on every rank; `auto` takes another."""

from __future__ import annotations

import ctypes
import logging
import time
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from freescale.compat import nixl
from freescale.kernels.transports import link_speed, open_transports, proof, selection
from host_device import HostDriver
from listening import listen, with_level
from ranks import run_ranks

ops = torch.ops.freescale
COUNTS = [[3, 0, 700], [1, 2, 0], [90, 5, 1]]


class SwapsTwoBytes(HostDriver):
    """Now and then, in what it copies to the device."""

    copies = 0

    def copy_to_device(self, to, data, nbytes, stream):
        super().copy_to_device(to, data, nbytes, stream)
        self.copies += 1
        if nbytes > 16 and self.copies % 5 == 0:
            both = (ctypes.c_uint8 * 2).from_address(to + nbytes // 2)
            self.queues[stream].put(lambda: both.__setitem__(slice(0, 2), bytes(both)[::-1]))


class StandsStill(HostDriver):
    """Never copies anything to the device."""

    def copy_to_device(self, to, data, nbytes, stream):
        self.queues[stream].put(lambda: time.sleep(20))


def _launch(drivers, name, view=None, c10d_seconds=None):
    """An all-to-all by the op that a graph has; `drivers`: of each rank. Also returned: what was said, what was open.

    With a `view`, every rank sees that, but for its number and its GPU; over c10d it takes `c10d_seconds` of each rank.
    """
    said = listen(level=logging.NOTSET, as_=with_level)
    logging.getLogger("freescale.kernels").setLevel(logging.INFO)
    rank, world = dist.get_rank(), dist.get_world_size()
    if view is not None:
        mine = selection.RankView(rank, **{"host": "a", "gpu": f"gpu {rank}", "backend": "gloo", **view})
        mock.patch.object(selection, "look", lambda group, device: mine).start()
    if c10d_seconds is not None:
        mock.patch.object(link_speed, "measure_transports", partial(_with_c10d, link_speed.measure_transports, c10d_seconds)).start()
    open_transports.options[name if name != "auto" else "staged"] = {"driver": drivers[rank](), "ring_bytes": 1 << 20, "piece_bytes": 8192}
    counts = torch.tensor([row[:world] for row in COUNTS[:world]])
    send, recv = counts[rank].clone(), counts[:, rank].clone()
    x, out = torch.randn(int(send.sum()), 8), []
    for _ in range(2):
        launched = ops.all_to_all_launch(x, send, recv, int(recv.sum()), 0, "t", dist.group.WORLD.group_name, name)
        out.append(torch.ops._c10d_functional.wait_tensor(launched).clone())
    expected = torch.empty_like(out[0])
    dist.all_to_all_single(expected, x, recv.tolist(), send.tolist())
    used = open_transports.names()
    open_transports.drain()
    open_transports.check()
    open_transports.close()
    return all(torch.equal(o, expected) for o in out), used, said


def _with_c10d(measure, c10d_seconds, transports, *args):
    """What is measured, but for c10d."""
    return {**measure(transports, *args), "c10d": c10d_seconds}


@pytest.mark.parametrize("name", ("staged", pytest.param("nixl", marks=pytest.mark.skipif(bool(nixl.missing_reason()), reason="no NIXL"))))
def test_one_that_brings_the_right_bytes_is_used(name):
    assert run_ranks(_launch, 3, [HostDriver] * 3, name) == [(True, [name], [])] * 3


SHARED_GPU = {"gpu": "the only one", "backend": "nccl"}  # c10d cannot serve


def test_one_that_swaps_two_bytes_is_replaced_on_every_rank_with_one_warning():
    found = run_ranks(_launch, 3, [HostDriver, SwapsTwoBytes, HostDriver], "auto", {})
    assert [(same, used) for same, used, _ in found] == [(True, [])] * 3  # over c10d
    warnings = [text for _, _, said in found for level, text in said if level == "WARNING"]
    assert len(warnings) == 1, found
    words = "freescale: launches use c10d instead of staged: rank 1: staged corrupted 2 of "
    assert warnings[0].startswith(words) and " bytes from rank " in warnings[0]


def _in_the_log(found):
    """The one sentence that the ranks say together on what `auto` takes."""
    (text,) = [text for _, _, said in found for level, text in said if level == "INFO" and text.startswith("auto: ")]
    return text


def test_auto_takes_what_the_ranks_can_use_and_says_so_once():
    found = run_ranks(_launch, 3, [HostDriver] * 3, "auto", SHARED_GPU)
    assert [(same, used) for same, used, _ in found] == [(True, ["staged"])] * 3
    assert _in_the_log(found) == "auto: group 0 uses staged: several ranks share a GPU"


def test_auto_goes_over_the_groups_own_nccl_between_hosts():
    found = run_ranks(_launch_between_hosts, 2)
    assert [(same, used) for same, used, _ in found] == [(True, [])] * 2
    text = "auto: group 0 uses c10d: the ranks are on 2 hosts; rank 0: no device"
    assert _in_the_log(found) == text


def _launch_between_hosts():
    view = {"host": f"host {dist.get_rank()}", "backend": "nccl", "no_rdma": "no device"}
    return _launch([HostDriver] * 2, "auto", view)


@pytest.mark.parametrize("c10d_seconds, taken", (([1e-9, 1e-9], "c10d"), ([1e-9, 100.0], "staged")))
def test_auto_takes_the_faster_by_its_slowest_rank(c10d_seconds, taken):
    """Ranks of one host: staged is measured here, c10d is said to take so long."""
    found = run_ranks(_launch, 2, [HostDriver] * 2, "auto", {}, c10d_seconds)
    assert [(same, used) for same, used, _ in found] == [(True, [taken] if taken != "c10d" else [])] * 2
    text = _in_the_log(found)
    assert text.startswith(f"auto: group 0 uses {taken}: for 0.0"), text
    assert f" ms, c10d {max(c10d_seconds) * 1e3:.3g} ms; the ranks are on one host" in text


def test_where_nothing_can_carry_rows_every_rank_says_so():
    for said in run_ranks(_launch, 2, [SwapsTwoBytes, HostDriver], "auto", SHARED_GPU, expect_errors=True):
        words = "UnsupportedTransport: freescale: no transport can carry the rows of group 0: rank 0: staged corrupted 2 of "
        assert said.startswith(words) and said.endswith("; NCCL needs a GPU for each rank"), said


def _part_of_the_world():
    """Ranks 0 and 2 of 3 launch; rank 1 knows nothing of it."""
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return None
    open_transports.options["staged"] = {"driver": HostDriver(), "ring_bytes": 1 << 20, "piece_bytes": 8192}
    view = selection.RankView(dist.get_rank(), "a", "the only one")
    with mock.patch.object(selection, "look", lambda group, device: view):
        x, counts = torch.full((4, 8), float(group.rank())), torch.tensor([2, 2])
        out = ops.all_to_all_launch(x, counts, counts, 4, 0, "t", group.group_name, "auto")
        got = torch.ops._c10d_functional.wait_tensor(out)[:, 0].tolist()
    used = open_transports.names()
    open_transports.close()
    return got, used


def test_auto_for_a_group_that_is_part_of_the_world():
    assert run_ranks(_part_of_the_world, 3) == [([0, 0, 1, 1], ["staged"]), None, ([0, 0, 1, 1], ["staged"])]


def _groups_of_the_same_ranks():
    """As in a step with a LookaheadLoader: urgent rows on the training's group, early and late ones on another."""
    background, driver = dist.new_group(), HostDriver()
    open_transports.options["staged"] = {"driver": driver, "ring_bytes": 1 << 20, "piece_bytes": 8192}
    counts = torch.tensor([2, 2])
    launched = [
        ops.all_to_all_launch(torch.full((4, 8), 10.0 * priority + dist.get_rank()), counts, counts, 4, priority, "t", name, "staged")
        for priority, name in ((0, dist.group.WORLD.group_name), (1, background.group_name), (2, background.group_name))
    ]
    got = [torch.ops._c10d_functional.wait_tensor(out)[:, 0].tolist() for out in launched]
    streams, transports = len(driver.queues), len(open_transports._transports())
    dist.destroy_process_group(background)
    other = dist.new_group()
    open_transports.transport_for("staged", other, launched[0], 4)  # the first group is alive
    transports = transports, len(open_transports._transports())
    open_transports.close()
    return got, streams, transports


def test_groups_of_the_same_ranks_share_a_transport_of_twelve_streams():
    assert run_ranks(_groups_of_the_same_ranks, 2) == [([[0, 0, 1, 1], [10, 10, 11, 11], [20, 20, 21, 21]], 12, (1, 1))] * 2


def test_one_that_was_asked_for_by_name_is_an_error_on_every_rank():
    for said in run_ranks(_launch, 2, [SwapsTwoBytes, HostDriver], "staged", expect_errors=True):
        words = "freescale: FREESCALE_TRANSPORT=staged is not supported here: rank 0: staged corrupted 2 of "
        assert said.startswith(f"UnsupportedTransport: {words}") and len(said.splitlines()) == 1, said


def _stands_still():
    proof.SECONDS = 1.0
    return _launch([HostDriver, StandsStill], "auto", {})


@pytest.mark.thorough
def test_one_that_stands_still_is_replaced_in_time():
    for same, used, _ in run_ranks(_stands_still, 2, timeout=100):
        assert same and used == []


def _cannot_open():
    class NoPinnedMemory(HostDriver):
        def pin(self, address, nbytes):
            raise RuntimeError("freescale: no memory can be pinned")

    return _launch([HostDriver, NoPinnedMemory], "auto", {})


@pytest.mark.thorough
def test_one_that_does_not_open_on_a_rank_is_replaced_on_every_rank():
    found = run_ranks(_cannot_open, 2, group_timeout=5)
    assert [(same, used) for same, used, _ in found] == [(True, [])] * 2
    assert any("rank 1: no memory can be pinned" in text for _, _, said in found for _, text in said), found
