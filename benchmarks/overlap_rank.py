"""What one rank of benchmarks/overlap.py does: train every variant in turns, and say where the time went.

Started by overlap.py, once per rank; writes what it found as JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import collisions  # noqa: E402
import netlab  # noqa: E402
from freescale import driver  # noqa: E402
from freescale.kernels.transports import c10d, launch_record  # noqa: E402
from overlap_variants import TAIL, WARM_UP, Batches, Moment, Step, Trainee, Variant, variants  # noqa: E402

OWN = "own exchange/compute 2"


@dataclass
class Compiled:
    seconds: float  # first step less a later one
    pass_seconds: float


def get_ready(variant: Variant, args: argparse.Namespace, shape: collisions.Shape) -> tuple[Trainee, Compiled] | str:
    """The variant after its first steps, on every rank; or why it does not run."""
    batches = Batches(shape, 0.12, WARM_UP + TAIL + 1)
    passes_before, failure, trainee, seconds = driver.REPORT.seconds, "", None, [0.0]
    try:
        trainee = Trainee(variant, args, shape)
        moments = [time.perf_counter()]
        for _ in trainee.loop(batches.fresh()):
            moments.append(time.perf_counter())
        seconds = list(np.diff(moments))
    except Exception as error:  # noqa: BLE001  (only TorchRec's pipeline may fail; see below)
        if not variant.pipeline:
            raise
        failure = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    failures: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    if any(failures) or trainee is None:
        return next(f for f in failures if f)
    return trainee, Compiled(seconds[0] - min(seconds[1:]), driver.REPORT.seconds - passes_before)


def get_all_ready(
    names: list[str], args: argparse.Namespace, shape: collisions.Shape
) -> tuple[dict[str, Trainee], dict[str, Compiled], dict[str, str]]:
    ready, compiled, left_out = {}, {}, {}
    # The complete one is compiled first, with cold caches, so that its time of compilation is all its own.
    for variant in sorted((v for v in variants() if v.name in names), key=lambda v: v.passes != "all"):
        made = get_ready(variant, args, shape)
        if isinstance(made, str):
            left_out[variant.name] = made
            say(f"{variant.name} does not run here: {made}")
            continue
        ready[variant.name], took = made
        if variant.passes is not None:
            compiled[variant.name] = took
            say(f"{variant.name}: compiled in {took.seconds:.1f} s, of which passes {took.pass_seconds * 1e3:.0f} ms")
    return {name: ready[name] for name in names if name in ready}, compiled, left_out


def measure_blocks(
    trainees: dict[str, Trainee], of: dict[float, Batches], link: str, rounds: int
) -> list[dict[str, Any]]:
    """Every variant at every collision rate, in turns; a row for each, of the steps of all ranks and rounds."""
    steps: dict[tuple[str, float], list[Step]] = {(name, c): [] for name in trainees for c in of}
    for _ in range(rounds):
        for collision, batches in of.items():
            for name, trainee in trainees.items():
                steps[name, collision] += trainee.block(batches.fresh())
            say(
                f"{link}, collision {batches.measured.collision:.0%}: "
                + ", ".join(f"{n} {np.median([s.step_ms for s in steps[n, collision]]):.0f} ms" for n in trainees)
            )
    return [row(name, link, of[c], s) for (name, c), s in steps.items()]


def row(name: str, link: str, batches: Batches, steps: list[Step]) -> dict[str, Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, steps)
    everyone = [s for mine in gathered for s in mine]
    step, exposed = [s.step_ms for s in everyone], [s.exposed_ms for s in everyone]
    compute = [s.step_ms - s.exposed_ms for s in everyone]
    metered = [s.meter_ms for s in everyone if s.meter_ms is not None]
    # Of each step the least of the ranks: the others also waited for a slower rank's compute.
    least = [min(s.exposed_ms for s in ranks) for ranks in zip(*gathered, strict=True)]
    return {
        "variant": name,
        "collision": batches.measured.collision,
        "link": link,
        "step_ms": float(np.median(step)),
        "compute_ms": float(np.median(compute)),
        "exposed_ms": float(np.median(exposed)),
        "bytes": float(np.mean([s.sent for s in everyone])),
        "exposed_least_ms": float(np.median(least)),
        "step_ms_iqr": spread(step),
        "compute_ms_iqr": spread(compute),
        "exposed_ms_iqr": spread(exposed),
        "cpu_ms": float(np.median([s.cpu_ms for s in everyone])),
        "queued_ms": float(np.median([s.queued_ms for s in everyone])),  # other threads, or others on the machine
        "process_ms": float(np.median([s.process_ms for s in everyone])),
        "meter_ms": float(np.median(metered)) if metered else None,
        "waits_ms": {name: float(np.median([s.waits.get(name, 0.0) for s in everyone])) for name in everyone[0].waits},
        "steps": len(everyone),
    }


def spread(values: list[float]) -> float:
    """Between the quartiles."""
    return float(np.subtract(*np.percentile(values, [75, 25])))


def say(words: str) -> None:
    if dist.get_rank() == 0:
        print(f"  {words}", file=sys.stderr, flush=True)


def agreed(value: float) -> float:
    """Rank 0's."""
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def check_of_exposed(rate: float, size: int) -> dict[str, Any]:
    """What this file calls exposed, where it is known: `size` bytes go from each rank to the others together."""
    world = dist.get_world_size()
    x, group = torch.zeros(size // 4 // (world - 1) * world), dist.group.WORLD
    assert group is not None
    equal = [x.shape[0] // world] * world
    out, steps, resent = torch.empty_like(x), [], netlab.resent_segments()
    for _ in range(7):
        dist.barrier()
        before = Moment.now()
        c10d.start_all_to_all(out, x, equal, equal, group).wait()
        steps.append(Step.between(before, Moment.now()))
    each = [s.exposed_ms for s in steps]
    return {
        "bytes": size,
        "bytes_over_rate_ms": size * 8e3 / rate,
        "exposed_ms": float(np.median(each[2:])),
        "exposed_ms_each": each,
        "resent_segments": netlab.resent_segments() - resent,
    }


def meter_share(step: Step) -> float:
    """What the meter's records of a step cost, each measured on a transfer that is done, over the step's time."""

    class Done:
        def is_completed(self) -> bool:
            return True

        def wait(self) -> None:
            pass

    out, group, repeats = torch.empty(1), dist.group.WORLD, 2000
    assert group is not None
    began = time.perf_counter()
    for _ in range(repeats):
        launch_record.RecordedWork(Done(), "x", out, group).wait()
    each = (time.perf_counter() - began) / repeats
    launch_record.records.clear()
    return each * len(step.waits) * 1e3 / step.step_ms


def shape_link(link: str, rate: float | None, size: float) -> list[dict[str, Any]]:
    """Set the speed of this rank's link, and check it."""
    if rate is None:
        return []
    netlab.set_rate(rate)
    check = {"link": link, **check_of_exposed(rate, int(size / 2))}
    say(
        f"link {link}: {rate / 1e6:.1f} Mbit/s; an all-to-all of {check['bytes'] / 1e6:.2f} MB, which is "
        f"{check['bytes_over_rate_ms']:.1f} ms, blocked the training thread for {check['exposed_ms']:.1f} ms"
    )
    return [check]


def section_train(args: argparse.Namespace, shape: collisions.Shape) -> dict[str, Any]:
    """Variants are made and compiled anew on every link: freescale measures its speed and places launches by it."""
    plain, _, _ = get_all_ready(["eager"], args, shape)
    per_block = WARM_UP + args.steps + TAIL
    of = {c: Batches(shape, c, per_block) for c in args.collisions}
    middle = of[min(of, key=lambda c: abs(c - 0.12))]
    (free,) = measure_blocks(plain, {0.12: middle}, "unshaped", 1)
    row_bytes = args.dim * 4
    size = 2 * middle.measured.all_values * row_bytes  # rows and gradients
    compute = agreed(free["cpu_ms"])  # not disturbed by what else runs on the machine
    links: dict[str, float | None] = {"loopback": None}
    if netlab.in_lab():
        links = {f"exchange/compute {ratio:g}": size * 8e3 / (ratio * compute) for ratio in args.ratios}
    rows, checks, compiled, left_out, metered = [free], [], {}, {}, None
    for link, rate in links.items():
        checks += shape_link(link, rate, size)
        trainees, took, missing = get_all_ready(args.variants, args, shape)
        compiled, left_out = compiled or took, {**left_out, **missing}
        rows += measure_blocks(trainees, of, link, args.rounds)
        if "freescale" in trainees and link == next(iter(links)):
            metered = meter_share(trainees["freescale"].block(middle.fresh())[-1])
    if netlab.in_lab() and "freescale" in args.variants:
        # The links above are chosen by what eager TorchRec sends. One more, by what freescale itself sends.
        own = agreed(np.mean([r["bytes"] for r in rows if r["variant"] == "freescale"]))
        links[OWN] = own * 8e3 / (2 * compute)
        checks += shape_link(OWN, links[OWN], size)
        trainees, _, _ = get_all_ready(["freescale"], args, shape)
        rows += measure_blocks(trainees, {0.12: middle}, OWN, args.rounds)
    return {
        "rows": rows,
        "links_bits_per_second": links,
        "eager_exchange_bytes": size,
        "row_bytes": row_bytes,
        "compute_ms": compute,
        "collisions": [asdict(b.measured) for b in of.values()],
        "compiled": {name: asdict(c) for name, c in compiled.items()},
        "left_out": left_out,
        "meter_share_of_step": metered,
        "check_of_exposed": checks,
    }


def section_single(args: argparse.Namespace, shape: collisions.Shape) -> dict[str, Any]:
    """One rank: everything against plain Inductor, in turns."""
    trainees, compiled, _ = get_all_ready(["inductor", "freescale"], args, shape)
    batches = Batches(shape, 0.12, WARM_UP + args.steps + TAIL)
    seen: dict[str, list[Step]] = {name: [] for name in trainees}

    def ratio(what: str, last: int = 0) -> float:
        """Of medians, freescale over Inductor; of the last steps or all."""
        ours, plain = (np.median([getattr(s, what) for s in seen[n][-last:]]) for n in ("freescale", "inductor"))
        return float(ours / plain)

    ratios = []
    for n in range(args.rounds):
        for name in list(trainees) if n % 2 == 0 else list(reversed(trainees)):
            seen[name] += trainees[name].block(batches.fresh())
        ratios.append(ratio("step_ms", args.steps))
        say(f"one rank, round {n + 1}: step {ratios[-1]:.4f}, CPU {ratio('process_ms', args.steps):.4f} of Inductor's")
    return {
        "single_rank_ratio": ratio("step_ms"),
        "single_rank_cpu_ratio": ratio("process_ms"),
        "single_rank_ratios": ratios,
        "step_ms": {name: float(np.median([s.step_ms for s in steps])) for name, steps in seen.items()},
        "step_ms_iqr": {name: spread([s.step_ms for s in steps]) for name, steps in seen.items()},
        "compiled": {name: asdict(c) for name, c in compiled.items()},
    }


SECTIONS = {
    "train": section_train,
    "single": section_single,
}


def main() -> None:
    args = argparse.Namespace(**json.loads(sys.argv[1]))
    warnings.filterwarnings("ignore")
    for name in ("torchrec", "torch._dynamo", "torch.fx"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # the variants share their code
    dist.init_process_group("gloo")
    shape = collisions.Shape(args.samples, args.length, args.table_rows)
    found = SECTIONS[args.section](args, shape)
    if dist.get_rank() == 0:
        Path(args.out).write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # loaded libraries have threads that do not like the usual way out


if __name__ == "__main__":
    main()
