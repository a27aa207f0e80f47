"""Whole training steps of several ranks that share one GPU: how close does a step come to its dense part alone?

    python benchmarks/step_gpu.py [--quick] [--json FILE] [--ranks 2] [--sizes 8ms 45ms] [--variants staged-ahead]

Ranks are processes under MPS, which this script starts and stops, each with an equal share of the SMs. NCCL takes them
for ranks of different hosts (NCCL_HOSTID) and connects them by sockets on loopback: its real kernels, and a slow link.
A step looks up one row-wise table (row-wise Adagrad), runs 4 blocks of HSTU in bfloat16 forward and backward, and Adam.
Histories are lognormal, all together about as many positions in every batch; ids follow Zipf's law, its exponent chosen
so that 12% of a batch's unique rows were in the batch before, too (`colliding` is what it turned out to be). The sizes
are named by about what the dense part takes with 2 ranks; with 1 and 4, the GPU holds as many positions. Gradients of
the dense part stay on their rank, so that the embedding exchange is alone on the wire.

    dense       the dense part alone, compiled by Inductor: same batches, rows already there, with its optimizer
    plain       ids, rows and gradients by NCCL's all-to-all, value by value, as TorchRec does; the dense part as above
    capture     freescale without passes: one graph, nothing planned ahead
    c10d        freescale over NCCL's all-to-all (gloo's with --device cpu); staged: over copy engines
    -ahead      with a LookaheadLoader; -balance: which moves samples between the ranks, too
    -planned    with LookaheadLoader(overlap=False): planned ahead, but rows and gradients travel in their own step
    -unmet      ranks do not synchronize before a step: what that takes. Not safe
    -tables     two further tables, each with an exchange of its own: what an exchange costs the host

All variants live in the same ranks and take turns, from the same weights every time. A step is the time between two
points of the compute stream; its median and quartiles are over all ranks and rounds. The host is at most two steps
ahead, so that host times per phase (next, forward, backward, optimizer; of the training thread) hold no wait for the
device. `dense` in a ratio is the slowest rank's in each step, since a synchronous step cannot be shorter; the others
wait for it in every variant. `busy` is the share of the time in which the mean rank's compute stream runs a kernel, by
the profiler on steps of their own; `longest` that of the rank with the most to compute in each step; `exposed` is
freescale's meter's. Losses and tables are compared: where the graphs are the same and only the transport differs, and
from round to round, every bit must be the same. (Not with --dense transformer on a GPU: the backward pass of softmax
attention adds up in any order there.)

What the host sets, steps of 8 ms above all, differs from start to start of the ranks by a tenth and more: --starts
takes the median of several.
"""

from __future__ import annotations

import itertools
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from multiprocessing import connection
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch  # noqa: E402

from command_line import parser  # noqa: E402
from gpu_machine import machine, mps, write  # noqa: E402
from step_gpu_model import EXAMPLES, Shape, Size, exponent_for  # noqa: E402
from step_gpu_rank import environment, rank_main  # noqa: E402
from step_gpu_variants import VARIANTS, Task  # noqa: E402

COLLISIONS = 0.12
# Of a rank of two: samples, mean length, steps of a block, blocks in a round. The host sets the small steps, and its
# speed comes and goes for a second on end: they take short turns, but many.
SIZES = {
    "cuda": {"8ms": (16, 768, 24, 5), "45ms": (16, 3584, 14, 1), "150ms": (32, 5120, 8, 1)},
    "cpu": {"8ms": (4, 12, 4, 1), "45ms": (4, 24, 4, 1), "150ms": (4, 48, 4, 1)},
}
QUICK = {
    "cuda": ["plain", "c10d-ahead", "staged", "staged-ahead", "staged-planned"],
    "cpu": ["plain", "capture", "c10d", "c10d-ahead", "c10d-planned", "c10d-ahead-balance"],
}
HEADLINES = (
    "step_over_dense_8ms",
    "step_over_dense_45ms",
    "step_over_dense_150ms",
    "times_plain_nccl_45ms",
    "host_ms_added",
    "compute_busy_45ms",
    "compute_busy_150ms",
    "balanced_busy_45ms",
    "balanced_busy_150ms",
    "lookahead_over_none_worst",
    "host_ms_per_further_exchange",
    "meeting_ms_4_ranks",
)


