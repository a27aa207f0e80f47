"""Dense gradients averaged by DistributedDataParallel or by the backward graph, on a link of chosen speed.

    sudo python benchmarks/dense_allreduce.py [--quick] [--json FILE]

Two ranks, one core each, in network namespaces behind shaped links (netlab.py: root and iproute2; without them ranks
use the loopback interface, and figures say nothing about a link). The model is a sharded table and a tower of linear
layers, trained with look-ahead. Two variants train on the same batches and take turns in the same processes:

    ddp        DistributedDataParallel around the compiled model: it averages when the backward graph has ended
    in graph   FREESCALE_DENSE=allreduce

Links are such that the dense gradients alone take about a share of the compute of a step, which is measured first
without a limit; the table has the share that it was. Compute is a step of `in graph` less what is exposed in it. `best`
is a bound that no order beats: the compute, or, where that is longer, what the link needs for all that a step sends.
Figures are medians over the steps of all ranks, with the distance between the quartiles; the meter's columns are of
`in graph`. Take them on a quiet machine with a core for each rank.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import netlab  # noqa: E402
from command_line import parser  # noqa: E402

VARIANTS = ("ddp", "in graph")
DENSE, URGENT = "dense gradients", "urgent"
Rows = list[dict[str, Any]]


# ---- one rank ----------------------------------------------------------------------------------------------------


class Trainee:
    """One variant: its model, compiled, and its optimizer."""

    def __init__(self, variant: str, settings: dict[str, Any], gbps: float) -> None:
        import torch

        from dense_tower import Tower, in_ddp

        torch.manual_seed(0)
        model = Tower(settings["rows"], settings["width"], settings["layers"])
        options = {"codegen": settings["codegen"], "bucket_mb": settings["bucket_mb"], "link_gbps": gbps}
        options["dense"] = "allreduce" if variant == "in graph" else "off"
        whole = model if variant == "in graph" else in_ddp(model)
        self.run = torch.compile(whole, backend="freescale", options=options)
        self.dense_bytes = sum(p.nbytes for p in model.parameters())
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def block(self, batches: list[Any]) -> list[dict[str, Any]]:
        """The meter's entries of all steps but the first and the last."""
        import freescale

        freescale.meter.clear()
        for batch in freescale.LookaheadLoader(batches, self.run):
            self.optimizer.zero_grad()
            self.run(batch).backward()
            self.optimizer.step()
        return freescale.meter.steps()[1:-1]


def batches_of(settings: dict[str, Any], rank: int) -> list[Any]:
    import torch

    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, settings["rows"], (settings["steps"] + 2, settings["samples"]), generator=generator)
    return [{"item": row} for row in ids]


def figures(steps: list[dict[str, Any]]) -> list[list[float]]:
    """Per step in ms: all of it, exposed for dense and for urgent transfers, dense bytes, all bytes."""
    found = []
    for s in steps:
        urgent = sum(v for k, v in s["waits"].items() if k.startswith(URGENT))
        size, dense = sum(s["bytes"].values()), s["bytes"].get(DENSE, 0)
        found.append([s["seconds"] * 1e3, s["waits"].get(DENSE, 0.0) * 1e3, urgent * 1e3, dense, size])
    return found


def measure(trainees: dict[str, Trainee], settings: dict[str, Any], rounds: int) -> dict[str, Any]:
    """{variant: columns of `figures`, of all ranks}; the variants take turns."""
    import torch.distributed as dist

    mine: dict[str, list[list[float]]] = {name: [] for name in trainees}
    batches = batches_of(settings, dist.get_rank())
    for _ in range(rounds):
        for name, trainee in trainees.items():
            dist.barrier()
            mine[name] += figures(trainee.block(batches))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return {name: [row for rank in gathered for row in rank[name]] for name in trainees}


def get_ready(settings: dict[str, Any], gbps: float) -> dict[str, Trainee]:
    """Both variants, compiled for a link of this speed."""
    import torch
    import torch.distributed as dist

    torch._dynamo.reset()
    trainees = {}
    for name in VARIANTS:
        trainees[name] = Trainee(name, settings, gbps)
        trainees[name].block(batches_of(settings, dist.get_rank())[:3])
    return trainees


