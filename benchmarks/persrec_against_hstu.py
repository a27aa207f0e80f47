"""PerSRec against HSTU: what its attention computes, what a step and a request cost, and what the tokens are worth.

    python benchmarks/persrec_against_hstu.py [--quick] [--json FILE] [--parts training]

    attention   pairs of a query and a key in training, exactly, at 1280 items: all of them, the 256 recent ones alone,
                and 1024 in segments with 4 tokens each before 256 recent ones; and those of one request
    request     time of one request on the CPU: the whole history through the model, or the recent items with kept
                keys and values of the tokens
    training    2 real ranks on gloo, freescale's tables, look-ahead, long synthetic histories: time of a step, bytes
                exchanged, and the share of a step for which the average rank waits for the slowest, in CPU time of
                the training threads. The same batches are trained several times, and ranks change places each time:
                a rank whose core is slower, or that owns more popular rows, is not slower because of its samples. So
                the share that is due to samples, which a cost can predict, is that of each batch's median time. It is
                predicted for the second half of the steps from costs fitted to the first half: by FittedCost with the
                features of the mask, and with L and L**2 as it is by default; and by the features of the mask and the
                rows of the other ranks, since ranks on one host slow each other down
    quality     persrec_quality.py: recall on MovieLens-100K, several seeds
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]

import numpy as np  # noqa: E402

from balance_train import in_ranks, loop  # noqa: E402
from command_line import parser  # noqa: E402

LONG, RECENT, TOKENS = 1024, 256, 4
ITEMS, DIM, HEADS, BLOCKS, BATCH, RANKS = 20_000, 32, 2, 2, 8, 2
ROUNDS = 4  # of the same batches, behind one that does not count; a multiple of RANKS
VARIANTS = {"full": 0, "recent": 0, "1 segment": 1, "4 segments": 4}
PARTS = ("attention", "requests", "training", "quality")
SKIPPED = 2  # first steps, which compile or have no neighbour


# ---- attention -----------------------------------------------------------------------------------------------------


def attention() -> list[dict[str, Any]]:
    from persrec import attention_pairs

    length = np.array([LONG + RECENT])
    full = int(attention_pairs(length, 0, 0, 0)[0])
    recent = int(attention_pairs(np.array([RECENT]), 0, 0, 0)[0])
    rows = [{"variant": "full", "training": full, "request": full}]
    rows += [{"variant": "recent", "training": recent, "request": recent}]
    for segments in (1, 2, 3, 4, 8):
        pairs = int(attention_pairs(length, segments, TOKENS, RECENT)[0])
        request = recent + RECENT * segments * TOKENS
        rows.append({"variant": f"{segments} segments", "training": pairs, "request": request})
    return [{**r, "training_share": r["training"] / full, "request_share": r["request"] / full} for r in rows]


# ---- a request -----------------------------------------------------------------------------------------------------


def requests(repetitions: int) -> list[dict[str, Any]]:
    """Of one user; medians, the calls in turns."""
    import torch
    from torch import nn

    from hstu import HSTU
    from native_tables import Jagged
    from persrec import PerSRec

    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.item = nn.Embedding(ITEMS, 64)

        def forward(self, features: dict[str, Any]) -> dict[str, Jagged]:
            return {name: Jagged(self.item(ids), torch.tensor([len(ids)])) for name, ids in features.items()}

    torch.manual_seed(0)
    torch.set_num_threads(1)
    plain = HSTU(Tables(), 64, HEADS, BLOCKS, max_distance=128)
    model = PerSRec(Tables(), 64, HEADS, BLOCKS, max_distance=128, segments=1, tokens=TOKENS, recent=RECENT)
    ids, candidate = torch.randint(ITEMS, (LONG + RECENT,)), torch.tensor([3])
    whole, long, recent = ({"history": x, "candidate": candidate} for x in (ids, ids[:LONG], ids[LONG:]))
    cache = model.compress_history(long)
    calls = {
        "full history, HSTU": lambda: plain.logits(whole),
        "tokens, not kept": lambda: model.logits(whole),
        "tokens, kept": lambda: model.score(cache, recent),
        "compressing, once": lambda: model.compress_history(long),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        off = float((calls["tokens, kept"]() - calls["tokens, not kept"]()).abs().max())
        for _ in range(repetitions):
            for name, call in calls.items():
                began = time.thread_time()
                call()
                times[name].append(1e3 * (time.thread_time() - began))
    return [{"request": name, "ms": statistics.median(t), "off": off} for name, t in times.items()]


# ---- training ------------------------------------------------------------------------------------------------------


def lengths_of(seed: int, rank: int, steps: int) -> np.ndarray:
    random = np.random.default_rng([seed, rank])
    return np.clip(random.lognormal(np.log(500), 0.8, (steps, BATCH)), 1, LONG + RECENT).astype(np.int64)


def batches(variant: str, lengths: np.ndarray, rank: int) -> list[dict[str, Any]]:
    import torch

    random, made = np.random.default_rng([7, rank]), []
    for mine in lengths:
        ids = (random.random(int(mine.sum())) ** 4 * ITEMS).astype(np.int64)
        if variant == "recent":  # the last ones of each history
            ids = np.concatenate([h[-RECENT:] for h in np.split(ids, np.cumsum(mine)[:-1])])
            mine = np.minimum(mine, RECENT)
        made.append(
            {
                "history": torch.from_numpy(ids),
                "history_lengths": torch.from_numpy(mine),
                "candidate": torch.from_numpy(random.integers(0, ITEMS, BATCH)),
                "labels": torch.from_numpy((random.random(BATCH) < 0.5).astype(np.float32)),
            }
        )
    return made


def build(variant: str) -> tuple[Any, Any]:
    """The model, and the model compiled, on freescale's own tables."""
    import torch
    from torch import nn

    import freescale
    from hstu import HSTU
    from native_tables import Jagged
    from persrec import PerSRec

    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            settings = {"optimizer": "rowwise_adagrad", "lr": 0.05}
            self.history = freescale.ShardedEmbedding(ITEMS, DIM, name="history", **settings)
            self.candidate = freescale.ShardedEmbedding(ITEMS, DIM, name="candidate", **settings)

        def forward(self, batch: Any) -> dict[str, Jagged]:
            ones = torch.ones_like(batch["history_lengths"])
            history = Jagged(self.history(batch["history"]), batch["history_lengths"])
            return {"history": history, "candidate": Jagged(self.candidate(batch["candidate"]), ones)}

    class Loss(nn.Module):
        def __init__(self, inner: HSTU) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, batch: Any) -> Any:
            scores = self.inner.logits(batch)
            return nn.functional.binary_cross_entropy_with_logits(scores, batch["labels"], reduction="sum") / BATCH

    torch.manual_seed(0)
    segments, settings = VARIANTS[variant], {"max_distance": 128}
    chosen = {"segments": segments, "tokens": TOKENS, "recent": RECENT}
    kind = PerSRec(Tables(), DIM, HEADS, BLOCKS, **chosen, **settings) if segments else None
    model = Loss(kind or HSTU(Tables(), DIM, HEADS, BLOCKS, **settings))
    return model, torch.compile(model, backend="freescale", fullgraph=True, options={"codegen": "eager"})


