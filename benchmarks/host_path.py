"""What one launch and one wait of a copy transport cost the training thread, by the number of peers.

    python benchmarks/host_path.py [--quick] [--json FILE]

C and Python issue the same messages in turns, one piece to and from each peer. Timed are the ops
all_to_all_launch_staged and _c10d_functional.wait_tensor as a compiled graph calls them, the first as a function
(compat/direct_calls.py), with the meter's records; and C again behind a launch that goes through torch's dispatcher.

On a GPU the driver is the real one, and a rank stands for all its peers: what it sends to each comes back through the
same slots. Elsewhere C functions that do nothing stand for the driver's, so what is left is our own share.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from command_line import parser
from freescale.kernels import reference  # noqa: F401  (the ops)
from freescale.kernels.ops.schemas import direct_ops
from freescale.kernels.transports import cuda_driver, issue_native, launch_record, open_transports
from freescale.kernels.transports.base import CopyTransport
from freescale.kernels.transports.channel import Channel
from freescale.kernels.transports.cuda_driver import CudaDriver
from freescale.kernels.transports.issue_native import NativeIssuer
from freescale.kernels.transports.issue_python import PythonIssuer
from freescale.kernels.transports.slot_rings import PAGE_BYTES, PRIORITY_LEVELS, WORD_STRIDE, Lane

SLOTS, ROWS, WIDTH = 2, 1, 16  # rows to each peer
LANE_BYTES = SLOTS * (PAGE_BYTES + 2 * WORD_STRIDE)
IN_FLIGHT = 4  # launches before the first of them is waited for
NO_DRIVER = """
#include <stdint.h>
int nothing(void) { return 0; }
int current(void **context) { *context = (void *)1; return 0; }
/* events without timing (done) are never reached, those with timing are */
int create(uintptr_t *event, unsigned flags) { static uintptr_t n; *event = 4 * ++n + (flags != 0); return 0; }
int query(uintptr_t event) { return event & 1 ? 600 : 0; }
int elapsed(float *milliseconds) { *milliseconds = 1; return 0; }
"""


class NoDriver(CudaDriver):
    """Functions in C that do nothing."""

    def __init__(self) -> None:
        folder = Path(tempfile.mkdtemp())
        try:
            (folder / "no_driver.c").write_text(NO_DRIVER)
            compiler = shutil.which("cc") or shutil.which("gcc") or "clang"
            command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(folder / "no_driver.so")]
            subprocess.run([*command, str(folder / "no_driver.c")], check=True)
            library = ctypes.CDLL(str(folder / "no_driver.so"))
        finally:
            shutil.rmtree(folder)
        ours = {"cuEventCreate": "create", "cuEventQuery": "query", "cuEventElapsedTime": "elapsed"}
        ours["cuCtxGetCurrent"] = "current"
        calls = {}
        for name, arguments in cuda_driver.cuda_calls._SIGNATURES.items():
            calls[name] = library[ours.get(name, "nothing")]
            calls[name].argtypes, calls[name].restype = arguments, ctypes.c_int
        CudaDriver.calls = calls
        self._streams = iter(range(1, 1000))
        super().__init__(torch.device("cuda", 0))

    def _device_context(self) -> int:
        return 1

    def _is_current(self) -> bool:
        return True

    def current_stream(self) -> int:
        return 0

    def pin(self, address: int, nbytes: int) -> int:
        return address

    def new_stream(self, priority: int) -> int:
        return next(self._streams)


class ManyPeers(CopyTransport):
    """Lanes to and from each peer that share their slots: what is sent there comes back."""

    name = "staged"

    def __init__(self, group: dist.ProcessGroup, driver: CudaDriver, issuer: type) -> None:
        super().__init__(group, driver, timeout=60.0)
        self._memory = np.frombuffer(mmap.mmap(-1, PRIORITY_LEVELS * self.world * LANE_BYTES), np.uint8)
        self._mapped = self._resources.pin(self._memory)
        self.streams = self._resources.open_streams()
        levels = range(PRIORITY_LEVELS)
        lanes = [[[self._lane(p, level, sends) for p in range(self.world)] for sends in (1, 0)] for level in levels]
        channels = [Channel(0, *self.streams[level], *lanes[level], PAGE_BYTES) for level in levels]
        self._issuer = issuer(driver, channels)
        self.in_flight.are_done = self._issuer.are_done

    def _lane(self, peer: int, level: int, sends: int) -> Lane:
        begin = (level * self.world + peer) * LANE_BYTES
        words = begin + SLOTS * PAGE_BYTES
        full, free = words, words + SLOTS * WORD_STRIDE
        waits, signals = (free, full) if sends else (full, free)
        return Lane(
            peer=peer,
            sends=sends,
            slots=SLOTS,
            piece_bytes=PAGE_BYTES,
            data_address=self._memory.ctypes.data + begin,
            wait_address=self._mapped + waits,
            signal_address=self._mapped + signals,
            wait_words=self._memory[waits : waits + SLOTS * WORD_STRIDE].view(np.uint32)[:: WORD_STRIDE // 4],
        )

    def missing_peers(self) -> set[int]:
        return set()

    def release_waits(self) -> None:
        pass


@contextmanager
def world_of(peers: int) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=peers)
    assert dist.group.WORLD is not None
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


class Loop:
    """Steps of IN_FLIGHT launches, then a wait for each."""

    def __init__(self, group: dist.ProcessGroup, driver: CudaDriver, issuer: type, device: str, launch: Any) -> None:
        self.transport, self.group, self.device = ManyPeers(group, driver, issuer), group, device
        self.launch = launch
        self.counts = torch.full((group.size(),), ROWS)
        self.x = torch.randn(ROWS * group.size(), WIDTH, device=device)

    def step(self) -> tuple[float, float]:
        """Microseconds of a launch and of a wait."""
        open_transports._open["staged", self.group.group_name] = self.group, self.transport
        launch, wait = self.launch, torch.ops._c10d_functional.wait_tensor.default
        n, name = self.x.shape[0], self.group.group_name
        began = time.perf_counter()
        outs = [launch(self.x, self.counts, self.counts, n, i % 3, "table", name) for i in range(IN_FLIGHT)]
        launched = time.perf_counter()
        if self.device == "cpu":  # as if the rows were on a GPU
            for work in launch_record._not_waited_for.values():
                work.stream_waits = launch_record._stream_waits(torch.device("cuda", 0))
        before = time.perf_counter()
        for out in outs:
            wait(out)
        waited = time.perf_counter()
        if self.device == "cuda":
            torch.cuda.synchronize()
            assert all(torch.equal(out, self.x) for out in outs)
        for messages in self.transport.in_flight._by_level:  # without a driver, nobody would say that they are done
            messages.clear()
        launch_record.records.clear()
        return (launched - began) / IN_FLIGHT * 1e6, (waited - before) / IN_FLIGHT * 1e6


def measure(peers: int, driver: CudaDriver, device: str, steps: int) -> dict[str, Any]:
    op = torch.ops.freescale.all_to_all_launch_staged.default
    function = direct_ops.function_of("all_to_all_launch_staged")
    variants = {"C": (NativeIssuer, function), "Python": (PythonIssuer, function), "C, op": (NativeIssuer, op)}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    with world_of(peers) as group:
        loops = {name: Loop(group, driver, issuer, device, launch) for name, (issuer, launch) in variants.items()}
        for step in range(steps + 5):
            for name, loop in loops.items():
                times = loop.step()
                if step >= 5:
                    found[name].append(times)
        open_transports._open.clear()
        for loop in loops.values():
            loop.transport.close()
    medians = {name: np.median(times, 0) for name, times in found.items()}
    return {"peers": peers, **{name: {"launch_us": float(m[0]), "wait_us": float(m[1])} for name, m in medians.items()}}


def main() -> None:
    args = parser(__doc__, "50 steps instead of 500, three numbers of peers").parse_args()
    if issue_native._functions() is None:
        raise SystemExit("freescale: there is no C library to compare with")
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    driver = CudaDriver(torch.device("cuda", 0)) if on_gpu else NoDriver()
    if not on_gpu:
        cuda_driver.driver_of = lambda device: driver  # type: ignore[assignment]
    what = torch.cuda.get_device_name() if on_gpu else f"no driver, {platform.machine()}"
    print(f"{what}: microseconds of the host for one launch and one wait, medians")
    print(f"{'peers':>6}{'launch, C':>11}{'Python':>9}{'C, op':>9}{'wait, C':>10}{'Python':>9}")
    rows = []
    for peers in (1, 8, 64) if args.quick else (1, 2, 4, 8, 16, 32, 64):
        row = measure(peers, driver, device, 50 if args.quick else 500)
        rows.append(row)
        times = [row[name]["launch_us"] for name in ("C", "Python", "C, op")]
        times += [row[name]["wait_us"] for name in ("C", "Python")]
        print(f"{peers:>6}{times[0]:>11.1f}{times[1]:>9.1f}{times[2]:>9.1f}{times[3]:>10.1f}{times[4]:>9.1f}")
    if args.json:
        result = {"machine": what, "torch": torch.__version__, "rows": rows}
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
