"""The report's first sentences: how long ranks waited, the main cause and rank, what was hidden, and what to try. A
rank that waits for rows waits for the link, or for a rank that sends late because it has more work: `straggler`."""

from __future__ import annotations

from typing import Any

from freescale.views.records import BETWEEN_STEPS, LOADER, PLANNER, Run, mean, settled

HIDDEN = 50e-6  # seconds: a message with a shorter wait counts as hidden
_LITTLE = 0.02  # share of a step: no advice below
_UNEVEN = 0.05  # share of a step: balancing is advised above this gain
_WORDS = {
    LOADER: "the loader",
    PLANNER: "planning",
    "straggler": "a rank with more work",
    "host_bound": "the host, which left the GPU idle before the model call",
}


def verdict(run: Run, s: dict[str, Any]) -> list[str]:
    if not s["steps"]:
        return []
    waiting = 1.0 - s["shares"]["compute"]
    by_rank = {number: _waits(settled(r.step)) for number, r in run.ranks.items() if r.step}
    seconds = {number: mean(step["seconds"] for step in settled(run.ranks[number].step)) for number in by_rank}
    causes = {name: mean(w.get(name, 0.0) for w in by_rank.values()) for waits in by_rank.values() for name in waits}
    found = [f"Ranks waited {waiting:.1%} of the time"]
    cause = max(causes, key=causes.__getitem__)
    if causes[cause] > 0:
        shares = {n: by_rank[n].get(cause, 0.0) / seconds[n] for n in by_rank}
        mostly = "mostly" if 2 * mean(shares.values()) > waiting else "the largest part"
        found[0] += f", {mostly} for {_WORDS.get(cause, cause)}"
        if len(shares) > 1:
            longest = max(shares, key=shares.__getitem__)
            found[0] += f" (rank {longest} longest: {shares[longest]:.1%})"
    if (share := hidden_share(run)) is not None:
        found.append(f"{share:.0%} of the received bytes arrived before they were needed")
    if waiting >= _LITTLE and (advice := _advice(run, s, cause)):
        found.append(advice)
    return [f"{sentence}." for sentence in found]


def hidden_share(run: Run) -> float | None:
    """The share of received bytes whose launches were not waited for longer than HIDDEN."""
    launches = [x for r in run.ranks.values() for step in settled(r.step) for x in step["launches"]]
    total = sum(size for *_, size, _ in launches)
    return sum(size for *_, size, exposed in launches if exposed <= HIDDEN) / total if total else None


def _waits(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Mean seconds per step of a rank by cause, over all tables. Waits for rows and gradients exclude straggler
    time."""
    waits: dict[str, float] = {}
    for step in steps:
        travelled = {name: seconds for name, seconds in step["waits"].items() if name not in BETWEEN_STEPS}
        share = step["exposed"] / (sum(travelled.values()) or 1.0)
        parts = {name: step["waits"].get(name, 0.0) for name in (LOADER, PLANNER)}
        parts |= {name: step[name] for name in ("straggler", "host_bound")}
        for name, seconds in [*parts.items(), *((n.partition(" of ")[0], s * share) for n, s in travelled.items())]:
            waits[name] = waits.get(name, 0.0) + seconds / len(steps)
    return waits


def _advice(run: Run, s: dict[str, Any], cause: str) -> str:
    if cause == "loader":
        return "Try more data loader workers"
    if cause == "planner":
        return "Try to leave more CPU cores for the planning thread"
    if cause == "host_bound":
        return "Try `python -m freescale report --profile` on a torch.profiler trace"
    if s["balance"] is None and (saved := run.saved_by_balance()) > _UNEVEN:
        return f"Try LookaheadLoader(balance=True): with equal work on all ranks, a step would be {saved:.0%} shorter"
    if cause == "straggler":
        return "Compare the compute of the ranks below"
    if not any(r.plan for r in run.ranks.values()):
        return "Try a LookaheadLoader, which sends rows early and gradients late"
    if cause.startswith("dense"):
        return "Try FREESCALE_DENSE=allreduce, or another bucket size (docs/dense.md)"
    return "Try another transport (docs/transports.md) or sending less (docs/compress.md)"
