"""How long a stream waited, and a step took: events are read when the device has got there, and used again."""

from __future__ import annotations

import pytest
import torch

from freescale.kernels.transports import cuda_driver, launch_record
from freescale.kernels.transports.launch_record import LaunchRecord, RecordedWork, StreamWaits
from freescale.runtime.meter import Meter
from recording_driver import RecordingDriver

COMPUTE = 5


class Group:
    def rank(self):
        return 3


class GroupsOwn:
    """A Work of the group itself."""

    def __init__(self, completed):
        self.completed, self.waited, self.error = completed, False, ""

    def is_completed(self):
        return self.completed

    def wait(self):
        self.waited = True
        if self.error:
            raise RuntimeError(self.error)


@pytest.fixture
def driver(monkeypatch):
    driver = RecordingDriver()
    driver.current_stream = lambda: COMPUTE
    record_event = driver.record_event
    driver.record_event = lambda stream, timing=False: record_event(stream)
    monkeypatch.setattr(cuda_driver, "driver_of", lambda device: driver)
    launch_record.records.clear()
    yield driver
    launch_record.records.clear()


def work_of(driver, completed=False):
    """As if the rows were on a GPU."""
    work = RecordedWork(GroupsOwn(completed), "urgent rows of item", torch.empty(3, 2), Group())
    work.stream_waits = StreamWaits(torch.device("cuda", 0))
    return work


def test_a_stream_that_waited(driver):
    """0.0 until the device has got there; then what its clock says, and the events are free."""
    work = work_of(driver)
    record = work.record
    assert record.bytes == 24 and launch_record.records[-1] is record
    assert work.wait() and not record.arrived_before_wait and work not in launch_record._not_waited_for.values()
    assert record.exposed_seconds() == 0.0 and record.events is not None and record.wait_ended > record.wait_began
    driver.milliseconds = 125.0
    driver.reached.add(driver.recorded[record.events[2].handle])
    handles = {event.handle for event in record.events[1:]}
    assert record.exposed_seconds() == record.exposed_seconds() == 0.125 and record.events is None
    assert handles <= set(driver.idle)


def test_a_message_that_had_come_waits_for_nothing(driver):
    work = work_of(driver, completed=True)
    lines = len(driver.log)
    assert work.wait() and work.work.waited and driver.log[lines:] == []
    assert work.record.arrived_before_wait and work.record.exposed_seconds() == 0.0 and work.record.events is None


def test_later_waits_read_the_events_of_earlier_ones(driver):
    """So the number of events does not grow with the steps that the meter keeps."""
    waits, kept, handles = StreamWaits(torch.device("cuda", 0)), [], set()
    for step in range(50):
        work = work_of(driver)
        work.stream_waits, driver.milliseconds = waits, 1.0 + step
        work.wait()
        kept.append(work.record)
        if work.record.events is not None:
            handles |= {event.handle for event in work.record.events[1:]}
            driver.reached.add(driver.recorded[work.record.events[2].handle])
    assert all(record.events is None for record in kept[:-2]) and len(handles) <= 8
    assert [record.exposed_seconds() for record in kept[:-2]] == [(2.0 + step) / 1e3 for step in range(48)]
    assert kept[-1].exposed_seconds() == 0.05


def test_the_groups_own_work_is_timed_too(driver):
    waits = StreamWaits(torch.device("cuda", 0))
    first, second = (RecordedWork(GroupsOwn(done), "late gradients of item", torch.empty(1), Group()) for done in (False, True))
    first.stream_waits = second.stream_waits = waits
    assert first.wait() and first.work.waited and not first.record.arrived_before_wait
    driver.milliseconds = 4.0
    driver.reached.add(driver.recorded[first.record.events[2].handle])
    assert second.wait() and second.record.arrived_before_wait
    assert first.record.events is None and first.record.exposed_seconds() == 0.004


def test_on_the_host_the_clock_of_the_host_counts(driver):
    work = RecordedWork(GroupsOwn(False), "early rows of item", torch.empty(1), Group())
    work.wait()
    record = work.record
    assert record.exposed_seconds() == record.wait_ended - record.wait_began > 0 and driver.log == []


def test_a_wait_in_vain(driver):
    work = work_of(driver)
    work.work.error = "rank 1 is gone"
    with pytest.raises(RuntimeError, match=r"rank 3 waited for urgent rows of item \(24 bytes\), which did not arrive: .* rank 1 is gone"):
        work.wait()
    assert work.record.wait_ended >= work.record.wait_began > 0


def test_a_time_that_the_host_was_blocked(driver):
    with pytest.raises(ValueError), launch_record.record_host_wait("rendezvous"):
        raise ValueError
    (record,) = launch_record.records
    assert isinstance(record, LaunchRecord) and record.label == "rendezvous" and record.bytes == 0
    assert record.exposed_seconds() == record.wait_ended - record.launched > 0


def test_a_flight_ends_where_arrival_was_seen():
    """Before the wait, or with it: a wait for what has arrived may be longer, where a process does not get its core."""
    record = launch_record.LaunchRecord("urgent rows", 8)
    record.launched, record.wait_began, record.wait_ended = 1.0, 3.0, 10.0
    assert record.flight_seconds() == 9.0 and record.exposed_seconds() == 7.0
    record.arrived_before_wait = True
    assert record.flight_seconds() == 2.0 and record.exposed_seconds() == 7.0


def test_a_step_begins_where_the_one_before_it_has_ended(driver):
    """One event says both; a step on another stream has one of its own."""
    meter, gpu = Meter(), torch.device("cuda", 0)
    meter.mark("first", gpu)
    meter.mark("second", gpu)
    driver.current_stream = lambda: COMPUTE + 1
    meter.mark("third", gpu)
    assert [line for line in driver.log if line[0] == "record"] == [("record", COMPUTE)] * 3 + [("record", COMPUTE + 1)]
    first, second = (step.on_device for step in meter._steps)
    ends = [driver.recorded[step._events[2].handle] for step in (first, second)]
    driver.milliseconds = 8.0
    driver.reached.add(ends[0])
    assert first.read() and first.seconds == 0.008 and not second.read()
    driver.reached.add(ends[1])
    assert second.read() and second.seconds == 0.008
    assert [line for line in driver.log if line[0] == "elapsed"] == [("elapsed", 0, ends[0]), ("elapsed", *ends)]


def test_a_step_may_be_read_when_the_next_one_begins(driver):
    """By a listener, where the device has got there already: its last event is the next step's first."""
    meter, gpu, read = Meter(), torch.device("cuda", 0), []
    meter.listen(lambda step: read.append(step.on_device.read()))
    driver.reached = range(1000)
    for name in ("first", "second", "third"):
        meter.mark(name, gpu)
    assert read == [True, True] and sum(line[0] == "record" for line in driver.log) == 3


def test_two_threads_may_read_a_step(driver):
    """The training thread, and the one that balances: each may find that the other has just done so."""
    meter, gpu = Meter(), torch.device("cuda", 0)
    meter.mark("first", gpu)
    step, driver.milliseconds = meter._on_device, 8.0

    class ReadMeanwhile(list):
        def __bool__(self):
            step._events = []
            return True

    step.end()
    driver.reached = range(1000)
    step._events = ReadMeanwhile(step._events)
    assert step.read() and step.read() and step.seconds == 0.008
