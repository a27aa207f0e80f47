"""Several checks on the same ranks, each reported separately, because compilation takes longer than most checks."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any

from ranks import RankFailed, run_ranks


class Outcomes:
    """The result of each check on every rank, or its error."""

    def __init__(self) -> None:
        self.results: dict[str, list[Any]] = {}
        self.failures: dict[str, str] = {}

    def of(self, name: str) -> list[Any]:
        """As run_ranks: the result of each rank, or RankFailed."""
        if name in self.failures:
            raise RankFailed(self.failures[name])
        return self.results[name]


def _until_one_fails(checks: list[tuple[str, Callable[[], Any]]]) -> tuple[list[Any], str | None]:
    results: list[Any] = []
    for name, check in checks:
        try:
            results.append(check())
        except BaseException:  # noqa: BLE001
            return results, f"in {name}\n{traceback.format_exc()}"
    return results, None


def run_together(checks: Mapping[str, Callable[[], Any]], world: int, **kwargs: Any) -> Outcomes:
    """Run every check on every rank, in order.

    After a failed check, ranks may be out of step or dead, so the remaining checks run on fresh ranks.
    """
    outcomes, left = Outcomes(), list(checks.items())
    while left:
        try:
            ranks = run_ranks(_until_one_fails, world, left, **kwargs)
        except RankFailed as error:  # a rank died or is stuck; which check is unknown
            alone = [left.pop(0)] if len(left) == 1 else []
            for check in left:
                part = run_together(dict([check]), world, **kwargs)
                outcomes.results |= part.results
                outcomes.failures |= part.failures
            outcomes.failures |= {name: str(error) for name, _ in alone}
            break
        everywhere = min(len(results) for results, _ in ranks)
        for place, (name, _) in enumerate(left[:everywhere]):
            outcomes.results[name] = [results[place] for results, _ in ranks]
        if everywhere < len(left):
            said = (f"--- rank {rank} {words}" for rank, (_, words) in enumerate(ranks) if words)
            outcomes.failures[left[everywhere][0]] = "\n".join(said)
        left = left[everywhere + 1 :]
    return outcomes
