"""Parts of one tensor's memory as tensors of their own."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import torch

from freescale.runtime.tables.plan_block import detached


def test_a_part_is_the_same_memory_without_being_a_view():
    memory = torch.arange(50)[7:]  # the memory need not begin where its storage does
    part, empty = detached(memory, 1, 2), detached(memory, 3, 0)
    assert part.tolist() == [8, 9] and part.data_ptr() == memory.data_ptr() + 8
    assert empty.tolist() == [] and empty.stride() == part.stride() == (1,)
    part[0] = -1
    assert memory[1] == -1
    assert not part._is_view() and part._version == 1 and memory._version == 0
    assert detached(torch.empty(0, dtype=torch.int64), 0, 0).shape == (0,)


def test_the_last_part_gives_the_memory_back():
    array = np.arange(64)
    memory, alive = torch.from_numpy(array), weakref.ref(array)
    parts = [detached(memory, *part) for part in ((0, 8), (16, 8), (32, 0))]
    del array, memory
    while parts:
        gc.collect()
        assert alive() is not None
        thread = threading.Thread(target=parts.pop)  # in any thread
        thread.start()
        thread.join()
    gc.collect()
    assert alive() is None
