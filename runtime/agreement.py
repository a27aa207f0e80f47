"""Detect ranks that would run different programs before they communicate, and raise on every rank.

Each rank posts what it will run to the default group's store, which counts arrivals and equal posts. The last rank to
arrive, or one that failed, posts the verdict that all wait for: the number of requests per rank does not depend on the
number of ranks. Ranks wait for a late rank as long as it reports that it is compiling.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from freescale.compat import distributed
from freescale.kernels.ops.schemas import implement

log = logging.getLogger(__name__)

_KEY = "freescale/agree"
_COMPILING = "freescale/compiling"
_EVERYONE = "all"
_BEAT_SECONDS = 5.0  # between two heartbeats of a compiling rank; less if the timeout is short
_LONGEST_PAUSE = 0.2  # seconds between two polls of the store
_STORE_SECONDS = 5.0  # for a response of the store, whose host process may be gone
_LONG_LIST = 8  # entries; for longer lists, only differences are shown
_generations: Counter[str] = Counter()  # per group of ranks: number of completed agreements


class Disagreement(RuntimeError):
    """Ranks have different settings, or a rank failed or did not arrive."""


def _looks(seconds: float) -> Iterator[None]:
    """Yield now, and again after growing pauses, for `seconds`. (The store's own wait would block other requests.)"""
    end, pause = time.monotonic() + seconds, 0.002
    while True:
        yield
        if time.monotonic() > end:
            return
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _has_peers() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


class _Agreement:
    """One agreement of one group: its keys in the store."""

    def __init__(self, group: str) -> None:
        self._store: Any = distributed.default_store()
        self._prefix = f"{_KEY}/{group}/{_generations[group]}"
        self._verdict = f"{self._prefix}/verdict"

    def post(self, settings: dict[str, object], world: int) -> None:
        """Post what this rank runs. The last of `world` ranks also posts the verdict."""
        text = json.dumps(settings, sort_keys=True)
        self._store.set(self._key_of(dist.get_rank()), text)
        same = f"{self._prefix}/same/{hashlib.sha256(text.encode()).hexdigest()}"
        self._store.add(same, 1)
        if self._store.add(f"{self._prefix}/arrived", 1) == world:
            # Each rank increments `same` before `arrived`. Adding zero reads the count.
            self.give_verdict({} if self._store.add(same, 0) == world else {"different": True})

    def give_verdict(self, verdict: dict[str, object]) -> None:
        self._store.compare_set(self._verdict, "", json.dumps(verdict))

    def wait(self, seconds: float) -> dict[str, Any] | None:
        for _ in _looks(seconds):
            if self._store.check([self._verdict]):
                return json.loads(self._store.get(self._verdict))
        return None

    def missing(self, ranks: list[int]) -> list[int]:
        return [rank for rank in ranks if not self._store.check([self._key_of(rank)])]

    def settings_of(self, rank: int) -> dict[str, object]:
        return json.loads(self._store.get(self._key_of(rank)))

    def _key_of(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"


def post_failure(error: BaseException) -> None:
    """Tell the other ranks that this rank failed. Never raises, so that the user sees the original error."""
    if _has_peers():
        try:
            verdict = {"rank": dist.get_rank(), "error": f"{type(error).__name__}: {error}"}
            _Agreement(_EVERYONE).give_verdict(verdict)
        except Exception:  # noqa: BLE001
            pass


def agree(settings: dict[str, object], timeout: float, group_name: str | None = None) -> None:
    """Raise on every rank unless all ranks of a group call this with the same `settings`. A rank that is more than
    `timeout` seconds late is waited for while it compiles."""
    if not _has_peers():
        return
    ranks, group = list(range(dist.get_world_size())), _EVERYONE
    if group_name is not None:
        group_ranks = dist.get_process_group_ranks(distributed.group_by_name(group_name))
        if len(group_ranks) < len(ranks):
            ranks, group = group_ranks, group_name
    agreement = _Agreement(group)
    agreement.post(settings, len(ranks))
    verdict = _wait_for_verdict(agreement, ranks, timeout)
    _generations[group] += 1
    if "error" in verdict:
        raise Disagreement(f"freescale: rank {verdict['rank']} failed before the first step: {verdict['error']}")
    if "different" in verdict:
        _compare({rank: agreement.settings_of(rank) for rank in ranks})


def first_reason(key: str, reason: str = "", instead_of: str = "") -> str:
    """Post `reason` to the store unless another rank has posted one, and return the first posted; without `reason`,
    that or "". `instead_of`: a reason to replace. Never raises, and returns within seconds."""
    found: list[str] = []

    def ask() -> None:
        with contextlib.suppress(Exception):
            found.append(distributed.default_store().compare_set(f"freescale/{key}", instead_of, reason).decode())

    thread = threading.Thread(target=ask, name="freescale-store", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # at process exit (Python 3.12+), or at the thread limit
        return reason
    thread.join(_STORE_SECONDS)
    return found[0] if found else reason


_compared: set[str] = set()


def compare_soon(name: str, value: str, others: Iterable[str], seconds: float) -> None:
    """Raise if a rank that called this earlier, or calls it within `seconds`, has another of the possible values: for
    settings that only some ranks would synchronize on. A rank waits briefly, once per process."""
    if name in _compared or not _has_peers():
        return
    _compared.add(name)
    store, rank, prefix = distributed.default_store(), dist.get_rank(), f"{_KEY}/{name}"
    try:
        store.compare_set(f"{prefix}/first/{value}", "", str(rank))  # the first one wins
        store.add(f"{prefix}/ranks/{value}", 1)
    except RuntimeError as error:  # e.g. the store of a fake process group
        log.info("%s is not compared with that of other ranks: %s", name, error)
        return
    for _ in _looks(seconds):
        arrived = {v: store.add(f"{prefix}/ranks/{v}", 0) for v in dict.fromkeys((value, *others))}
        if other := next((v for v, n in arrived.items() if n and v != value), None):
            _compare({int(store.get(f"{prefix}/first/{v}")): {name: v} for v in (value, other)})
        if sum(arrived.values()) >= dist.get_world_size():
            return


_agreed_launches: set[str] = set()


def _agree_on_launches(first: torch.Tensor, launches: str, group_name: str, timeout: float) -> torch.Tensor:
    """Runs in a graph before its first launch. The text is part of the compiled code, so it survives caching."""
    if launches not in _agreed_launches:
        direction, *names = launches.split("; ")
        agree({f"what the {direction} graph launches": names}, timeout, group_name)
        _agreed_launches.add(launches)
    return first.new_empty(0)


implement("agree", _agree_on_launches)


def _wait_for_verdict(agreement: _Agreement, ranks: list[int], timeout: float) -> dict[str, Any]:
    verdict = agreement.wait(timeout)
    while verdict is None:
        missing = agreement.missing(ranks)
        if not missing:  # the rank that should have posted the verdict is gone, so any rank posts it
            texts = {json.dumps(agreement.settings_of(rank), sort_keys=True) for rank in ranks}
            agreement.give_verdict({} if len(texts) == 1 else {"different": True})
        before = _beats(missing)
        verdict = agreement.wait(2.5 * _beat_seconds(timeout))
        after = _beats(missing)
        silent = [rank for rank in missing if before[rank] == after[rank]]
        if verdict is None and silent and (silent := [r for r in agreement.missing(ranks) if r in silent]):
            raise Disagreement(
                f"freescale: rank {', '.join(map(str, silent[:8]))} did not reach the first compiled step "
                f"within {timedelta(seconds=timeout)}; the others have (FREESCALE_TIMEOUT sets the limit)"
            )
        if verdict is None and missing:
            log.info("waiting for rank %s, still compiling", ", ".join(map(str, missing[:8])))
    return verdict


def _compare(settings: Mapping[int, Mapping[str, object]]) -> None:
    first = min(settings)
    reference = settings[first]
    for rank in sorted(settings):
        for name in sorted(reference.keys() | settings[rank].keys()):
            expected, actual = reference.get(name), settings[rank].get(name)
            if expected != actual:
                expected, actual = _what_differs(expected, actual)
                raise Disagreement(
                    f"freescale: ranks disagree: {name} is {expected!r} on rank {first} and {actual!r} on rank {rank}; "
                    "set the same flags and options everywhere"
                )


def _what_differs(expected: object, actual: object) -> tuple[object, object]:
    if not (isinstance(expected, list) and isinstance(actual, list)) or max(len(expected), len(actual)) <= _LONG_LIST:
        return expected, actual
    only_expected, only_actual = ([x for x in a if x not in b] for a, b in ((expected, actual), (actual, expected)))
    different = only_expected or only_actual
    return (only_expected[:_LONG_LIST], only_actual[:_LONG_LIST]) if different else (expected, actual)


# ---- heartbeats of compiling ranks -------------------------------------------------------------------------------


def _beat_seconds(timeout: float) -> float:
    return min(_BEAT_SECONDS, timeout / 4)


def _beats(ranks: list[int]) -> dict[int, int]:
    store = distributed.default_store()
    return {rank: store.add(f"{_COMPILING}/{rank}", 0) for rank in ranks}


@contextlib.contextmanager
def while_compiling(timeout: float) -> Iterator[None]:
    """Tell waiting ranks periodically that this rank is compiling."""
    if not _has_peers():
        yield
        return
    done, store, key = threading.Event(), distributed.default_store(), f"{_COMPILING}/{dist.get_rank()}"

    def tell() -> None:
        while not done.wait(_beat_seconds(timeout)):
            try:
                store.add(key, 1)
            except Exception:  # noqa: BLE001  (the store is gone, so no rank is waiting)
                return

    thread = threading.Thread(target=tell, name="freescale: compiling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
