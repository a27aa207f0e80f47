"""What FREESCALE_RECORD costs a step: the time of the recording calls themselves.

    python benchmarks/record_cost.py [--quick] [--json FILE]

A step differs from the next by far more than recording takes, so steps with and without it cannot tell. Instead, two
real ranks train (the model of balance_train.py: two tables, HSTU blocks, balanced batches, gloo), and every call of the
recorder is timed where it happens:

    training thread   wall time of the calls that queue steps and plans
    planning thread   the same of those that queue what the balancer did
    writing thread    its CPU time: it turns what is queued into lines of JSON and writes them, once a second. It runs
                      beside the training thread, but takes Python's lock meanwhile

`share` is all three over the median step of this run, as if the threads had only one core. Steps that compile do not
count. `short` is the same for a step of 12.3 ms, the shortest whole step that was measured on an H200
(docs/simulate.md, `host_ms`), with what the writing thread takes if so many of this run's steps are queued as are in a
second then.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import balance_train
from command_line import parser

SHORT_STEP_MS = 12.3
REPEATS = 9
THREADS = ("training", "planning", "writing")


class Spent:
    """Seconds of recording calls, by thread."""

    def __init__(self) -> None:
        self.seconds, self.calls = dict.fromkeys(THREADS, 0.0), dict.fromkeys(THREADS, 0)
        self.queued: list[tuple[Any, ...]] = []  # calls and their arguments

    def timed(self, function: Callable[..., Any], clock: Callable[[], float]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            began = clock()
            result = function(*args, **kwargs)
            took, thread = clock() - began, threading.current_thread()
            name = "training" if thread is threading.main_thread() else "planning"
            name = "writing" if thread.name == "freescale-record" else name
            self.seconds[name] += took
            self.calls[name] += 1
            if function.__name__ != "flush":
                self.queued.append((function.__name__, *args[1:]))
            return result

        return call


def written_per_step(recorder: Any, queued: list[tuple[Any, ...]], steps: int) -> float:
    """Seconds of CPU that the writing thread takes for each of as many steps as are in a second, if they are short."""
    many, took = round(1e3 / SHORT_STEP_MS), []
    for _ in range(REPEATS):
        for name, *args in (queued * (many // steps + 1))[: len(queued) * many // steps]:
            getattr(type(recorder), name).__wrapped__(recorder, *args)
        began = time.thread_time()
        type(recorder).flush.__wrapped__(recorder)
        took.append((time.thread_time() - began) / many)
    return statistics.median(took)


def rank_main(rank: int, folder: str, steps: int, codegen: str) -> None:
    import torch
    import torch.distributed as dist

    import freescale
    from freescale.runtime import recording

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=balance_train.RANKS)
    spent, kind = Spent(), recording.Recorder
    for name in ("add", "add_balance", "_add_step", "flush"):
        clock = time.thread_time if name == "flush" else time.perf_counter
        setattr(kind, name, spent.timed(getattr(kind, name), clock))
    model, run = balance_train.build(codegen)
    for count, seed in ((4, 9), (steps, 1)):  # the first compile
        spent.__init__()
        freescale.meter.clear()
        data = balance_train.batches("lognormal", rank, count, seed)
        for _ in balance_train.loop(model, run, freescale.LookaheadLoader(data, run, balance=True)):
            pass
    time.sleep(1.5)  # what was queued is written
    file = next(Path(folder, "record").glob(f"*-rank{rank:05d}.jsonl"))
    median = statistics.median(s["seconds"] for s in freescale.meter.steps())
    found = {"rank": rank, "steps": steps, "step_ms": 1e3 * median, "bytes_per_step": file.stat().st_size / (steps + 4)}
    found |= {f"{n}_us": 1e6 * spent.seconds[n] / steps for n in THREADS}
    (recorder,) = recording._recorders.values()
    found["writing_short_us"] = 1e6 * written_per_step(recorder, spent.queued, steps)
    found |= {f"{n}_calls": spent.calls[n] / steps for n in THREADS}
    Path(folder, f"found{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measured(steps: int, codegen: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FREESCALE_RECORD"] = str(Path(folder, "record"))  # for the ranks
        balance_train.in_ranks(rank_main, folder, steps, codegen)
        return [json.loads(Path(folder, f"found{rank}.json").read_text()) for rank in range(balance_train.RANKS)]


def main() -> None:
    args = parser(__doc__, "24 steps without code generation").parse_args()
    rows = measured(24, "eager") if args.quick else measured(120, "inductor")
    print(f"{'rank':>4} {'step ms':>8}" + "".join(f"{n + ' us':>13}" for n in THREADS), end="")
    print(f"{'share':>9}{'writing, short':>16}{'share, short':>14}")
    for r in rows:
        queued = r["training_us"] + r["planning_us"]
        r["share"] = (queued + r["writing_us"]) / r["step_ms"] / 1e3
        r["share_of_short_step"] = (queued + r["writing_short_us"]) / SHORT_STEP_MS / 1e3
        cells = "".join(f"{r[f'{n}_us']:>13.1f}" for n in THREADS) + f"{r['share']:>9.3%}"
        cells += f"{r['writing_short_us']:>16.1f}{r['share_of_short_step']:>14.3%}"
        print(f"{r['rank']:>4} {r['step_ms']:>8.1f}{cells}")
    result = {"record_share": max(r["share"] for r in rows), "rows": rows}
    result |= {"record_share_of_short_step": max(r["share_of_short_step"] for r in rows), "quick": args.quick}
    here, short = result["record_share"], result["record_share_of_short_step"]
    print(f"recording takes at most {here:.3%} of a step here, {short:.3%} of one of {SHORT_STEP_MS} ms")
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
