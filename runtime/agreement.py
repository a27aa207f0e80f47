"""Ranks that would run different programs find out before they exchange anything, and each says so.

Every rank posts what it is about to run in the store of the default process group. The store counts how many ranks have
come and how many have said the same; the last one that comes gives the verdict, for which all others wait. So a rank
asks the store a few times, however many ranks there are. A rank that failed before it got here gives the verdict
itself, and nobody waits for it. For a rank that is late, the others wait as long as it says that it is compiling.
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
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from freescale.compat import distributed
from freescale.kernels.ops.schemas import implement

log = logging.getLogger(__name__)

_KEY = "freescale/agree"
_COMPILING = "freescale/compiling"
_EVERYONE = "all"
_BEAT_SECONDS = 5.0  # between two signs that a rank is compiling; less where the time-out is short
_LONGEST_PAUSE = 0.2  # seconds between two questions to the store
_STORE_SECONDS = 5.0  # for an answer of the store; the rank that keeps it may be the one that is gone
_LONG_LIST = 8  # entries; of a longer one only what differs is shown
_generations: Counter[str] = Counter()  # per group of ranks: how often they have agreed


class Disagreement(RuntimeError):
    """Ranks with different settings, or a rank that failed or did not come."""


def _looks(seconds: float) -> Iterator[None]:
    """Now, and again after growing pauses, for so long.

    Not the store's own wait: until that ends, nothing else of this process can ask the store.
    """
    end, pause = time.monotonic() + seconds, 0.002
    while True:
        yield
        if time.monotonic() > end:
            return
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _has_peers() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class _Meeting:
    """One agreement of one group: its keys in the store."""

    def __init__(self, group: str) -> None:
        self._store: Any = distributed.default_store()
        self._prefix = f"{_KEY}/{group}/{_generations[group]}"
        self._verdict = f"{self._prefix}/verdict"

    def post(self, settings: dict[str, object], world: int) -> None:
        """Say what this rank runs; the last of so many ranks also gives the verdict."""
        text = json.dumps(settings, sort_keys=True)
        self._store.set(self._key_of(dist.get_rank()), text)
        same = f"{self._prefix}/same/{hashlib.sha256(text.encode()).hexdigest()}"
        self._store.add(same, 1)
        if self._store.add(f"{self._prefix}/arrived", 1) == world:
            # Whoever has arrived has been counted before; adding nothing reads the count.
            self.give_verdict({} if self._store.add(same, 0) == world else {"different": True})

    def give_verdict(self, verdict: dict[str, object]) -> None:
        """The first one counts."""
        self._store.compare_set(self._verdict, "", json.dumps(verdict))

    def wait(self, seconds: float) -> dict[str, Any] | None:
        """The verdict; None if there is none by then."""
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
    """Tell the others that this rank will not come. Never raises: the user must see the error itself."""
    if _has_peers():
        try:
            verdict = {"rank": dist.get_rank(), "error": f"{type(error).__name__}: {error}"}
            _Meeting(_EVERYONE).give_verdict(verdict)
        except Exception:  # noqa: BLE001
            pass


def agree(settings: dict[str, object], timeout: float, group_name: str | None = None) -> None:
    """Raise on every rank unless all ranks of a group call this with the same `settings`.

    A rank that has not come `timeout` seconds after this one is waited for as long as it compiles.
    """
    if not _has_peers():
        return
    ranks, group = list(range(dist.get_world_size())), _EVERYONE
    if group_name is not None:
        group_ranks = dist.get_process_group_ranks(distributed.group_by_name(group_name))
        if len(group_ranks) < len(ranks):
            ranks, group = group_ranks, group_name
    meeting = _Meeting(group)
    meeting.post(settings, len(ranks))
    verdict = _wait_for_verdict(meeting, ranks, timeout)
    _generations[group] += 1
    if "error" in verdict:
        raise Disagreement(f"freescale: rank {verdict['rank']} failed before the first step: {verdict['error']}")
    if "different" in verdict:
        _compare({rank: meeting.settings_of(rank) for rank in ranks})


def first_reason(key: str, reason: str = "", instead_of: str = "") -> str:
    """Post `reason` in the store for the other ranks, and return the first that a rank has posted there. Without
    `reason`: return that, or "". `instead_of`: one that `reason` replaces. Never raises, and returns within seconds."""
    found: list[str] = []

    def ask() -> None:
        with contextlib.suppress(Exception):
            found.append(distributed.default_store().compare_set(f"freescale/{key}", instead_of, reason).decode())

    thread = threading.Thread(target=ask, name="freescale-store", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # when the process ends (from Python 3.12 on), or at a limit of threads
        return reason
    thread.join(_STORE_SECONDS)
    return found[0] if found else reason


_compared: set[str] = set()


def compare_soon(name: str, value: str, others: Iterable[str], seconds: float) -> None:
    """Raise if a rank that was here before, or comes within `seconds`, has another of the possible values.

    For what only some of the ranks would meet about: whoever comes has to say it, and waits for a moment at most, once
    in a process.
    """
    if name in _compared or not _has_peers():
        return
    _compared.add(name)
    store, rank, prefix = distributed.default_store(), dist.get_rank(), f"{_KEY}/{name}"
    try:
        store.compare_set(f"{prefix}/first/{value}", "", str(rank))  # the first one counts
        store.add(f"{prefix}/ranks/{value}", 1)
    except RuntimeError as error:  # the store of a group that only pretends to have peers
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
    """In a graph, before its first launch. The text is part of the compiled code, so it also comes out of a cache."""
    if launches not in _agreed_launches:
        direction, *names = launches.split("; ")
        agree({f"what the {direction} graph launches": names}, timeout, group_name)
        _agreed_launches.add(launches)
    return _empty(first.dtype, first.device)


@cache
def _empty(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """For all graphs the same: nothing is in it, and to make one takes as long as all the rest of the op."""
    return torch.empty(0, dtype=dtype, device=device)


implement("agree", _agree_on_launches)


def _wait_for_verdict(meeting: _Meeting, ranks: list[int], timeout: float) -> dict[str, Any]:
    verdict = meeting.wait(timeout)
    while verdict is None:
        missing = meeting.missing(ranks)
        if not missing:  # all have posted, but the one that was to give the verdict is gone: then anybody gives it
            texts = {json.dumps(meeting.settings_of(rank), sort_keys=True) for rank in ranks}
            meeting.give_verdict({} if len(texts) == 1 else {"different": True})
        before = _beats(missing)
        verdict = meeting.wait(2.5 * _beat_seconds(timeout))
        after = _beats(missing)
        silent = [rank for rank in missing if before[rank] == after[rank]]
        if verdict is None and silent and (silent := [r for r in meeting.missing(ranks) if r in silent]):
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
    """Of two long lists what only one of them has, if there is something."""
    if not (isinstance(expected, list) and isinstance(actual, list)) or max(len(expected), len(actual)) <= _LONG_LIST:
        return expected, actual
    only_expected, only_actual = ([x for x in a if x not in b] for a, b in ((expected, actual), (actual, expected)))
    different = only_expected or only_actual
    return (only_expected[:_LONG_LIST], only_actual[:_LONG_LIST]) if different else (expected, actual)


# ---- signs of ranks that compile ---------------------------------------------------------------------------------


def _beat_seconds(timeout: float) -> float:
    return min(_BEAT_SECONDS, timeout / 4)


def _beats(ranks: list[int]) -> dict[int, int]:
    store = distributed.default_store()
    return {rank: store.add(f"{_COMPILING}/{rank}", 0) for rank in ranks}


@contextlib.contextmanager
def while_compiling(timeout: float) -> Iterator[None]:
    """Others that wait for this rank are told, now and then, that it is compiling."""
    if not _has_peers():
        yield
        return
    done, store, key = threading.Event(), distributed.default_store(), f"{_COMPILING}/{dist.get_rank()}"

    def tell() -> None:
        while not done.wait(_beat_seconds(timeout)):
            try:
                store.add(key, 1)
            except Exception:  # noqa: BLE001  (the store is gone, and with it whoever would ask)
                return

    thread = threading.Thread(target=tell, name="freescale: compiling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
