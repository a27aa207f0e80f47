"""Graphs of many features: avoid torch's work on sizes that is never used.

A plan holds the end of each key's values as the sizes of `value_counts.slots` (runtime/tables/step_plan.py), which grow
from key to key. For each split between two features, torch asks whether they do, and checks it again in every step.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import sympy
import torch

from freescale.compat import dynamo_settings

_SLOT = re.compile(r"(.*\bfreescale_plan\b.*\.slots)\[(\d+)\]\.size\(\)\[0\]")


def leave_out_contiguity() -> None:
    """While a model is compiled for freescale, AOTAutograd skips computing the memory formats of every node, which
    Inductor does not read."""
    from torch.fx.experimental import proxy_tensor

    extract = proxy_tensor._extract_tensor_metadata
    if hasattr(extract, "_freescale"):
        return

    @functools.wraps(extract)
    def extract_metadata(*args: Any, **kwargs: Any) -> Any:
        return extract(*args, **{"include_contiguity": not dynamo_settings.is_tracing(), **kwargs})

    extract_metadata._freescale = True  # type: ignore[attr-defined]
    proxy_tensor._extract_tensor_metadata = extract_metadata


def drop_implied_guards() -> int:
    """Called by a backend after tracing: drop guards that follow from growing slots. Returns how many."""
    context = torch._guards.TracingContext.try_get()
    shape_env = None if context is None or context.fake_mode is None else context.fake_mode.shape_env
    if shape_env is None:
        return 0
    slots = _slots(shape_env)
    kept = [g for g in shape_env.guards if not any(_is_implied(g.expr, of_plan) for of_plan in slots)]
    dropped = len(shape_env.guards) - len(kept)
    shape_env.guards[:] = kept
    return dropped


def _slots(shape_env: Any) -> list[list[sympy.Symbol]]:
    """The symbols of each plan's slots, in order."""
    plans: dict[str, dict[int, sympy.Symbol]] = {}
    for symbol, sources in shape_env.var_to_sources.items():
        for source in sources:
            if match := _SLOT.fullmatch(dynamo_settings.source_name(source)):
                plans.setdefault(match[1], {})[int(match[2])] = shape_env.replace(symbol)
    ordered = [[slots[i] for i in sorted(slots)] for slots in plans.values()]
    return [slots for slots in ordered if all(isinstance(s, sympy.Symbol) for s in slots)]


def _is_implied(relation: sympy.Basic, slots: list[sympy.Symbol]) -> bool:
    """Whether 0 <= slots[0] <= slots[1] <= ... implies `relation`.

    As a linear form in the steps between slots, which are nonnegative, it must have no negative coefficient.
    """
    if not isinstance(relation, (sympy.Ge, sympy.Le)):
        return False
    terms = dict((relation.gts - relation.lts).as_coefficients_dict())
    if terms.pop(sympy.S.One, 0) < 0:
        return False
    coefficient = 0  # of the step that ends at a slot: sum over that slot and all later ones
    for slot in reversed(slots):
        coefficient += terms.pop(slot, 0)
        if coefficient < 0:
            return False
    return not terms
