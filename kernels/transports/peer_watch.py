"""A thread that polls a transport's messages in flight a few times per second.

If a peer is gone, or a message exceeds the timeout, the transport fails: it records the error, then releases the
waiting streams, so nothing hangs. The thread holds no reference to the transport between polls, so an unused transport
can be collected.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterable
from typing import Any, ClassVar, Protocol

from freescale.kernels.transports.in_flight import InFlight

_INTERVAL = 0.05  # seconds


class Liveness(Protocol):
    """What a rank knows about its peers."""

    def lost_peers(self) -> dict[int, int]:
        """Peers that will send nothing more, and for each the rank to name: itself, or the one it reported."""

    def report_failure(self, culprits: set[int]) -> None: ...

    def set_launched(self, messages: int) -> None: ...

    def peers_behind(self, messages: int) -> set[int]:
        """Peers that have launched fewer messages."""


class WatchedTransport(Protocol):
    """The interface of a transport that the thread needs."""

    name: ClassVar[str]
    driver: Any
    timeout: float
    rank: int
    error: str | None
    in_flight: InFlight
    liveness: Liveness | None

    @property
    def global_rank(self) -> int: ...

    def missing_peers(self) -> set[int]: ...

    def describe_peers(self, peers: Iterable[int]) -> str: ...

    def fail(self, reason: str, culprits: set[int]) -> None: ...

    def release_waits(self) -> None: ...


def start_watching(transport: WatchedTransport, stop: threading.Event) -> None:
    arguments = (weakref.ref(transport), stop)
    threading.Thread(target=_watch, args=arguments, name=f"freescale-{transport.name}", daemon=True).start()


def look_for_failure(transport: WatchedTransport, waited: float = 0.0) -> None:
    """One poll of the watcher thread, or of a thread that has `waited` this many seconds until nothing is in flight,
    including data that the host sends after the device has finished."""
    oldest = transport.in_flight.oldest()
    if oldest is None and not waited:
        return
    if transport.error is not None:
        transport.release_waits()
        return
    lost = transport.liveness.lost_peers() if transport.liveness is not None else {}
    age = time.monotonic() - oldest.launched_at if oldest is not None else waited
    if not lost and age < transport.timeout:
        return
    missing = transport.missing_peers()  # empty if the message waits for this rank's own computation
    what = f"rank {transport.global_rank} cannot finish "
    what += f"message {oldest.number} of priority {oldest.priority}" if oldest is not None else "sending"
    if gone := {lost[p] for p in missing if p in lost}:
        transport.fail(f"{what}: {transport.describe_peers(gone)} gone", gone)
    elif missing and age >= transport.timeout:
        behind = set()
        if oldest is not None and transport.liveness is not None:
            # a peer that launched the message may itself wait for one that did not
            behind = transport.liveness.peers_behind(oldest.number + 1)
        silent = behind & missing or missing
        transport.fail(f"{what}: {transport.describe_peers(silent)} not responding after {age:.1f} s", silent)


def _watch(transport_ref: weakref.ref[WatchedTransport], stop: threading.Event) -> None:
    bound = False
    while not stop.wait(_INTERVAL):
        transport = transport_ref()
        if transport is None:
            return
        try:
            if not bound:
                transport.driver.bind_thread()
                bound = True
            look_for_failure(transport)
        except Exception as error:  # noqa: BLE001  (without this thread, what waits would wait for ever)
            with contextlib.suppress(Exception):  # the error is recorded first
                transport.fail(
                    f"rank {transport.global_rank} cannot watch its messages: {type(error).__name__}: {error}",
                    {transport.rank},
                )
        del transport
