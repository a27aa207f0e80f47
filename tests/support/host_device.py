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
