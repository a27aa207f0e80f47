"""What compress_exchange saves and what it costs: bytes, steps over a link, and how well the model learns.

    python benchmarks/compress.py [--quick] [--json FILE] [--seeds 5] [--steps 120] [--variants exact fp16]
    python benchmarks/compress.py --kernels [--json FILE]

Two ranks learn to tell the next item of MovieLens-100K (movielens.py; synthetic histories without it) from the last
ones of a history: a sharded table, a small tower, sampled negatives. Every variant trains with several seeds from the
same beginnings on the same batches. Asked for is each user's last item, which no batch has; recall@10 is the share of
users for whom it is among the ten best of all items. `spread` is the standard deviation over seeds.

    exact        everything travels
    fp16         FREESCALE_WIRE=fp16, which=all
    rows 5x      FREESCALE_COMPRESS=rows:0.2,which=all
    early 5x     FREESCALE_COMPRESS=rows:0.2: early rows and late gradients alone, so with a LookaheadLoader
    rows 20x     FREESCALE_COMPRESS=rows:0.05,which=all
    dense 100x   FREESCALE_COMPRESS=dense:0.01

Bytes are those that a rank receives from the other in one step: of table rows with their gradients, counted where an
all-to-all starts, and of dense gradients as the meter has them. `link` is the time of a step with look-ahead on a link
of 20 Mbit/s (netlab.py: root and iproute2; without them no figure).
--kernels, on a GPU: the kernels that pack and unpack, against a copy of the same rows.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import netlab  # noqa: E402
from command_line import parser  # noqa: E402

LOSSY = {"passes": "all,compress_exchange"}
VARIANTS: dict[str, dict[str, Any]] = {
    "exact": {},
    "fp16": {**LOSSY, "wire": "fp16", "compress": "which=all"},
    "rows 5x": {**LOSSY, "compress": "rows:0.2,which=all"},
    "early 5x": {**LOSSY, "compress": "rows:0.2"},
    "rows 20x": {**LOSSY, "compress": "rows:0.05,which=all"},
    "dense 100x": {**LOSSY, "compress": "dense:0.01"},
}
HISTORY, DIM, NEGATIVES, BATCH = 10, 64, 20, 64
LINK = 20e6  # bit/s


def histories() -> list[Any]:
    """Each user's items in the order of time, at least HISTORY + 2 of them."""
    import numpy as np

    import movielens

    path = movielens.histories()
    if path is None:
        random = np.random.default_rng(0)
        found = [(random.integers(0, 1600) + np.arange(60).cumsum() % 97) % 1682 for _ in range(900)]
        return found
    data = np.load(path)
    return [h for h in np.split(data["ids"], np.cumsum(data["lengths"])[:-1]) if len(h) >= HISTORY + 2]


