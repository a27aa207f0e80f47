"""What planning one batch ahead costs: CPU time per million ids, its growth with the number of ranks, and memory.

    python benchmarks/plan.py [--quick] [--json FILE]

Ranks are SIMULATED: one thread does all that one rank does for a batch, and another one stands in for all other ranks,
at the other ends of the first one's sockets; what they would send is drawn from the distribution of the ids. Times are
CPU times of the first thread, sockets included. Every rank has the same number of ids, however many ranks there are.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path

import numpy as np
import torch

from command_line import parser
from freescale.kernels.native.memory_parts import split_arrays
from freescale.kernels.planning import native_plan
from freescale.kernels.planning.batch_plan import Extents, Room
from freescale.kernels.planning.native_batch import BatchPlan
from freescale.kernels.planning.owners import ExchangeTables, Shard, owner_map
from freescale.kernels.planning.rank_mesh import RankMesh
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
    """Rank 0 of `world`, and what stands in for the others."""

    def __init__(self, ids: Ids, world: int) -> None:
        self.ids, self.world = ids, world
        self.block = -(-TABLE // world)
        shards = [
            Shard(0, r * self.block, min(self.block, TABLE - r * self.block), r, 0)
            for r in range(world)
        ]
        self.owners = owner_map(shards, [TABLE], world)
        self.mass = np.cumsum(ids.chance(np.arange(self.block)))
        self.asked: list[np.ndarray] = []  # keys that it asked for, of the last two batches
        self.rows: list[np.ndarray] = []  # of each other rank: what it asks of this one, of the last two batches

    def draw(self) -> torch.Tensor:
        """The next batch, and what the other ranks ask of this one for theirs: each rank's rows ascend."""
        values = self.ids.draw()
        self.asked = [*self.asked[-1:], np.unique(values.numpy())]  # here, the key of a row is its number
        peers, random = self.world - 1, self.ids.random
        total = random.poisson(self.ids.per_rank * peers * self.mass[-1])
        rows = np.searchsorted(self.mass, random.random(total) * self.mass[-1])
        both = np.unique(random.integers(1, self.world, total) * self.block + rows)
        ends = np.searchsorted(both, np.arange(2, self.world + 1) * self.block)
        self.rows = [*self.rows[-1:], np.split(both % self.block, ends[:-1])]
        return values

    def flags(self) -> list[np.ndarray]:
        """What the other owners answer: a key was or will be asked for by this rank too, or by chance by another."""
        before, after = self.asked
        parts = []
        for keys, others in ((after, before), (before, after)):
            rest = 1 - np.exp(-self.ids.per_rank * (self.world - 1) * self.ids.chance(keys))
            hit = np.isin(keys, others) | (self.ids.random.random(keys.shape[0]) < rest)
            parts.append(np.split(hit, np.searchsorted(keys, np.arange(1, self.world) * self.block))[1:])
        return [np.concatenate(of_peer).astype(np.uint8) for of_peer in zip(*parts, strict=True)]

    def stand_in(self, sockets: list[socket.socket]) -> threading.Thread:
        """A thread that is all other ranks for one batch."""
        rows, counts = self.rows[-1], np.diff(np.searchsorted(self.asked[-1], np.arange(self.world + 1) * self.block))
        headers = [np.array([0, 0, -1, 0, r.shape[0], -1, 0]) for r in rows]  # row_requests.header_width(1)
        messages = [(headers, [h.nbytes for h in headers]), (rows, counts[1:] * 8)]
        if len(self.asked) == 2:
            messages.append((self.flags(), [a.shape[0] + b.shape[0] for a, b in zip(*self.rows, strict=True)]))

        def serve() -> None:
            for send, receive in messages:
                for s, message in zip(sockets, send, strict=True):
                    s.sendall(message.tobytes())
                for s, size in zip(sockets, receive, strict=True):
                    while size:
                        size -= len(s.recv(min(size, 1 << 20)))

        thread = threading.Thread(target=serve)
        thread.start()
        return thread


def measure(rank: OneRank, batches: int) -> tuple[list[list[float]], step_plan.StepPlan]:
    """For each batch, ms per million ids: to request, to plan, to make tensors; and the last finished step."""
    like, times, before = torch.empty(0, DIM), [], None
    rank.asked, rank.rows = [], []
    ours, theirs = zip(*(socket.socketpair() for _ in range(rank.world - 1)), strict=True)
    for s in ours:
        s.setblocking(False)
    plan = BatchPlan(RankMesh([None, *ours], 0), [ExchangeTables([0], [TABLE], rank.owners)], 600.0)
    memories = [np.zeros(0, dtype=np.int64)] * 2  # in turn, as pinned memory would be
    for number in range(batches + 2):
        values = rank.draw()
        thread = rank.stand_in(list(theirs))
        clock = [time.thread_time()]
        plan.request(0, [values])
        clock.append(time.thread_time())
        if memories[number % 2].shape[0] < plan.needed:
            memories[number % 2] = np.zeros(plan.needed * 5 // 4, dtype=np.int64)
        memory = memories[number % 2]
        clock.append(time.thread_time())
        _, read = plan.plan(Room(native_plan.address_of(memory), memory.shape[0]))
        (planned,) = read()
        clock.append(time.thread_time())
        arrays = _tensors(memory, planned.rows)
        values = step_plan.count_values({}, None)
        after = step_plan.plan_rows(number, arrays, values, planned.row_counts, planned.urgent_entries, like)
        if before is not None:
            step_plan.plan_gradients(before, _tensors(memory, planned.gradients), planned.gradient_counts)
        clock.append(time.thread_time())
        thread.join()
        if number > 1:
            times.append((np.diff(clock)[[0, 2, 3]] * 1e9 / rank.ids.per_rank).tolist())
        before, finished = after, before
    for s in (*ours, *theirs):
        s.close()
    assert finished is not None
    return times, finished


def _tensors(memory: np.ndarray, extents: Extents) -> list[torch.Tensor]:
    return split_arrays(torch.from_numpy(memory), extents.numbers, extents.begin, extents.end)


def row(world: int, zipf: float, times: list[list[float]], finished: step_plan.StepPlan) -> dict:
    ms = np.array(times)
    total = ms.sum(1)
    return {
        "ranks": world,
        "zipf": zipf,
        "ms_per_million_ids": float(np.median(total)),
        "min": float(total.min()),
        "max": float(total.max()),
        **dict(zip(("request", "plan", "make"), np.median(ms, 0).tolist(), strict=True)),
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
        "plan_tensors_bytes": sum(t.nbytes for t in tensors.values()),
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
    print(f"{'= request':>9} {'+ plan':>8} {'+ make':>7} {'unique':>9} {'colliding':>9}")
    for r in rows:
        print(
            f"{r['ranks']:>5} {r['zipf']:>5} {r['ms_per_million_ids']:>19.1f} {r['min']:>6.1f} {r['max']:>6.1f} "
            f"{r['request']:>9.1f} {r['plan']:>8.1f} {r['make']:>7.1f} {r['unique_rows']:>9} {r['colliding_rows']:>9}"
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
