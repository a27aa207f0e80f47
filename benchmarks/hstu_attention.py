"""Fused jagged HSTU attention (examples/hstu_triton.py) against a kernel for sequences of one length, on one GPU.

    python benchmarks/hstu_attention.py [--quick] [--json FILE] [--sweep]

Eight heads of 64, bfloat16. The kernel that it is compared with (hstu_equal_length.py) has no list of tiles, no bias
and no gradient of one. Both are replayed from CUDA graphs, in turns, so that no launch is measured; medians.
TFLOP/s are those of the products that the definition needs, two forward and five backward, below the diagonal only,
counted exactly from the lengths. `of it`: TFLOP/s relative to the other kernel on sequences of 2048 or, where all have
one length, of that length. The list of tiles is made once per step, for all layers, and has a line of its own.

--sweep first tries other sizes of tiles for each kernel, and says which were the fastest.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]

from command_line import parser  # noqa: E402
from gpu_machine import machine, quartiles, write  # noqa: E402

HEADS, DIM, DISTANCES = 8, 64, 128


def lognormal(rows: int) -> list[int]:
    """Lengths of median 1000 and sigma 1 up to 8192, about so many rows."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < rows:
        lengths.append(min(int((torch.randn((), generator=generator)).exp() * 1000), 8192))
    return lengths


