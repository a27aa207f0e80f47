"""NVIDIA's NIXL, an optional library: one-sided writes into the memory of other processes, through UCX, which uses RDMA
if there is a network for it, else shared memory or TCP."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import logging
from collections.abc import Iterator
from functools import cache
from typing import Any

_INSTALL = "pip install 'freescale[nixl]'"
_PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")  # the first one loads whichever of the others fits torch's CUDA


class PeerLost(RuntimeError):
    """An agent that is no longer reachable."""


@cache
def library() -> Any:
    """Import the package; raises a one-sentence error if that fails."""
    reason = "it is not installed"
    raise_exceptions = logging.raiseExceptions  # NIXL turns it off for the whole process
    for name in _PACKAGES:
        try:
            package = importlib.import_module(name)
            logging.getLogger("nixl").setLevel(logging.WARNING)  # otherwise every agent prints to stdout
            return package
        except ImportError as error:
            if name in _PACKAGES[1:] and not isinstance(error, ModuleNotFoundError):
                reason = f"{name} does not load: {next(iter(str(error).splitlines()), '')}"
        finally:
            logging.raiseExceptions = raise_exceptions
    raise ImportError(f"NVIDIA's NIXL is missing, {reason}: {_INSTALL}")


def missing_reason() -> str:
    """Why NIXL cannot be used here, and what to do; empty if it can."""
    try:
        library()
    except ImportError as error:
        return str(error)
    return ""


def version() -> str | None:
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name.replace("_", "-"))
    return None


class Agent:
    """Writes from a region of this process's memory into regions of other agents. Thread-safe."""

    def __init__(self, name: str, address: int, nbytes: int) -> None:
        nixl = library()
        settings = nixl.nixl_agent_config(
            enable_prog_thread=True, sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        self.name = name
        self._agent = nixl.nixl_agent(name, settings)
        self._memory = self._agent.register_memory([(address, nbytes, 0, "")], "DRAM")
        self._peers: list[str] = []

    def metadata(self) -> bytes:
        """What another agent needs in order to write here."""
        return self._agent.get_agent_metadata()

    def connect(self, peer: str, metadata: bytes) -> None:
        self._agent.add_remote_agent(metadata)
        self._peers.append(peer)
        self._agent.make_connection(peer)

    def write(self, peer: str, address: int, remote_address: int, nbytes: int, notification: bytes) -> Any:
        """Start a write; the peer gets the notification after all data. Raises PeerLost."""
        agent = self._agent
        try:
            local, remote = (agent.get_xfer_descs([(a, nbytes, 0)], "DRAM") for a in (address, remote_address))
            handle = agent.initialize_xfer("WRITE", local, remote, peer, notification)
            if agent.transfer(handle) == "ERR":
                raise PeerLost("the write failed")
        except Exception as error:
            raise PeerLost(_text(error)) from error
        return handle

    def is_written(self, handle: Any) -> bool:
        """Whether the write completed; then its handle is released. Raises PeerLost."""
        try:
            state = self._agent.check_xfer_state(handle)
            if state == "PROC":
                return False
            handle.release()
        except Exception as error:
            raise PeerLost(_text(error)) from error
        if state != "DONE":
            raise PeerLost("the write failed")
        return True

    def notify(self, peer: str, notification: bytes) -> None:
        try:
            self._agent.send_notif(peer, notification)
        except Exception as error:
            raise PeerLost(_text(error)) from error

    def notifications(self) -> Iterator[tuple[str, bytes]]:
        """Notifications since the last call, with their senders."""
        for peer, notifications in self._agent.get_new_notifs().items():
            for notification in notifications:
                yield peer, notification

    def close(self) -> None:
        for peer in self._peers:
            with contextlib.suppress(Exception):  # the agent may be gone already
                self._agent.remove_remote_agent(peer)
        self._agent.deregister_memory(self._memory)
        self._agent = None


def _text(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
