"""The Triton kernels for rows on a GPU, in GB/s, beside a device copy of the same run and the obvious PyTorch.

    python benchmarks/kernels_gpu.py [--quick] [--json FILE]

Bytes are counted once for every input and once for every output, however often the hardware moves them; a copy is its
bytes read and its bytes written. Times are the device's, between two events, with the launches queued ahead behind a
sleeping kernel; medians of interleaved runs. Inputs:

    pack      rows of a table of 20 million, for 8 peers, each peer's distinct and ascending, as plans have them
    sum       gradients of Zipf 1.05 ids over 50 million, in random order; the most popular row has some 3% of them
    update    gradients from 8 requesters, each with the distinct rows of its Zipf 1.05 ids over 20 million rows
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import freescale.kernels  # noqa: F401
from command_line import parser
from freescale.kernels import reference, row_kernels
from gpu_machine import machine, quartiles, write

TABLE, IDS, STRIDE = 20_000_000, 50_000_000, 39_916_801  # a prime: popular rows lie all over the table
SHAPES = ((32, torch.float32), (64, torch.float32), (128, torch.float32), (256, torch.float32), (64, torch.bfloat16))
Run = Callable[[], Any]


def zipf(n: int, table: int) -> torch.Tensor:
    u = torch.rand(n, device="cuda", dtype=torch.float64)
    popularity = (1 + u * ((table + 1) ** -0.05 - 1)) ** -20 - 1  # the inverse of the distribution, exponent 1.05
    return popularity.long().clamp(max=table - 1) * STRIDE % table


def milliseconds(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    torch.cuda.synchronize()
    for _ in range(rounds):
        for name, run in runs.items():
            torch.cuda._sleep(4_000_000)  # the events and launches below are queued while it lasts
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end))
    return times


def grouped(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Distinct values, and the positions of each one after another: a plan's `rows`, `order` and `ends`."""
    ordered, order = torch.sort(values, stable=True)
    distinct, counts = torch.unique_consecutive(ordered, return_counts=True)
    return distinct, order, counts.cumsum(0)


def pack(weight: torch.Tensor, n: int) -> tuple[str, int, Run, Run]:
    at = torch.cat([torch.randint(0, TABLE, (n // 8,), device="cuda").unique() for _ in range(8)])
    moved = 2 * at.numel() * weight[0].nbytes + at.nbytes
    return f"{at.numel()} rows", moved, lambda: row_kernels.pack_rows(weight, at), lambda: weight.index_select(0, at)


def summed(weight: torch.Tensor, n: int) -> tuple[str, int, Run, Run]:
    _, order, ends = grouped(zipf(n, IDS))
    grad = torch.randn(n, weight.shape[1], device="cuda").to(weight.dtype)
    moved = grad.nbytes + ends.numel() * weight[0].nbytes + order.nbytes + ends.nbytes
    longest = int(ends.diff().max())
    plain = lambda: reference.sum_rows(grad, order, ends)  # noqa: E731
    return f"{n} to {ends.numel()}, longest {longest}", moved, lambda: row_kernels.sum_rows(grad, order, ends), plain


def update(weight: torch.Tensor, n: int, momentum: torch.Tensor | None) -> tuple[str, int, Run, Run]:
    at, order, ends = grouped(torch.cat([zipf(n // 2, TABLE).unique() for _ in range(8)]))
    grad = torch.randn(order.numel(), weight.shape[1], device="cuda").to(weight.dtype)
    index_bytes = at.nbytes + order.nbytes + ends.nbytes
    state = 0 if momentum is None else 2 * at.numel() * momentum.element_size()
    moved = grad.nbytes + 2 * at.numel() * weight[0].nbytes + state + index_bytes
    name = "sgd" if momentum is None else "rowwise_adagrad"
    args = (weight, momentum, grad, at, order, ends, 1e-3, 1e-8)
    return (
        f"{order.numel()} to {at.numel()}", moved,
        lambda: row_kernels.update_rows(*args, name, longest=8), lambda: row_kernels.update_rows_reference(*args),
    )  # fmt: skip


def measure(dim: int, dtype: torch.dtype, n: int, rounds: int) -> list[dict[str, Any]]:
    weight = torch.empty(TABLE, dim, device="cuda", dtype=dtype).uniform_(-1, 1)
    momentum = torch.rand(TABLE, device="cuda")
    copied = torch.empty(1 << 30, device="cuda", dtype=torch.int8).random_()
    room, found = torch.empty_like(copied), []
    for name, make in (
        ("pack", lambda: pack(weight, n)),
        ("sum", lambda: summed(weight, n)),
        ("update, sgd", lambda: update(weight, n, None)),
        ("update, adagrad", lambda: update(weight, n, momentum)),
    ):
        what, moved, ours, plain = make()
        times = milliseconds({"kernel": ours, "torch": plain, "copy": lambda: room.copy_(copied)}, rounds)
        ms, low, high = quartiles(times["kernel"])
        copy = 2 * copied.nbytes / quartiles(times["copy"])[0] / 1e6
        row = {"kernel": name, "dim": dim, "dtype": str(dtype).removeprefix("torch."), "row_bytes": weight[0].nbytes}
        row |= {"input": what, "ms": ms, "ms_quartiles": [low, high], "gb_per_s": moved / ms / 1e6}
        row |= {"copy_gb_per_s": copy, "share_of_copy": moved / ms / 1e6 / copy}
        row |= {"over_torch": quartiles(times["torch"])[0] / ms}
        found.append(row)
        print(
            f"{name:>16} {dim:>4} {row['dtype']:>9} {ms:>8.3f} {row['gb_per_s']:>7.0f} {row['share_of_copy']:>7.1%} "
            f"{row['over_torch']:>9.1f}x  {what}",
            flush=True,
        )
    return found


def main() -> None:
    args = parser(__doc__, "two row sizes, five rounds").parse_args()
    torch.manual_seed(1)
    n, rounds, shapes = (2_000_000, 5, (SHAPES[0], SHAPES[2])) if args.quick else (3_000_000, 15, SHAPES)
    print(f"{'kernel':>16} {'dim':>4} {'dtype':>9} {'ms':>8} {'GB/s':>7} {'of copy':>7} {'over torch':>10}  rows")
    found = [row for dim, dtype in shapes for row in measure(dim, dtype, n, rounds)]

    def worst(*names: str) -> float:
        return min(row["share_of_copy"] for row in found if row["kernel"] in names)

    headlines = {
        "pack_share_of_copy": worst("pack"),
        "update_share_of_copy": worst("update, sgd", "update, adagrad"),
        "update_sgd_share_of_copy": worst("update, sgd"),
        "update_adagrad_share_of_copy": worst("update, adagrad"),
    }
    for name, share in headlines.items():
        print(f"{name}: {share:.3f} (the worst of all row sizes)")
    write(args.json, {"machine": machine(), **headlines, "quick": args.quick, "rows": found})


if __name__ == "__main__":
    main()
