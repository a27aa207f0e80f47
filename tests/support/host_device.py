"""A device made of threads, so that the transports can be tested where there is no GPU.

Each stream is a thread that does its work in order, with random delays; "device memory" is host memory. The current
stream is the host itself, on which everything is done at once: a stream wait there blocks.
"""

from __future__ import annotations

import ctypes
import itertools
import queue
import random
import threading
import time

from freescale.kernels.transports.cuda_calls import NOT_READY
from freescale.kernels.transports.cuda_driver import DriverEvent

_P, _U64, _U32, _SIZE = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_size_t


class Mark:
    def __init__(self):
        self.reached = threading.Event()


class HostDriver:
    def __init__(self, seed=0, delay=0.0):
        self.random, self.delay = random.Random(seed), delay
        self.names = itertools.count(1)
        self.queues: dict[int, queue.SimpleQueue] = {}
        self.pins: dict[int, int] = {}

    def bind_thread(self):
        pass

    def pin(self, address, nbytes):
        self.pins[address] = nbytes
        return address

    def unpin(self, address):
        del self.pins[address]

    def new_stream(self, priority):
        name = next(self.names)
        self.queues[name] = queue.SimpleQueue()
        threading.Thread(target=self._run, args=(self.queues[name],), daemon=True).start()
        return name

    def destroy_stream(self, stream):
        self.queues.pop(stream).put(None)

    def _run(self, work):
        while (todo := work.get()) is not None:
            if self.delay and self.random.random() < 0.2:
                time.sleep(self.random.random() * self.delay)
            todo()

    def _copy(self, to, data, nbytes, stream):
        self.queues[stream].put(lambda: ctypes.memmove(to, data, nbytes))

    copy_to_host = copy_to_device = copy_device_to_device = _copy

    def write_word(self, address, value, stream):
        word = ctypes.c_uint32.from_address(address)
        self.queues[stream].put(lambda: setattr(word, "value", value & 0xFFFFFFFF))

    def wait_for_word(self, address, value, stream):
        word = ctypes.c_uint32.from_address(address)

        def spin():
            while (word.value - value) & 0xFFFFFFFF >= 0x80000000:
                time.sleep(1e-4)

        self.queues[stream].put(spin)

    def current_stream(self):
        return 0

    def record_event(self, stream):
        mark = Mark()
        if stream == 0:
            mark.reached.set()
        else:
            self.queues[stream].put(mark.reached.set)
        return mark

    def wait_for_event(self, stream, mark):
        if stream == 0:
            assert mark.reached.wait(60), "a stream has been waiting for a minute"
        else:
            self.queues[stream].put(mark.reached.wait)

    def is_done(self, mark):
        return mark.reached.is_set()


def driver_call(*arguments):
    """Decorator: a function of the driver that C can call. It returns a code; None is 0."""
    return lambda fn: ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(lambda *values: fn(*(v or 0 for v in values)) or 0)


class NativeHostDriver(HostDriver):
    """The same device behind function pointers like libcuda's, for the C code. Events have handles, used again."""

    context = 0

    def __init__(self, seed=0, delay=0.0):
        super().__init__(seed, delay)
        self.idle, self.handles = [], itertools.count(1)
        self.marks: dict[int, Mark] = {}  # what each event stands for now
        copy = driver_call(_P, _P, _SIZE, _P)(self._copy)
        self.calls = {
            "cuCtxGetCurrent": driver_call(_P)(self._unused),
            "cuCtxPushCurrent_v2": driver_call(_P)(self._unused),
            "cuCtxPopCurrent_v2": driver_call(_P)(self._unused),
            "cuEventRecord": driver_call(_P, _P)(lambda event, stream: self._record(event, stream)),
            "cuStreamWaitEvent": driver_call(_P, _P, _U32)(lambda stream, event, _: self._wait(stream, event)),
            "cuEventQuery": driver_call(_P)(lambda event: 0 if self.marks[event].reached.is_set() else NOT_READY),
            "cuEventElapsedTime": driver_call(_P, _P, _P)(self._unused),
            "cuMemcpyDtoHAsync_v2": copy,
            "cuMemcpyHtoDAsync_v2": copy,
            "cuMemcpyDtoDAsync_v2": copy,
            "cuStreamWriteValue32_v2": driver_call(_P, _U64, _U32, _U32)(lambda s, a, v, _: self.write_word(a, v, s)),
            "cuStreamWaitValue32_v2": driver_call(_P, _U64, _U32, _U32)(lambda s, a, v, _: self.wait_for_word(a, v, s)),
        }

    def _unused(self, *_):
        raise AssertionError("a device of threads has no contexts and no clock")

    def _record(self, event, stream):
        self.marks[event] = super().record_event(stream)

    def _wait(self, stream, event):
        super().wait_for_event(stream, self.marks[event])

    def raise_on_error(self, name, code):
        if code:
            raise RuntimeError(f"freescale: {name.removesuffix('_v2')} failed on a device of threads: {code}")

    def new_event(self):
        return DriverEvent(self.idle.pop() if self.idle else next(self.handles), self.idle)

    def is_done(self, event):
        return self.marks[event.handle].reached.is_set()
