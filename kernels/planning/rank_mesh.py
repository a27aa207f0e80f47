"""Socket connections between ranks that C uses without the GIL (native/mesh.c): between every pair of ranks for
planning, to a few others for comparing numbers. If ranks cannot connect, or plan within the step, C calls back into
Python for each exchange, which uses a process group: slower, since it waits for the GIL several times."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import secrets
import socket
import struct
import time
import weakref
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from freescale.compat import distributed
from freescale.kernels.native import c_library

log = logging.getLogger(__name__)

_CONNECT_SECONDS = 20.0  # for all connections of a rank
_ATTEMPT_SECONDS = 3.0  # for one address
_TOKEN_BYTES = 16
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_LOOPBACK = "127.0.0.1"
RANK_LEFT = -3  # returned by C if a rank disconnected


def require_memory(address: int | None) -> int:
    if not address:
        raise MemoryError("freescale: out of memory while planning a batch")
    return address


class RankMesh:
    """One rank's connections. `address`: the C mesh."""

    failure = None  # see GroupMesh

    def __init__(self, connections: Sequence[socket.socket | None], rank: int) -> None:
        self._connections = [c for c in connections if c is not None]
        numbers = (ctypes.c_int * len(connections))(*(-1 if c is None else c.fileno() for c in connections))
        self.world = len(connections)
        self.address = require_memory(c_library.library().fs_new_mesh(self.world, rank, numbers, None))
        # Not at exit: a thread may still be waiting in C.
        weakref.finalize(self, _close, self.address, self._connections).atexit = False

    def all_same(self, numbers: Sequence[int], timeout: float) -> bool:
        """Whether the numbers are the same on all ranks; raises if a rank disconnected or was too late. Collective."""
        own, failed = (ctypes.c_int64 * len(numbers))(*numbers), ctypes.c_int64()
        same = c_library.library().fs_all_same(self.address, own, len(numbers), timeout, ctypes.byref(failed))
        if same < 0:
            # That rank may itself be waiting for another one.
            raise RuntimeError(f"rank {failed.value} {'disconnected' if same == RANK_LEFT else 'did not arrive'}")
        return bool(same)

    def give_up(self) -> None:
        """Tell ranks that arrive in `all_same` later that this one timed out."""
        c_library.library().fs_give_up(self.address)

    def hang_up(self) -> None:
        """Close the connections: waits on this rank and on its peers fail at once."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _close(address: int, connections: Sequence[socket.socket]) -> None:
    c_library.library().fs_free_mesh(address)
    for connection in connections:
        connection.close()


class _Messages(ctypes.Structure):
    """`struct messages` in C: consecutive messages of one kind, one per rank."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("send", "recv", "send_counts", "recv_counts")]
    _fields_ += [("width", ctypes.c_int64)]


_CARRIER = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.POINTER(_Messages), ctypes.c_int64)


class GroupMesh:
    """A process group used instead of connections. `failure`: an exception raised in it, which C cannot propagate."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.world = group.size()
        self._failures: list[BaseException] = []
        # A single rank sends nothing. (The function does not reference this object, to avoid a reference cycle.)
        self._carrier = _carrier(group, self._failures) if self.world > 1 else None
        new_mesh, connections = c_library.library().fs_new_mesh, (ctypes.c_int * self.world)(*[-1] * self.world)
        self.address = require_memory(new_mesh(self.world, group.rank(), connections, self._carrier))
        weakref.finalize(self, _close, self.address, ()).atexit = False

    @property
    def failure(self) -> BaseException | None:
        return self._failures[-1] if self._failures else None


def _carrier(group: dist.ProcessGroup, failures: list[BaseException]) -> Any:
    def carry(messages: Any, kinds: int) -> int:
        try:
            for m in messages[:kinds]:
                send, recv = (list((ctypes.c_int64 * world).from_address(a)) for a in (m.send_counts, m.recv_counts))
                x, out = _bytes(m.send, sum(send), m.width), _bytes(m.recv, sum(recv), m.width)
                all_to_all_cpu(out, x, recv, send, group)
            return 0
        except BaseException as error:  # noqa: BLE001  (C cannot raise it)
            failures.append(error)
            return RANK_LEFT

    world = group.size()
    return _CARRIER(carry)


class _Bytes:
    """[n, width] at an address, for NumPy. (A ctypes array would create a new type per size.)"""

    def __init__(self, address: int, n: int, width: int) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (n, width), "typestr": "|u1", "version": 3}


def _bytes(address: int, n: int, width: int) -> torch.Tensor:
    return torch.from_numpy(np.asarray(_Bytes(address, n, width))) if n else torch.empty(0, width, dtype=torch.uint8)


def all_to_all_cpu(
    out: torch.Tensor, x: torch.Tensor, recv: Sequence[int], send: Sequence[int], group: dist.ProcessGroup
) -> None:
    """All-to-all of small CPU tensors over any group; a group without a CPU backend goes through its device."""
    devices = distributed.devices_of_group(group)
    if "cpu" in devices:
        distributed.all_to_all(out, x, list(recv), list(send), group)
        return
    out_on_device = torch.empty_like(out, device=devices[0])
    dist.all_to_all_single(out_on_device, x.to(devices[0]), list(recv), list(send), group=group)
    out.copy_(out_on_device)


def peers_to_compare(rank: int, world: int) -> set[int]:
    """Ranks that `RankMesh.all_same` sends to or receives from."""
    distances = [1 << i for i in range((world - 1).bit_length())]
    return {(rank + sign * d) % world for d in distances for sign in (1, -1)} - {rank}


class _Place(NamedTuple):
    """A rank's listening address, or why it has none."""

    problem: str
    no_library: str = ""  # why its C library is unavailable
    network: tuple[str, int] = ("", 0)
    addresses: tuple[str, ...] = ()
    port: int = 0
    token: bytes = b""  # secret shared by the ranks


