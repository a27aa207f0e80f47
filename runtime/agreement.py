"""Ranks that would run different programs find out before they exchange anything, and each says so.

Every rank posts what it is about to run in the store of the default process group and reads what the others
posted. A rank that failed before it got here posts its error instead, so nobody waits for it.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist

from freescale.compat import distributed, dynamo
from freescale.kernels.ops.schemas import lib

_KEY = "freescale/agree"
_EVERYONE = "all"
_generations: Counter[str] = Counter()  # per group of ranks: how often they have agreed


class Disagreement(RuntimeError):
    """Ranks with different settings, or a rank that failed or did not come."""


def _key(group: str, rank: int) -> str:
    return f"{_KEY}/{group}/{_generations[group]}/{rank}"


def _post(message: dict[str, object], group: str = _EVERYONE) -> None:
    distributed.default_store().set(_key(group, dist.get_rank()), json.dumps(message))


def post_failure(error: BaseException) -> None:
    """Tell the others that this rank will not come. Never raises: the user must see the error itself."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        try:
            _post({"error": f"{type(error).__name__}: {error}"})
        except Exception:  # noqa: BLE001
            pass


def agree(settings: dict[str, object], timeout: float, group_name: str | None = None) -> None:
    """Raise on every rank unless all ranks of a group call this with the same `settings` within `timeout` seconds."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    ranks, group = list(range(dist.get_world_size())), _EVERYONE
    if group_name is not None:
        group_ranks = dist.get_process_group_ranks(distributed.group_by_name(group_name))
        if len(group_ranks) < len(ranks):
            ranks, group = group_ranks, group_name
    _post({"settings": settings}, group)
    messages = _read_all(timeout, ranks, group)
    _generations[group] += 1
    errors = {rank: m["error"] for rank, m in messages.items() if "error" in m}
    if errors:
        rank, error = min(errors.items())
        raise Disagreement(f"freescale: rank {rank} failed before the first step: {error}")
    _compare({rank: m["settings"] for rank, m in messages.items()})  # type: ignore[misc]


_agreed_launches: set[str] = set()


def _agree_on_launches(first: torch.Tensor, launches: str, group_name: str, timeout: float) -> torch.Tensor:
    """In a graph, before its first launch. The text is part of the compiled code, so it also comes out of a cache."""
    if launches not in _agreed_launches:
        direction, *names = launches.split("; ")
        agree({f"what the {direction} graph launches": names}, timeout, group_name)
        _agreed_launches.add(launches)
    return first.new_empty(0)


# untraced: as every op (kernels/reference.py)
lib.impl("agree", dynamo.untraced(_agree_on_launches), "CompositeExplicitAutograd")


def _read_all(timeout: float, ranks: list[int], group: str) -> dict[int, dict[str, object]]:
    """What each rank posted; as soon as one says that it failed, that alone is enough."""
    store, messages = distributed.default_store(), {}
    missing = list(ranks)
    deadline = time.monotonic() + timeout
    while missing:
        for rank in list(missing):
            key = _key(group, rank)
            if store.check([key]):
                messages[rank] = json.loads(store.get(key))
                missing.remove(rank)
                if "error" in messages[rank]:
                    return messages
        if not missing:
            break
        if time.monotonic() > deadline:
            raise Disagreement(
                f"freescale: rank {', '.join(map(str, missing[:8]))} did not reach the first compiled step "
                f"within {timedelta(seconds=timeout)}; the others have (FREESCALE_TIMEOUT sets the limit)"
            )
        time.sleep(0.01)
    return messages


def _compare(settings: dict[int, dict[str, object]]) -> None:
    first = min(settings)
    reference = settings[first]
    for rank in sorted(settings):
        for name in sorted(reference.keys() | settings[rank].keys()):
            expected, actual = reference.get(name), settings[rank].get(name)
            if expected != actual:
                raise Disagreement(
                    f"freescale: ranks disagree: {name} is {expected!r} on rank {first} and {actual!r} on rank {rank}; "
                    "set the same flags and options everywhere"
                )
