"""Fused jagged HSTU attention (examples/hstu_triton.py) against a kernel for sequences of one length, on one GPU.

    python benchmarks/hstu_attention.py [--quick] [--json FILE] [--sweep SECONDS] [--no-graphs]
    python benchmarks/hstu_attention.py --check

Eight heads of 64, bfloat16. The kernel that it is compared with (hstu_equal_length.py) has no list of tiles, no bias
and no gradient of one. Both are replayed from CUDA graphs, in turns, so that no launch is measured; medians.
TFLOP/s are those of the products that the definition needs, two forward and five backward, below the diagonal only,
counted exactly from the lengths. `of it`: TFLOP/s relative to the other kernel on sequences of 2048 or, where all have
one length, of that length. The list of tiles is made once per step, for all layers, and has a line of its own.

--sweep then tries other sizes of tiles for each kernel, as many as it can in that time, and says which are the fastest.
--no-graphs launches the kernels instead, while the GPU is kept waiting; so does what cannot be captured.
--check measures nothing: it waits for every kernel, without PyTorch's cache of memory, so that a wrong address is seen
and the kernel named which made it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]

import graph_timing  # noqa: E402
import hstu_attention_sweep as sweeping  # noqa: E402
from command_line import parser  # noqa: E402
from gpu_machine import machine, write  # noqa: E402
from hstu_attention_work import (  # noqa: E402
    DISTANCES,
    Checked,
    Inputs,
    equal_length_works,
    launched_by,
    lognormal,
    product_flops,
)
from separate_process import Failed, results  # noqa: E402


class Case(NamedTuple):
    name: str
    lengths: list[int]
    distances: int
    equal: tuple[int, int]  # batch and length of the other kernel
    turns: int
    graphs: bool


def cases(quick: bool, graphs: bool) -> list[Case]:
    mixed, turns = lognormal(32768), 6 if quick else 20
    found = [("8 of 2048", [2048] * 8, DISTANCES, (8, 2048)), ("4 of 8192", [8192] * 4, DISTANCES, (4, 8192))]
    found += [(f"{len(mixed)} lognormal", mixed, DISTANCES, (8, 2048))]
    if not quick:
        found += [("8 of 2048, 2048 distances", [2048] * 8, 2048, (8, 2048))]
        found += [("2000 of 20", [20] * 2000, DISTANCES, (8, 2048))]
    return [Case(*x, turns, graphs) for x in found]


def measure(case: Case) -> list[dict[str, Any]]:
    batch, length = case.equal
    works = {("fused", k): w for k, w in Inputs(case.lengths, case.distances).works().items()}
    works |= {("equal", k): w for k, w in equal_length_works(batch, length).items()}
    prepared = {name: graph_timing.prepare(work, graphs=case.graphs) for name, work in works.items()}
    ms = graph_timing.medians(prepared, case.turns)
    rows: list[dict[str, Any]] = []
    for part, products in (("forward", 2), ("backward", 5)):
        mine = products * product_flops(case.lengths) / ms["fused", part] / 1e9
        other = products * product_flops([length] * batch) / ms["equal", part] / 1e9
        row = {"lengths": case.name, "part": part, "ms": ms["fused", part], "tflop_per_s": mine}
        rows.append(row | {"equal_ms": ms["equal", part], "equal_tflop_per_s": other, "of_it": mine / other})
    rows.append({"lengths": case.name, "part": "tiles", "ms": ms["fused", "tiles"]})
    return rows


def compare(chosen: list[Case]) -> list[dict[str, Any]]:
    sweeping.compile_all([*sweeping.EQUAL_LENGTH, *sweeping.defaults().items()], 120)  # all at once
    print(f"\n{'lengths':28} {'part':10} {'ms':>8} {'TFLOP/s':>8}   {'equal ms':>8} {'TFLOP/s':>8} {'of it':>7}")
    rows = []
    for case, got in results(measure, chosen):
        if isinstance(got, Failed):
            print(f"{case.name:28} failed: {got.why} (--check says which kernel)", flush=True)
            got = [{"lengths": case.name, "failed": got.why}]
        else:
            for row in got:
                show(row)
        rows += got
    return rows


def show(r: dict[str, Any]) -> None:
    line = f"{r['lengths']:28} {r['part']:10} {r['ms']:>8.4f}"
    if "of_it" in r:
        line += f" {r['tflop_per_s']:>8.0f}   {r['equal_ms']:>8.4f} {r['equal_tflop_per_s']:>8.0f} {r['of_it']:>7.1%}"
    print(line, flush=True)


def check_one(case: Case) -> str:
    """Which kernels ran. Raises RuntimeError, which names the one that failed."""
    checked = Checked()
    with launched_by(checked):
        for work in (*Inputs(case.lengths, case.distances).works().values(), *equal_length_works(*case.equal).values()):
            work()
    return f"{len(checked.seen)} launches of {len(set(checked.seen))} kernels"


def check(chosen: list[Case]) -> bool:
    """Whether all is well."""
    well = True
    for case, got in results(check_one, chosen):
        print(f"{case.name:28} {f'failed: {got.why}' if isinstance(got, Failed) else f'ok: {got}'}", flush=True)
        well &= not isinstance(got, Failed)
    return well


def main() -> None:
    p = parser(__doc__, "fewer turns, and fewer lengths")
    p.add_argument("--sweep", type=float, metavar="SECONDS", help="then try other sizes of tiles, for so long")
    p.add_argument("--no-graphs", action="store_true", help="launch the kernels, do not replay them from CUDA graphs")
    p.add_argument("--check", action="store_true", help="measure nothing, wait for every kernel, say which one fails")
    args = p.parse_args()
    if not torch.cuda.is_available():
        p.error("this needs a GPU")
    chosen = cases(args.quick, not args.no_graphs)
    if args.check:
        os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # for the process that it runs in
        sys.exit(0 if check(chosen) else 1)
    rows = compare(chosen)
    result = {"machine": machine(), "rows": rows}
    if args.sweep:
        result["sweep"] = sweeping.sweep(args.sweep)
    write(args.json, result)
    sys.exit(any("failed" in row for row in rows))


if __name__ == "__main__":
    main()
