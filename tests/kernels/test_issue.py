"""A message put on streams by C (native/transfers.c) and by Python: the same driver calls, the same errors.

The driver is one that writes down what it is asked for, behind function pointers, so the C code runs without a GPU.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.kernels.transports.cuda_driver import CudaDriver, DriverEvent
from freescale.kernels.transports.issue import Channel, Issuer
from freescale.kernels.transports.slot_rings import WORD_STRIDE, Lane
from issue_python import PythonIssuer, transfers_in_order
from recording_driver import RecordingDriver

OUTWARDS, INWARDS, COMPUTE = [11, 12], [21, 22], 5


def lanes_of(world, slots, piece_bytes, sends, first_pieces, words):
    """One lane for each peer, with addresses that tell them apart."""
    lanes = []
    for peer in range(world):
        base = (10 + 2 * peer + sends) << 32
        lane = Lane(
            peer=peer, sends=sends, slots=slots, piece_bytes=piece_bytes, data_address=base,
            wait_address=base + (1 << 24), signal_address=base + (1 << 25),
            wait_words=words[sends, peer],
        )  # fmt: skip
        lane.next_piece = first_pieces[sends][peer]
        lanes.append(lane)
    return lanes


def channel_of(rank, world, slots, piece_bytes, first_pieces, words=None):
    """`words`: what the peers have written; nothing if not given."""
    words = words if words is not None else words_with(np.zeros((2, world, slots), np.int64))
    lanes = [lanes_of(world, slots, piece_bytes, sends, first_pieces, words) for sends in (1, 0)]
    return Channel(rank, OUTWARDS, INWARDS, *lanes, piece_bytes)


def words_with(rounds):
    """[2, world, slots] words, a cache line each, with what the peers have written."""
    words = np.zeros((*rounds.shape, WORD_STRIDE // 4), np.uint32)
    words[..., 0] = rounds & 0xFFFFFFFF
    return words[..., 0]


def issue(issuer, messages, row_bytes):
    """The addresses of what each message sends and receives."""
    addresses = []
    for send, recv in messages:
        x, out = (torch.empty(sum(counts), row_bytes, dtype=torch.uint8) for counts in (send, recv))
        assert issuer.launch(0, COMPUTE, x, out, torch.tensor(send), torch.tensor(recv), row_bytes) is not None
        addresses.append((x.data_ptr(), out.data_ptr()))
    return addresses


def one_row(issuer):
    x, one = torch.empty(1, 8, dtype=torch.uint8), torch.tensor([1])
    return issuer.launch(0, COMPUTE, x, x, one, one, 8)


def counts(draw, world):
    return [draw.choice((0, 0, 1, draw.randrange(40))) for _ in range(world)]


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 6), st.integers(1, 4), st.integers(1, 32), st.booleans(), st.integers(0, 10**9),
)  # fmt: skip
def test_c_and_python_ask_the_driver_for_the_same(world, slots, piece_bytes, at_wrap, seed):
    """Pieces of any size, several messages through the same lanes, words that have got anywhere, rounds that wrap."""
    draw = random.Random(seed)
    rank, row_bytes = draw.randrange(world), draw.choice((1, 4, 7))
    begin = slots * ((1 << 32) - 2) if at_wrap else 0
    first = [[begin + draw.randrange(5) for _ in range(world)] for _ in range(2)]
    rounds = np.array([[[n // slots + draw.randrange(-1, 3) for _ in range(slots)] for n in way] for way in first])
    words = words_with(rounds)
    messages = [(counts(draw, world), counts(draw, world)) for _ in range(3)]
    logs, ends = [], []
    for make in (PythonIssuer, Issuer):
        driver = RecordingDriver()
        channel = channel_of(rank, world, slots, piece_bytes, first, words)
        issuer = make(driver, [channel])
        for message in messages:
            begin = len(driver.log)
            (addresses,) = issue(issuer, [message], row_bytes)
            driver.log[begin:] = [in_tensor(line, *addresses) for line in driver.log[begin:]]
        copies = [line for line in driver.log if line[0] in ("sends", "receives")]
        logs.append(driver.log)
        ends.append([lane.next_piece for lane in (*channel.lanes_out, *channel.lanes_in)])
    assert logs[0] == logs[1] and ends[0] == ends[1]
    expected = []
    for send, recv in messages:
        sizes = [n * row_bytes for n in send], [n * row_bytes for n in recv]
        for sends, _, offset, nbytes in transfers_in_order(rank, *sizes, piece_bytes):
            expected.append(("sends" if sends else "receives", offset, nbytes))
    assert [(line[0], line[1], line[3]) for line in copies] == expected
    assert all(line[4] in (OUTWARDS if line[0] == "sends" else INWARDS) for line in copies)


def in_tensor(line, x, out):
    """A line of the driver's log; of a copy, the place in the tensor instead of an address."""
    if line[0] == "to host":
        _, to, data, nbytes, stream = line
        return "sends", data - x, to, nbytes, stream
    if line[0] == "to device":
        _, to, data, nbytes, stream = line
        return "receives", to - out, data, nbytes, stream
    return line


