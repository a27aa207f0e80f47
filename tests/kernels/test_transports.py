"""The transports: pieces and rings by themselves, then whole all-to-alls against dist.all_to_all_single.

Everything that needs no GPU runs on a device made of threads (host_device.py), with real ranks and real shared memory.
The same functions run on CUDA where there is one.
"""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from freescale.kernels.transports import nixl, slot_rings, staged
from freescale.kernels.transports.in_flight import STREAMS_PER_DIRECTION as STREAMS
from freescale.kernels.transports.in_flight import InFlight, Message
from freescale.runtime.tables.sharded_embedding import ShardedEmbedding
from host_device import HostDriver
from issue_python import transfers_in_order
from ranks import run_ranks

wait = torch.ops._c10d_functional.wait_tensor.default
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

# ---- pieces and rings --------------------------------------------------------------------------------------

worlds = st.integers(1, 5).flatmap(
    lambda w: st.lists(st.lists(st.integers(0, 40), min_size=w, max_size=w), min_size=w, max_size=w)
)


@settings(max_examples=100, deadline=None)
@given(worlds, st.integers(1, 16))
def test_every_byte_is_in_one_piece(counts, piece):
    for rank, send in enumerate(counts):
        recv = [row[rank] for row in counts]
        for sends, nbytes in ((True, send), (False, recv)):
            covered = np.zeros(sum(nbytes), int)
            for way, _peer, offset, size in transfers_in_order(rank, send, recv, piece):
                assert 0 < size <= piece
                if way == sends:
                    covered[offset : offset + size] += 1
            assert (covered == 1).all()


def simulate(messages, slots, piece, one_queue, choose):
    """Ranks whose streams run in any order that `choose` likes; returns what every rank received, or None if stuck."""
    world = len(messages[0])
    layout = slot_rings.SharedLayout(world, slots, piece)
    ring = np.zeros((layout.lanes, slots, piece), np.uint8)
    full, free = np.zeros((2, layout.lanes, slots), np.int64)
    ways = 1 if one_queue else 2 * STREAMS * slot_rings.PRIORITY_LEVELS
    streams = {(rank, s): [] for rank in range(world) for s in range(ways)}
    numbers, turns = {}, Counter()
    data, got = {}, {}
    for m, counts in enumerate(messages):
        for rank in range(world):
            send, recv = counts[rank], [row[rank] for row in counts]
            level = m % slot_rings.PRIORITY_LEVELS
            data[m, rank] = np.random.default_rng([m, rank]).integers(1, 255, sum(send)).astype(np.uint8)
            got[m, rank] = np.zeros(sum(recv), np.uint8)
            for sends, other, offset, nbytes in transfers_in_order(rank, send, recv, piece):
                lane = layout.lane(rank, other, level) if sends else layout.lane(other, rank, level)
                number = numbers.get((lane, sends), 0)
                numbers[lane, sends] = number + 1
                way = 2 * level + sends
                stream = 0 if one_queue else STREAMS * way + turns[rank, way] % STREAMS
                turns[rank, way] += 1
                streams[rank, stream].append((m, rank, sends, lane, number, offset, nbytes))
    while any(streams.values()):
        able = []
        for key, steps in streams.items():
            if steps:
                _, _, sends, lane, number, _, _ = steps[0]
                word, needed = (free, number // slots) if sends else (full, number // slots + 1)
                if word[lane, number % slots] >= needed:
                    able.append(key)
        if not able:
            return None, data
        m, rank, sends, lane, number, offset, nbytes = streams[choose(able)].pop(0)
        slot = ring[lane, number % slots]
        if sends:
            slot[:nbytes] = data[m, rank][offset : offset + nbytes]
            full[lane, number % slots] = number // slots + 1
        else:
            got[m, rank][offset : offset + nbytes] = slot[:nbytes]
            slot[:] = 0
            free[lane, number % slots] = number // slots + 1
    return got, data


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 8), st.booleans(), st.integers(0, 10**6))
def test_no_order_of_events_blocks_or_mixes_up_data(world, slots, piece, one_queue, seed):
    draw = random.Random(seed)
    messages = [[[draw.choice((0, 0, 3, 17, 30)) for _ in range(world)] for _ in range(world)] for _ in range(5)]
    got, data = simulate(messages, slots, piece, one_queue, draw.choice)
    assert got is not None, "blocked"
    for m, counts in enumerate(messages):
        for rank in range(world):
            starts = [sum(counts[source][:rank]) for source in range(world)]
            expected = [data[m, s][starts[s] : starts[s] + counts[s][rank]] for s in range(world)]
            np.testing.assert_array_equal(got[m, rank], np.concatenate(expected))


