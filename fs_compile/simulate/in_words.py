"""A study as text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from freescale.simulate import findings
from freescale.simulate.study import Outcome, Study
from freescale.simulate.sweep import AXES, Point
from freescale.simulate.workload import Generated


def described(study: Study) -> str:
    """What is simulated."""
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
        ids += f" (NOT the {w.collision:.1%} of --collision, which --rows {w.rows:g} do not allow)"
    planned = "all rows" if study.owners == w.ranks else f"the rows of {study.owners} owners, which stand for all"
    return "\n".join(
        [
            f"SIMULATED, nothing here was measured: {w.ranks} ranks, {c.name}, {c.ranks_per_host} to a host, "
            f"{study.steps} steps, seed {w.seed}",
            f"  batches   {w.batch} samples per rank, histories up to {w.cap}, {tokens:,.0f} tokens per rank; {ids}; "
            f"{colliding:.1%} of a rank's unique rows collide, {repeats:.2f} values per unique row",
            f"  plans     made by freescale's planning code for every rank and step, of {planned}",
            "  balance   by freescale's balancer, with its cost fitted to the simulated times",
            f"  order     as freescale's passes order the compiled graphs of a model with {c.layers} HSTU blocks",
            f"  compute   {c.seconds_per_token:.3g} s per token + {c.seconds_per_token_squared:.3g} s per token squared"
            f"; jitter {c.jitter:.1%}",
            f"  links     {c.inside_gb_per_s:g} GB/s inside a host, {c.between_gb_per_s:g} between hosts, "
            f"{c.copy_engine_gb_per_s:g} to host memory; {c.latency_us:g} us + {c.message_us:g} us per peer",
            f"  tax       compute loses {c.sm_tax:.1%} by kernel-based collectives, {c.copy_tax:.1%} by copies",
            "  left out  table lookups and updates, the bytes of dense gradients, the loader (docs/simulate.md)",
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
    """Who takes away how much, against synchronous TorchRec."""
    found, (before, after) = findings.part_shares(outcomes), findings.before_and_after(outcomes)
    bubbles, step = findings.bubbles_ms(before) - findings.bubbles_ms(after), before.step_ms - after.step_ms
    lines = ["what each part takes away, of bubbles and of the step (mean over all orders of adding them):"]
    for name, saved in found.items():
        words = findings.PART_WORDS.get(name, "one graph, unique rows")
        of_bubbles, of_step = saved["bubbles_ms"] / (bubbles or 1), saved["step_ms"] / (step or 1)
        lines.append(
            f"  {words:<28}{saved['bubbles_ms']:>8.1f} ms{of_bubbles:>8.1%}{saved['step_ms']:>9.1f} ms{of_step:>8.1%}"
        )
    return "\n".join(lines)


def headline_lines(outcomes: Sequence[Outcome]) -> str:
    h = findings.headlines(outcomes)
    return "\n".join(
        [
            f"bubbles, ms per step: {h['bubble_reduction']:.1%} less than synchronous TorchRec "
            f"(as a share of the shorter step: {h['bubble_share_reduction']:.1%} less)",
            f"straggler share {h['straggler_before']:.1%}, then {h['straggler_after']:.1%}; exposed time "
            f"{h['exposed_reduction']:.1%} less; step {h['step_reduction']:.1%} less",
        ]
    )


def sweep_table(points: Sequence[Point]) -> str:
    names = [o.variant.name.replace("TorchRec, ", "") for o in points[0].outcomes]
    lines = [f"{AXES[points[0].axis][0]}: step ms and bubbles"]
    lines.append(f"{'':>10}" + "".join(f"{name:>22}" for name in names) + f"{'bubbles less':>14}")
    for p in points:
        cells = "".join(f"{f'{o.step_ms:.1f}  {o.bubbles:.1%}':>22}" for o in p.outcomes)
        note = "" if findings.pays(p.outcomes) else "  does not pay"
        lines.append(f"{p.value:>10g}{cells}{findings.headlines(p.outcomes)['bubble_reduction']:>14.1%}{note}")
    return "\n".join(lines)