# ---- sets of processes -----------------------------------------------------------------------------------------------


def context_for(device: str) -> Any:
    """Fresh processes with a GPU, where a fork could not use CUDA; else forks of one that has torch loaded."""
    context = mp.get_context("spawn" if device == "cuda" else "forkserver")
    if device == "cpu":
        context.set_forkserver_preload(["torch._inductor.compile_fx"])  # no effect where a server runs already
    return context


class Ranks:
    """A set of ranks at work on a task, and what they have said so far."""

    def __init__(self, world: int, task: Task, deadline: float) -> None:
        self.world, self.task, self.deadline = world, task, deadline
        self.sizes: list[dict[str, Any]] = []
        self.compile_seconds: dict[str, float] = {}
        self.failure = ""  # of a rank, in words
        self.failed_at = ""  # the variant that it was training
        self._at = [""] * world

    def run(self) -> None:
        context = context_for(self.task.device)
        with tempfile.TemporaryDirectory() as folder:
            pipes, processes = [], []
            for rank in range(self.world):
                ours, theirs = context.Pipe(duplex=False)
                arguments = (rank, self.world, f"{folder}/store", self.task, theirs)
                processes.append(context.Process(target=rank_main, args=arguments, daemon=True))
                with mock.patch.dict(os.environ, environment(rank, self.world, self.task.device)):
                    processes[-1].start()
                theirs.close()
                pipes.append(ours)
            try:
                self._listen(pipes)
            finally:
                for p in processes:
                    p.kill()
                    p.join(10)

    def _listen(self, pipes: list[Any]) -> None:
        done: set[int] = set()
        while len(done) < self.world and not self.failure:
            left = self.deadline - time.monotonic()
            ready = connection.wait([p for r, p in enumerate(pipes) if r not in done], timeout=max(left, 0))
            if not ready:
                self.failure, self.failed_at = "not done in time", self._at[0]
            for pipe in ready:
                rank = pipes.index(pipe)
                try:
                    kind, *words = pipe.recv()
                except EOFError:
                    kind, words = "failed", ["the process died"]
                if kind == "done":
                    done.add(rank)
                else:
                    self._heard(rank, kind, words)

    def _heard(self, rank: int, kind: str, words: list[Any]) -> None:
        if kind == "failed":
            self.failure, self.failed_at = f"rank {rank}: {words[0]}", self._at[rank]
        elif kind == "at":
            self._at[rank] = words[0]
        elif rank == 0 and kind == "compiled":
            self.compile_seconds[words[0]] = words[1]
            print(f"  {words[0]}: ready after {words[1]:.1f} s", file=sys.stderr, flush=True)
        elif rank == 0 and kind == "size":
            self.sizes.append(words[0])
            show(words[0])


def measure(world: int, task: Task, seconds: float) -> dict[str, Any]:
    """All sizes. A variant that fails is left out, and the sizes that are not done yet are done without it."""
    found: dict[str, Any] = {"sizes": [], "failed": {}, "compile_seconds": {}, "mps": False}
    deadline = time.monotonic() + seconds
    while task.sizes:
        with mps() if task.device == "cuda" else nullcontext(False) as under_mps:
            found["mps"] = under_mps
            if task.device == "cuda" and not under_mps:
                print("WITHOUT MPS: the ranks take turns on the GPU")
            ranks = Ranks(world, task, deadline)
            ranks.run()
        found["sizes"] += ranks.sizes
        found["compile_seconds"] |= ranks.compile_seconds
        if not ranks.failure:
            break
        print(f"{world} ranks, {ranks.failed_at or 'start'}: {ranks.failure}", file=sys.stderr, flush=True)
        found["failed"][ranks.failed_at or "start"] = ranks.failure
        task.sizes = {name: s for name, s in task.sizes.items() if name not in {d["size"] for d in ranks.sizes}}
        if ranks.failed_at in ("", "dense") or time.monotonic() >= deadline:
            break
        task.variants.remove(ranks.failed_at)
    return found


