"""The `nixl` transport: the tests of the other transports, over NVIDIA's NIXL; here with host memory, on CUDA with both."""

from __future__ import annotations

import threading
import time
from unittest import mock

import pytest
import test_gpu
import test_transports
import torch
import torch.distributed as dist

from freescale.compat import nixl
from ranks import run_ranks

pytestmark = pytest.mark.skipif(bool(nixl.missing_reason()), reason=nixl.missing_reason() or "-")


@pytest.mark.parametrize("world", (1, 2, 3))
def test_all_to_all_on_a_device_of_threads(world):
    sizes = {"ring_bytes": 1 << 20, "piece_bytes": 8192}
    assert run_ranks(test_transports.many, world, "nixl", "cpu", 12, 900, 4, sizes) == [12] * world


def test_a_message_larger_than_the_ring():
    assert run_ranks(test_transports.smaller_than_a_message, 2, "nixl", "cpu") == [True, True]


def test_urgent_passes_early():
    assert run_ranks(test_transports.urgent_first, 2, "nixl") == [True, True]


def test_memory_and_streams_are_given_back():
    assert run_ranks(test_transports.given_back, 2, "nixl") == [0, 0]


@pytest.mark.parametrize("network", ("any", "tcp"))
def test_a_rank_that_dies_is_named(network):
    env = {} if network == "any" else {"UCX_TLS": network}
    for rank, said in enumerate(run_ranks(test_transports.dies, 3, "nixl", "cpu", 30, env=env, expect_errors=True)):
        if rank != 1:
            assert f"freescale: nixl: rank {rank} cannot finish message 1 of priority 1: rank 1 is gone" in said, said
            assert float(said.split("took ")[1].split()[0]) < 15, said


def _late_rank():
    """Rank 1 lives but launches nothing."""
    transport = test_transports.opened("nixl", "cpu", timeout=1.0)
    counts = torch.full((3,), 4000)
    if dist.get_rank() == 1:
        time.sleep(4)
        raise RuntimeError("rank 1 was only late")
    test_transports.wait(transport.launch(torch.ones(12000, 16), counts, counts, 12000, 2))
    transport.drain()


def test_a_late_rank_is_named_after_the_time_out():
    for rank, said in enumerate(run_ranks(_late_rank, 3, expect_errors=True)):
        if rank != 1:
            assert f"freescale: nixl: rank {rank} cannot finish message 0 of priority 2: rank 1 is not responding after " in said, said


def _waits_for_its_own_device():
    """Rank 1 takes longer than the time-out to empty its slots: rank 0 waits for it, nobody waits for rank 0."""
    transport = test_transports.opened("nixl", "cpu", ring_bytes=1 << 20, piece_bytes=4096, timeout=1.0)
    go_on, counts = threading.Event(), torch.full((2,), 640)  # ten pieces, four slots
    if dist.get_rank() == 1:
        for stream in transport.streams[1][1]:
            transport.driver.queues[stream].put(go_on.wait)
    transport.launch(torch.ones(1280, 16), counts, counts, 1280, 1)
    time.sleep(2.5)
    error = transport.error
    go_on.set()
    transport.close()
    return error


def test_who_waits_for_its_own_device_names_nobody():
    first, second = run_ranks(_waits_for_its_own_device, 2)
    assert "rank 0 cannot finish message 0 of priority 1: rank 1 is not responding" in first
    assert second is None or "rank 0 is not responding" not in second, second


def _thread_dies():
    transport = test_transports.opened("nixl", "cpu", timeout=200.0)
    if dist.get_rank() == 1:

        def post(peer):
            time.sleep(0.3)  # until then this rank has received all that it waits for
            raise MemoryError("no room for a piece")

        transport._threads[1]._post = post
    counts = torch.full((2,), 400)
    out = transport.launch(torch.ones(800, 16), counts, counts, 800, 1)
    try:
        test_transports.wait(out)
        transport.drain()
    finally:
        transport.close()


def test_a_thread_that_dies_of_anything_is_an_error():
    other, own = run_ranks(_thread_dies, 2, timeout=60, expect_errors=True)
    assert "freescale: nixl: rank 1 cannot continue: MemoryError: no room for a piece" in own
    assert "freescale: nixl: rank 0 cannot finish message 0 of priority 1: rank 1 is gone" in other


def _refused():
    with pytest.raises(ValueError, match="nixl: the slots of 2 ranks need at least 196608 bytes and pieces of 4096, found ring_bytes=1000"):
        test_transports.opened("nixl", "cpu", ring_bytes=1000)
    return True


def test_a_ring_that_is_too_small_is_refused():
    assert all(run_ranks(_refused, 2))


def test_it_refuses_to_run_without_caching(monkeypatch):
    """A tensor that is freed would wait for the device, and with it the GIL, which the threads need."""
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    with pytest.raises(RuntimeError, match="freescale: nixl cannot run with PYTORCH_NO_CUDA_MEMORY_CACHING set"):
        test_transports.nixl.open_transport(None)


def _one_rank_without_it():
    if dist.get_rank() == 1:
        mock.patch.object(nixl, "missing_reason", lambda: "NVIDIA's NIXL is missing").start()
    test_transports.opened("nixl", "cpu")


def test_one_rank_without_nixl_is_an_error_on_every_rank():
    for said in run_ranks(_one_rank_without_it, 2, expect_errors=True):
        assert "freescale: nixl: rank 1 cannot open the transport: NVIDIA's NIXL is missing" in said


# ---- on CUDA: ranks on one GPU -------------------------------------------------------------------------------------


class TestOnCuda:
    pytestmark = test_transports.gpu

    @pytest.mark.parametrize("world", (1, 2, 4))
    def test_all_to_all_with_delays(self, world):
        assert all(run_ranks(test_transports.every_kind, world, ("nixl",), 24, True, timeout=100))

    def test_over_tcp(self):
        env = {"UCX_TLS": "tcp,cuda_copy"}  # the copy is for UCX to know a GPU's memory when it sees it
        assert all(run_ranks(test_transports.every_kind, 2, ("nixl",), 24, True, env=env, timeout=100))

    def test_a_message_larger_than_the_ring(self):
        assert all(run_ranks(test_transports.smaller_than_a_message, 2, "nixl", "cuda", timeout=100))

    def test_a_rank_that_dies_is_named(self):
        test_transports.check_death("nixl", "cuda", 30, 15)

    def test_training_gives_the_bits_of_c10d(self):
        """100 steps, look-ahead on and off."""
        found, expected = (
            run_ranks(test_gpu._hundred_steps, 2, env={"FREESCALE_TRANSPORT": name}, timeout=200)
            for name in ("nixl", "c10d")
        )
        for (states, used), (others, _) in zip(found, expected, strict=True):
            assert used == ["nixl"]
            for key, (losses, state) in states.items():
                assert losses == others[key][0], key
                assert all(torch.equal(state[k], others[key][1][k]) for k in state), key
