"""Whole training steps on real TorchRec tables: freescale beside eager TorchRec and TorchRec's own pipelines.

    python benchmarks/step_torchrec.py [--quick] [--json FILE] [--ranks 2 4] [--links slow fast] [--sizes 8ms 45ms]
    python benchmarks/step_torchrec.py --device cpu --quick      (two gloo ranks, a few positions: no figures)

Ranks share one GPU under MPS, each with an equal share of its SMs. The model is a DistributedModelParallel: one
row-wise table (FBGEMM's fused row-wise Adagrad), a dense part in bfloat16 inside DDP, SGD. Two kinds of experiment:

    8ms, 45ms, 150ms   histories of equal length under a transformer; named by about what its dense part takes
    lognormal          the paper's experiment in the small: jagged HSTU (the example's fused attention) on lognormal
                       histories, median 1000, sigma 1, cap 21,000, 32 samples per rank (4 ranks: 400, 8000, 64)

Two links:

    slow    NCCL over sockets on loopback (NCCL_HOSTID makes it take the ranks for several hosts), about 1.2 GiB/s
    fast    NCCL 2.31 through device memory (NCCL_MULTI_RANK_GPU_ENABLE=1); --nccl names its library

Variants, in turns in the same processes, on the same batches:

    dense        the dense part alone, with its DDP and its optimizer on that link, on rows that are there already: the
                 limit of a step. Of lognormal batches, less what the slowest rank takes longer than the mean one
                 (measured rank by rank without DDP): the limit under perfect balance
    eager        eager TorchRec, dense part compiled by Inductor
    sparsedist   TorchRec's TrainPipelineSparseDist, dense part compiled
    pec          TorchRec's TrainPipelinePEC (1.9 and later), dense part compiled
    plain        freescale without a LookaheadLoader
    default      with a LookaheadLoader; no-overlap: with overlap=False; -c10d: over the group's own all-to-all instead
                 of what FREESCALE_TRANSPORT=auto selects
    collection   the default with the embedding collection compiled alone, and the dense part by Inductor; -inline:
                 without the pass move_background
    allreduce    the default with FREESCALE_DENSE=allreduce instead of DDP
    balance      the default with balance=True (lognormal only)

A figure is the mean step of a turn, on the compute stream from the end of the step before to its own end; median and
quartiles are over turns, of the slowest rank. Memory is the most that torch's allocator gave to that variant alone, of
the rank that needs the most. `check` compares each variant with uncompiled eager TorchRec after 8 steps in float32:
losses, table rows and dense parameters.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
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

NCCL = Path.home() / "nccl" / "libnccl.so.2"
SIZES = ("8ms", "45ms", "150ms", "lognormal")
LATE = "not done in time"
BALANCED = ("balance", "balance-c10d")
NOT_OURS = ("dense", "eager", "sparsedist", "pec")
PARTS = ("exposed", "straggler", "host_bound")  # of the meter, in the table
WIDTHS = (9, 17, 9, 14, 7, 14, 11, 11, 11)
HEADLINES = (
    "times_sparsedist_slow_8ms",
    "times_sparsedist_slow_45ms",
    "times_sparsedist_slow_lognormal",
    "times_sparsedist_fast_8ms",
    "times_sparsedist_fast_45ms",
    "times_sparsedist_fast_lognormal",
    "times_sparsedist_fast_lognormal_4_ranks",
    "times_sparsedist_worst",
    "step_over_limit_fast_8ms",
    "step_over_limit_fast_45ms",
    "step_over_limit_fast_150ms",
    "step_over_limit_fast_lognormal",
    "memory_over_sparsedist_worst",
    "max_abs_diff",
)


def experiment(name: str, world: int, device: str) -> Any:
    """The size of that name. The GPU holds as many samples with any number of ranks."""
    from step_torchrec_model import Size

    if device == "cpu":
        cap = 60 if name == "lognormal" else 0
        lengths = {"8ms": 8, "45ms": 16, "150ms": 32, "lognormal": 12}
        return Size(name, 4, lengths[name], 2_000, 16, 2, 1, cap, bfloat16=False)
    if name == "lognormal":
        samples, median, cap = (64, 400, 8_000) if world > 2 else (32, 1_000, 21_000)
        return Size(name, samples, median, 2_000_000, 512, 4, 4, cap)
    samples, length = {"8ms": (16, 2048), "45ms": (32, 4096), "150ms": (64, 5120)}[name]
    return Size(name, max(2 * samples // world, 1), length, 2_000_000, 256, 4, 4)


# ---- sets of processes -----------------------------------------------------------------------------------------------


def environment(number: int, world: int, args: Any, link: str) -> dict[str, str]:
    """Of a rank, before anything of CUDA, NCCL or TorchRec starts in it."""
    names = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    if args.device == "cpu":
        return names
    names |= {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // world)}
    names |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    if link == "slow":
        return names | {"NCCL_HOSTID": f"rank{number}"}
    preload = ":".join(filter(None, (args.nccl, os.environ.get("LD_PRELOAD"))))
    return names | {"LD_PRELOAD": preload, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}


class Ranks:
    """A set of ranks at work on a task, and what they have reported so far."""

    def __init__(self, world: int, task: Any, args: Any, deadline: float) -> None:
        self.world, self.task, self.args, self.deadline = world, task, args, deadline
        self.sizes: list[dict[str, Any]] = []
        self.checked: dict[str, float] | None = None
        self.failure = self.failed_at = ""
        self._at = [("start", "")] * world

    def run(self) -> None:
        from step_torchrec_rank import rank_main

        context = mp.get_context("spawn" if self.args.device == "cuda" else "forkserver")
        if self.args.device == "cpu":
            context.set_forkserver_preload(["torch._inductor.compile_fx"])  # no effect where a server runs already
        with tempfile.TemporaryDirectory() as folder:
            pipes, processes = [], []
            for number in range(self.world):
                ours, theirs = context.Pipe(duplex=False)
                arguments = (number, self.world, f"{folder}/store", self.task, theirs)
                processes.append(context.Process(target=rank_main, args=arguments, daemon=True))
                with mock.patch.dict(os.environ, environment(number, self.world, self.args, self.task.link)):
                    processes[-1].start()
                theirs.close()
                pipes.append(ours)
            try:
                self._listen(pipes)
                if self.failure == LATE:
                    for p in processes:
                        print(f"rank {processes.index(p)} of {self.world} is here:", file=sys.stderr, flush=True)
                        os.kill(p.pid, signal.SIGUSR1)
                        time.sleep(1)
            finally:
                for p in processes:
                    p.kill()
                    p.join(10)

    def _listen(self, pipes: list[Any]) -> None:
        done: set[int] = set()
        while len(done) < self.world and not self.failure:
            left = self.deadline - time.monotonic()
            ready = connection.wait([p for n, p in enumerate(pipes) if n not in done], timeout=max(left, 0))
            if not ready:
                self.failure, self.failed_at = LATE, self._at[0][0]
            for pipe in ready:
                number = pipes.index(pipe)
                try:
                    kind, *words = pipe.recv()
                except EOFError:
                    kind, words = "failed", ["the process died"]
                if kind == "done":
                    done.add(number)
                elif kind == "failed":
                    # the others fail with it, and may report first
                    self.failure, self.failed_at = f"rank {number}: {words[0]}", self._at[number][0]
                elif kind == "at":
                    self._progress(number, words[0], words[1])
                elif number == 0 and kind == "checked":
                    self.checked = words[0]
                elif number == 0 and kind == "size":
                    self.sizes.append(words[0])
                    show(words[0])

    def _progress(self, number: int, variant: str, size: str) -> None:
        new, self._at[number] = self._at[number] != (variant, size), (variant, size)
        if number == 0 and new:
            left = self.deadline - time.monotonic()
            print(f"  {self.task.link}, {size}: {variant} ({left:.0f} s left)", file=sys.stderr, flush=True)


def measure(world: int, link: str, args: Any, deadline: float, check: bool) -> dict[str, Any]:
    """All sizes. A variant that fails is omitted, and what is not done yet is done without it."""
    from step_torchrec_loops import VARIANTS, Task, why_not

    found: dict[str, Any] = {"sizes": [], "failed": {}, "mps": False, "checked": {}}
    refused = {v: why for v in args.variants if (why := why_not(VARIANTS[v], args.device))}
    found["failed"] |= refused
    variants = [v for v in args.variants if v not in refused]
    sizes = [experiment(name, world, args.device) for name in args.sizes]
    checked = check_size(args) if check else None
    while sizes:
        task = Task(args.device, link, sizes, {s.name: turns(s, args) for s in sizes}, variants, args.codegen, checked)
        with mps() if args.device == "cuda" else nullcontext(False) as under_mps:
            found["mps"] = under_mps
            if args.device == "cuda" and not under_mps:
                print("WITHOUT MPS: the ranks take turns on the GPU")
            ranks = Ranks(world, task, args, deadline)
            ranks.run()
        found["sizes"] += ranks.sizes
        found["checked"] |= ranks.checked or {}
        if not ranks.failure:
            break
        name = ranks.failed_at
        print(f"{world} ranks, {link}, {name}: {ranks.failure}", file=sys.stderr, flush=True)
        found["failed"][name] = ranks.failure
        if name not in variants or name == "dense" or time.monotonic() >= deadline:
            break
        variants = [v for v in variants if v != name]
        checked = checked if ranks.checked is None else None
        done = {s["size"] for s in ranks.sizes}
        sizes = [s for s in sizes if s.name not in done]
    return found


def check_size(args: Any) -> Any:
    from step_torchrec_model import Size

    samples, median, rows, dim = (4, 12, 500, 16) if args.device == "cpu" else (8, 100, 5_000, 64)
    return Size("check", samples, median, rows, dim, 2, 2, cap=6 * median, bfloat16=False)


def turns(size: Any, args: Any) -> tuple[int, int]:
    """Steps of a turn that count, and turns of each variant."""
    if args.device == "cpu":
        return 3, 1 if args.quick else 3
    steps = {"8ms": 30, "45ms": 12, "150ms": 6, "lognormal": 40}[size.name]
    return steps, args.rounds or (2 if args.quick or size.jagged else 5)


# ---- words and figures -----------------------------------------------------------------------------------------------


def limit_of(found: dict[str, Any], balanced: bool = False) -> float | None:
    """A step of the dense part with its DDP and its optimizer; `balanced`: had all ranks the same work."""
    dense = next((r["ms"] for r in found["rows"] if r["variant"] == "dense"), None)
    if dense is None or not balanced:
        return dense
    return dense - found["slowest_rank_ms"] + found["mean_rank_ms"]


def show(found: dict[str, Any]) -> None:
    by_name = {r["variant"]: r for r in found["rows"]}
    baseline, even = by_name.get("sparsedist"), limit_of(found, balanced=found["cap"] > 0)
    lengths = f"lognormal around {found['length']}, cap {found['cap']}" if found["cap"] else f"of {found['length']}"
    where = f"{found['size']}, {found['link']} link, {found['ranks']} ranks"
    print(f"\n{where}: {found['samples']} histories {lengths} per rank")
    columns = ("step ms", "quartiles", "/ limit", "sparsedist /", "GiB", "/ sparsedist", *PARTS)
    print(f"{'variant':14}" + "".join(f"{c:>{w}}" for c, w in zip(columns, WIDTHS, strict=True)))
    for r in found["rows"]:
        memory = r["peak_bytes"] if r["variant"] != "dense" else None
        cells = [
            f"{r['ms']:.2f}",
            "-".join(f"{q:.2f}" for q in r["quartiles"]),
            f"{r['ms'] / even:.3f}" if even else "-",
            f"{baseline['ms'] / r['ms']:.2f}" if baseline else "-",
            f"{memory / 2**30:.2f}" if memory else "-",
            f"{memory / baseline['peak_bytes']:.3f}" if memory and baseline and baseline["peak_bytes"] else "-",
            *(f"{r['meter_ms'][p]:.2f}" if "meter_ms" in r else "-" for p in PARTS),
        ]
        print(f"{r['variant']:14}" + "".join(f"{c:>{w}}" for c, w in zip(cells, WIDTHS, strict=True)))
    if found["cap"]:
        print(
            f"  dense part without DDP: slowest rank of each step {found['slowest_rank_ms']:.2f} ms, mean of the ranks "
            f"{found['mean_rank_ms']:.2f}; the limit is that of perfect balance, {even:.2f}"
        )
    for r in found["rows"]:
        if late := r.get("straggling"):
            words = ", ".join(f"{k.replace('_', ' ')} {share:.1%}" for k, share in late.items())
            print(f"  {r['variant']}: straggler share of a step: {words}")
    sys.stdout.flush()


def headlines(sizes: list[dict[str, Any]], checked: dict[str, float]) -> dict[str, float | None]:
    """None: not measured. Of 2 ranks, unless named; freescale as by default, of lognormal lengths with balance."""
    found: dict[str, Any] = dict.fromkeys(HEADLINES)
    memory, times = [], []
    for s in sizes:
        rows = {r["variant"]: r for r in s["rows"]}
        ours = rows.get("balance" if s["cap"] else "default")
        theirs = rows.get("sparsedist")
        ranks = "" if s["ranks"] == 2 else f"_{s['ranks']}_ranks"
        name = f"{s['link']}_{s['size']}{ranks}"
        if ours and theirs:
            times.append(theirs["ms"] / ours["ms"])
            found[f"times_sparsedist_{name}"] = times[-1]
            peaks = [r["peak_bytes"] for v, r in rows.items() if v not in NOT_OURS]
            memory += [peak / theirs["peak_bytes"] for peak in peaks if peak and theirs["peak_bytes"]]
        if ours and (limit := limit_of(s, balanced=s["cap"] > 0)):
            found[f"step_over_limit_{name}"] = ours["ms"] / limit
    found["times_sparsedist_worst"] = min(times, default=None)
    found["memory_over_sparsedist_worst"] = max(memory, default=None)
    found["max_abs_diff"] = max(checked.values(), default=None)
    return found


# ---- the program -----------------------------------------------------------------------------------------------------


def arguments() -> Any:
    p = parser(__doc__, "2 ranks, both links, 45 ms and lognormal, fewer variants and turns")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: gloo, a few positions, no figures")
    p.add_argument("--ranks", type=int, nargs="+", help="numbers of ranks (default 2)")
    p.add_argument("--links", nargs="+", choices=("slow", "fast"), help="default: both, fast where --nccl is there")
    p.add_argument("--sizes", nargs="+", choices=SIZES, help="default: all; --quick: 45ms lognormal")
    p.add_argument("--variants", nargs="+", help="default: all that this size has")
    p.add_argument("--codegen", choices=("inductor", "eager"), help="default: inductor; eager with --device cpu")
    p.add_argument("--rounds", type=int, help="turns of each variant (default 5; lognormal and --quick 2)")
    p.add_argument("--nccl", default=str(NCCL), help="library of NCCL 2.30 or later, for the fast link")
    p.add_argument("--no-check", action="store_true", help="do not compare with eager TorchRec first")
    p.add_argument("--seconds", type=float, default=540, help="after which no rank goes on (default 540)")
    args = p.parse_args()
    try:
        from step_torchrec_loops import VARIANTS
    except (ImportError, OSError) as error:
        p.exit(2, f"this needs TorchRec and FBGEMM: {error}\n")
    args.ranks = args.ranks or [2]
    if args.device == "cuda" and (why := why_no_gpu(args)):
        p.exit(2, why + "\n")
    args.codegen = args.codegen or ("inductor" if args.device == "cuda" else "eager")
    args.sizes = args.sizes or (["45ms", "lognormal"] if args.quick else list(SIZES))
    if args.device == "cpu":
        args.links = ["gloo"]
    elif not args.links:
        args.links = ["slow", *(["fast"] if Path(args.nccl).exists() else [])]
    if "fast" in args.links and not Path(args.nccl).exists():
        p.error(f"the fast link needs NCCL 2.30 or later as a library of its own; {args.nccl} is not there (--nccl)")
    quick = ["dense", "sparsedist", "default", "balance"]
    args.variants = args.variants or (quick if args.quick else list(VARIANTS))
    if unknown := [v for v in args.variants if v not in VARIANTS]:
        p.error(f"--variants: {', '.join(unknown)} is none of {', '.join(VARIANTS)}")
    if "dense" not in args.variants:
        args.variants.insert(0, "dense")
    return args


def why_no_gpu(args: Any) -> str:
    if not torch.cuda.is_available():
        return "this needs a GPU; --device cpu runs it in a tiny size"
    import fbgemm_gpu

    if getattr(fbgemm_gpu, "__variant__", "cuda") == "cpu":
        return "this FBGEMM has no CUDA kernels (fbgemm-gpu-cpu); --device cpu runs it in a tiny size"
    room = torch.cuda.get_device_properties(0).total_memory / 2**30
    if (most := max(args.ranks)) * 12 > room:
        return f"{most} ranks need about {12 * most} GiB on the GPU, which has {room:.0f}"
    return ""


def main() -> None:
    args = arguments()
    deadline = time.monotonic() + args.seconds
    # Compiled code of one set of ranks serves the next, and the next call.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), "freescale-step-torchrec")))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    result: dict[str, Any] = {"device": args.device, "sizes": [], "checked": {}, "failed": {}}
    for world in args.ranks:
        for link in args.links:
            if deadline - time.monotonic() < 20:
                result["failed"][f"{world} ranks, {link}"] = "no time left"
                continue
            found = measure(world, link, args, deadline, check=not args.no_check and not result["checked"])
            result["sizes"] += found["sizes"]
            result["checked"] |= found["checked"]
            result["failed"] |= {f"{world} ranks, {link}, {name}": why for name, why in found["failed"].items()}
            result |= {"mps": found["mps"], **headlines(result["sizes"], result["checked"])}
            write(args.json, result)
    if args.device == "cuda":
        import torchrec

        result = {"machine": machine() | {"torchrec": torchrec.__version__}, **result}
    write(args.json, result)
    for name, difference in result["checked"].items():
        print(f"{name}: at most {difference:.2g} from eager TorchRec after 8 steps in float32")
    print("\n" + "\n".join(f"{k}: {'-' if result.get(k) is None else f'{result[k]:.3g}'}" for k in HEADLINES))
    unexpected = [name for name in result["failed"] if not name.endswith(", pec")]
    print("\n".join(f"FAILED {name}: {why}" for name, why in result["failed"].items()))
    sys.exit(1 if unexpected else 0)


if __name__ == "__main__":
    main()
