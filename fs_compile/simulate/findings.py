"""Summarize a study: headlines, the gain of each part, where freescale is not worth it; and all as text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import numpy as np

from freescale.simulate.events import Compute, Launch, Wait
from freescale.simulate.study import AXES, Outcome, Point, Study
from freescale.simulate.variants import EVERYTHING, TORCHREC
from freescale.simulate.workload import Generated

PARTS = ("balance", "look_ahead", "copies")
PART_WORDS = {
    "balance": "balance", "look_ahead": "look-ahead with priorities", "copies": "SM-free copies",
    "the rest": "no part enabled",
}  # fmt: skip
WORTH_IT = 0.02  # smaller relative gains count as none


def bubbles_ms(o: Outcome) -> float:
    return o.exposed_ms + o.straggler_ms


def named(outcomes: Sequence[Outcome], name: str) -> Outcome:
    return next(o for o in outcomes if o.variant.name == name)


def before_and_after(outcomes: Sequence[Outcome]) -> tuple[Outcome, Outcome]:
    """Synchronous TorchRec, and freescale with all parts."""
    return named(outcomes, TORCHREC[0].name), named(outcomes, EVERYTHING.name)


def less(before: float, after: float) -> float:
    return 1 - after / before if before else 0.0


def headlines(outcomes: Sequence[Outcome]) -> dict[str, float]:
    before, after = before_and_after(outcomes)
    return {
        "bubble_reduction": less(bubbles_ms(before), bubbles_ms(after)),
        "bubble_share_reduction": less(before.bubbles, after.bubbles),
        "straggler_before": before.straggler,
        "straggler_after": after.straggler,
        "exposed_reduction": less(before.exposed_ms, after.exposed_ms),
        "step_reduction": less(before.step_ms, after.step_ms),
    }


def by_parts(outcomes: Sequence[Outcome]) -> dict[tuple[bool, ...], Outcome]:
    """freescale's outcomes, by which parts are enabled."""
    return {tuple(getattr(o.variant, p) for p in PARTS): o for o in outcomes if o.variant.program is None}


def part_shares(outcomes: Sequence[Outcome]) -> dict[str, dict[str, float]]:
    """Milliseconds of bubbles and of the step that each part saves: its Shapley value (mean over all orders of adding
    the parts), so the parts add up. `the rest` is what freescale saves with no part enabled."""
    of = by_parts(outcomes)
    found: dict[str, dict[str, float]] = {}
    orders = list(permutations(PARTS))
    for part in PARTS:
        saved = {"bubbles_ms": 0.0, "step_ms": 0.0}
        for order in orders:
            on = set(order[: order.index(part)])
            without, with_it = (of[tuple(p in s for p in PARTS)] for s in (on, on | {part}))
            saved["bubbles_ms"] += (bubbles_ms(without) - bubbles_ms(with_it)) / len(orders)
            saved["step_ms"] += (without.step_ms - with_it.step_ms) / len(orders)
        found[part] = saved
    before, none = before_and_after(outcomes)[0], of[False, False, False]
    rest = bubbles_ms(before) - bubbles_ms(none)
    found["the rest"] = {"bubbles_ms": rest, "step_ms": before.step_ms - none.step_ms}
    return found


def best_torchrec(outcomes: Sequence[Outcome]) -> Outcome:
    """The fastest of TorchRec's variants. PEC is in TorchRec since 1.9, for row-wise tables on GPUs."""
    known = {v.name for v in TORCHREC}
    return min((o for o in outcomes if o.variant.name in known), key=lambda o: o.step_ms)


def pays(outcomes: Sequence[Outcome]) -> bool:
    return less(best_torchrec(outcomes).step_ms, before_and_after(outcomes)[1].step_ms) >= WORTH_IT


