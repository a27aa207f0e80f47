"""What the outcomes of a study say: headlines, what each part brings, where freescale does not pay. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

from freescale.simulate.events import Compute, Launch, Wait
from freescale.simulate.study import Outcome
from freescale.simulate.variants import EVERYTHING, TORCHREC

PARTS = ("balance", "look_ahead", "copies")
PART_WORDS = {"balance": "balance", "look_ahead": "look-ahead with priorities", "copies": "SM-free copies"}
WORTH_IT = 0.02  # a step that is shorter by less than this share is as long


def bubbles_ms(o: Outcome) -> float:
    return o.exposed_ms + o.straggler_ms


def named(outcomes: Sequence[Outcome], name: str) -> Outcome:
    return next(o for o in outcomes if o.variant.name == name)


def before_and_after(outcomes: Sequence[Outcome]) -> tuple[Outcome, Outcome]:
    """Synchronous TorchRec, and freescale with everything."""
    return named(outcomes, TORCHREC[0].name), named(outcomes, EVERYTHING.name)


def less(before: float, after: float) -> float:
    """The share by which it fell."""
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
    """freescale's, by which of its parts are on."""
    return {tuple(getattr(o.variant, p) for p in PARTS): o for o in outcomes if o.variant.program is None}


def part_shares(outcomes: Sequence[Outcome]) -> dict[str, dict[str, float]]:
    """Milliseconds of bubbles and of the step that each part takes away: the mean over all orders of adding the parts
    (Shapley's value), so that they add up. `the rest` is what freescale saves with no part on."""
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
    found["the rest"] = {
        "bubbles_ms": bubbles_ms(before) - bubbles_ms(none),
        "step_ms": before.step_ms - none.step_ms,
    }
    return found


def best_torchrec(outcomes: Sequence[Outcome]) -> Outcome:
    """PEC is in TorchRec from 1.9 on, for row-wise tables on GPUs."""
    known = {v.name for v in TORCHREC}
    return min((o for o in outcomes if o.variant.name in known), key=lambda o: o.step_ms)


def pays(outcomes: Sequence[Outcome]) -> bool:
    return less(best_torchrec(outcomes).step_ms, before_and_after(outcomes)[1].step_ms) >= WORTH_IT


def verdict(outcomes: Sequence[Outcome]) -> str:
    ours, theirs = before_and_after(outcomes)[1], best_torchrec(outcomes)
    gain = less(theirs.step_ms, ours.step_ms)
    steps = f"a step takes {ours.step_ms:.1f} ms, with {theirs.variant.name} {theirs.step_ms:.1f} ms"
    if gain >= WORTH_IT:
        return f"freescale pays here: {steps} ({gain:.1%} less)"
    return f"freescale does NOT pay here: {steps} ({abs(gain):.1%} {'less' if gain > 0 else 'more'})"


def parts_that_do_not_pay(outcomes: Sequence[Outcome]) -> list[str]:
    """A sentence for each part that can be left out without making the step longer."""
    everything, found = before_and_after(outcomes)[1], []
    for part in PARTS:
        without = by_parts(outcomes).get(tuple(p != part for p in PARTS))
        if without is not None and less(without.step_ms, everything.step_ms) < WORTH_IT / 4:
            found.append(
                f"does NOT pay here: {PART_WORDS[part]} (a step takes {without.step_ms:.1f} ms without, "
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
    of = {0: "", 1: " of the next batch", -1: " of the batch before"}[i.of]
    return f"{'launch' if isinstance(i, Launch) else 'wait for'} {i.what}{of}"