def test_rounds_wrap_around():
    assert slot_rings.at_least(5, 5) and slot_rings.at_least(3, 0xFFFFFFFE) and not slot_rings.at_least(0xFFFFFFFE, 3)


def test_a_ring_stays_within_its_size():
    for world in (1, 2, 3, 8, 64):
        layout = slot_rings.SharedLayout.fitting(world, 64 << 20, 4 << 20)
        assert layout.lanes // world * layout.slots * layout.piece_bytes <= 64 << 20 and layout.piece_bytes <= 4 << 20
        ends = [layout.data_offset(lane) for lane in range(layout.lanes + 1)]
        assert all(b - a == layout.slots * layout.piece_bytes for a, b in zip(ends, ends[1:], strict=False))
        assert layout.free_offset(layout.lanes) <= layout.data_offset(0) and ends[-1] == layout.nbytes
    with pytest.raises(ValueError, match="staged: the slots of 64 ranks need at least"):
        slot_rings.SharedLayout.fitting(64, 1 << 20, 4 << 20)


def test_memory_of_finished_messages_is_let_go_while_an_earlier_one_is_in_flight():
    flying, polls = InFlight(lambda done: polls.append(done) or done), []
    for number in range(1000):
        flying.add(Message(number, 0, 0.0, 0, done=number != 3, tensors=()))
    assert 3 in {m.number for m in flying.messages} and len(flying.messages) <= 17 and len(polls) <= 2000


# ---- whole exchanges ---------------------------------------------------------------------------------------


def opened(kind, device, **sizes):
    """The group's transport on this device; on the CPU, on a device made of threads with random delays."""
    sizes = {"ring_bytes": 4 << 20, "piece_bytes": 64 << 10, **sizes}
    if device == "cuda":
        torch.cuda.set_device(0)
        driver = None
    else:
        driver = HostDriver(seed=dist.get_rank(), delay=0.002)
    return {"staged": staged, "nixl": nixl}[kind].open_transport(dist.group.WORLD, driver=driver, **sizes)


def some_counts(draw, most):
    world = dist.get_world_size()
    return [[draw.choice((0, 1, draw.randrange(most))) for _ in range(world)] for _ in range(world)]


