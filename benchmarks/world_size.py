"""Compile time, graph size and guards against the number of ranks, in fake worlds (nothing travels).

    python benchmarks/world_size.py [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from command_line import parser

TESTS = Path(__file__).resolve().parent.parent / "tests"


def measure(world: int) -> dict[str, float]:
    """One cold compilation of forward and backward in this process."""
    sys.path.insert(0, str(TESTS / "support"))
    import torch

    from fake_world import fake_world, graphs_of
    from one_table import Model

    torch.compile(torch.nn.Linear(2, 2), backend="freescale")(torch.ones(1, 2))  # imports and warm-up
    with fake_world(1, world):
        model = torch.compile(Model(), backend="freescale", fullgraph=True, options={"codegen": "eager"})
        start = time.perf_counter()
        texts = graphs_of(lambda: model(torch.arange(5) % 3).backward())
        seconds = time.perf_counter() - start
        entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(Model.forward.__code__)
        guards = sum(len(str(e.guard_manager).splitlines()) for e in entries)
    nodes = sum(len(text.splitlines()) for (_, name), text in texts.items() if name != "before")
    return {"world": world, "seconds": seconds, "nodes": nodes, "guards": guards}


def main() -> None:
    p = parser(__doc__, "one repetition instead of five")
    p.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.one:
        print(json.dumps(measure(args.one)))
        return
    worlds, rows = (8, 64, 256, 1024), []
    for repetition in range(1 if args.quick else 5):  # interleaved, each in a fresh process
        for world in worlds:
            done = subprocess.run([sys.executable, __file__, "--one", str(world)], capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr)
            rows.append({"repetition": repetition, **json.loads(done.stdout.splitlines()[-1])})
    print(f"{'ranks':>6} {'compile s (median)':>20} {'min':>6} {'max':>6} {'nodes':>6} {'guards':>7}")
    medians = {}
    for world in worlds:
        mine = [r for r in rows if r["world"] == world]
        times = sorted(r["seconds"] for r in mine)
        medians[world] = times[len(times) // 2]
        print(
            f"{world:>6} {medians[world]:>20.2f} {times[0]:>6.2f} {times[-1]:>6.2f} "
            f"{mine[0]['nodes']:>6} {mine[0]['guards']:>7}"
        )
    growth = medians[1024] / medians[8]
    print(f"compile time at 1024 ranks over 8 ranks: {growth:.2f}")
    if args.json:
        Path(args.json).write_text(json.dumps({"rows": rows, "compile_time_1024_over_8": growth}, indent=1))


if __name__ == "__main__":
    main()
