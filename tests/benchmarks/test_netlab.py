"""The shaped network of the benchmarks, and the pure functions of benchmarks/overlap.py. No test asserts a speed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from repo import ROOT

BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import collisions  # noqa: E402
import netlab  # noqa: E402
import overlap  # noqa: E402

HAS_TORCHREC = all(importlib.util.find_spec(name) is not None for name in ("torchrec", "fbgemm_gpu"))
needs_a_lab = pytest.mark.skipif(netlab.why_not() is not None, reason=str(netlab.why_not()))

# Rank 1 sends 10 MB to rank 0 over its link, then both say what they saw.
SEND = """
import json, os, socket, sys, time
sys.path.insert(0, {folder!r})
import netlab
rank, size = int(os.environ["RANK"]), 10_000_000
netlab.set_rate(200e6)
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    server = socket.create_server(address)
    peer, _ = server.accept()
    began, got = time.perf_counter(), 0
    while got < size:
        got += len(peer.recv(1 << 20))
    peer.sendall(b"!")
    print(json.dumps({{"seconds": time.perf_counter() - began, "in_lab": netlab.in_lab()}}))
else:
    for _ in range(1000):
        try:
            peer = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    before = netlab.sent_bytes()
    peer.sendall(bytes(size))
    peer.recv(1)
    assert size <= netlab.sent_bytes() - before < 1.1 * size
