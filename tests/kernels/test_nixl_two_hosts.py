"""`nixl` between two hosts, as far as one machine can show it: ranks that share no network, no memory and no processes.

Each rank has namespaces of its own: of the network, behind a shaped link (benchmarks/netlab.py), of shared memory and of
processes. The device is one of threads (host_device.py).
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from freescale.compat import nixl
from repo import ROOT

HERE = Path(__file__).resolve().parent
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import netlab  # noqa: E402

OF_ITS_OWN = ["unshare", "--ipc", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
OF_ITS_OWN += ["sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]
PATHS = f"import sys; sys.path[:0] = [{str(HERE)!r}, {str(ROOT / 'tests/support')!r}, {str(BENCHMARKS)!r}]"
EXCHANGES = f"""
{PATHS}
import json
import torch.distributed as dist
import netlab, test_transports
dist.init_process_group("gloo")
netlab.set_rate(400e6)
launched = test_transports.many("nixl", "cpu", 12, 900, 4, {{"ring_bytes": 1 << 20, "piece_bytes": 8192}})
# One large message: what goes over the link beside it does not count.
transport = test_transports.opened("nixl", "cpu")
before = netlab.sent_bytes()
out, expected = test_transports.one(transport, [[5, 20000], [30000, 5]], 1, "cpu")
same = bool((test_transports.wait(out) == expected).all())
sent = netlab.sent_bytes() - before
transport.close()
with open(sys.argv[1] + str(dist.get_rank()), "w") as f:
    json.dump({{"launched": launched, "same": same, "sent": sent}}, f)
dist.barrier()
"""
DEATH = f"""
{PATHS}
import json, os
from datetime import timedelta
import torch.distributed as dist
import test_transports
leave = os._exit
os._exit = lambda code: leave(0)  # a rank that dies with another code would take the lab with it
dist.init_process_group("gloo", timeout=timedelta(seconds=120))
try:
    test_transports.dies("nixl", "cpu", 60)
except RuntimeError as error:
    with open(sys.argv[1] + str(dist.get_rank()), "w") as f:
        json.dump(str(error), f)
leave(0)
"""
why_not = nixl.missing_reason() or netlab.why_not() or ("" if shutil.which("unshare") else "no unshare")
pytestmark = pytest.mark.skipif(bool(why_not), reason=why_not or "-")


def run(tmp_path, program: str, ranks: int) -> tuple[int, dict[int, object]]:
    file, result = tmp_path / "rank.py", str(tmp_path / "result")
    file.write_text(program)
    with netlab.Lab(ranks=ranks) as lab:
        if not lab.shaped:
            pytest.skip("no network namespaces can be made here")
        code = lab.run([*OF_ITS_OWN, sys.executable, str(file), result])
    found = {r: Path(result + str(r)) for r in range(ranks)}
    return code, {r: json.loads(f.read_text()) for r, f in found.items() if f.exists()}


def test_ranks_that_share_nothing_exchange_bit_for_bit_as_c10d(tmp_path):
    code, found = run(tmp_path, EXCHANGES, 2)
    assert code == 0
    for rank, bytes_of_rows in ((0, 20000 * 64), (1, 30000 * 64)):
        assert found[rank]["launched"] == 12 and found[rank]["same"], found
        # c10d carried what is expected, nixl what has come: twice over the link, and not through memory
        assert found[rank]["sent"] > 2 * bytes_of_rows, found


@pytest.mark.slow
def test_a_rank_that_dies_on_another_host_is_named(tmp_path):
    _, found = run(tmp_path, DEATH, 3)
    assert set(found) == {0, 2}
    for rank, said in found.items():
        assert f"freescale: nixl: rank {rank} cannot finish message 1 of priority 1: rank 1 is gone" in said, said
        assert float(said.split("took ")[1].split()[0]) < 30, said