# ---- words and figures -----------------------------------------------------------------------------------------------


def show(found: dict[str, Any]) -> None:
    by_name = {r["variant"]: r for r in found["rows"]}
    dense = by_name["dense"]["slowest_rank_ms"]
    colliding = next((r["colliding_share"] for r in found["rows"] if "colliding_share" in r), None)
    share = "" if colliding is None else f", colliding {colliding:.1%}"
    print(
        f"\n{found['size']}, {found['ranks']} ranks: {found['samples']} samples and {found['positions']} positions per "
        f"rank, Zipf {found['zipf']:.2f}{share}; dense part of the slowest rank {dense:.2f} ms"
    )
    phases = "".join(f"{p:>10}" for p in ("next", "forward", "backward", "optimizer", "host sum"))
    print(f"{'variant':22}{'step ms':>9}{'quartiles':>17}{'/ dense':>8}{phases}{'busy':>7}{'longest':>9}{'exposed':>9}")
    for r in found["rows"]:
        low, high = r["step_ms_quartiles"]
        host = "".join(f"{ms:>10.2f}" for ms in r["host_ms"].values())
        busy, longest = ("-" if s is None else f"{s:.1%}" for s in (r["compute_busy"], r["compute_busy_longest"]))
        exposed = f"{r['exposed_ms']:.2f}" if "exposed_ms" in r else "-"
        print(
            f"{r['variant']:22}{r['step_ms']:>9.2f}{f'{low:.2f}-{high:.2f}':>17}{r['step_ms'] / dense:>8.3f}{host}"
            f"{busy:>7}{longest:>9}{exposed:>9}"
        )
    skew = by_name["dense"]["host_skew_ms"]
    print(f"  dense: the slowest rank's host takes {skew:.2f} ms longer than the mean one's")
    for r in found["rows"]:
        if waits := {name: round(ms, 2) for name, ms in r.get("waits_ms", {}).items() if ms >= 0.005}:
            print(f"  {r['variant']} waits, ms: {waits}")
        if met := r.get("meeting_ms"):
            print(
                f"  {r['variant']}: the ranks meet in {met['mean']:.2f} ms (mean) or {met['median']:.2f} (median), "
                f"waiting for the last rank included; that one in {met['last_rank']:.2f} (median). The compute stream "
                f"stands still for {met['stalled']:.2f} of it (mean). Besides, the slowest rank's host takes "
                f"{r['host_skew_ms']:.2f} ms longer than the mean one's"
            )
        for rank, places in enumerate(r.get("idle_ms", [])):
            if listed := ", ".join(f"{ms:.2f} at {place}" for place, ms in places.items() if ms >= 0.2):
                print(f"  {r['variant']}, rank {rank}: compute stream idle, ms: {listed}")
        if late := r.get("straggling"):
            print(
                f"  {r['variant']}: ranks straggle {late['predicted_before']:.1%} of a step as the batches come, "
                f"{late['predicted_after']:.1%} balanced as predicted, {late['measured']:.1%} as measured"
            )
        if packing := r.get("packing_ms"):
            print(f"  {r['variant']} packs and unpacks: {packing:.3f} ms of the GPU's time, {packing / dense:.2%}")
    checks = found["checks"]
    for name, same in checks["same_bits"].items():
        if not same:
            print(f"  DIFFERENT BITS: {name}")
    if checks["loss_difference"]:
        listed = ", ".join(f"{name} {d:.2g}" for name, d in checks["loss_difference"].items())
        print(f"  largest difference of a loss from {checks['loss_difference_from']}'s: {listed}", flush=True)


def headlines(sizes: list[dict[str, Any]]) -> dict[str, float | None]:
    """Medians of those of each start."""
    starts = dict.fromkeys(s["start"] for s in sizes)
    each = [headlines_of_start([s for s in sizes if s["start"] == start]) for start in starts]
    measured = {name: [h[name] for h in each if h[name] is not None] for name in HEADLINES}
    return {name: statistics.median(values) if values else None for name, values in measured.items()}


