"""A device made of threads, to test the transports without a GPU.

Each stream is a thread that runs its work in order, with random delays; "device memory" is host memory. The current
stream is the host thread itself and runs work immediately: a stream wait on it blocks.
"""

from __future__ import annotations

import ctypes
import itertools
import queue
import random
import threading
import time

from freescale.kernels.transports.cuda_driver import DriverEvent

_P, _U64, _U32, _SIZE = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_size_t


def driver_call(*arguments):
    """Decorator for a driver function callable from C. It returns an error code; None is 0."""
    return lambda fn: ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(lambda *values: fn(*(v or 0 for v in values)) or 0)


class HostDriver:
    """The device behind function pointers like libcuda's, for the C code. Event handles are reused."""

    context = 0

    def __init__(self, seed=0, delay=0.0):
        self.random, self.delay = random.Random(seed), delay
        self.names = itertools.count(1)
        self.queues: dict[int, queue.SimpleQueue] = {}
        self.pins: dict[int, int] = {}
        self.idle, self.handles = [], itertools.count(1)
        self.marks: dict[int, threading.Event] = {}  # the current record of each event
        self.calls = {
            "cuCtxGetCurrent": driver_call(_P)(self._unused),
            "cuCtxPushCurrent_v2": driver_call(_P)(self._unused),
            "cuCtxPopCurrent_v2": driver_call(_P)(self._unused),
            "cuEventRecord": driver_call(_P, _P)(self._record),
            "cuStreamWaitEvent": driver_call(_P, _P, _U32)(lambda stream, event, _: self._wait(stream, event)),
            "cuMemcpyDtoHAsync_v2": driver_call(_P, _U64, _SIZE, _P)(self._copy),
            "cuMemcpyHtoDAsync_v2": driver_call(_U64, _P, _SIZE, _P)(self.copy_to_device),
            "cuStreamWriteValue32_v2": driver_call(_P, _U64, _U32, _U32)(lambda s, a, v, _: self._write_word(a, v, s)),
            "cuStreamWaitValue32_v2": driver_call(_P, _U64, _U32, _U32)(lambda s, a, v, _: self._wait_for_word(a, v, s)),
        }

    def _unused(self, *_):
        raise AssertionError("a device of threads has no contexts")

    def raise_on_error(self, name, code):
        if code:
            raise RuntimeError(f"freescale: {name.removesuffix('_v2')} failed on a device of threads: {code}")

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

    def copy_to_device(self, to, data, nbytes, stream):
        self._copy(to, data, nbytes, stream)

    def _write_word(self, address, value, stream):
        word = ctypes.c_uint32.from_address(address)
        self.queues[stream].put(lambda: setattr(word, "value", value & 0xFFFFFFFF))

    def _wait_for_word(self, address, value, stream):
        word = ctypes.c_uint32.from_address(address)

        def spin():
            while (word.value - value) & 0xFFFFFFFF >= 0x80000000:
                time.sleep(1e-4)

        self.queues[stream].put(spin)

    def current_stream(self):
        return 0

    def _record(self, event, stream):
        mark = self.marks[event] = threading.Event()
        if stream == 0:
            mark.set()
        else:
            self.queues[stream].put(mark.set)

    def _wait(self, stream, event):
        mark = self.marks[event]
        if stream == 0:
            assert mark.wait(60), "a stream has been waiting for a minute"
        else:
            self.queues[stream].put(mark.wait)

    def new_event(self):
        return DriverEvent(self.idle.pop() if self.idle else next(self.handles), self.idle)

    def wait_for_event(self, stream, event):
        self._wait(stream, event.handle)

    def is_done(self, event):
        return self.marks[event.handle].is_set()