def one(transport, counts, number, device, dtype=torch.float32, width=16):
    """Launch one message; return the tensor that is to come and what must be in it."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(1000 * number + rank)
    send, recv = torch.tensor(counts[rank]), torch.tensor([row[rank] for row in counts])
    x = torch.randn(int(send.sum()), width, generator=generator).to(dtype)
    expected = torch.empty(int(recv.sum()), width, dtype=dtype)
    dist.all_to_all_single(expected, x, recv.tolist(), send.tolist())
    given_x = x.to(device)
    if device == "cuda":
        torch.cuda._sleep(random.Random(number + rank).randrange(2_000_000))
        given_x = given_x + 0  # computed after the delay
    out = transport.launch(given_x, send, recv, int(recv.sum()), number % 4)
    return out, expected


def many(kind, device, messages, most, in_flight, sizes):
    """Mixed priorities, several in flight, waited in random order, inputs dropped right after the launch."""
    transport = opened(kind, device, **sizes)
    draw, order = random.Random(5), random.Random(dist.get_rank())
    flying = []
    for number in range(messages):
        counts = some_counts(draw, most)
        dtype, width = ((torch.float32, 16), (torch.bfloat16, 7), (torch.float64, 1))[number % 3]
        flying.append((number, *one(transport, counts, number, device, dtype, width)))
        noise = torch.full((most, 16), -1.0, device=device)  # takes freed memory, if any was freed too early
        del noise
        while len(flying) > in_flight or (number == messages - 1 and flying):
            which, out, expected = flying.pop(order.randrange(len(flying)))
            got = wait(out).clone()
            assert torch.equal(got.cpu(), expected), (which, got.shape)
    transport.check()
    transport.close()
    assert not transport.in_flight.messages
    return transport.launched


@pytest.mark.parametrize("world", (1, 2, 3))
def test_all_to_all_on_a_device_of_threads(world):
    sizes = {"ring_bytes": 1 << 20, "piece_bytes": 8192}
    assert run_ranks(many, world, "staged", "cpu", 12, 900, 4, sizes) == [12] * world


def smaller_than_a_message(kind, device):
    transport = opened(kind, device, ring_bytes=1 << 20, piece_bytes=4096)
    counts = [[20_000 + 1000 * r + p for p in range(2)] for r in range(2)]
    early, expected = one(transport, counts, 2, device)
    pinned = transport.pinned_bytes
    urgent, soon = one(transport, [[3, 1], [2, 0]], 0, device)
    assert torch.equal(wait(urgent).cpu(), soon)
    assert torch.equal(wait(early).cpu(), expected)
    transport.check()
    assert transport.pinned_bytes == pinned <= 3 << 20  # of the host; the message alone is 2.5 MB per rank
    transport.close()
    return True


def test_a_message_larger_than_the_ring():
    assert run_ranks(smaller_than_a_message, 2, "staged", "cpu") == [True, True]


def urgent_first(kind):
    """A large early message that cannot move does not hold an urgent one up."""
    transport = opened(kind, "cpu", ring_bytes=1 << 20, piece_bytes=8192)
    rank = dist.get_rank()
    counts, few = [[5000] * 2] * 2, [[4] * 2] * 2
    late = rank == 1  # this rank takes nothing out of its early lanes for a while
    if late:
        go_on = threading.Event()
        for stream in transport.streams[2][1]:
            transport.driver.queues[stream].put(go_on.wait)
    early, expected = one(transport, counts, 2, "cpu")
    urgent, soon = one(transport, few, 0, "cpu")
    assert torch.equal(wait(urgent), soon)
    behind = not transport.driver.is_done(transport.in_flight.messages[0].done) if late else True
    dist.barrier()
    if late:
        go_on.set()
    assert torch.equal(wait(early), expected)
    transport.close()
    return behind


def test_urgent_passes_early():
    assert run_ranks(urgent_first, 2, "staged") == [True, True]


def refused():
    transport = opened("staged", "cpu")
    x = torch.zeros(3, 2)
    with pytest.raises(ValueError, match="expected 4 rows to send and 2 to receive, found 3 and 2"):
        transport.launch(x, torch.tensor([2, 2]), torch.tensor([1, 1]), 2, 0)
    with pytest.raises(ValueError, match="expected counts for 2 ranks, found 1 and 2"):
        transport.launch(x, torch.tensor([3]), torch.tensor([1, 1]), 2, 0)
    transport.close()
    return True


def test_wrong_arguments_are_refused():
    assert all(run_ranks(refused, 2))


def _shared_segments() -> int:
    """How many this process has mapped."""
    with open("/proc/self/maps") as maps:
        return maps.read().count("/dev/shm/#")  # a file without a name


def given_back(kind):
    transport = opened(kind, "cpu")
    driver = transport.driver
    out, expected = one(transport, [[5, 5], [5, 5]], 0, "cpu")
    assert torch.equal(wait(out), expected) and driver.pins and driver.queues
    transport.close()
    assert not driver.pins and not driver.queues
    with pytest.raises(RuntimeError, match="the transport was closed"):
        one(transport, [[5, 5], [5, 5]], 1, "cpu")
    dropped = opened(kind, "cpu")
    driver = dropped.driver
    assert driver.pins
    if kind == "staged":
        assert _shared_segments() == 2
    del transport, dropped
    for _ in range(100):  # a watching thread may hold it for a moment
        gc.collect()
        if not driver.pins and not driver.queues:
            return _shared_segments()
        time.sleep(0.05)
    raise AssertionError("pinned memory was not given back")


def test_memory_and_streams_are_given_back():
    assert run_ranks(given_back, 2, "staged") == [0, 0]


def dies(kind, device, seconds):
    """Rank 1 is killed in the middle of a message; what the others meet, and when."""
    rank = dist.get_rank()
    transport = opened(kind, device, timeout=seconds)
    out, expected = one(transport, [[40] * 3] * 3, 0, device)
    assert torch.equal(wait(out).cpu(), expected)
    dist.barrier()
    if rank == 1:
        os._exit(1)  # before it has launched the next
    start = time.monotonic()
    counts = torch.full((3,), 20_000)
    out = transport.launch(torch.ones(60_000, 16, device=device), counts, counts, 60_000, 1)
    told = ""
    try:
        wait(out)
        transport.drain()
    except RuntimeError as error:
        told = str(error)
    took = time.monotonic() - start
    if device == "cuda":
        torch.cuda.synchronize()  # the streams are released, so this ends
    with pytest.raises(RuntimeError, match="freescale: "):
        transport.launch(torch.ones(60_000, 16, device=device), counts, counts, 60_000, 1)
    transport.close()
    raise RuntimeError(f"took {took:.1f} s: {told}")


def check_death(kind, device, seconds, limit):
    for rank, said in enumerate(run_ranks(dies, 3, kind, device, seconds, expect_errors=True)):
        if rank != 1:
            assert "freescale: " in said and "rank 1 is gone" in said and "rank 2 " not in said.split("cannot")[1], said
            assert float(said.split("took ")[1].split()[0]) < limit, said


def test_a_rank_that_dies_is_named():
    check_death("staged", "cpu", 8, 20)


def late_rank():
    """Rank 1 lives but launches nothing: the time-out names it, and nobody gets to write a checkpoint."""
    from freescale.kernels.transports import open_transports

    transport = opened("staged", "cpu", timeout=1.0)
    open_transports._open["staged", "the group"] = dist.group.WORLD, transport
    table = ShardedEmbedding(8, 4)
    assert set(table.state_dict()) == {"weight", "momentum"}
    world = dist.get_world_size()
    counts, rows = torch.full((world,), 4000), 4000 * world
    if dist.get_rank() != 1:
        out = transport.launch(torch.ones(rows, 16), counts, counts, rows, 2)
        wait(out)
        nn.ModuleDict({"inside": table}).state_dict()
    else:
        time.sleep(4)
        raise RuntimeError("rank 1 was only late")
    return True


def test_a_late_rank_is_named_after_the_time_out():
    for rank, said in enumerate(run_ranks(late_rank, 3, expect_errors=True)):
        if rank != 1:
            assert f"freescale: staged: rank {rank} cannot" in said and ": rank 1 is " in said, said


# ---- threads that meet something unexpected ----------------------------------------------------------------


def list_empties():
    """Between two looks at the list of messages, another thread finds that the last one has finished."""
    transport = opened("staged", "cpu")
    out, expected = one(transport, [[5]], 0, "cpu")
    in_flight = transport.in_flight
    message = in_flight.messages[0]
    assert torch.equal(wait(out), expected)
    oldest = type(in_flight).oldest

    def then_empties():
        if threading.current_thread() is not threading.main_thread():
            return oldest(in_flight)  # the watching thread itself
        in_flight.add(message)
        in_flight._is_done = lambda event: False
        found = oldest(in_flight)
        in_flight._is_done = transport.driver.is_done
        oldest(in_flight)
        return found

    in_flight.oldest = then_empties
    transport.look_for_failure()
    del in_flight.oldest
    transport.close()
    return True


def test_a_look_at_a_message_that_finishes_meanwhile():
    assert run_ranks(list_empties, 1) == [True]


def watcher_raises():
    """What a look raises is told by the next use, and what waits is released."""
    transport = opened("staged", "cpu", timeout=200.0)
    if dist.get_rank() == 0:

        def missing_peers():
            raise ValueError("a flag that cannot be read")

        transport.missing_peers, transport.timeout = missing_peers, 0.2
        counts = torch.full((2,), 4000)
        try:
            wait(transport.launch(torch.ones(8000, 16), counts, counts, 8000, 1))
            transport.drain()
        finally:
            transport.close()
    else:
        while not transport.liveness.lost_peers():
            time.sleep(0.01)
        transport.close()
        raise RuntimeError("rank 1 launched nothing")


def test_a_watching_thread_that_raises_is_an_error():
    said = run_ranks(watcher_raises, 2, timeout=60, expect_errors=True)[0]
    assert "freescale: staged: rank 0 cannot watch its messages: ValueError: a flag that cannot be read" in said


def never_done():
    """Nobody fails and nothing finishes: who reads the tables waits as long as the group would, not longer."""
    transport = opened("staged", "cpu", timeout=0.5)
    go_on = threading.Event()
    for stream in transport.streams[1][1]:
        transport.driver.queues[stream].put(go_on.wait)
    transport.launch(torch.ones(4, 16), torch.tensor([4]), torch.tensor([4]), 4, 1)
    try:
        transport.drain()
    finally:
        go_on.set()
        transport.close()


def test_draining_ends_with_the_time_out():
    (said,) = run_ranks(never_done, 1, timeout=60, expect_errors=True)
    assert "freescale: staged: rank 0 waited 0.5 s for its own device to finish message 0 of priority 1" in said


# ---- the same on CUDA --------------------------------------------------------------------------------------

small = {"ring_bytes": 4 << 20, "piece_bytes": 64 << 10}


def stress(kind, device, caching):
    """Delays on every stream, memory that is freed and taken again at once, several messages in flight."""
    assert bool(os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING")) != caching
    transport = opened(kind, device, piece_bytes=64 << 10)
    draw, order = random.Random(7), random.Random(dist.get_rank())
    streams = [torch.cuda.ExternalStream(s) for pair in transport.streams for way in pair for s in way]
    side, flying = torch.cuda.Stream(), []
    for number in range(30 if caching else 12):
        with torch.cuda.stream(order.choice(streams)):
            torch.cuda._sleep(order.randrange(3_000_000))
        with torch.cuda.stream(order.choice((torch.cuda.current_stream(), side))):
            torch.cuda._sleep(order.randrange(1_000_000))
            flying.append(one(transport, some_counts(draw, 3000), number, device))
            filler = [torch.full((3000, 16), -2.0, device=device) for _ in range(4)]
            del filler
        while len(flying) > 3:
            out, expected = flying.pop(order.randrange(len(flying)))
            with torch.cuda.stream(order.choice((torch.cuda.current_stream(), side))):
                got = wait(out) * 1
                assert torch.equal(got.cpu(), expected)
                del out, got
    for out, expected in flying:
        assert torch.equal(wait(out).cpu(), expected)
    transport.check()
    transport.close()
    return True


def every_kind(kinds, messages, caching):
    """All in one set of processes: starting them takes longer than the tests."""
    for kind in kinds:
        if caching:
            many(kind, "cuda", messages, 5000, 4, small)
        stress(kind, "cuda", caching)
    return True


class TestOnCuda:
    pytestmark = gpu

    @pytest.mark.parametrize("world", (1, 2, 4))
    def test_all_to_all_with_delays(self, world):
        assert all(run_ranks(every_kind, world, ("staged",), 24, True, timeout=100))

    def test_without_the_caching_allocator(self):
        env = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        assert all(run_ranks(every_kind, 2, ("staged",), 0, False, env=env, timeout=100))

    def test_one_hardware_queue_for_all_streams(self):
        env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        assert all(run_ranks(every_kind, 2, ("staged",), 24, True, env=env, timeout=100))

    def test_a_message_larger_than_the_ring(self):
        assert all(run_ranks(smaller_than_a_message, 2, "staged", "cuda", timeout=100))

    def test_a_rank_that_dies_is_named(self):
        check_death("staged", "cuda", 8, 20)