def headlines_of_start(sizes: list[dict[str, Any]]) -> dict[str, Any]:
    """Of 2 ranks, unless named. None: not measured. Look-ahead is with the faster setting of
    `overlap`. How busy the compute stream is: of the fastest, balanced or not; and
    balanced. (As the batches come, a rank has nothing to do while another has more.) A meeting is the last rank's,
    which waits for nobody; of the slowest variant."""
    two = {s["size"]: {r["variant"]: r for r in s["rows"]} for s in sizes if s["ranks"] == 2}
    found: dict[str, Any] = dict.fromkeys(HEADLINES)
    over_none = []
    for name, rows in two.items():
        ahead = []
        for v in ("c10d", "staged"):
            with_it = [rows[f"{v}-{how}"] for how in ("ahead", "planned") if f"{v}-{how}" in rows]
            if v in rows and with_it:
                over_none.append(min(r["step_ms"] for r in with_it) / rows[v]["step_ms"])
            ahead += with_it
        if not ahead:
            continue
        best = min(ahead, key=lambda r: r["step_ms"])
        if f"step_over_dense_{name}" in found:
            found[f"step_over_dense_{name}"] = best["step_ms"] / rows["dense"]["slowest_rank_ms"]
        if name == "8ms":
            found["host_ms_added"] = best["host_ms"]["sum"] - rows["dense"]["host_ms"]["sum"]
        if name in ("45ms", "150ms"):
            balanced = [r for v, r in rows.items() if v.endswith("-balance")]
            found[f"compute_busy_{name}"] = min((best, *balanced), key=lambda r: r["step_ms"])["compute_busy"]
            found[f"balanced_busy_{name}"] = max((r["compute_busy"] for r in balanced), default=None)
        if name == "45ms":
            found["times_plain_nccl_45ms"] = rows["plain"]["step_ms"] / best["step_ms"] if "plain" in rows else None
        added = [
            (rows[f"{v}-tables"]["host_ms"]["sum"] - r["host_ms"]["sum"]) / VARIANTS[f"{v}-tables"].further_tables
            for v, r in rows.items()
            if f"{v}-tables" in rows
        ]
        if name == "8ms":
            found["host_ms_per_further_exchange"] = max(added, default=None)
    four = (r for s in sizes if s["ranks"] == 4 for r in s["rows"] if "meeting_ms" in r)
    found["meeting_ms_4_ranks"] = max((r["meeting_ms"]["last_rank"] for r in four), default=None)
    found["lookahead_over_none_worst"] = max(over_none, default=None)
    return found


# ---- the program -----------------------------------------------------------------------------------------------------


def size_of(text: str) -> tuple[str, tuple[int, int, int, int] | None]:
    """`45ms`, or `NAME=SAMPLESxLENGTH` to try another one."""
    name, _, numbers = text.partition("=")
    if not numbers:
        return name, None
    samples, length = (int(n) for n in numbers.split("x"))
    return name, (samples, length, 10, 1)


