"""Predictions against what overlap.py measured: two ranks, shaped links, several collision rates.

Calibrated: compute, from runs in which nothing had to travel far (eager TorchRec on the unshaped link; one rank alone
with Inductor and with freescale), and the speed of each link, from the transfer that overlap.py checks it with. What
gloo's own all-to-all makes of a link is known from one row of each link, eager TorchRec's at 12% collisions, which is
left out of the comparison.
"""

from __future__ import annotations

from typing import Any

from fidelity import Rows, cluster_of, planned, predict
from freescale.simulate import graphs
from freescale.simulate.events import Launch, Wait
from freescale.simulate.variants import BACKWARD, FORWARD, TORCHREC, Variant

NEAR = 0.12
# What Inductor alone makes of the captured graph: every exchange is waited for where it stands.
UNORDERED = (
    Launch("requests"), Wait("requests"), Launch("urgent rows"), Wait("urgent rows"), FORWARD, BACKWARD,
    Launch("urgent gradients"), Wait("urgent gradients"),
)  # fmt: skip


def compare(recorded: dict[str, Any]) -> Rows:
    settings = recorded["settings"]
    traced = {ahead: graphs.trace(settings["blocks"], ahead) for ahead in (True, False)}
    compute = compute_ms(recorded)
    rows: Rows = []
    for check in recorded["check_of_exposed"]:
        measured = [r for r in recorded["rows"] if r["link"] == check["link"] and r["variant"] in compute]
        eager = next((r for r in measured if r["variant"] == "eager" and abs(r["collision"] - NEAR) < 0.02), None)
        share = 1.0 if eager is None else torchrec_share(recorded, eager)
        speed = check["bytes"] / check["exposed_ms"] * 1e3
        cluster = cluster_of(settings, {"bytes_per_second": speed, "latency": 0.0, "torchrec_share": share})
        for row in (r for r in measured if r is not eager):
            wanted = min(settings["collisions"], key=lambda c: abs(c - row["collision"]))
            counts, name = planned(settings, 2, wanted), row["variant"]
            variant = TORCHREC[0] if name == "eager" else Variant(name, look_ahead=name == "freescale")
            order = UNORDERED if name == "inductor" else None
            predicted, spread = predict(variant, counts, cluster, compute[name], traced, order), row["step_ms_iqr"] / 2
            rows.append(
                {
                    "ranks": 2, "link": f"{check['link']}, {row['collision']:.0%} collide", "variant": name,
                    "predicted_ms": predicted, "measured_ms": row["step_ms"],
                    "quartiles": [row["step_ms"] - spread, row["step_ms"] + spread],
                    "error": predicted / row["step_ms"] - 1,
                }
            )  # fmt: skip
    return rows


def compute_ms(recorded: dict[str, Any]) -> dict[str, float]:
    """Of each variant, where nothing travels."""
    unshaped = next(r for r in recorded["rows"] if r["link"] == "unshaped")
    return {"eager": unshaped["compute_ms"], **recorded["single"]["step_ms"]}


def torchrec_share(recorded: dict[str, Any], eager: dict[str, Any]) -> float:
    """Of the link's speed, that eager TorchRec's exchange reached."""
    rate = recorded["links_bits_per_second"][eager["link"]]
    return min(recorded["eager_exchange_bytes"] * 8e3 / rate / eager["exposed_ms"], 1.0)
