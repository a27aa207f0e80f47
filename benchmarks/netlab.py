"""A small network on one machine: every rank in a network namespace of its own, behind a link of a chosen speed.

Each rank has a veth link `eth0`, shaped on its way out with `tc tbf`; the other ends meet in a bridge. A rank can
change the speed of its own link at any time (`set_rate`) and count what it has sent (`sent_bytes`). Everything is
removed when the `with` ends, on Ctrl-C and SIGTERM too; what a killed lab has left behind, the next one removes.

Needs Linux, root and iproute2 (`why_not` says what is missing). Without them ranks run on the loopback interface,
which nothing slows down. The module uses the standard library only and does not know what the ranks do.

    with Lab(ranks=2) as lab:
        code = lab.run([sys.executable, "train.py"])

    python benchmarks/netlab.py 2 400mbit python train.py
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

DEVICE = "eth0"
NETWORK = "10.77.0."  # inside the namespaces only
_MTU = "3000"
BURST = 6000  # bytes that may leave at once after a pause: two packets, so that short messages take their time too
QUEUE = 16 * 1024 * 1024  # more than all connections hold back: nothing is dropped
_PREFIX = "fslab"
# Wire time should be bytes / rate, also after a pause or a change of the rate, and a message should not wait behind
# more than a network card's queue of another connection: no slow start, no probing, 32 kB per connection in the queue.
_TCP = " && ".join(
    f"echo {value} > {name}"
    for name, value in (
        ("tcp_slow_start_after_idle", 0), ("tcp_congestion_control", "reno"), ("tcp_limit_output_bytes", 32768)
    )
)  # fmt: skip


def why_not() -> str | None:
    """What is missing for a shaped network; None where it can be made."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces need Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"iproute2 is not installed ({' and '.join(missing)} not found)"
    return None