def product_flops(lengths: list[int]) -> int:
    return sum(n * (n + 1) // 2 for n in lengths) * HEADS * DIM * 2


class Inputs:
    """q, k, v and the gradient as the model makes them: parts of the rows of one tensor."""

    def __init__(self, lengths: list[int], distances: int = DISTANCES) -> None:
        import hstu_triton

        rows = sum(lengths)
        together = torch.randn(rows, 4 * HEADS * DIM, device="cuda", dtype=torch.bfloat16)
        _, v, q, k = (x.unflatten(1, (HEADS, DIM)) for x in together.split(HEADS * DIM, 1))
        self.qkv, self.grad = (q, k, v), torch.randn(rows, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        self.bias = torch.randn(HEADS, distances, device="cuda", dtype=torch.bfloat16)
        self.offsets = torch.tensor([0, *lengths]).cumsum(0).cuda()
        self.rows, self.tiles = rows, hstu_triton.list_tiles(self.offsets, rows)

    def works(self) -> dict[str, Callable[[], Any]]:
        import hstu_triton as fused

        rest = (self.tiles, self.bias, DIM**-0.5)
        return {
            "forward": lambda: fused.attention(*self.qkv, *rest),
            "backward": lambda: fused.attention_backward(self.grad, *self.qkv, *rest),
            "tiles": lambda: fused.list_tiles(self.offsets, self.rows),
        }


def equal_length_works(batch: int, length: int) -> dict[str, Callable[[], Any]]:
    import hstu_equal_length as e

    q, k, v, grad = (torch.randn(batch, HEADS, length, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(4))

    def forward() -> None:
        e.launch(e._forward, e.FORWARD, "QUERIES", q, k, v, torch.empty_like(q))

    def backward() -> None:
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        e.launch(e._backward_keys, e.BACKWARD_KEYS, "KEYS", q, k, v, grad, dk, dv)
        e.launch(e._backward_queries, e.BACKWARD_QUERIES, "QUERIES", q, k, v, grad, dq)

    return {"forward": forward, "backward": backward}


def graph_of(work: Callable[[], Any], times: int = 10) -> Callable[[], None]:
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=aside):
        for _ in range(times):
            work()
    return graph.replay


def milliseconds(replay: Callable[[], None]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def medians(graphs: dict[Any, Callable[[], None]], turns: int, times: int = 10) -> dict[Any, float]:
    """Milliseconds of each, all measured in turns."""
    found: dict[Any, list[float]] = {name: [] for name in graphs}
    for _ in range(turns):
        for name, replay in graphs.items():
            found[name].append(milliseconds(replay) / times)
    return {name: quartiles(values[1:])[0] for name, values in found.items()}


def compare(turns: int, quick: bool) -> list[dict[str, Any]]:
    mixed = lognormal(32768)
    cases = [("8 of 2048", [2048] * 8, DISTANCES, (8, 2048)), ("4 of 8192", [8192] * 4, DISTANCES, (4, 8192))]
    cases += [(f"{len(mixed)} lognormal", mixed, DISTANCES, (8, 2048))]
    if not quick:
        cases += [("8 of 2048, 2048 distances", [2048] * 8, 2048, (8, 2048))]
        cases += [("2000 of 20", [20] * 2000, DISTANCES, (8, 2048))]
    rows = []
    for name, lengths, distances, (batch, length) in cases:
        graphs = {("fused", k): graph_of(w) for k, w in Inputs(lengths, distances).works().items()}
        graphs |= {("equal", k): graph_of(w) for k, w in equal_length_works(batch, length).items()}
        ms = medians(graphs, turns)
        for part, products in (("forward", 2), ("backward", 5)):
            mine = products * product_flops(lengths) / ms["fused", part] / 1e9
            other = products * product_flops([length] * batch) / ms["equal", part] / 1e9
            row = {"lengths": name, "part": part, "ms": ms["fused", part], "tflop_per_s": mine}
            rows.append(row | {"equal_ms": ms["equal", part], "equal_tflop_per_s": other, "of_it": mine / other})
        rows.append({"lengths": name, "part": "tiles", "ms": ms["fused", "tiles"]})
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print(f"\n{'lengths':28} {'part':10} {'ms':>8} {'TFLOP/s':>8}   {'equal ms':>8} {'TFLOP/s':>8} {'of it':>7}")
    for r in rows:
        line = f"{r['lengths']:28} {r['part']:10} {r['ms']:>8.4f}"
        if "of_it" in r:
            line += f" {r['tflop_per_s']:>8.0f}   {r['equal_ms']:>8.4f} {r['equal_tflop_per_s']:>8.0f}"
            line += f" {r['of_it']:>7.1%}"
        print(line)


# ---- other sizes of tiles ------------------------------------------------------------------------------------------


def variants() -> Iterator[tuple[str, dict[str, int]]]:
    """Kernel and tile."""

    def tile(queries: int, keys: int, warps: int, stages: int, near: int, registers: int = 0) -> dict[str, int]:
        sides = {"QUERIES": queries, "KEYS": keys, "NEAR_STAGES": near, "num_warps": warps, "num_stages": stages}
        return sides | ({"maxnreg": registers} if registers else {})

    for queries, keys, warps in ((128, 64, 4), (128, 64, 8), (128, 128, 8), (64, 64, 4), (128, 32, 4)):
        for stages, near in ((2, 2), (3, 2), (3, 1), (4, 3)):
            yield "forward", tile(queries, keys, warps, stages, near)
    for registers in (0, 128, 168):
        for queries, keys, warps in ((32, 64, 4), (64, 64, 4), (32, 128, 8), (64, 128, 8)):
            for stages, near in ((2, 2), (3, 2), (3, 3)):
                yield "backward_keys", tile(queries, keys, warps, stages, near, registers)
        for queries, keys, warps in ((64, 64, 4), (64, 32, 4), (128, 64, 8), (128, 32, 8)):
            for stages, near in ((2, 2), (3, 2), (3, 3)):
                yield "backward_queries", tile(queries, keys, warps, stages, near, registers)
    for grain, warps in ((64, 4), (64, 8), (128, 8)):
        for stages in (1, 2, 3):
            for registers in (0, 168, 128):
                block = {"GRAIN": grain, "num_warps": warps, "num_stages": stages}
                yield "bias", block | ({"maxnreg": registers} if registers else {})


def variant(inputs: Inputs, kernel: str, block: dict[str, int]) -> Callable[[], list[torch.Tensor]]:
    """Runs one kernel alone and returns what it made."""
    import hstu_triton

    rows = inputs.qkv if kernel == "forward" else (*inputs.qkv, inputs.grad)
    call = hstu_triton._Call(rows, inputs.tiles, inputs.bias, DIM**-0.5)
    outs = [torch.empty(inputs.rows, HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2)]

    def run() -> list[torch.Tensor]:
        if kernel == "forward":
            call.forward(outs[0], block)
            return outs[:1]
        if kernel == "backward_keys":
            call.backward_keys(outs[0], outs[1], block)
            return outs
        if kernel == "backward_queries":
            sums = call.backward_queries(outs[0], block, 64)
            return [outs[0], sums.view(-1, HEADS).sum(0)]
        out, none = torch.empty_like(inputs.bias), torch.zeros(HEADS, device="cuda")
        call.backward_bias(none, out, block)
        return [out[:, :-1]]  # the last one has no far ones here

    return run


def compile_variant(job: tuple[str, dict[str, int]]) -> None:
    try:
        variant(Inputs([200]), *job)()
        torch.cuda.synchronize()
    except Exception as e:  # said again where it is measured
        print(f"{job}: {type(e).__name__}", file=sys.stderr)


def sweep() -> dict[str, list[dict[str, Any]]]:
    import hstu_triton

    jobs = list(variants())
    defaults = dict(zip(("forward", "backward_keys", "backward_queries", "bias"), hstu_triton.HALF, strict=True))
    with multiprocessing.get_context("spawn").Pool(12) as pool:
        pool.map(compile_variant, jobs, chunksize=1)
    shapes = {"2048": Inputs([2048] * 8), "8192": Inputs([8192] * 4)}
    found: dict[str, list[dict[str, Any]]] = {}
    for kernel, default in defaults.items():
        right = [x.clone() for x in variant(shapes["2048"], kernel, default)()]
        rows = []
        for block in [default, *(b for k, b in jobs if k == kernel and b != default)]:
            try:
                got = variant(shapes["2048"], kernel, block)()
                pairs = [(a.float(), b.float()) for a, b in zip(got, right, strict=True)]
                off = max(float((a - b).norm() / b.norm()) for a, b in pairs)
                graphs = {name: graph_of(variant(x, kernel, block), 4) for name, x in shapes.items()}
                ms = medians(graphs, 5, 4)
            except Exception as e:
                print(f"{kernel} {block}: {type(e).__name__}")
                continue
            rows.append({**ms, "off": off, "default": block == default, "block": block})
        found[kernel] = sorted(rows, key=lambda r: r["2048"] / rows[0]["2048"] + r["8192"] / rows[0]["8192"])
        print(f"\n{kernel:18} {'2048':>8} {'8192':>8} {'off':>8}")
        for r in [*found[kernel][:8], *(r for r in found[kernel][8:] if r["default"])]:
            words = " ".join(f"{k}={v}" for k, v in r["block"].items()) + (" (default)" if r["default"] else "")
            print(f"{'':18} {r['2048']:>8.4f} {r['8192']:>8.4f} {r['off']:>8.1e} {words}")
    return found


def main() -> None:
    p = parser(__doc__, "fewer turns, and fewer lengths")
    p.add_argument("--sweep", action="store_true", help="try other sizes of tiles too")
    args = p.parse_args()
    if not torch.cuda.is_available():
        p.error("this needs a GPU")
    torch.cuda.set_device(0)
    rows = compare(7 if args.quick else 21, args.quick)
    show(rows)
    result = {"machine": machine(), "rows": rows}
    if args.sweep:
        result["sweep"] = sweep()
    write(args.json, result)


if __name__ == "__main__":
    main()