def verdict(outcomes: Sequence[Outcome]) -> str:
    ours, theirs = before_and_after(outcomes)[1], best_torchrec(outcomes)
    gain = less(theirs.step_ms, ours.step_ms)
    steps = f"{ours.step_ms:.1f} ms per step, {theirs.variant.name}: {theirs.step_ms:.1f} ms"
    if gain >= WORTH_IT:
        return f"freescale is worth it here: {steps} ({gain:.1%} less)"
    return f"freescale is NOT worth it here: {steps} ({abs(gain):.1%} {'less' if gain > 0 else 'more'})"


def parts_that_do_not_pay(outcomes: Sequence[Outcome]) -> list[str]:
    """One sentence for each part that can be disabled without a longer step."""
    everything, found = before_and_after(outcomes)[1], []
    for part in PARTS:
        without = by_parts(outcomes).get(tuple(p != part for p in PARTS))
        if without is not None and less(without.step_ms, everything.step_ms) < WORTH_IT / 4:
            found.append(
                f"NOT worth it here: {PART_WORDS[part]} ({without.step_ms:.1f} ms per step without, "
                f"{everything.step_ms:.1f} ms with)"
            )
    return found


def row(o: Outcome) -> dict[str, Any]:
    return {
        "variant": o.variant.name,
        "step_ms": o.step_ms,
        "compute_ms": o.compute_ms,
        "exposed_ms": o.exposed_ms,
        "straggler_ms": o.straggler_ms,
        "exposed_share": o.exposed,
        "straggler_share": o.straggler,
        "bubble_share": o.bubbles,
        "program": [_in_words(i) for i in o.program],
    }


def _in_words(i: Compute | Launch | Wait) -> str:
    if isinstance(i, Compute):
        return f"compute {i.per_token:.1%} of the work per token, {i.per_square:.1%} of that per square"
    of = {0: "", 1: " of the next batch", -1: " of the previous batch"}[i.of]
    return f"{'launch' if isinstance(i, Launch) else 'wait for'} {i.what}{of}"


def point_row(p: Point) -> dict[str, Any]:
    found = [{k: v for k, v in row(o).items() if k != "program"} for o in p.outcomes]
    return {"axis": p.axis, "value": p.value, "pays": pays(p.outcomes), "rows": found} | headlines(p.outcomes)


def described(study: Study) -> str:
    w, c = study.source.workload, study.cluster
    counts = study.batches(False).counts[1:]
    colliding = np.mean([(x.urgent / np.maximum(x.unique, 1)).mean() for x in counts])
    repeats = np.mean([(x.values / np.maximum(x.unique, 1)).mean() for x in counts])
    tokens = study.source.lengths(0).sum() / w.ranks
    ids = (
        f"Zipf ids with exponent {study.source.exponent:.2f} over {w.rows:g} rows"
        if isinstance(study.source, Generated)
        else f"recorded ids of {w.rows} rows"
    )
    if isinstance(study.source, Generated) and abs(colliding - w.collision) > 0.1 * max(w.collision, 0.01):
        ids += f" (NOT --collision {w.collision:.1%}, which --rows {w.rows:g} does not allow)"
    planned = "all rows" if study.owners == w.ranks else f"a sample: the rows of {study.owners} owners"
    return "\n".join(
        [
            f"SIMULATED, not measured: {w.ranks} ranks, {c.name}, {c.ranks_per_host} ranks per host, "
            f"{study.steps} steps, seed {w.seed}",
            f"  batches   {w.batch} samples per rank, histories up to {w.cap}, {tokens:,.0f} tokens per rank; {ids}; "
            f"{colliding:.1%} of a rank's unique rows collide, {repeats:.2f} values per unique row",
            f"  plans     counted for every rank and step, with the planner's row splits, for {planned}",
            "  balance   freescale's balancer, with its cost fitted to the simulated times",
            f"  order     from freescale's passes on the compiled graphs of a model with {c.layers} HSTU blocks",
            f"  compute   {c.seconds_per_token:.3g} s per token + {c.seconds_per_token_squared:.3g} s per token squared"
            f"; jitter {c.jitter:.1%}",
            f"  links     {c.inside_gb_per_s:g} GB/s inside a host, {c.between_gb_per_s:g} between hosts, "
            f"{c.copy_engine_gb_per_s:g} to host memory; {c.latency_us:g} us + {c.message_us:g} us per peer",
            f"  tax       kernel-based collectives slow compute by {c.sm_tax:.1%}, copies by {c.copy_tax:.1%}",
            "  PEC       Prioritized Embedding Communication, a TorchRec pipeline since 1.9: the next batch's values "
            "that this batch does not update are sent during this step",
            "  omitted   table lookups and updates, dense gradient bytes, the data loader (docs/simulate.md)",
        ]
    )