"""


def labs() -> str:
    """Everything on this machine that belongs to a lab."""
    names = [["ip", "netns", "list"], ["ip", "-o", "link"]]
    text = "".join(subprocess.run(n, capture_output=True, text=True).stdout for n in names)
    return "\n".join(line for line in text.splitlines() if netlab._PREFIX in line)


def mine() -> str:
    return "\n".join(line for line in labs().splitlines() if f"{netlab._PREFIX}{os.getpid()}" in line)


@needs_a_lab
def test_the_link_is_shaped_and_nothing_stays_behind(tmp_path, capfd):
    script = tmp_path / "send.py"
    script.write_text(SEND.format(folder=str(BENCHMARKS)))
    with netlab.Lab(2) as lab:
        assert lab.shaped and mine()
        assert lab.run([sys.executable, str(script)]) == 0
    seen = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert seen["in_lab"]
    assert seen["seconds"] >= 0.35  # 0.4 s by the rate: a link that is not shaped takes hundredths
    assert mine() == ""


@needs_a_lab
def test_a_failed_rank_ends_the_others_and_an_error_cleans_up():
    with netlab.Lab(2) as lab:
        began = time.perf_counter()
        code = lab.run([sys.executable, "-c", "import os, sys, time; sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(60)"])
        assert code == 3
        assert time.perf_counter() - began < 50
    with pytest.raises(KeyboardInterrupt), netlab.Lab(2):
        raise KeyboardInterrupt
    assert mine() == ""


@needs_a_lab
@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM"])
def test_signals_clean_up(how):
    sleeps = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]
    command = [sys.executable, str(BENCHMARKS / "netlab.py"), "2", "100mbit", *sleeps]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as lab:
        assert lab.stdout is not None and lab.stdout.readline().startswith(b"up")
        lab.send_signal(getattr(signal, how))
        assert lab.wait(30) != 0
    assert f"{netlab._PREFIX}{lab.pid}" not in labs()


@needs_a_lab
def test_what_a_killed_lab_left_behind_is_removed():
    gone = subprocess.Popen(["true"])
    gone.wait()
    name = f"{netlab._PREFIX}{gone.pid}"
    subprocess.run(["ip", "netns", "add", f"{name}-0"], check=True)
    assert name in labs()
    with netlab.Lab(1):
        assert name not in labs()


def test_without_root_it_says_so_and_uses_loopback(monkeypatch, capfd):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with netlab.Lab(2) as lab:
        assert not lab.shaped
        script = "import os; assert os.environ['MASTER_ADDR'] == '127.0.0.1' and os.environ['WORLD_SIZE'] == '2'"
        assert lab.run([sys.executable, "-c", script]) == 0
    assert "need root" in capfd.readouterr().err


def test_rates_are_read_and_refused():
    assert netlab.parse_rate("400mbit") == 400e6 and netlab.parse_rate("1.5gbit") == 1.5e9
    with pytest.raises(ValueError, match="400mbit"):
        netlab.parse_rate("fast")


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("collision", [0.0, 0.03, 0.12, 0.6, 1.0])
def test_batches_collide_as_asked(ranks, collision):
    shape = collisions.Shape(samples=20, length=31, table_rows=10_000)
    batches = []
    for t, rows in enumerate(collisions.unique_rows(shape, ranks, collision, 4, seed=3)):
        batches.append(np.stack([collisions.values_of(rows[r], shape, 10 * t + r) for r in range(ranks)]))
    assert batches[0].shape == (ranks, shape.values)
    found = collisions.measure(batches, block=-(-10_000 // ranks))
    assert found.collision == pytest.approx(collision, abs=0.5 / (ranks * shape.unique))
    assert found.duplication == pytest.approx(2.0)
    assert found.urgent_rows <= found.all_rows <= found.all_values
    if ranks == 1:
        assert found.all_values == 0  # nothing leaves a rank that is alone
    elif collision == 1.0:
        assert found.urgent_rows == found.all_rows > 0
    elif collision == 0.0:
        assert found.urgent_rows == 0 < found.all_rows


def test_what_a_rank_sends_is_counted_by_hand():
    # Rank 0 owns rows 0 to 9, rank 1 the others. Both batches share row 12, which rank 0 asks rank 1 for.
    before = np.array([[0, 12, 12], [11, 11, 13]])
    after = np.array([[1, 12, 14], [2, 3, 15]])
    found = collisions.measure([before, after], block=10)
    assert found.collision == pytest.approx(1 / 6)
    assert found.all_values == found.all_rows == 2  # 12 and 14 one way, 2 and 3 the other
    assert found.urgent_rows == 1


def test_a_table_that_is_too_small_is_refused():
    shape = collisions.Shape(samples=20, length=31, table_rows=1000)
    with pytest.raises(ValueError, match="do not fit"):
        next(collisions.unique_rows(shape, 4, 0.1, 1, seed=0))


def test_r_squared():
    assert overlap.r_squared([0, 1, 2], [1, 3, 5]) == pytest.approx(1.0)
    x, y = [0.0, 0.1, 0.2, 0.6], [3.0, 5.0, 1.0, 9.0]
    assert overlap.r_squared(x, y) == pytest.approx(np.corrcoef(x, y)[0, 1] ** 2)
    assert overlap.r_squared([0, 1], [1, 3]) is None and overlap.r_squared([0, 1, 2], [4, 4, 4]) is None


def row(variant: str, link: str, collision: float, step: float, exposed: float, size: float = 0.0) -> dict:
    times = {"step_ms": step, "compute_ms": step - exposed, "exposed_ms": exposed}
    spread = {f"{name}_iqr": 0.0 for name in times}
    return {"variant": variant, "link": link, "collision": collision, "bytes": size, "meter_ms": None, **times, **spread}


def test_headlines_are_ratios_of_the_rows():
    rows = [row("eager", overlap.FAST, 0.12, 150, 50)]
    rows += [row("freescale", overlap.FAST, c, 100, 50 * c) for c in (0.0, 0.12, 0.6)]
    rows += [row("freescale", overlap.OWN, 0.12, 110, 10, size=1e6)]
    train = {
        "rows": rows,
        "links_bits_per_second": {overlap.FAST: 8e6, overlap.OWN: 80e6},
        "row_bytes": 100,
        "collisions": [{"collision": 0.12, "urgent_rows": 25}],
        "compiled": {},
    }
    single = {"single_rank_ratio": 1.01, "compiled": {"freescale": {"seconds": 20.0, "pass_seconds": 0.5}}}
    found = overlap.headlines(train, single)
    assert found["exposed_reduction_at_12pct"] == pytest.approx(0.88)
    assert found["linear_r2"] == pytest.approx(1.0)
    assert found["wire_bound_ratio"] == pytest.approx(1.1)  # 1 MB at 80 Mbit/s takes 100 ms
    assert found["wire_bound_ratio_slow_link"] is None
    assert found["urgent_wire_ms"] == pytest.approx(5.0)  # 25 rows there and back
    assert found["exposed_over_urgent_at_12pct"] == pytest.approx(1.2)
    assert found["single_rank_ratio"] == 1.01 and found["pass_share_of_compile"] == pytest.approx(0.025)
    assert "88.0%" in overlap.table(rows)


@pytest.mark.skipif(not HAS_TORCHREC, reason="the variants are TorchRec models")
def test_variants_add_one_pass_each_and_end_with_everything():
    from overlap_variants import Moment, Step, variants

    found = {v.name: (v.passes, v.look_ahead) for v in variants(("a", "b", "c"))}
    assert found == {
        "eager": (None, False),
        "pipeline": (None, False),
        "inductor": ("none", False),
        "a": ("a", True),
        "b": ("a,b", True),
        "freescale": ("all", True),
    }
    step = Step.between(Moment(1.0, 2.0, 3.0, 4.0, 100), Moment(1.5, 2.25, 3.125, 4.5, 300))
    assert (step.step_ms, step.exposed_ms, step.sent) == (500, 125, 200)  # 0.5 s less 0.25 computing, 0.125 queued
    chosen, every = overlap.settings_of(overlap.arguments([]))["variants"], [v.name for v in variants()]
    assert [name for name in every if name in chosen] == chosen and chosen[-1] == "freescale"