def rank_main(rank: int, folder: str, steps: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    rows = []
    for variant in VARIANTS:
        model, run = build(variant)
        rounds: list[Any] = []
        for n in range(1 + ROUNDS):
            everyone: list[Any] = [None] * RANKS
            dist.all_gather_object(everyone, train(variant, model, run, (rank + n) % RANKS, steps))
            rounds.append([everyone[(place - n) % RANKS] for place in range(RANKS)])
        rows.append(training_row(variant, rounds[1:]))
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def train(variant: str, model: Any, run: Any, place: int, steps: int) -> dict[str, Any]:
    """One round with the batches of that place."""
    import freescale

    lengths = lengths_of(0, place, steps + SKIPPED + 1)
    loader = freescale.LookaheadLoader(batches(variant, lengths, place), run, overlap=True)
    clocks = np.array([(time.thread_time(), time.perf_counter()) for _ in loop(model, run, loader)])
    cpu, wall = np.diff(clocks, axis=0)[SKIPPED:].T
    moved = [s for s in loader.stats() if s["step"] >= SKIPPED]
    keys = ("bytes_urgent", "bytes_back_urgent", "bytes_early", "bytes_late")
    exchanged = sum(s[k] for s in moved for k in keys) / steps
    if variant == "recent":
        lengths = np.minimum(lengths, RECENT)
    return {"cpu": cpu, "wall": wall, "bytes": exchanged, "lengths": lengths[SKIPPED:-1]}


def training_row(variant: str, rounds: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """rounds: of each, what came of the batches of each place."""
    cpu, wall = (np.array([[e[key] for e in places] for places in rounds]) for key in ("cpu", "wall"))
    lengths = np.stack([e["lengths"] for e in rounds[0]])  # [places, steps, samples]
    half = cpu.shape[2] // 2
    of_samples = np.median(cpu, axis=0)
    return {
        "variant": variant,
        "step_ms": 1e3 * float(np.median(wall)),
        "cpu_ms": 1e3 * float(np.median(cpu.max(1))),
        "kilobytes": float(np.mean([e["bytes"] for e in rounds[0]])) / 1e3,
        "straggler": float(np.mean([share(c) for c in cpu])),
        "of_each_round": [share(c[:, half:]) for c in cpu],
        "measured": share(of_samples[:, half:]),
        "by_mask": share(predicted(lengths, cpu, half, VARIANTS[variant])),
        "by_length": share(predicted(lengths, cpu, half, None)),
        "by_mask_and_others": share(predicted(lengths, cpu, half, VARIANTS[variant], beside=True)),
    }


def share(times: np.ndarray) -> float:
    """Mean idle time over step time, mean over steps. times: [ranks, steps]."""
    return float(np.mean(1 - times.mean(0) / times.max(0)))


def predicted(
    lengths: np.ndarray, cpu: np.ndarray, half: int, segments: int | None, beside: bool = False
) -> np.ndarray:
    """Times of the second half of the steps, by a cost that saw the first, of all rounds.

    segments None: L and L**2. beside: the rows of the other ranks are one more feature of a rank's batch.
    """
    import freescale
    from persrec import cost_features

    prior, features = (1.0, 1 / 2048), lambda x: np.stack([x, x * x]).astype(np.float64)
    if segments is not None:
        prior, features = (1.0, 1 / 1024), cost_features(segments, TOKENS, RECENT)
    sums = np.array([[features(x).sum(1) for x in place] for place in lengths])  # [places, steps, features]
    if beside:
        rows = sums[:, :, :1]
        prior, sums = (*prior, 0.0), np.concatenate([sums, rows.sum(0) - rows], axis=2)
    fit = freescale.FittedCost(prior, features=features, window=cpu.shape[0] * half)
    for times in cpu:
        for step in range(half):
            fit.observe(sums[:, step], times[:, step])
    return fit.constant + sums[:, half:] @ np.array(fit.current.weights)


# ---- all of it -----------------------------------------------------------------------------------------------------


def print_attention(rows: list[dict[str, Any]]) -> None:
    print(f"attention at {LONG} + {RECENT} items, {TOKENS} tokens: pairs of a query and a key, and their share of full")
    for r in rows:
        print(f"{r['variant']:<12} training {r['training']:>8} {r['training_share']:>6.3f}", end="   ")
        print(f"request {r['request']:>8} {r['request_share']:>6.3f}")


def print_requests(rows: list[dict[str, Any]]) -> None:
    print("\none request on one CPU core, CPU time (kept or not, scores differ by at most", end=" ")
    print(f"{rows[0]['off']:.1e})")
    for r in rows:
        print(f"{r['request']:<20} {r['ms']:>8.2f} ms")


def print_training(rows: list[dict[str, Any]]) -> None:
    print(f"\n{RANKS} CPU ranks, {BATCH} histories each, median 500 items, at most {LONG + RECENT}; idle: of all")
    print(f"steps; of the second half, the least and the most of {ROUNDS} rounds, and what is due to samples; and that")
    print("as predicted by the cost of the mask, by L and L**2, and by the mask and the rows of the other rank")
    print(f"{'variant':<12} {'step ms':>8} {'CPU ms':>8} {'kB':>8} {'idle':>7} {'2nd half':>15}", end=" ")
    print(f"{'samples':>8} {'mask':>7} {'L, L**2':>8} {'others':>7}")
    for r in rows:
        print(f"{r['variant']:<12} {r['step_ms']:>8.1f} {r['cpu_ms']:>8.1f} {r['kilobytes']:>8.1f}", end=" ")
        print(f"{r['straggler']:>7.1%} {min(r['of_each_round']):>6.2%} - {max(r['of_each_round']):>6.2%}", end=" ")
        print(f"{r['measured']:>8.2%} {r['by_mask']:>7.2%} {r['by_length']:>8.2%} {r['by_mask_and_others']:>7.2%}")


def training(steps: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        in_ranks(rank_main, folder, steps)
        rows: list[dict[str, Any]] = json.loads(Path(folder, "result.json").read_text())
    return rows


def main() -> None:
    p = parser(__doc__, "fewer steps and repetitions, no training on MovieLens: about a minute")
    p.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    args = p.parse_args()
    result: dict[str, Any] = {}
    if "attention" in args.parts:
        print_attention(result.setdefault("attention", attention()))
    if "requests" in args.parts:
        print_requests(result.setdefault("requests", requests(5 if args.quick else 21)))
    if "training" in args.parts:
        print_training(result.setdefault("training", training(8 if args.quick else 40)))
    if "quality" in args.parts and not args.quick:
        import movielens
        import persrec_quality

        if (path := movielens.histories()) is not None:
            result["quality"] = persrec_quality.quality(path, seeds=5, epochs=10)
            persrec_quality.print_quality(result["quality"])
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
