"""What a transfer costs the computation beside it: copy engines (`staged`) against a kernel that copies.

    python benchmarks/contention.py [--quick] [--json FILE]

One process, several streams. First the proof: every SM is taken by a spinning kernel, threads and shared memory both
full, and each operation is tried. Then HSTU attention (fused, hstu_equal_length.py), softmax attention, a matrix
product and a memory-bound kernel: alone, beside an emulation of a kernel-based collective (a kernel on a few blocks
that copies device memory at the bytes per second of `staged`; it is no collective and has no network), beside plain
copies of the same bytes (what no transport can go below), and beside `staged` at full rate, which here sends to itself:
the same copies and signals over the same link, in both directions. Attention is replayed from CUDA graphs, so that no
launch is measured. Medians of interleaved runs. Needs CuPy for two kernels.

TFLOP/s are those of the products that the definition needs, two forward and five backward, below the diagonal only.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from command_line import parser
from freescale.kernels.transports import staged
from gpu_machine import machine, quartiles, write
from hstu_equal_length import hstu_attention

try:
    import cupy
except ImportError:  # said in main
    cupy = None

BLOCKS = (4, 8, 16, 32)
SHARED = 113 * 1024  # two such blocks of 1024 threads fill an SM
COPY_THREADS, COPY_SHARED, CHUNK = 512, 80 * 1024, 128 * 1024  # about what a block of a kernel-based collective holds
KERNELS = r"""
extern "C" __global__ void spin(volatile int* stop, long long most) {
    extern __shared__ char s[]; s[threadIdx.x] = 1;
    long long t = clock64();
    if (threadIdx.x == 0) while (!*stop && clock64() - t < most) __nanosleep(1000);
    __syncthreads();  // the other threads stay, and take their place
}
extern "C" __global__ void paced_copy(const uint4* from, uint4* to, long long chunks, int vectors, long long pause) {
    extern __shared__ char s[]; s[threadIdx.x] = 1;
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    long long turn = 0;
    for (long long c = blockIdx.x; c < chunks; c += gridDim.x, ++turn) {
        const uint4* f = from + c * vectors; uint4* t = to + c * vectors;
        for (int i = threadIdx.x; i < vectors; i += blockDim.x * 4) {
            uint4 v[4];
            #pragma unroll
            for (int k = 0; k < 4; ++k) if (i + k * blockDim.x < vectors) v[k] = f[i + k * blockDim.x];
            #pragma unroll
            for (int k = 0; k < 4; ++k) if (i + k * blockDim.x < vectors) t[i + k * blockDim.x] = v[k];
        }
        do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now < start + (turn + 1) * pause);
    }
}
"""
wait = torch.ops._c10d_functional.wait_tensor.default


def kernel(name: str, shared: int) -> Any:
    found = cupy.RawModule(code=KERNELS).get_function(name)
    found.max_dynamic_shared_size_bytes = shared
    return found


def array(t: torch.Tensor) -> Any:
    memory = cupy.cuda.UnownedMemory(t.data_ptr(), t.numel() * t.element_size(), t)
    return cupy.ndarray((t.numel(),), cupy.int32, cupy.cuda.MemoryPointer(memory, 0))


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
        lane = transport._lanes_out[0][0]
        self.slot, self.piece = lane.data_address, lane.piece_bytes
        self.host_word = torch.zeros(64, dtype=torch.int32, pin_memory=True)

    def exchange(self) -> None:
        rows = torch.tensor([self.data.shape[0]])
        self.arrived = wait(self.transport.launch(self.data, rows, rows, int(rows), 0))

    def operations(self) -> dict[str, Callable[[], Any]]:
        d, s, of_transport = self.driver, self.stream.cuda_stream, self.transport.streams[0][0][0]
        a, b, word = self.data.data_ptr(), self.other.data_ptr(), self.words.data_ptr()
        return {
            "staged: copy out, device to slot": lambda: d.copy_to_host(self.slot, a, self.piece, s),
            "staged: copy in, slot to device": lambda: d.copy_to_device(b, self.slot, self.piece, s),
            "staged: signal, word of host memory": lambda: d.write_word(self.host_word.data_ptr(), 7, s),
            "staged: stream wait, word of host memory": lambda: d.wait_for_word(self.host_word.data_ptr(), 7, s),
            "staged: event between two streams": lambda: d.wait_for_event(s, d.record_event(of_transport)),
            "staged: a whole all-to-all of 64 MiB": self.exchange,
            "peer: signal, word of device memory": lambda: d.write_word(word, 7, s),
            "peer: stream wait, word of device memory": lambda: d.wait_for_word(word, 7, s),
            "peer: copy on one and the same device": lambda: d.copy_device_to_device(b, a, 1 << 20, s),
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
            self.driver.write_word(self.stop.data_ptr(), 1, self.stopping)
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


def discard(_: Any) -> None:
    pass


class Work(NamedTuple):
    run: Callable[[], None]
    flops: float | None = None  # of attention


def attention(batch: int, length: int, function: Callable[..., torch.Tensor]) -> Work:
    """Forward and backward of 8 heads of 64."""
    *qkv, grad = (torch.randn(batch, 8, length, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    for t in qkv:
        t.requires_grad_()
    product = 2 * batch * 8 * length**2 / 2 * 64
    run = lambda: torch.autograd.grad(function(*qkv), qkv, grad)  # noqa: E731
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()  # or the shorter ones wait for Python, which a transfer keeps busy too
    with torch.cuda.graph(graph, stream=aside):
        run()
    return Work(graph.replay, 7 * product)


def softmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def unfused_hstu(length: int) -> Callable[..., torch.Tensor]:
    """The example's formula, compiled: the matrix of scores goes through device memory."""
    mask = torch.ones(length, length, device="cuda", dtype=torch.bool).tril()

    @torch.compile(dynamic=False)
    def hstu(q, k, v):
        return (F.silu(q @ k.transpose(-1, -2) / 8) * mask / length) @ v

    return hstu


