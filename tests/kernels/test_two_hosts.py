"""Planning between two hosts, as far as one machine can show it: ranks that share no network and no memory.

Each rank has a network namespace of its own behind a shaped link (benchmarks/netlab.py), and a /dev/shm of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from repo import ROOT

HERE = Path(__file__).resolve().parent
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import netlab  # noqa: E402

MEMORY_OF_ITS_OWN = ["sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]
RANK = f"""
import json, sys
sys.path[:0] = [{str(HERE)!r}, {str(ROOT / "tests/support")!r}, {str(BENCHMARKS)!r}]
import torch.distributed as dist
import netlab, test_batch_plan, test_transports
dist.init_process_group("gloo")
netlab.set_rate(400e6)
try:
    test_transports.opened("staged", "cpu")
    said = ""
except RuntimeError as error:
    said = str(error)
before = netlab.sent_bytes()
planned = test_batch_plan._same(5, 4, "sockets")  # over those of the two networks, and over gloo
with open(sys.argv[1] + str(dist.get_rank()), "w") as f:
    json.dump({{"said": said, "sent": netlab.sent_bytes() - before, "planned": planned}}, f)
dist.barrier()
"""


@pytest.mark.thorough
@pytest.mark.skipif(netlab.why_not() is not None, reason=str(netlab.why_not()))
def test_ranks_that_share_no_memory_plan_over_the_network(tmp_path):
    program, result = tmp_path / "rank.py", str(tmp_path / "result")
    program.write_text(RANK)
    with netlab.Lab(ranks=2) as lab:
        if not lab.shaped:
            pytest.skip("no network namespaces can be made here")
        assert lab.run([*MEMORY_OF_ITS_OWN, sys.executable, str(program), result]) == 0
    for rank in range(2):
        found = json.loads(Path(result + str(rank)).read_text())
        assert "freescale: staged: the ranks cannot share memory: the ranks are on 2 hosts" in found["said"], found
        assert found["planned"] > 100 and found["sent"] > 1000, found