def rank_main(settings: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trainees = get_ready(settings, 0.0)
    free = measure(trainees, settings, 2)
    compute_ms = min(row[0] - row[1] - row[2] for row in free["in graph"])  # the others were disturbed
    size, links = trainees["in graph"].dense_bytes, []
    for ratio in settings["ratios"]:
        rate = size * 8e3 / (ratio * compute_ms)
        if netlab.in_lab():
            netlab.set_rate(rate)
        found = measure(get_ready(settings, rate / 1e9), settings, settings["rounds"])
        links.append({"ratio": ratio, "bits_per_second": rate, "found": found})
    if dist.get_rank() == 0:
        found = {"compute_ms": compute_ms, "dense_bytes": size, "links": links, "shaped": netlab.in_lab()}
        Path(settings["out"]).write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


# ---- pure functions of what the ranks found ------------------------------------------------------------------------


def median(values: Any) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def spread(values: list[float]) -> float:
    """Between the quartiles."""
    ordered = sorted(values)
    return ordered[(3 * len(ordered)) // 4] - ordered[len(ordered) // 4]


def rows_of(found: dict[str, Any]) -> Rows:
    """One per link."""
    rows = []
    for link in found["links"]:
        ddp, ours = (link["found"][name] for name in VARIANTS)
        wire = found["dense_bytes"] * 8e3 / link["bits_per_second"]
        all_wire = median(r[4] for r in ours) * 8e3 / link["bits_per_second"]
        exposed, compute = median(r[1] for r in ours), median(r[0] - r[1] - r[2] for r in ours)
        rows.append({
            "ratio": wire / compute, "mbit": link["bits_per_second"] / 1e6, "wire_ms": wire, "compute_ms": compute,
            "ddp_ms": median(r[0] for r in ddp), "ddp_iqr": spread([r[0] for r in ddp]),
            "graph_ms": median(r[0] for r in ours), "graph_iqr": spread([r[0] for r in ours]),
            "best_ms": max(compute, all_wire),
            "dense_exposed_ms": exposed, "urgent_exposed_ms": median(r[2] for r in ours),
            "ddp_urgent_exposed_ms": median(r[2] for r in ddp), "hidden": 1 - exposed / wire,
        })  # fmt: skip
    return rows


def table(rows: Rows) -> str:
    lines = [
        f"{'wire/compute':>12}{'Mbit/s':>9}{'dense wire':>12}{'compute':>9}{'ddp ms':>16}{'in graph ms':>16}"
        f"{'best ms':>9}{'dense exposed':>15}{'hidden':>8}{'urgent exposed':>16}{'(ddp)':>8}"
    ]
    for r in rows:
        lines.append(
            f"{r['ratio']:>12.2f}{r['mbit']:>9.0f}{r['wire_ms']:>12.1f}{r['compute_ms']:>9.1f}"
            f"{r['ddp_ms']:>9.1f} ±{r['ddp_iqr']:<5.1f}"
            f"{r['graph_ms']:>9.1f} ±{r['graph_iqr']:<5.1f}{r['best_ms']:>9.1f}{r['dense_exposed_ms']:>15.1f}"
            f"{r['hidden']:>8.0%}{r['urgent_exposed_ms']:>16.1f}{r['ddp_urgent_exposed_ms']:>8.1f}"
        )
    return "\n".join(lines)


# ---- the run -----------------------------------------------------------------------------------------------------


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    p = parser(__doc__, "small model, no code generation, few steps: does it run?")
    p.add_argument("--ratios", metavar="R,S", help="dense wire time over compute on each link (default: 0.25,0.5,1,2)")
    p.add_argument("--rounds", type=int, help="blocks of every variant on each link")
    p.add_argument("--bucket-mb", type=float, default=25.0, help="of the in-graph variant")
    p.add_argument("--rank", help=argparse.SUPPRESS)  # settings of one rank
    return p.parse_args(words)


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    chosen: dict[str, Any] = {
        "rows": 50_000, "width": 768, "layers": 8, "samples": 256, "steps": 5, "rounds": 3,
        "ratios": [0.25, 0.5, 1.0, 2.0], "codegen": "inductor", "bucket_mb": args.bucket_mb,
    }  # fmt: skip
    if args.quick:
        chosen |= {"width": 256, "steps": 3, "rounds": 1, "ratios": [0.5, 2.0], "codegen": "eager"}
    if args.ratios:
        chosen["ratios"] = [float(r) for r in args.ratios.split(",")]
    return chosen | ({"rounds": args.rounds} if args.rounds else {})


def main() -> None:
    args, began, load = arguments(), time.perf_counter(), os.getloadavg()[0]
    if args.rank:
        rank_main(json.loads(args.rank))
        return
    if load > 0.5:
        print(f"the machine is not quiet (load {load:.1f}): figures will be disturbed", file=sys.stderr)
    settings = settings_of(args)
    with tempfile.TemporaryDirectory(prefix="freescale-dense-") as folder:
        out = Path(folder) / "found.json"
        with netlab.Lab(2) as lab:
            command = [sys.executable, __file__, "--rank", json.dumps({**settings, "out": str(out)})]
            code = lab.run(command, {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache"})
        if code:
            sys.exit(f"freescale: a rank ended with exit code {code}")
        found = json.loads(out.read_text())
    rows = rows_of(found)
    print(f"dense gradients: {found['dense_bytes'] / 1e6:.1f} MB")
    print(table(rows))
    if not found["shaped"]:
        print("the link was not shaped: these figures say nothing about one")
    if args.json:
        result = {
            "rows": rows, "settings": settings, "dense_bytes": found["dense_bytes"],
            "shaped": found["shaped"], "load_at_start": load, "seconds": time.perf_counter() - began,
        }  # fmt: skip
        Path(args.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
