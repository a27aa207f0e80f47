"""Does the meter say what the profiler says, on a GPU?

    python benchmarks/meter_gpu.py [--quick] [--json FILE] [--ranks 2]

Ranks share one GPU (under MPS where it is there) and train a native table and some linear layers over a
LookaheadLoader, in four settings: much compute; little compute, so that the host is what a step waits for; a loader
that sleeps 50 ms before each batch; little compute and many rows, so that transfers are exposed. Each setting is
profiled on rank 0 with the meter on. Beside the meter's five parts stand the time between the same two moments by the
profiler (kernels on the compute stream mark where each step begins) and how long that stream was busy.

meter_step_error_percent     the sum of the meter's parts against the profiler's step, the worst setting. Bar: 5
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gpu_machine
from command_line import parser

MARKER = "erfinv"  # a kernel that no model has, launched on the compute stream where a step begins
WARM_UP = 6
SLEEP = 0.05
ROWS = 400_000
PARTS = ("compute", "exposed", "loader", "straggler", "host_bound")


class Setting(NamedTuple):
    layers: int
    width: int
    ids: int
    sleep: float = 0.0


SETTINGS = {
    "compute": Setting(layers=24, width=2048, ids=16_000),
    "host": Setting(layers=60, width=64, ids=500),
    "loader": Setting(layers=4, width=512, ids=16_000, sleep=SLEEP),
    "exposed": Setting(layers=2, width=256, ids=200_000),
}


# ---- a rank ----------------------------------------------------------------------------------------------------------


def rank_main(rank: int, world: int, folder: str, steps: int, pipe: Any) -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(100 // world)
    try:
        import torch
        import torch.distributed as dist

        torch.cuda.set_device(0)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        for name, setting in SETTINGS.items():
            found = measure(setting, rank, steps, Path(folder, f"{name}.json"))
            if rank == 0:
                pipe.send((name, found))
        dist.barrier()
        pipe.send(("done", None))
    except BaseException:  # noqa: BLE001
        pipe.send(("failed", f"rank {rank}\n{traceback.format_exc()}"))
    finally:
        pipe.close()
        os._exit(0)


def model_of(setting: Setting) -> Any:
    import torch

    import freescale

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.item = freescale.ShardedEmbedding(ROWS, 256, name="item", optimizer="rowwise_adagrad", device="cuda")
            sizes = [256] + [setting.width] * setting.layers
            pairs = zip(sizes[:-1], sizes[1:], strict=True)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(a, b, device="cuda") for a, b in pairs)

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            x = self.item(batch["item"])
            for layer in self.layers:
                x = layer(x).relu()
            return x.square().mean()

    return Model()


def batches(setting: Setting, rank: int, number: int) -> Iterator[dict[str, Any]]:
    import torch

    generator = torch.Generator().manual_seed(rank)
    ready = [{"item": torch.randint(0, ROWS, (setting.ids,), generator=generator)} for _ in range(number)]
    for batch in ready:
        time.sleep(setting.sleep)
        yield batch


def measure(setting: Setting, rank: int, steps: int, trace: Path) -> dict[str, Any] | None:
    import torch

    import freescale

    model = model_of(setting)
    model.compile(backend="freescale")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    marker = torch.zeros(1, device="cuda")
    activities = [torch.profiler.ProfilerActivity.CUDA]
    profiler = torch.profiler.profile(activities=activities) if rank == 0 else None
    freescale.meter.clear()
    loop = iter(freescale.LookaheadLoader(batches(setting, rank, WARM_UP + steps + 2), model, overlap=True))
    for number in range(WARM_UP + steps + 1):
        if number == WARM_UP and profiler is not None:
            torch.cuda.synchronize()
            profiler.start()
        if number >= WARM_UP:
            torch.erfinv(marker)  # right before the meter's step begins
        batch = next(loop)
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
    torch.cuda.synchronize()
    if profiler is None:
        return None
    profiler.stop()
    profiler.export_chrome_trace(str(trace))
    wanted = range(WARM_UP, WARM_UP + steps)
    metered = [s for s in freescale.meter.steps() if s["step"] in wanted]
    return compare(metered, json.loads(trace.read_text())["traceEvents"])


def compare(metered: list[dict[str, Any]], events: list[dict[str, Any]]) -> dict[str, Any]:
    """Milliseconds per step, by the meter and by the profiler, of the same steps."""
    kernels = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"])
    marks = [e for e in kernels if MARKER in e["name"]]
    steps = len(marks) - 1
    if len(metered) != steps:
        raise RuntimeError(f"the meter has {len(metered)} steps, the profiler {steps}")
    begin, end = marks[0]["ts"], marks[-1]["ts"]
    busy = busy_microseconds(kernels, marks[0]["args"]["stream"], begin, end)
    parts = {p: sum(s[p] for s in metered) / steps * 1e3 for p in PARTS}
    step = (end - begin) / steps / 1e3
    found = {"meter_ms": parts, "step_ms": step, "busy_ms": busy / steps / 1e3, "steps": steps}
    found["step_error_percent"] = abs(sum(parts.values()) - step) / step * 100
    return found


def busy_microseconds(kernels: list[dict[str, Any]], stream: int, begin: float, end: float) -> float:
    """Microseconds from `begin` to `end` in which a kernel ran on the stream."""
    busy, until = 0.0, begin
    for kernel in sorted((k for k in kernels if k["args"]["stream"] == stream), key=lambda e: e["ts"]):
        first, last = max(kernel["ts"], until), min(kernel["ts"] + kernel["dur"], end)
        busy += max(last - first, 0.0)
        until = max(until, last)
    return busy


# ---- the program -----------------------------------------------------------------------------------------------------


def run(world: int, steps: int) -> dict[str, Any]:
    context, found = mp.get_context("spawn"), {}
    with tempfile.TemporaryDirectory() as folder, gpu_machine.mps():
        pipe, theirs = context.Pipe(duplex=False)
        ranks = [context.Process(target=rank_main, args=(r, world, folder, steps, theirs)) for r in range(world)]
        for process in ranks:
            process.start()
        done = 0
        while done < world:
            if not pipe.poll(240):
                sys.exit("no rank has said anything for 240 s")
            name, result = pipe.recv()
            if name == "failed":
                for process in ranks:
                    process.kill()
                sys.exit(result)
            if name == "done":
                done += 1
            else:
                print(line(name, result), flush=True)
                found[name] = result
        for process in ranks:
            process.join(20)
    return found


def line(name: str, r: dict[str, Any]) -> str:
    parts = "".join(f"{r['meter_ms'][p]:>12.2f}" for p in PARTS)
    total = sum(r["meter_ms"].values())
    return f"{name:<10}{parts}{total:>10.2f}{r['step_ms']:>12.2f}{r['busy_ms']:>10.2f}{r['step_error_percent']:>10.2f}"


def main() -> None:
    p = parser(__doc__, "8 steps of each setting instead of 30")
    p.add_argument("--ranks", type=int, default=2)
    args = p.parse_args()
    import torch

    if not torch.cuda.is_available():
        sys.exit("this needs a GPU")
    print(f"{args.ranks} ranks on one GPU, rank 0, ms per step\n")
    print(f"{'':<10}" + "".join(f"{p:>12}" for p in PARTS) + f"{'sum':>10}{'profiler':>12}{'busy':>10}{'error, %':>10}")
    found = run(args.ranks, 8 if args.quick else 30)
    worst = max(r["step_error_percent"] for r in found.values())
    print(f"\nmeter_step_error_percent: {worst:.2f}")
    result = {"meter_step_error_percent": worst, "settings": found}
    gpu_machine.write(args.json, {**result, "machine": gpu_machine.machine()})


if __name__ == "__main__":
    main()