def test_a_message_in_full():
    """One piece to a peer and one back, the second round of a lane of one slot."""
    driver = RecordingDriver()
    channel = channel_of(0, 2, 1, 64, [[0, 1], [0, 1]])
    ((x, received),) = issue(Issuer(driver, [channel]), [([0, 3], [0, 2])], 8)
    out, back = channel.lanes_out[1], channel.lanes_in[1]
    assert driver.log == [
        ("record", COMPUTE),
        ("wait", 11, 0),
        ("word", out.wait_address, 1, 11),
        ("to host", out.data_address, x, 24, 11),
        ("write", out.signal_address, 2, 11),
        ("wait", 21, 0),
        ("word", back.wait_address, 2, 21),
        ("to device", received, back.data_address, 16, 21),
        ("write", back.signal_address, 2, 21),
        ("record", 11),
        ("wait", 21, 9),
        ("record", 21),
    ]


@pytest.mark.parametrize("make", (PythonIssuer, Issuer))
def test_a_message_without_rows_is_done_with_the_compute_before_it(make):
    driver = RecordingDriver()
    issue(make(driver, [channel_of(0, 2, 1, 64, [[0, 0], [0, 0]])]), [([0, 0], [0, 0])], 8)
    assert driver.log == [("record", COMPUTE), ("record", COMPUTE)]


def test_every_call_that_can_fail_is_named_with_its_code():
    """At the first one, nothing more is asked of the driver."""
    messages = [([2, 1, 3], [1, 4, 2])]
    whole = RecordingDriver()
    channel = channel_of(1, 3, 1, 2, [[1] * 3] * 2)
    issue(Issuer(whole, [channel]), messages, 1)
    failed = set()
    for fails_at in range(len(whole.log)):
        said = []
        for make in (PythonIssuer, Issuer):
            driver = RecordingDriver(fails_at=fails_at, code=2**31 + 7)
            channel = channel_of(1, 3, 1, 2, [[1] * 3] * 2)
            with pytest.raises(RuntimeError) as error:
                issue(make(driver, [channel]), messages, 1)
            assert [line[0] for line in driver.log] == [line[0] for line in whole.log[: fails_at + 1]]
            said.append((str(error.value), [lane.next_piece for lane in (*channel.lanes_out, *channel.lanes_in)]))
        assert said[0] == said[1]
        failed.add(said[0][0].split()[1])
    copies = {"cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync"}
    assert failed == {"cuEventRecord", "cuStreamWaitEvent", "cuStreamWriteValue32", "cuStreamWaitValue32"} | copies


def test_another_context_is_left_as_it_was():
    """Also where a call fails."""
    messages = [([1], [1])]
    for current, expected in ((7, (0, 0)), (9, (1, 1)), (0, (1, 1))):
        for fails_at in (None, 3):
            driver = RecordingDriver(context=7, current_context=current, fails_at=fails_at)
            issuer = Issuer(driver, [channel_of(0, 1, 1, 64, [[0], [0]])])
            if fails_at is None:
                issue(issuer, messages, 1)
            else:
                with pytest.raises(RuntimeError):
                    issue(issuer, messages, 1)
            asked = [line[0] for line in driver.log]
            assert (asked.count("push"), asked.count("pop")) == expected
            if expected[0]:
                assert driver.log[0] == ("push", 7) and driver.log[-1] == ("pop",)