def model_of(items: int) -> Any:
    import torch
    from torch import nn

    import freescale

    class NextItem(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = freescale.ShardedEmbedding(items, DIM, name="item", optimizer="rowwise_adagrad", lr=0.1)
            self.tower = nn.Sequential(nn.Linear(HISTORY * DIM, 256), nn.ReLU(), nn.Linear(256, DIM))

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            found = self.table(batch["item"]).view(-1, HISTORY + 1 + NEGATIVES, DIM)
            wanted = self.tower(found[:, :HISTORY].reshape(-1, HISTORY * DIM))
            scores = (found[:, HISTORY:] @ wanted[:, :, None]).squeeze(2)
            return nn.functional.cross_entropy(scores, scores.new_zeros(scores.shape[0], dtype=torch.int64))

    return NextItem()


def batches(users: list[Any], items: int, steps: int, seed: int, rank: int) -> list[dict[str, Any]]:
    import numpy as np
    import torch

    random, made = np.random.default_rng(1000 * seed + rank), []
    for _ in range(steps):
        rows = []
        for user in random.integers(0, len(users), BATCH):
            end = random.integers(HISTORY, len(users[user]) - 1)  # the last item is for the test
            rows.append([*users[user][end - HISTORY : end + 1], *random.integers(0, items, NEGATIVES)])
        made.append({"item": torch.tensor(rows).view(-1)})
    return made


def recall(model: Any, users: list[Any], items: int) -> float:
    import numpy as np
    import torch

    with torch.no_grad():
        table = model.table(torch.arange(items))
        last = torch.tensor(np.stack([u[-HISTORY - 1 :] for u in users]))
        wanted = model.tower(table[last[:, :-1]].view(-1, HISTORY * DIM))
        best = (wanted @ table.T).topk(10).indices
    return float((best == last[:, -1:]).any(1).float().mean())


def train(name: str, users: list[Any], items: int, settings: dict[str, Any]) -> dict[str, Any]:
    """One variant: per seed the mean loss of the last tenth and the recall; bytes of a step; the time of one."""
    import torch
    import torch.distributed as dist

    import freescale

    torch._dynamo.reset()
    rank, results = dist.get_rank(), []
    torch.manual_seed(0)  # every variant has the same beginnings
    model = model_of(items)
    options = {"codegen": "eager", "dense": "allreduce", "strict": True, **VARIANTS[name]}
    run = torch.compile(model, backend="freescale", fullgraph=True, options=options)

    def steps(loader: Any, optimizer: Any) -> list[float]:
        losses = []
        for batch in loader:
            optimizer.zero_grad()
            loss = run(batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    beginning = {k: v.clone() for k, v in model.state_dict().items()}
    for seed in range(settings["seeds"]):
        torch.manual_seed(seed)
        new = {k: torch.zeros_like(v) if "momentum" in k else v for k, v in beginning.items()}
        for k, v in new.items():
            if v.dim() == 2:
                new[k] = torch.randn_like(v) * (0.1 if k.startswith("table") else v.shape[1] ** -0.5)
                if not k.startswith("table"):
                    dist.broadcast(new[k], 0)
        model.load_state_dict(new)
        optimizer = torch.optim.Adam(model.tower.parameters(), lr=1e-3)
        data: Any = batches(users, items, settings["steps"], seed, rank)
        losses = steps(freescale.LookaheadLoader(data, run) if name.startswith("early") else data, optimizer)
        last = torch.tensor([statistics.fmean(losses[-len(losses) // 10 :])])
        dist.all_reduce(last)
        results.append({"loss": last.item() / dist.get_world_size(), "recall": recall(model, users, items)})
    found = {"variant": name, "seeds": results, **step_of(run, optimizer, steps, users, items, rank)}
    freescale.meter.clear()
    return found


@contextmanager
def bytes_from_others() -> Iterator[list[int]]:
    """Of rows and their gradients, so far, when each step ends. (Of an exact launch the meter counts a rank's own.)"""
    import freescale
    from freescale.kernels.transports import c10d

    start, so_far, at_ends = c10d.start_all_to_all, [0], [0]

    def start_and_count(out: Any, x: Any, recv: list[int], send: list[int], group: Any) -> Any:
        so_far[0] += (sum(recv) - recv[group.rank()]) * out[:1].nbytes
        return start(out, x, recv, send, group)

    stop_listening = freescale.meter.listen(lambda step: at_ends.append(so_far[0]))
    c10d.start_all_to_all = start_and_count
    try:
        yield at_ends
    finally:
        c10d.start_all_to_all = start
        stop_listening()


def step_of(run: Any, optimizer: Any, steps: Any, users: list[Any], items: int, rank: int) -> dict[str, Any]:
    import freescale

    more = batches(users, items, 14, 99, rank)
    steps(freescale.LookaheadLoader(more[:4], run), optimizer)  # compiles
    if netlab.in_lab():
        netlab.set_rate(LINK)
    freescale.meter.clear()
    with bytes_from_others() as at_ends:
        steps(freescale.LookaheadLoader(more, run), optimizer)
    if netlab.in_lab():
        netlab.set_rate(None)
    middle = freescale.meter.steps()[2:-2]
    return {
        "dense_bytes": statistics.fmean(s["bytes"].get("dense gradients", 0) for s in middle),
        "row_bytes": (at_ends[-3] - at_ends[2]) / len(middle),
        "link_ms": statistics.median(s["seconds"] for s in middle) * 1e3 if netlab.in_lab() else None,
    }  # fmt: skip


def rank_main(settings: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    users = histories()
    items = int(max(u.max() for u in users)) + 1
    found = [train(name, users, items, settings) for name in settings["variants"]]
    if dist.get_rank() == 0:
        Path(settings["out"]).write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


def summary(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for f in found:
        row = {k: f[k] for k in ("variant", "row_bytes", "dense_bytes", "link_ms")}
        for figure in ("loss", "recall"):
            values = [s[figure] for s in f["seeds"]]
            row[figure] = statistics.fmean(values)
            row[f"{figure}_spread"] = statistics.stdev(values) if len(values) > 1 else 0.0
        rows.append(row)
    return rows


def headlines(rows: list[dict[str, Any]]) -> dict[str, float]:
    """How far the bytes are from what was asked for, as a share of it; and the recall lost, in spreads over seeds."""
    by = {r["variant"]: r for r in rows}
    if by.keys() != VARIANTS.keys():
        return {}
    exact, fewer = by["exact"], by["rows 5x"]
    spread = max(exact["recall_spread"], 1e-9)
    full_gather = exact["dense_bytes"]  # of two ranks: an all-reduce moves as much as an all-gather
    return {
        "rows_ratio_error": abs(by["rows 20x"]["row_bytes"] / (0.05 * exact["row_bytes"]) - 1),
        "dense_ratio_error": abs(by["dense 100x"]["dense_bytes"] / (0.01 * full_gather) - 1),
        "recall_loss_at_5x_in_spreads": (exact["recall"] - fewer["recall"]) / spread,
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| variant | row bytes | dense bytes | step on the link | loss | recall@10 |", "|---|---|---|---|---|---|"]
    for r in rows:
        link = "-" if r["link_ms"] is None else f"{r['link_ms']:.0f} ms"
        lines.append(
            f"| {r['variant']} | {r['row_bytes'] / 1e3:.1f} kB | {r['dense_bytes'] / 1e3:.1f} kB | {link} "
            f"| {r['loss']:.4f} ± {r['loss_spread']:.4f} | {r['recall']:.4f} ± {r['recall_spread']:.4f} |"
        )
    return "\n".join(lines)


def kernels() -> dict[str, float]:
    """Milliseconds on a GPU for 2,000,000 rows of 128."""
    import torch

    from freescale.kernels import compression, compression_triton

    x, slabs = torch.randn(2_000_000, 128, device="cuda"), compression.Slabs.of(torch.tensor([2_000_000]))
    out, found = torch.empty_like(x), {}

    def milliseconds(call: Any) -> float:
        for _ in range(3):
            call()
        times = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        times[0].record()
        for _ in range(20):
            call()
        times[1].record()
        torch.cuda.synchronize()
        return times[0].elapsed_time(times[1]) / 20

    found["copy"] = milliseconds(lambda: out.copy_(x))
    for share, text in ((0.2, "largest:256/15:8"), (0.05, "largest:64/15:8")):
        packing = compression.parse(text)
        packed = compression_triton.compress(x, slabs, packing)
        found[f"compress {share}"] = milliseconds(lambda p=packing: compression_triton.compress(x, slabs, p))
        found[f"expand {share}"] = milliseconds(
            lambda p=packing, k=packed: compression_triton.expand(k, out, slabs, p)
        )
    for name, ms in found.items():
        print(f"{name:15s} {ms:8.3f} ms {ms / found['copy']:6.2f} copies")
    return found


def main() -> None:
    p = parser(__doc__, "one seed, few steps")
    p.add_argument("--kernels", action="store_true", help="the kernels on a GPU, and nothing else")
    p.add_argument("--seeds", type=int, default=5)
    p.add_argument("--steps", type=int, default=120)
    p.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="default: all")
    p.add_argument("--rank", help="what a rank is started with")
    args, began = p.parse_args(), time.perf_counter()
    if args.rank:
        rank_main(json.loads(args.rank))
        return
    if args.kernels:
        result: dict[str, Any] = {"kernels_ms": kernels()}
    else:
        settings = {"seeds": 2 if args.quick else args.seeds, "steps": 40 if args.quick else args.steps}
        settings["variants"] = args.variants
        with tempfile.TemporaryDirectory(prefix="freescale-compress-") as folder:
            out = Path(folder) / "found.json"
            with netlab.Lab(2) as lab:
                code = lab.run([sys.executable, __file__, "--rank", json.dumps({**settings, "out": str(out)})], {})
            if code:
                sys.exit(f"freescale: a rank ended with exit code {code}")
            rows = summary(json.loads(out.read_text()))
        print(table(rows))
        result = {"rows": rows, "settings": settings, **headlines(rows), "seconds": time.perf_counter() - began}
        for name, value in headlines(rows).items():
            print(f"{name}: {value:.4f}")
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