def workloads() -> dict[str, Work]:
    a, b, c = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    x = torch.randn(256 << 20, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    return {
        "attention, HSTU fused, length 2048, fwd + bwd": attention(8, 2048, hstu_attention),
        "attention, HSTU fused, length 8192, fwd + bwd": attention(4, 8192, hstu_attention),
        "softmax attention (SDPA), length 2048, fwd + bwd": attention(8, 2048, softmax),
        "softmax attention (SDPA), length 8192, fwd + bwd": attention(4, 8192, softmax),
        "HSTU formula, not fused, 2048, fwd + bwd": attention(8, 2048, unfused_hstu(2048)),
        "matrix product 8192^3": Work(lambda: discard(torch.mm(a, b, out=c))),
        "memory-bound (scale 512 MiB)": Work(lambda: discard(torch.mul(x, 1.5, out=y))),
    }


class Beside:
    """What runs beside the computation. Starts a transfer and says how fast it was."""

    def __init__(self, transport: Any, nbytes: int) -> None:
        self.transport, self.nbytes = transport, nbytes
        self.data = torch.randint(0, 255, (nbytes // 4096, 4096), dtype=torch.uint8, device="cuda")
        self.to = torch.empty_like(self.data)
        self.host = torch.empty(2 * nbytes, dtype=torch.uint8, pin_memory=True)
        self.rows = torch.tensor([self.data.shape[0]])
        self.stream = torch.cuda.Stream()
        self.copy = kernel("paced_copy", COPY_SHARED)
        self.rate = 0.0  # bytes per second of staged alone, which the copy kernel is held to

    def staged(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        outwards = torch.cuda.ExternalStream(self.transport.streams[1][0][0])
        start.record(outwards)
        with torch.cuda.stream(self.stream):
            wait(self.transport.launch(self.data, self.rows, self.rows, int(self.rows), 1))
            end.record()
        return start, end

    def copy_kernel(self, blocks: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pause = int(CHUNK * blocks / self.rate * 1e9)
        with torch.cuda.stream(self.stream), cupy.cuda.ExternalStream(self.stream.cuda_stream):
            start.record()
            arguments = (array(self.data.view(torch.int32)), array(self.to.view(torch.int32)))
            numbers = (cupy.int64(self.nbytes // CHUNK), cupy.int32(CHUNK // 16), cupy.int64(pause))
            self.copy((blocks,), (COPY_THREADS,), (*arguments, *numbers), shared_mem=COPY_SHARED)
            end.record()
        return start, end

    def plain(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """The same bytes by one copy in each direction, without pieces or signals: what no transport can go below."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        driver, ((outwards, _), (inwards, _)) = self.transport.driver, self.transport.streams[2]
        start.record(torch.cuda.ExternalStream(outwards))
        driver.copy_to_host(self.host.data_ptr(), self.data.data_ptr(), self.nbytes, outwards)
        driver.copy_to_device(self.to.data_ptr(), self.host.data_ptr() + self.nbytes, self.nbytes, inwards)
        driver.wait_for_event(outwards, driver.record_event(inwards))
        end.record(torch.cuda.ExternalStream(outwards))
        return start, end

    def go(self, what: str) -> tuple[torch.cuda.Event, torch.cuda.Event] | None:
        if what == "alone":
            return None
        if what == "plain copies":
            return self.plain()
        if what == "staged":
            return self.staged()
        return self.copy_kernel(int(what.split()[-1]))


def sample(work: Callable[[], None], times: int, beside: Beside, what: str) -> tuple[float, float, bool]:
    """Seconds of one run of the work; GB/s of the transfer; whether the transfer lasted longer than the work."""
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    transfer = beside.go(what)
    time.sleep(0.0005)  # the transfer is under way
    start.record()
    for _ in range(times):
        work()
    end.record()
    torch.cuda.synchronize()
    seconds = start.elapsed_time(end) / 1e3 / times
    if transfer is None:
        return seconds, 0.0, True
    rate = beside.nbytes / (transfer[0].elapsed_time(transfer[1]) / 1e3) / 1e9
    return seconds, rate, end.elapsed_time(transfer[1]) >= 0


def transfer_alone(beside: Beside, what: str, times: int = 5) -> float:
    """GB/s with nothing beside it."""
    rates = []
    for _ in range(times):
        torch.cuda.synchronize()
        pair = beside.go(what)
        assert pair is not None
        torch.cuda.synchronize()
        rates.append(beside.nbytes / pair[0].elapsed_time(pair[1]) / 1e6)
    return quartiles(rates)[0]


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


def compare(beside: Beside, turns: int, kinds: list[str], alone_rates: dict[str, float]) -> list[dict[str, Any]]:
    rows = []
    seconds_of_transfer = beside.nbytes / beside.rate
    for name, (work, flops) in workloads().items():
        for _ in range(3):
            work()
        once = sorted(sample(work, 5, beside, "alone")[0] for _ in range(3))[1]
        times = max(1, int(0.6 * seconds_of_transfer / once))
        found: dict[str, list[tuple[float, float, bool]]] = {kind: [] for kind in kinds}
        for _ in range(turns):
            for kind in random.sample(kinds, len(kinds)):
                found[kind].append(sample(work, times, beside, kind))
        alone = quartiles([s for s, _, _ in found["alone"]])
        for kind in kinds:
            middle, low, high = quartiles([s for s, _, _ in found[kind]])
            rate = quartiles([r for _, r, _ in found[kind]])[0]
            row = {"work": name, "beside": kind, "ms": middle * 1e3, "ms_quartiles": [low * 1e3, high * 1e3]}
            row |= {"kept": alone[0] / middle, "runs_per_sample": times, "samples": turns}
            row |= {"transfer_gb_per_s": rate, "transfer_kept": rate / alone_rates[kind] if rate else None}
            row["covered"] = sum(c for _, _, c in found[kind]) / turns
            row["tflop_per_s"] = flops / middle / 1e12 if flops and kind == "alone" else None
            rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    last = f"{'kept':>6} {'covered':>7} {'TFLOP/s':>7}"
    print(f"\n{'work':48} {'beside':22} {'ms':>8} {'kept':>7} {'transfer GB/s':>13} {last}")
    for r in rows:
        kept = f"{r['transfer_kept']:.1%}" if r["transfer_kept"] else "-"
        speed = f"{r['tflop_per_s']:.0f}" if r["tflop_per_s"] else ""
        print(
            f"{r['work']:48} {r['beside']:22} {r['ms']:>8.3f} {r['kept']:>7.1%} {r['transfer_gb_per_s']:>13.1f} "
            f"{kept:>6} {r['covered']:>7.0%} {speed:>7}".rstrip()
        )


def worst_kept(rows: list[dict[str, Any]], work: str, beside: str) -> float:
    return min(r["kept"] for r in rows if r["work"].startswith(work) and r["beside"] == beside)


def main() -> None:
    p = parser(__doc__, "fewer turns, 8 and 32 blocks only")
    args = p.parse_args()
    if cupy is None or not torch.cuda.is_available():
        p.error("this needs a GPU" if cupy is not None else "this needs CuPy (pip install cupy-cuda13x) and a GPU")
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    transport = staged.open_transport(dist.group.WORLD, network="memory")
    proof = ZeroSm(transport).prove()
    beside = Beside(transport, 1 << 30)
    beside.staged()
    link, alone_rates = pcie_both_ways(), {"staged": transfer_alone(beside, "staged")}
    beside.rate = alone_rates["staged"] * 1e9
    blocks = BLOCKS if not args.quick else (8, 32)
    kernels = [f"copy kernel, blocks: {n}" for n in blocks]
    for name in (*kernels, "plain copies"):
        alone_rates[name] = transfer_alone(beside, name)
    print(f"\nPCIe, both ways at once: {link:.1f} GB/s in each; staged alone: {alone_rates['staged']:.1f}")
    rows = compare(beside, 5 if args.quick else 21, ["alone", *kernels, "plain copies", "staged"], alone_rates)
    show(rows)
    headlines = {
        "attention_kept_beside_staged": worst_kept(rows, "attention, HSTU fused", "staged"),
        "attention_kept_beside_plain_copies": worst_kept(rows, "attention, HSTU fused", "plain copies"),
        "sdpa_kept_beside_staged": worst_kept(rows, "softmax attention", "staged"),
        "staged_alone_share_of_pcie": alone_rates["staged"] / link,
    }
    print("\n" + "\n".join(f"{name}: {value:.4f}" for name, value in headlines.items()))
    result = {"machine": machine(), **headlines, "pcie_both_ways_gb_per_s": link, "alone_gb_per_s": alone_rates}
    write(args.json, {**result, "every_sm_taken_ms": proof, "rows": rows})
    transport.close()


if __name__ == "__main__":
    main()
