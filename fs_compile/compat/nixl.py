"""NVIDIA's NIXL, an optional library: one-sided writes into the memory of other processes, by UCX on whatever it finds.

RDMA where there is a network for it; shared memory and TCP elsewhere. No names of torch here, but all that freescale
knows of another library's.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from collections.abc import Iterator
from functools import cache
from typing import Any

_INSTALL = "pip install 'freescale[nixl]'"
_PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")  # the first takes the one of the last two that fits torch's CUDA


class PeerLost(RuntimeError):
    """An agent that cannot be reached any more."""


@cache
def library() -> Any:
    """The package; an error in one sentence where there is none that loads."""
    reason = "it is not installed"
    raise_exceptions = logging.raiseExceptions  # NIXL turns it off for the whole process
    for name in _PACKAGES:
        try:
            package = importlib.import_module(name)
            logging.getLogger("nixl").setLevel(logging.WARNING)  # else every agent says on stdout that it is there
            return package
        except ImportError as error:
            if name in _PACKAGES[1:] and not isinstance(error, ModuleNotFoundError):
                reason = f"{name} does not load: {next(iter(str(error).splitlines()), '')}"
        finally:
            logging.raiseExceptions = raise_exceptions
    raise ImportError(f"NVIDIA's NIXL is missing, {reason}: {_INSTALL}")


def missing_reason() -> str:
    """Why NIXL cannot be used here, and what to do about it; empty if it can."""
    try:
        library()
    except ImportError as error:
        return str(error)
    return ""


def version() -> str | None:
    for name in _PACKAGES:
        try:
            return importlib.metadata.version(name.replace("_", "-"))
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


class Agent:
    """Writes from a stretch of this process's memory into stretches of other agents'. Any thread may call it.

    A thread of NIXL's own moves what others write here and what this agent has posted.
    """

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
        """What another agent needs to know to write here."""
        return self._agent.get_agent_metadata()

    def connect(self, peer: str, metadata: bytes) -> None:
        self._agent.add_remote_agent(metadata)
        self._peers.append(peer)
        self._agent.make_connection(peer)

    def write(self, peer: str, address: int, remote_address: int, nbytes: int, notification: bytes) -> Any:
        """Begin to write; when all of it is there, the peer finds the notification. Raises PeerLost."""
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
        """Whether the write has come to its end; then its handle is given back. Raises PeerLost."""
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
        """Raises PeerLost."""
        try:
            self._agent.send_notif(peer, notification)
        except Exception as error:
            raise PeerLost(_text(error)) from error

    def notifications(self) -> Iterator[tuple[str, bytes]]:
        """Those that have come since the last call, each with who has sent it."""
        for peer, notifications in self._agent.get_new_notifs().items():
            for notification in notifications:
                yield peer, notification

    def close(self) -> None:
        """What is being written to others is given up."""
        for peer in self._peers:
            try:
                self._agent.remove_remote_agent(peer)
            except Exception:  # noqa: BLE001, S112  (of an agent that is gone already)
                continue
        self._agent.deregister_memory(self._memory)
        self._agent = None


def _text(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
