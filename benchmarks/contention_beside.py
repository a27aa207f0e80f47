"""Work, transfers beside it, and how benchmarks/contention.py measures both in turns."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from gpu_machine import quartiles
from hstu_equal_length import hstu_attention

try:
    import cupy
except ImportError:  # said in contention.py's main
    cupy = None

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
    # A graph does not keep its inputs, and capturing the next one gives freed memory back to the device.
    return Work(partial(_replay, graph, (*qkv, grad)), 7 * product)


def _replay(graph: torch.cuda.CUDAGraph, inputs: tuple[torch.Tensor, ...]) -> None:
    graph.replay()


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


class Transfer(NamedTuple):
    start: torch.cuda.Event
    end: torch.cuda.Event
    nbytes: int

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / self.start.elapsed_time(self.end) / 1e6


def pair_of_events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


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

    def staged(self) -> Transfer:
        start, end = pair_of_events()
        outwards = torch.cuda.ExternalStream(self.transport.streams[1][0][0])
        start.record(outwards)
        with torch.cuda.stream(self.stream):
            wait(self.transport.launch(self.data, self.rows, self.rows, int(self.rows), 1))
            end.record()
        return Transfer(start, end, self.nbytes)

    def copy_kernel(self, blocks: int, nbytes: int, rate: float) -> Transfer:
        start, end = pair_of_events()
        pause = int(CHUNK * blocks / rate * 1e9)
        with torch.cuda.stream(self.stream), cupy.cuda.ExternalStream(self.stream.cuda_stream):
            start.record()
            arguments = (array(self.data.view(torch.int32)), array(self.to.view(torch.int32)))
            numbers = (cupy.int64(nbytes // CHUNK), cupy.int32(CHUNK // 16), cupy.int64(pause))
            self.copy((blocks,), (COPY_THREADS,), (*arguments, *numbers), shared_mem=COPY_SHARED)
            end.record()
        return Transfer(start, end, nbytes)

    def plain(self) -> Transfer:
        """The same bytes by one copy in each direction, without pieces or signals: what no transport can go below."""
        start, end = pair_of_events()
        driver, ((outwards, _), (inwards, _)) = self.transport.driver, self.transport.streams[2]
        start.record(torch.cuda.ExternalStream(outwards))
        data, to, host = self.data.data_ptr(), self.to.data_ptr(), self.host.data_ptr()
        driver.call("cuMemcpyDtoHAsync_v2", host, data, self.nbytes, outwards)
        driver.call("cuMemcpyHtoDAsync_v2", to, host + self.nbytes, self.nbytes, inwards)
        driver.wait_for_event(outwards, driver.record_event(inwards))
        end.record(torch.cuda.ExternalStream(outwards))
        return Transfer(start, end, self.nbytes)

    def go(self, what: str) -> Transfer | None:
        if what == "alone":
            return None
        if what == "plain copies":
            return self.plain()
        if what == "staged":
            return self.staged()
        return self.copy_kernel(int(what.split()[-1]), self.nbytes, self.rate)


def sample(work: Callable[[], None], times: int, beside: Beside, what: str) -> tuple[float, float, bool]:
    """Seconds of one run of the work; GB/s of the transfer; whether the transfer lasted longer than the work."""
    torch.cuda.synchronize()
    start, end = pair_of_events()
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
    return seconds, transfer.gb_per_s, end.elapsed_time(transfer.end) >= 0


def transfer_alone(beside: Beside, what: str, times: int = 5) -> float:
    """GB/s with nothing beside it."""
    rates = []
    for _ in range(times):
        torch.cuda.synchronize()
        transfer = beside.go(what)
        assert transfer is not None
        torch.cuda.synchronize()
        rates.append(transfer.gb_per_s)
    return quartiles(rates)[0]


def compare(
    works: dict[str, Work], beside: Beside, turns: int, kinds: list[str], alone_rates: dict[str, float]
) -> list[dict[str, Any]]:
    rows = []
    seconds_of_transfer = beside.nbytes / beside.rate
    for name, (work, flops) in works.items():
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
    print(f"\n{'work':48} {'beside':24} {'ms':>8} {'kept':>7} {'transfer GB/s':>13} {last}")
    for r in rows:
        kept = f"{r['transfer_kept']:.1%}" if r["transfer_kept"] else "-"
        speed = f"{r['tflop_per_s']:.0f}" if r["tflop_per_s"] else ""
        print(
            f"{r['work']:48} {r['beside']:24} {r['ms']:>8.3f} {r['kept']:>7.1%} {r['transfer_gb_per_s']:>13.1f} "
            f"{kept:>6} {r['covered']:>7.0%} {speed:>7}".rstrip()
        )


def worst_kept(rows: list[dict[str, Any]], work: str, beside: str) -> float:
    return min(r["kept"] for r in rows if r["work"].startswith(work) and r["beside"] == beside)
