"""The method `local` of `balance`: no sample leaves its rank; every rank combines its own base batches into steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from freescale.runtime.balance.integer_problem import BalanceError, IntArray, Problem, checked_integers
from freescale.runtime.balance.memory_cap import over_cap
from freescale.runtime.balance.result import BalanceResult, make_result


def balance_locally(problem: Problem, costs: np.ndarray, base: Any, steps: int | None) -> BalanceResult:
    """`base` is the base batch of each sample on its rank; `steps`, how many steps they become (None: half as many)."""
    if base is None:
        raise BalanceError("freescale: the method 'local' wants the base batch of each sample (base=...)")
    batch = checked_integers("base", base, len(costs), None)
    batches = int(batch.max(initial=0)) + 1
    steps = -(-batches // 2) if steps is None else steps
    if not 1 <= steps <= batches:
        raise BalanceError(f"freescale: {batches} base batches make between 1 and {batches} steps; found steps={steps}")
    cell = problem.home * batches + batch  # of a matrix [ranks, base batches]
    loads = np.bincount(cell, problem.costs.astype(np.float64), minlength=problem.ranks * batches)
    step = _combine(loads.reshape(problem.ranks, batches), steps)[problem.home, batch]
    if problem.memory is not None:
        held = np.bincount(problem.home * steps + step, problem.memory.astype(np.float64))
        if held.max(initial=0) > problem.cap:
            raise over_cap("local", held.max(), problem.cap)
    return make_result(problem, costs, problem.home, "local", step, batch * steps // batches, steps)


def _combine(loads: np.ndarray, steps: int) -> IntArray:
    """The step of every base batch, for loads[rank, base batch].

    On each rank heavy base batches join light ones; then the ranks' heaviest steps come at the same time. The given
    order stays where that is no better.
    """
    ranks, batches = loads.shape
    per_step = -(-batches // steps)
    padded = np.zeros((ranks, per_step * steps), loads.dtype)
    padded[:, :batches] = loads
    as_given = np.broadcast_to(np.minimum(np.arange(per_step * steps) * steps // batches, steps - 1), padded.shape)
    order = np.argsort(-padded, axis=1, kind="stable")
    turns = np.tile(np.arange(steps), (per_step, 1))
    turns[1::2] = turns[1::2, ::-1]
    step = np.empty_like(order)
    np.put_along_axis(step, order, np.broadcast_to(turns.ravel(), order.shape), 1)
    by_load = np.argsort(np.argsort(-_step_loads(padded, step, steps), axis=1, kind="stable"), axis=1, kind="stable")
    step = np.take_along_axis(by_load, step, 1)
    before, after = (_step_loads(padded, s, steps).max(0).sum() for s in (as_given, step))
    return (step if after < before else as_given)[:, :batches]


def _step_loads(loads: np.ndarray, step: IntArray, steps: int) -> np.ndarray:
    cell = step + np.arange(len(loads))[:, None] * steps
    return np.bincount(cell.ravel(), loads.ravel(), minlength=len(loads) * steps).reshape(len(loads), steps)