def test_an_event_is_used_again_when_its_message_is_gone():
    driver = RecordingDriver()
    issuer = Issuer(driver, [channel_of(0, 1, 1, 64, [[0], [0]])])
    before = next(driver.handles)
    for _ in range(10):
        done = one_row(issuer)
    held = [one_row(issuer) for _ in range(3)]
    assert len({e.handle for e in (*held, done)}) == 4
    assert next(driver.handles) <= before + 6


def test_counts_that_do_not_add_up_issue_nothing():
    send, recv, rows = torch.tensor([3, 0, 4]), torch.tensor([9, 1, 0]), torch.empty(10, 8, dtype=torch.uint8)
    driver = RecordingDriver()
    issuer = Issuer(driver, [channel_of(0, 3, 2, 64, [[0] * 3] * 2)])
    for n_send, n_recv in ((8, 10), (7, 9)):
        assert issuer.launch(0, COMPUTE, rows[:n_send], rows[:n_recv], send, recv, 8) is None and driver.log == []
    assert issuer.launch(0, COMPUTE, rows[:7], rows[:10], send, recv, 8) is not None


# ---- events of the CUDA driver -----------------------------------------------------------------------------


def driver_with(monkeypatch, device, **calls):
    """CudaDrivers make these calls, and no others; torch's current device is `device`."""
    monkeypatch.setattr("freescale.kernels.transports.cuda_driver.load", lambda: calls)
    monkeypatch.setattr(CudaDriver, "_device_context", lambda self: 7)
    monkeypatch.setattr("freescale.compat.cuda.current_device", lambda: device)


def test_events_of_the_driver_are_pooled(monkeypatch):
    """Per device, with and without timing apart."""
    created = []

    def create(to, flags):
        created.append(flags)
        to._obj.value = len(created)
        return 0

    def current(to):
        to._obj.value = 7
        return 0

    driver_with(monkeypatch, 0, cuEventCreate=create, cuCtxGetCurrent=current)
    monkeypatch.setattr("freescale.kernels.transports.cuda_driver._idle_events", {})
    first, second = CudaDriver(torch.device("cuda", 0)), CudaDriver(torch.device("cuda", 0))
    a, b = first.new_event(), first.new_event(timing=True)
    assert (a.handle, b.handle, created) == (1, 2, [2, 0])  # CU_EVENT_DISABLE_TIMING is 2
    del a, b
    assert second.new_event(timing=True).handle == 2 and second.new_event().handle == 1 and len(created) == 2
    assert CudaDriver(torch.device("cuda", 1)).new_event().handle == 3


@pytest.mark.parametrize(
    ("device", "context", "expected"),
    [
        (0, 7, ["record"]),
        (1, 8, ["push 7", "record", "pop"]),
        (0, None, ["record", "set 7", "record"]),  # a thread in which nothing of CUDA has been yet
        (1, None, ["set 7", "record"]),
    ],
)
def test_a_call_is_made_in_the_context_of_its_device(monkeypatch, device, context, expected):
    """`context`: the thread's. 7 is that of device 0."""
    said, stack = [], [context]

    def current(to):
        to._obj.value = stack[-1]
        return 0

    def enter(name):
        return lambda context: said.append(f"{name} {context}") or stack.append(context) or 0

    def record(event, stream):
        said.append("record")
        return 0 if stack[-1] == 7 else 201

    def pop(to):
        said.append("pop")
        stack.pop()
        return 0

    contexts = {"cuCtxSetCurrent": enter("set"), "cuCtxPushCurrent_v2": enter("push"), "cuCtxPopCurrent_v2": pop}
    driver_with(monkeypatch, device, cuEventRecord=record, cuCtxGetCurrent=current, **contexts)
    CudaDriver(torch.device("cuda", 0)).record(DriverEvent(3, []), 0)
    assert said == expected


def test_an_error_of_the_driver_has_its_name(monkeypatch):
    def name_of(code, to):
        to._obj.value = b"CUDA_ERROR_INVALID_HANDLE"

    driver_with(monkeypatch, 0, cuEventRecord=lambda *_: 400, cuGetErrorName=name_of)
    with pytest.raises(RuntimeError, match="cuEventRecord failed on cuda:0: CUDA_ERROR_INVALID_HANDLE"):
        CudaDriver(torch.device("cuda", 0)).record(DriverEvent(3, []), 0)
