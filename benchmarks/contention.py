"""What a transfer costs the computation beside it: copy engines (`staged`) against kernels that copy.

    python benchmarks/contention.py [--quick] [--json FILE]

One process, several streams. First the proof: every SM is taken by a spinning kernel, threads and shared memory both
full, and each operation is tried. Then HSTU attention (fused, hstu_equal_length.py), softmax attention, a matrix
product and a memory-bound kernel: alone, beside an emulation of a kernel-based collective (a kernel on a few blocks
that copies device memory at the bytes per second of `staged`; it is no collective and has no network), beside plain
copies of the same bytes (what no transport can go below), and beside `staged` at full rate, which here sends to
itself: the same copies and signals over the same link, in both directions. Attention is replayed from CUDA graphs, so
that no launch is measured. Medians of interleaved runs. Needs CuPy for two kernels.

Then a second table, of processes of their own under MPS, where a second rank takes part in NCCL's real all-to-all
(contention_nccl.py says what that is and what it is not): the same work alone, beside NCCL's own kernels, beside the
emulation with as many blocks, and beside `staged`.

TFLOP/s are those of the products that the definition needs, two forward and five backward, below the diagonal only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import contention_nccl
from command_line import parser
from contention_beside import (
    SHARED,
    Beside,
    array,
    compare,
    cupy,
    kernel,
    show,
    transfer_alone,
    wait,
    workloads,
    worst_kept,
)
from freescale.kernels.transports import staged
from gpu_machine import machine, write

BLOCKS = (4, 8, 16, 32)


class ZeroSm:
    """Tries operations while no SM is free."""

    def __init__(self, transport: Any) -> None:
        self.transport, self.driver = transport, transport.driver
        self.spin = kernel("spin", SHARED)
        self.stop = torch.zeros(1, dtype=torch.int32, device="cuda")  # polled where it does not load the PCIe link
        self.stopping = self.driver.new_stream(0)
        self.spinning, self.stream = torch.cuda.Stream(), torch.cuda.Stream()
        self.sms = torch.cuda.get_device_properties(0).multi_processor_count
        self.data = torch.randint(0, 255, (64 << 20,), dtype=torch.uint8, device="cuda").view(-1, 256)
        self.other, self.words = torch.empty_like(self.data), torch.zeros(64, dtype=torch.int32, device="cuda")
        lane = transport.lanes[0]
        self.slot, self.piece = lane.data_address, lane.piece_bytes
        self.host_word = torch.zeros(64, dtype=torch.int32, pin_memory=True)

    def exchange(self) -> None:
        rows = torch.tensor([self.data.shape[0]])
        self.arrived = wait(self.transport.launch(self.data, rows, rows, int(rows), 0))

    def operations(self) -> dict[str, Callable[[], Any]]:
        d, s, of_transport = self.driver, self.stream.cuda_stream, self.transport.streams[0][0][0]
        a, b, word = self.data.data_ptr(), self.other.data_ptr(), self.words.data_ptr()
        host_word, write, wait_for = self.host_word.data_ptr(), "cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"
        return {
            "staged: copy out, device to slot": lambda: d.call("cuMemcpyDtoHAsync_v2", self.slot, a, self.piece, s),
            "staged: copy in, slot to device": lambda: d.call("cuMemcpyHtoDAsync_v2", b, self.slot, self.piece, s),
            "staged: signal, word of host memory": lambda: d.call(write, s, host_word, 7, 0),
            "staged: stream wait, word of host memory": lambda: d.call(wait_for, s, host_word, 7, 0),
            "staged: event between two streams": lambda: d.wait_for_event(self.stream, d.record_event(of_transport)),
            "staged: a whole all-to-all of 64 MiB": self.exchange,
            "signal, word of device memory": lambda: d.call(write, s, word, 7, 0),
            "stream wait, word of device memory": lambda: d.call(wait_for, s, word, 7, 0),
            "any kernel (an addition)": lambda: torch.add(self.words, 1, out=self.words),
        }

    def try_one(self, operation: Callable[[], Any]) -> float | None:
        """Milliseconds until it was done, or None if it was not while the SMs were taken."""
        self.stop.zero_()
        torch.cuda.synchronize()
        most = cupy.int64(4_000_000_000)  # cycles: two seconds, then it ends by itself
        with cupy.cuda.ExternalStream(self.spinning.cuda_stream):
            self.spin((2 * self.sms,), (1024,), (array(self.stop), most), shared_mem=SHARED)
        time.sleep(0.02)
        done = torch.cuda.Event()
        start = time.perf_counter()
        try:
            with torch.cuda.stream(self.stream):
                operation()
                done.record()
            while time.perf_counter() - start < 0.3:
                if done.query():
                    return (time.perf_counter() - start) * 1e3
            return None
        finally:
            self.driver.call("cuStreamWriteValue32_v2", self.stopping, self.stop.data_ptr(), 1, 0)
            torch.cuda.synchronize()

    def prove(self) -> dict[str, float | None]:
        for operation in 2 * tuple(self.operations().values()):  # loads and allocates what first uses need
            with torch.cuda.stream(self.stream):
                operation()
            torch.cuda.synchronize()
        found = {}
        for name, operation in self.operations().items():
            found[name] = self.try_one(operation)
            ms = found[name]
            print(f"{name:44} {f'done with every SM taken, {ms:.2f} ms' if ms is not None else 'NEEDS AN SM'}")
        if found["staged: a whole all-to-all of 64 MiB"] is not None:
            assert torch.equal(self.arrived, self.data)
        return found


def pcie_both_ways(nbytes: int = 256 << 20) -> float:
    """GB/s of one direction by plain copies of pinned memory while the other direction is as busy."""
    device, host = torch.empty(2, nbytes, dtype=torch.uint8, device="cuda"), torch.empty(2, nbytes, dtype=torch.uint8)
    host = host.pin_memory()
    streams, seconds = (torch.cuda.Stream(), torch.cuda.Stream()), []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(4):
            with torch.cuda.stream(streams[0]):
                host[0].copy_(device[0], non_blocking=True)
            with torch.cuda.stream(streams[1]):
                device[1].copy_(host[1], non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 4 * nbytes / min(seconds) / 1e9


def copies(quick: bool) -> tuple[dict[str, float], dict[str, Any]]:
    """Headlines and everything else, of this process alone: all but NCCL."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    transport = staged.open_transport(dist.group.WORLD)
    proof = ZeroSm(transport).prove()
    beside = Beside(transport, 1 << 30)
    beside.staged()
    link, alone_rates = pcie_both_ways(), {"staged": transfer_alone(beside, "staged")}
    beside.rate = alone_rates["staged"] * 1e9
    kernels = [f"copy kernel, blocks: {n}" for n in (BLOCKS if not quick else (8, 32))]
    for name in (*kernels, "plain copies"):
        alone_rates[name] = transfer_alone(beside, name)
    print(f"\nPCIe, both ways at once: {link:.1f} GB/s in each; staged alone: {alone_rates['staged']:.1f}")
    kinds = ["alone", *kernels, "plain copies", "staged"]
    rows = compare(workloads(), beside, 5 if quick else 21, kinds, alone_rates)
    show(rows)
    headlines = {
        "attention_kept_beside_staged": worst_kept(rows, "attention, HSTU fused", "staged"),
        "attention_kept_beside_plain_copies": worst_kept(rows, "attention, HSTU fused", "plain copies"),
        "sdpa_kept_beside_staged": worst_kept(rows, "softmax attention", "staged"),
        "staged_alone_share_of_pcie": alone_rates["staged"] / link,
    }
    transport.close()
    rates = {"pcie_both_ways_gb_per_s": link, "alone_gb_per_s": alone_rates}
    return headlines, {**rates, "every_sm_taken_ms": proof, "rows": rows}


def main() -> None:
    p = parser(__doc__, "fewer turns, 8 and 32 blocks only")
    args = p.parse_args()
    if cupy is None or not torch.cuda.is_available():
        p.error("this needs a GPU" if cupy is not None else "this needs CuPy (pip install cupy-cuda13x) and a GPU")
    torch.cuda.set_device(0)
    headlines, found = copies(args.quick)
    nccl = contention_nccl.measure(args.quick)
    headlines |= nccl.pop("headlines", {})
    print("\n" + "\n".join(f"{name}: {value:.4f}" for name, value in headlines.items()))
    write(args.json, {"machine": machine(), **headlines, **found, "nccl": nccl})
    if "failed" in nccl:
        raise SystemExit(f"NCCL: {nccl['failed']}")


if __name__ == "__main__":
    main()