def table(outcomes: Sequence[Outcome]) -> str:
    wide = max(len(o.variant.name) for o in outcomes) + 2
    lines = [f"{'':<{wide}}{'step ms':>9}{'compute':>9}{'exposed':>9}{'straggler':>11}{'bubbles':>9}{'straggler':>11}"]
    lines[0] += f"{'exposed':>9}"
    for o in outcomes:
        lines.append(
            f"{o.variant.name:<{wide}}{o.step_ms:>9.1f}{o.compute_ms:>9.1f}{o.exposed_ms:>9.1f}{o.straggler_ms:>11.1f}"
            f"{o.bubbles:>9.1%}{o.straggler:>11.1%}{o.exposed:>9.1%}"
        )
    return "\n".join(lines)


def shares(outcomes: Sequence[Outcome]) -> str:
    found, (before, after) = part_shares(outcomes), before_and_after(outcomes)
    bubbles, step = bubbles_ms(before) - bubbles_ms(after), before.step_ms - after.step_ms
    lines = ["savings of each part, of bubbles and of the step (mean over all orders of adding them):"]
    for name, saved in found.items():
        of_bubbles, of_step = saved["bubbles_ms"] / (bubbles or 1), saved["step_ms"] / (step or 1)
        words = PART_WORDS[name]
        lines.append(
            f"  {words:<28}{saved['bubbles_ms']:>8.1f} ms{of_bubbles:>8.1%}{saved['step_ms']:>9.1f} ms{of_step:>8.1%}"
        )
    no_part = by_parts(outcomes)[False, False, False]
    lines.append(
        f"  (no part enabled: one compiled graph that sends each row once and waits less often; straggler "
        f"{before.straggler_ms - no_part.straggler_ms:.1f} ms, exposed {before.exposed_ms - no_part.exposed_ms:.1f} ms)"
    )
    return "\n".join(lines)


def headline_lines(outcomes: Sequence[Outcome]) -> str:
    h = headlines(outcomes)
    return "\n".join(
        [
            f"bubbles, ms per step: {h['bubble_reduction']:.1%} less than synchronous TorchRec "
            f"(as a share of the shorter step: {h['bubble_share_reduction']:.1%} less)",
            f"straggler share fell from {h['straggler_before']:.1%} to {h['straggler_after']:.1%}; exposed time "
            f"{h['exposed_reduction']:.1%} less; step {h['step_reduction']:.1%} less",
        ]
    )


def sweep_table(points: Sequence[Point]) -> str:
    names = [o.variant.name.replace("TorchRec, ", "") for o in points[0].outcomes]
    lines = [f"{AXES[points[0].axis][0]}: step ms and bubbles"]
    lines.append(f"{'':>10}" + "".join(f"{name:>22}" for name in names) + f"{'fewer bubbles':>14}")
    for p in points:
        cells = "".join(f"{f'{o.step_ms:.1f}  {o.bubbles:.1%}':>22}" for o in p.outcomes)
        note = "" if pays(p.outcomes) else "  not worth it"
        lines.append(f"{p.value:>10g}{cells}{headlines(p.outcomes)['bubble_reduction']:>14.1%}{note}")
    return "\n".join(lines)
