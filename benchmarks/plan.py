"""What planning one batch ahead costs: CPU time per million ids, its growth with the number of ranks, and memory.

    python benchmarks/plan.py [--quick] [--json FILE]

Ranks are SIMULATED: one process does all that one rank does for a batch (ask, answer, steps.make, steps.finish), and
what the other ranks would send is drawn from the distribution of the ids. Times are CPU times of one thread, without
the making and the travelling of messages. Every rank has the same number of ids, however many ranks there are.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from command_line import parser
from freescale.kernels.planning import exchange_plan, row_requests
from freescale.runtime.tables import step_plan

WORLDS, ZIPFS = (2, 8, 32, 128, 256), (0.8, 1.05)
TABLE, DIM = 50_000_000, 128
STRIDE = 39_916_801  # a prime: popular rows lie all over the table, as hashing would place them


class Ids:
    """Zipf ids over the table, and the same law seen by an owner."""

    def __init__(self, zipf: float, per_rank: int, seed: int) -> None:
        self.power, self.per_rank = 1 - zipf, per_rank
        self.random = np.random.default_rng(seed)

    def draw(self) -> torch.Tensor:
        u = self.random.random(self.per_rank)
        popularity = (1 + u * ((TABLE + 1) ** self.power - 1)) ** (1 / self.power) - 1
        return torch.from_numpy(popularity.astype(np.int64).clip(max=TABLE - 1) * STRIDE % TABLE)

    def chance(self, rows: np.ndarray) -> np.ndarray:
        """How likely an id is to be each of these rows."""
        at = rows * pow(STRIDE, -1, TABLE) % TABLE + 1.0
        return ((at + 1) ** self.power - at**self.power) / ((TABLE + 1) ** self.power - 1)


class OneRank:
    """Rank 0 of `world`: stands in for the all-to-all of its planning, and keeps the time that this takes."""

    def __init__(self, ids: Ids, world: int) -> None:
        self.ids, self.world, self.away = ids, world, 0.0
        self.block = -(-TABLE // world)
        shards = [
            exchange_plan.Shard(0, r * self.block, min(self.block, TABLE - r * self.block), r, 0)
            for r in range(world)
        ]
        self.owners = exchange_plan.owner_map(shards, [TABLE], world)
        self.mass = np.cumsum(ids.chance(np.arange(self.block)))
        self.asked: list[np.ndarray] = []  # keys that it asked for, of the last two batches

    def hear_requests(self) -> None:
        """What the other ranks ask of this one for the next batch: rows, each rank's distinct and ascending."""
        peers, random = self.world - 1, self.ids.random
        total = random.poisson(self.ids.per_rank * peers * self.mass[-1])
        rows = np.searchsorted(self.mass, random.random(total) * self.mass[-1])
        both = np.unique(random.integers(1, self.world, total) * self.block + rows)
        self.rows = torch.from_numpy(both % self.block)
        self.counts = torch.from_numpy(np.bincount(both // self.block, minlength=self.world))

    def clock(self) -> float:
        """CPU time of this thread, without what the other ranks' part took."""
        return time.thread_time() - self.away

    def all_to_all(self, out, x, recv, send, group) -> None:  # noqa: ANN001
        start = time.thread_time()
        if x.dim() == 2:  # how it stands, counts and complaints
            out[:] = x
            out[1:, 1] = self.counts[1:]
        elif x.dtype == torch.uint8:  # flags
            out[: recv[0]] = x[: send[0]]
            out[recv[0] :] = torch.from_numpy(self.flags(recv))
        else:  # rows
            out[: recv[0]] = x[: send[0]]
            out[recv[0] :] = self.rows
        self.away += time.thread_time() - start

    def flags(self, recv: list[int]) -> np.ndarray:
        """What the other owners answer: a key was or will be asked for by this rank too, or by chance by another."""
        before, after = self.asked[-2:]
        found = []
        for keys, others in ((after, before), (before, after)):
            rest = 1 - np.exp(-self.ids.per_rank * (self.world - 1) * self.ids.chance(keys))
            hit = np.isin(keys, others) | (self.ids.random.random(keys.shape[0]) < rest)
            found.append((keys // self.block, hit))
        peer = np.concatenate([p for p, _ in found])
        hits = np.concatenate([h for _, h in found])[np.argsort(peer, kind="stable")]
        return hits[recv[0] :].astype(np.uint8)


def measure(rank: OneRank, batches: int) -> tuple[list[list[float]], step_plan.StepPlan]:
    """For each batch, ms per million ids of ask, answer and making the steps; and the last finished step."""
    like, times = torch.empty(0, DIM), []
    before = asked_before = None
    with mock.patch.object(row_requests, "all_to_all_cpu", rank.all_to_all):
        for number in range(batches + 1):
            values = rank.ids.draw()
            rank.hear_requests()
            rank.asked = [*rank.asked[-1:], np.unique(values.numpy())]  # here, the key of a row is its number
            clock = [rank.clock()]
            asked = row_requests.request_rows([values], [0], [TABLE], rank.owners, "table", None)
            clock.append(rank.clock())
            if before is None:
                everything = [torch.ones_like(t, dtype=torch.bool) for t in (asked.needed.values, asked.rows)]
                rows = exchange_plan.plan_rows(asked, exchange_plan.split_requests(asked, *everything))
                after = step_plan.plan_rows(number, values, asked, rows, like)
            else:
                gradients, rows = row_requests.split_colliding(asked_before, asked, None)
                clock.append(rank.clock())
                after = step_plan.plan_rows(number, values, asked, rows, like)
                step_plan.plan_gradients(before, gradients)
                clock.append(rank.clock())
                times.append((np.diff(clock) * 1e9 / rank.ids.per_rank).tolist())
                finished = before
            before, asked_before = after, asked
    return times, finished


def row(world: int, zipf: float, times: list[list[float]], finished: step_plan.StepPlan) -> dict:
    ms = np.array(times)
    total = ms.sum(1)
    return {
        "ranks": world,
        "zipf": zipf,
        "ms_per_million_ids": float(np.median(total)),
        "min": float(total.min()),
        "max": float(total.max()),
        **dict(zip(("ask", "answer", "make"), np.median(ms, 0).tolist(), strict=True)),
        "batches": len(times),
        **{name: finished.stats[name] for name in ("unique_rows", "colliding_rows")},
        **memory(finished),
    }


def memory(p: step_plan.StepPlan) -> dict[str, int]:
    """Bytes that one batch needs and a synchronous step does not."""
    parts = [v if isinstance(v, tuple) else (v,) for name, v in vars(p).items() if name not in ("late_slot", "arrived")]
    tensors = {t.data_ptr(): t for part in parts for t in part if isinstance(t, torch.Tensor)}
    row = DIM * p.arrived.element_size()
    sizes = {
        "early_rows_bytes": p.early_slots.shape[0] * row,
        "late_gradients_bytes": p.late_index.shape[0] * row,
        "late_slots_bytes": p.late_slot.untyped_storage().nbytes(),
        "plan_tensors_bytes": sum(t.untyped_storage().nbytes() for t in tensors.values()),
    }
    return {**sizes, "extra_bytes": sum(sizes.values())}


def main() -> None:
    args = parser(__doc__, "200,000 ids per rank instead of a million").parse_args()
    torch.set_num_threads(1)
    per_rank, rounds, batches = (200_000, 2, 2) if args.quick else (1_000_000, 3, 3)
    print(f"SIMULATED ranks: one process does one rank's planning; {per_rank} ids per rank, Zipf over {TABLE} rows.")
    ranks = {(w, z): OneRank(Ids(z, per_rank, seed=w), w) for z in ZIPFS for w in WORLDS}
    times: dict[tuple[int, float], list[list[float]]] = {at: [] for at in ranks}
    finished: dict[tuple[int, float], step_plan.StepPlan] = {}
    for _ in range(rounds):  # interleaved: what else the machine does should not fall on one of them alone
        for at, rank in ranks.items():
            more, finished[at] = measure(rank, batches)
            times[at] += more
    rows = [row(*at, times[at], finished[at]) for at in ranks]
    print(f"{'ranks':>5} {'zipf':>5} {'ms per million ids':>19} {'min':>6} {'max':>6}", end=" ")
    print(f"{'= ask':>7} {'+ answer':>8} {'+ make':>7} {'unique':>9} {'colliding':>9}")
    for r in rows:
        print(
            f"{r['ranks']:>5} {r['zipf']:>5} {r['ms_per_million_ids']:>19.1f} {r['min']:>6.1f} {r['max']:>6.1f} "
            f"{r['ask']:>7.1f} {r['answer']:>8.1f} {r['make']:>7.1f} {r['unique_rows']:>9} {r['colliding_rows']:>9}"
        )
    of = {(r["ranks"], r["zipf"]): r for r in rows}
    chosen = of[8, 1.05]
    growth = of[WORLDS[-1], 1.05]["ms_per_million_ids"] / of[WORLDS[0], 1.05]["ms_per_million_ids"]
    print(f"planning, 8 ranks, Zipf 1.05: {chosen['ms_per_million_ids']:.1f} ms of one core per million ids")
    print(f"growth from {WORLDS[0]} to {WORLDS[-1]} ranks: {growth:.2f}")
    parts = {name: size for name, size in chosen.items() if name.endswith("_bytes")}
    words = ", ".join(
        f"{name.removesuffix('_bytes').replace('_', ' ')} {size / 1e6:.1f}" for name, size in parts.items()
    )
    print(f"memory of one batch above a synchronous step, MB, {DIM} floats a row: {words}")
    if args.json:
        result = {
            "simulated_ranks": True,
            "ids_per_rank": per_rank,
            "ms_per_million_ids": chosen["ms_per_million_ids"],
            "growth_2_to_256": growth,
            **parts,
            "rows": rows,
        }
        Path(args.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
