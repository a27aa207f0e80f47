"""What one rank of benchmarks/fidelity.py does: train three variants on links of several speeds, and time the steps.

Started by fidelity.py, once per rank; rank 0 writes what all found as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import collisions  # noqa: E402
import fidelity_asleep as asleep  # noqa: E402
import netlab  # noqa: E402
from freescale.simulate import calibrate  # noqa: E402
from overlap_rank import agreed, say  # noqa: E402
from overlap_variants import TAIL, WARM_UP, Batches, Step, Trainee, Variant  # noqa: E402

VARIANTS = (
    Variant("eager TorchRec"),
    Variant("freescale, no look-ahead", "all"),
    Variant("freescale", "all", look_ahead=True),
)
UNSHAPED = 10e9  # bits per second: faster than the machine
PROBE_SECONDS = 0.2


def gather(steps: list[Step]) -> dict[str, Any]:
    """Of all ranks and steps: milliseconds without the time in which the thread waited for its core."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [(s.step_ms - s.queued_ms, s.cpu_ms, s.exposed_ms) for s in steps])
    step, cpu, exposed = np.array([s for mine in everyone for s in mine]).T
    low, middle, high = np.percentile(step, [25, 50, 75])
    return {
        "step_ms": float(middle), "quartiles": [float(low), float(high)], "cpu_ms": float(np.median(cpu)),
        "exposed_ms": float(np.median(exposed)),
    }  # fmt: skip


def measure(trainees: dict[str, Trainee], batches: Batches, rounds: int) -> dict[str, dict[str, Any]]:
    """Every variant in turns."""
    steps: dict[str, list[Step]] = {name: [] for name in trainees}
    asleep.slept, trained = 0.0, 0
    for _ in range(rounds):
        for name, trainee in trainees.items():
            data = batches.fresh()
            steps[name] += trainee.block(data)
            trained += len(data)
    found = {name: gather(s) for name, s in steps.items()}
    for f in found.values():
        f["compute_ms"] = f["cpu_ms"] + 1e3 * asleep.slept / trained
    say(", ".join(f"{name} {f['step_ms']:.0f} ms" for name, f in found.items()))
    return found


def main() -> None:
    args = argparse.Namespace(**json.loads(sys.argv[1]))
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64
    dist.init_process_group("gloo")
    shape = collisions.Shape(args.samples, args.length, args.table_rows)
    batches = Batches(shape, args.collision, WARM_UP + args.steps + TAIL)
    trainees = {v.name: Trainee(v, args, shape) for v in VARIANTS}
    shaped = netlab.in_lab()
    if shaped:
        netlab.set_rate(UNSHAPED)
    for name, trainee in trainees.items():
        trainee.block(batches.fresh())
        say(f"{name} is ready")
    free = measure(trainees, batches, args.rounds)
    size = 2 * batches.measured.all_values * args.dim * 4  # rows and gradients
    compute = agreed(free[VARIANTS[0].name]["compute_ms"])
    settings = []
    for ratio in args.ratios if shaped else ():
        rate = size * 8e3 / (ratio * compute)
        netlab.set_rate(rate)
        ours, theirs, latency = calibrate.probe_link(torch.device("cpu"), max(int(rate / 8 * PROBE_SECONDS), 4096))
        say(f"exchange/compute {ratio:g}: {rate / 1e6:.1f} Mbit/s, probed {ours * 8e-6:.1f} and {theirs * 8e-6:.1f}")
        probe = {"bytes_per_second": ours, "torchrec_share": min(theirs / ours, 1.0), "latency": latency}
        settings.append({"ratio": ratio, "probe": probe, "measured": measure(trainees, batches, args.rounds)})
    if dist.get_rank() == 0:
        found = {"unshaped": free, "settings": settings, "collision": batches.measured.collision}
        Path(args.out).write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # loaded libraries have threads that do not like the usual way out


if __name__ == "__main__":
    main()
