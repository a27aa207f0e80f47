"""A LookaheadLoader's threads: what one of them does while another is in the middle of something, stops or fails."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from freescale.kernels import plan
from freescale.runtime import steps
from freescale.runtime.pending import Planned, Run

# ---- a plan that is placed while it is finished ------------------------------------------------------------------


def _planned(number: int, device: str) -> tuple[Planned, plan.Requests, plan.Split]:
    """A batch of one rank; every second row of it is needed by its neighbours too."""
    ids = torch.tensor([3, 1, 3, 0, 2])
    keys = plan.group(ids)
    count = torch.tensor([keys.values.shape[0]])
    asked = plan.Requests(keys, count, keys.values.clone(), count.clone())
    half = torch.arange(keys.values.shape[0]) % 2 == 0
    split = plan.split(asked, half, half)
    return Planned(number, {}, [steps.make(number, ids, asked, split, torch.empty(0, 4, device=device))]), asked, split


def _on_the_host(p: steps.StepPlan) -> list[str]:
    """What a graph would read on the device and find on the host."""
    read: dict[str, tuple[Any, ...]] = {
        "ids": (p.ids,), "inverse": (p.inverse,), "order": (p.order,), "ends": (p.ends,), "urgent": p.urgent[:1],
        "early_rows": (p.early_rows,), "back": p.back[:4], "late_index": (p.late_index,), "late_own": p.late_own,
        "late_slot": (p.late_slot,),
    }  # fmt: skip
    return [name for name, tensors in read.items() if not tensors or any(t.device.type == "cpu" for t in tensors)]


def _before_line(of: Callable[..., Any], number: int, action: Callable[[], None]) -> Callable[..., Any]:
    """A trace function: `action` comes when `of` is about to run its line `number`, as if another thread did it then."""
    seen = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal seen
        if frame.f_code is not of.__code__:
            return None
        seen += event == "line"
        if seen == number:
            sys.settrace(None)
            frame.f_trace = None
            action()
        return trace

    return trace


def test_a_plan_is_on_the_device_whenever_the_batch_before_it_is_handed_out(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: t)
    for line in range(1, 100):
        run, handed = Run([], 1), []
        (before, *asked_before), (item, *asked) = _planned(0, "meta"), _planned(1, "meta")
        steps.finish(before.plans[0], *asked_before)
        before.plans[0].next = item.plans[0]

        def hand_out(run=run, handed=handed, before=before) -> None:
            run.hand_out(before, {})
            handed.append(before)

        sys.settrace(_before_line(steps.finish, line, hand_out))
        try:
            steps.finish(item.plans[0], *asked)
        finally:
            sys.settrace(None)
        if not handed:
            assert line > 3
            return
        item.plans[0].next = steps.nothing_next(item.plans[0])
        run.hand_out(item, {})
        assert _on_the_host(item.plans[0]) == [], f"the batch before was handed out at line {line} of finish"
        assert all(t.device.type == "cpu" for t in (*item.plans[0].back[4:], *item.plans[0].late_counts))
    raise AssertionError("finish has no end")