class Lab:
    """`ranks` namespaces on one bridge, one core for each rank; without root or iproute2, plain processes."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.shaped = ranks, why_not() is None
        self._id = f"{_PREFIX}{os.getpid()}"
        self._running: list[subprocess.Popen[bytes]] = []
        self._old_handler: object = None

    def __enter__(self) -> Lab:
        if not self.shaped:
            print(f"netlab: no shaped link: {why_not()}; ranks use the loopback interface", file=sys.stderr)
            return self
        with contextlib.suppress(ValueError):  # not the main thread: then Ctrl-C and SIGTERM are not ours either
            self._old_handler = signal.signal(signal.SIGTERM, _leave)
        try:
            _remove_left_behind()
            self._build()
        except BaseException as error:
            self._tear_down()
            if isinstance(error, subprocess.CalledProcessError):
                words = f"netlab: `{' '.join(error.cmd)}` failed: {error.stderr.strip()}"
                print(f"{words}; ranks use the loopback interface", file=sys.stderr)
                self.shaped = False
                return self
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop_ranks()
        self._tear_down()

    def run(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> int:
        """Run `command` on every rank with what torch.distributed reads from the environment; the first bad exit code.

        When a rank fails, the others are ended.
        """
        try:
            for rank in range(self.ranks):
                self._running.append(subprocess.Popen(self._command(rank, command), env=self._env(rank, env or {})))
            while True:
                codes = [p.poll() for p in self._running]
                bad = [c for c in codes if c]
                if bad or None not in codes:
                    return bad[0] if bad else 0
                time.sleep(0.05)
        finally:
            self._stop_ranks()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _namespace(self, rank: int) -> str:
        return f"{self._id}-{rank}"

    def _build(self) -> None:
        bridge = self._id
        _do("ip", "link", "add", bridge, "mtu", _MTU, "type", "bridge")
        _do("ip", "link", "set", bridge, "up")
        for rank in range(self.ranks):
            space, outer = self._namespace(rank), f"{self._id}v{rank}"
            inside = ("ip", "netns", "exec", space)
            _do("ip", "netns", "add", space)
            _do("ip", "link", "add", outer, "mtu", _MTU, "type", "veth", "peer", "name", DEVICE, "netns", space)
            _do("ip", "link", "set", outer, "mtu", _MTU, "master", bridge, "up")
            _do(*inside, "ip", "addr", "add", f"{NETWORK}{rank + 1}/24", "dev", DEVICE)
            _do(*inside, "ip", "link", "set", DEVICE, "mtu", _MTU, "up")
            _do(*inside, "ip", "link", "set", "lo", "up")
            _do(*inside, "ip", "link", "set", DEVICE, "gso_max_size", "16384")
            _do(*inside, "sh", "-c", f"cd /proc/sys/net/ipv4 && {_TCP}")

    def _command(self, rank: int, command: Sequence[str]) -> list[str]:
        cores = sorted(os.sched_getaffinity(0))
        pinned = ["taskset", "-c", str(cores[rank % len(cores)])] if shutil.which("taskset") else []
        inside = ["ip", "netns", "exec", self._namespace(rank)] if self.shaped else []
        return [*inside, *pinned, *command]

    def _env(self, rank: int, more: Mapping[str, str]) -> dict[str, str]:
        if rank == 0:
            self._port = "29555" if self.shaped else str(_free_port())
        return {
            **os.environ,
            "MASTER_ADDR": f"{NETWORK}1" if self.shaped else "127.0.0.1",
            "MASTER_PORT": self._port,
            "GLOO_SOCKET_IFNAME": DEVICE if self.shaped else "lo",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "OMP_NUM_THREADS": "1",
            **more,
        }

    def _stop_ranks(self) -> None:
        for p in self._running:
            if p.poll() is None:
                p.terminate()
        for p in self._running:
            try:
                p.wait(5)
            except subprocess.TimeoutExpired:
                p.kill()
                p.wait()
        self._running.clear()

    def _tear_down(self) -> None:
        if self.shaped:
            _remove(self._id, self.ranks)
            if self._old_handler is not None:
                signal.signal(signal.SIGTERM, self._old_handler)  # type: ignore[arg-type]
                self._old_handler = None


def _leave(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _remove(lab: str, ranks: int) -> None:
    for rank in range(ranks):  # a link goes with its namespace
        subprocess.run(["ip", "netns", "del", f"{lab}-{rank}"], capture_output=True)
        subprocess.run(["ip", "link", "del", f"{lab}v{rank}"], capture_output=True)
    subprocess.run(["ip", "link", "del", lab], capture_output=True)


def _remove_left_behind() -> None:
    """Labs whose process is gone."""
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    names += subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout
    ranks: dict[str, int] = {}
    for pid, rank in re.findall(rf"\b{_PREFIX}(\d+)(?:[-v](\d+))?\b", names):
        ranks[pid] = max(ranks.get(pid, 0), int(rank or 0) + 1)
    for pid, n in ranks.items():
        if not Path(f"/proc/{pid}").exists():
            _remove(f"{_PREFIX}{pid}", n)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# ---- what a rank does with its own link ------------------------------------------------------------------------------


def in_lab() -> bool:
    """Is this process a rank behind a link of its own?"""
    return os.environ.get("GLOO_SOCKET_IFNAME") == DEVICE and os.environ.get("MASTER_ADDR", "").startswith(NETWORK)


def set_rate(bits_per_second: float | None, burst: int = BURST) -> None:
    """Shape what this rank sends from now on; None: as fast as it goes."""
    if bits_per_second is None:
        subprocess.run(["tc", "qdisc", "del", "dev", DEVICE, "root"], capture_output=True)
        return
    rate = ["rate", f"{round(bits_per_second)}bit", "burst", str(burst), "limit", str(QUEUE)]
    _do("tc", "qdisc", "replace", "dev", DEVICE, "root", "tbf", *rate)


def sent_bytes() -> int:
    """Bytes that left this rank so far, headers included (on loopback: those of all ranks)."""
    device = DEVICE if in_lab() else "lo"
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == device:
            return int(counts.split()[8])
    raise RuntimeError(f"netlab: this rank has no network device {device!r}")


def resent_segments() -> int:
    """TCP segments that this rank had to send again so far: 0 on a healthy link."""
    names, counts = (
        line.split()[1:] for line in Path("/proc/self/net/snmp").read_text().splitlines() if line.startswith("Tcp:")
    )
    return int(dict(zip(names, counts, strict=True))["RetransSegs"])


def parse_rate(text: str) -> float:
    """Bits per second of "400mbit", "1.5gbit", "64kbit"."""
    found = re.fullmatch(r"([\d.]+)([kmg]?)bit", text)
    if found is None:
        raise ValueError(f"netlab: a rate is written like 400mbit or 1.5gbit, found {text!r}")
    return float(found[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[found[2]]


def main() -> int:
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    if len(sys.argv) < 4:
        print("usage: netlab.py RANKS RATE COMMAND...   (RATE as in 400mbit, or none)", file=sys.stderr)
        return 2
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with it ignored
    ranks, text, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    wanted = None if text == "none" else parse_rate(text)
    with Lab(ranks) as lab:
        if lab.shaped and wanted is not None:
            shape = "import netlab, os, sys; netlab.set_rate(float(sys.argv[1])); os.execvp(sys.argv[2], sys.argv[2:])"
            here = str(Path(__file__).resolve().parent)
            prefix = [sys.executable, "-c", f"import sys; sys.path.insert(0, {here!r}); {shape}", str(wanted)]
            command = [*prefix, *command]
        return lab.run(command)


if __name__ == "__main__":
    sys.exit(main())