def open_mesh(group: dist.ProcessGroup, peers: Collection[int] | None = None) -> RankMesh | None:
    """Connect the ranks of a CPU group, each to all others or to `peers` (a symmetric relation). None on every rank if
    that fails. Raises on every rank if one has no C library. Collective."""
    rank, world = group.rank(), group.size()
    peers = set(range(world) if peers is None else peers) - {rank}
    connections: list[socket.socket | None] = [None] * world
    with contextlib.ExitStack() as stack:
        listener, place = _open_listener(stack)
        places = distributed.gather_objects(place, group)
        for missing_on, why in enumerate(p.no_library for p in places):
            if why:
                raise RuntimeError(f"freescale: rank {missing_on} cannot plan batches: {why}")
        problems = [p.problem for p in places]
        if listener is not None and not any(problems):
            problem = ""
            try:
                _connect(connections, rank, peers, places, listener)
            except OSError as error:
                problem = str(error)
            problems = distributed.gather_objects(problem, group)
    if not any(problems):
        return RankMesh(connections, rank)
    for connection in filter(None, connections):
        connection.close()
    if rank == 0:
        failed, words = next((r, p) for r, p in enumerate(problems) if p)
        log.warning("freescale: planning falls back to gloo, which is slower: rank %d: %s", failed, words)
    return None


def _open_listener(stack: contextlib.ExitStack) -> tuple[socket.socket | None, _Place]:
    """Never raises: the problem is reported to the other ranks."""
    if why := c_library.problem():
        return None, _Place("", why)
    try:
        listener = stack.enter_context(_listen())
        port, token = listener.getsockname()[1], secrets.token_bytes(_TOKEN_BYTES)
        return listener, _Place("", "", _network(), tuple(_addresses()), port, token)
    except OSError as error:
        return None, _Place(f"cannot listen for connections: {error}")


def _listen() -> socket.socket:
    listener = socket.create_server(("", 0), backlog=1024)
    listener.settimeout(_ATTEMPT_SECONDS)
    return listener


def _network() -> tuple[str, int]:
    """An id that is equal for ranks that reach each other over the loopback interface."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, os.stat("/proc/self/ns/net").st_ino
    return socket.gethostname(), 0


def _addresses() -> list[str]:
    """Addresses of this host; the one that routes to the ranks' store comes first."""
    found = []
    if host := distributed.store_host():
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            found.append(probe.getsockname()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                reply = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", name[:15].encode()))
                found.append(socket.inet_ntoa(reply[20:24]))
    return [a for a in dict.fromkeys(found) if not a.startswith("127.")]


def _connect(
    connections: list[socket.socket | None], rank: int, peers: set[int], ranks: Sequence[_Place],
    listener: socket.socket,
) -> None:  # fmt: skip
    """Connect to lower-ranked peers and accept the higher-ranked ones. Each side sends the other's secret."""
    end, own = time.monotonic() + _CONNECT_SECONDS, ranks[rank]
    for peer in sorted(p for p in peers if p < rank):
        place = ranks[peer]
        addresses = (_LOOPBACK,) if place.network == own.network else place.addresses
        connections[peer] = _call(addresses, place.port, rank, place.token, own.token, end)
        if connections[peer] is None:
            raise OSError(f"cannot connect to rank {peer} at {' or '.join(addresses) or 'no address'}")
    while missing := [p for p in peers if connections[p] is None]:
        if time.monotonic() > end:
            raise OSError(f"rank {min(missing)} did not connect within {_CONNECT_SECONDS:g} s")
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            connection.settimeout(_ATTEMPT_SECONDS)
            greeting = _receive(connection, 8 + _TOKEN_BYTES)
            (caller,) = struct.unpack("<q", greeting[:8]) if greeting else (-1,)
            if caller > rank and caller in peers and secrets.compare_digest(greeting[8:], own.token):
                connection.sendall(ranks[caller].token)
                connections[caller] = connection
            else:
                connection.close()
    for made in filter(None, connections):
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _call(
    addresses: Sequence[str], port: int, rank: int, token: bytes, own_token: bytes, end: float
) -> socket.socket | None:
    while True:
        for address in addresses:
            with contextlib.suppress(OSError):
                connection = socket.create_connection((address, port), _ATTEMPT_SECONDS)
                connection.sendall(struct.pack("<q", rank) + token)
                # The other rank may still be connecting to others before it answers.
                connection.settimeout(max(0.001, end - time.monotonic()))
                if _receive(connection, _TOKEN_BYTES) == own_token:
                    return connection
                connection.close()
        if not addresses or time.monotonic() > end:
            return None
        time.sleep(0.05)


def _receive(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        if not (part := connection.recv(size - len(received))):
            return b""
        received += part
    return received