def arguments() -> Any:
    p = parser(__doc__, "2 ranks, 8 and 45 ms, fewer variants and steps")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: gloo, a few positions, no figures")
    p.add_argument("--ranks", type=int, nargs="+", help="numbers of ranks (default 2 1 4)")
    p.add_argument("--sizes", nargs="+", help="8ms 45ms 150ms (default: all), or NAME=SAMPLESxLENGTH")
    p.add_argument("--variants", nargs="+", choices=[v for v in VARIANTS if v != "dense"], help="beside dense")
    p.add_argument("--dense", choices=("hstu", "transformer"), help="default: hstu where its fused kernel is there")
    p.add_argument("--codegen", choices=("inductor", "eager"), help="default: inductor; eager with --device cpu")
    p.add_argument("--rounds", type=int, help="turns of each variant (default 4, of 8 ms 5 times as many; quick 2)")
    p.add_argument("--steps", type=int, help="of a turn that count (default: by size)")
    p.add_argument("--starts", type=int, default=1, help="of the ranks, whose speed differs from start to start")
    p.add_argument("--seconds", type=float, default=540, help="after which no rank goes on (default 540)")
    p.add_argument("--host-profile", metavar="FILE", help="write there what functions rank 0's threads spend time in")
    args = p.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        p.error("this needs a GPU; --device cpu runs it in a tiny size")
    fused = args.device == "cpu" or (EXAMPLES / "hstu_triton.py").exists()
    args.dense = args.dense or ("hstu" if fused else "transformer")
    args.codegen = args.codegen or ("inductor" if args.device == "cuda" else "eager")
    args.rounds = args.rounds or (2 if args.quick else 4)
    args.ranks = args.ranks or ([2] if args.quick else [2, 1, 4])
    legal = [v for v in VARIANTS if args.device == "cuda" or "staged" not in v]  # staged copies between GPUs
    if args.dense == "transformer":
        legal = [v for v in legal if "balance" not in v]  # histories of one length
    every = [v.name for v in VARIANTS.values() if v.synchronizes and not v.compress and not v.further_tables]
    wanted = args.variants or (QUICK[args.device] if args.quick else every)
    args.variants = ["dense", *(v for v in legal if v in wanted and v != "dense")]
    known = SIZES[args.device]
    chosen = [size_of(s) for s in args.sizes or (["8ms", "45ms"] if args.quick else known)]
    if unknown := [name for name, numbers in chosen if numbers is None and name not in known]:
        p.error(f"--sizes: {', '.join(unknown)} is none of {', '.join(known)}")
    args.sizes = {name: numbers or known[name] for name, numbers in chosen}
    return args


def task_for(args: Any, world: int) -> Task:
    on_gpu = args.device == "cuda"
    further = max(VARIANTS[v].further_tables for v in args.variants)
    shape = Shape(8_000_000, 512, 8, 4, 512, args.dense, further, 400_000)
    if not on_gpu:
        shape = Shape(4_000, 16, 2, 1, 8, args.dense, further, 1_000)
    sizes = {}
    for name, (samples, length, steps, blocks) in args.sizes.items():
        size = Size(name, max(2 * samples // world, 1), length)
        rounds = args.rounds * (1 if args.quick else blocks)
        steps = args.steps or (max(steps // 2, 4) if args.quick else steps)
        sizes[name] = size, exponent_for(COLLISIONS, shape.rows, size.positions, world), steps, rounds
    return Task(args.device, shape, sizes, list(args.variants), args.codegen, args.host_profile)


def main() -> None:
    args = arguments()
    began = time.monotonic()
    # Compiled code of one set of ranks serves the next, and the next call.
    folder = Path(tempfile.gettempdir(), "freescale-step-gpu")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    result: dict[str, Any] = {"device": args.device, "dense": args.dense, "sizes": [], "failed": {}}
    for file in filter(None, (args.host_profile,)):
        Path(file).write_text("")
    for start, world in itertools.product(range(args.starts), args.ranks):
        left = args.seconds - (time.monotonic() - began)
        if left < 20:
            result["failed"][f"{world} ranks"] = "no time left"
            continue
        found = measure(world, task_for(args, world), left)
        result["sizes"] += [{"start": start, **size} for size in found["sizes"]]
        result["failed"] |= {f"{world} ranks, {name}": why for name, why in found["failed"].items()}
        result |= {"mps": found["mps"], **headlines(result["sizes"])}
        result.setdefault("compile_seconds", {})[str(world)] = found["compile_seconds"]
        write(args.json, result)
    if args.device == "cuda":
        result = {"machine": machine(), **result}
    write(args.json, result)
    print("\n" + "\n".join(f"{k}: {'-' if result.get(k) is None else f'{result[k]:.3f}'}" for k in HEADLINES))
    if args.starts > 1:
        for start in range(args.starts):
            own = headlines_of_start([s for s in result["sizes"] if s["start"] == start])
            print(f"start {start}: " + ", ".join(f"{k} {v:.3f}" for k, v in own.items() if v is not None))
    bits = [(s["size"], *check) for s in result["sizes"] for check in s["checks"]["same_bits"].items()]
    different = [f"DIFFERENT BITS {size}, {name}" for size, name, same in bits if not same]
    failed = [f"FAILED {name}: {why}" for name, why in result["failed"].items()]
    print("\n".join(failed + different))
    sys.exit(1 if failed or different else 0)


if __name__ == "__main__":
    main()
