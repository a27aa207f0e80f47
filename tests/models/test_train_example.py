"""The training example where there is no TorchRec: on freescale's own tables, as a program."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest
import torch

from interpreted import needs_gpu
from ranks import run_ranks
from repo import ROOT

sys.path.insert(0, str(ROOT / "examples"))


def rows_of_each_sample() -> None:
    """Histories, candidates and actions are those of the samples, also where a history is empty or nothing is there."""
    from native_tables import NativeTables
    from synthetic import SyntheticHistories

    made = {"steps": 3, "batch_size": 6, "items": 50, "actions": 4, "median": 3.0, "empty_share": 0.3}
    tables = NativeTables(50, 4, 8, torch.device("cpu"))
    empty = 0
    for samples in (6, 1, 0):
        data = SyntheticHistories(**made | {"batch_size": samples}, native=True)
        for features in (batch.features for batch in data):
            got = tables(features)
            ids = features["item"].split(features["item_lengths"].tolist())
            histories, candidates = [x[:-1] for x in ids], [x[-1:] for x in ids]
            nothing = torch.empty(0, dtype=torch.int64)
            assert torch.equal(got["history"].values(), tables.item.weight[torch.cat([nothing, *histories])])
            assert torch.equal(got["candidate"].values(), tables.item.weight[torch.cat([nothing, *candidates])])
            assert torch.equal(got["action"].values(), tables.action.weight[features["action"]])
            lengths = [len(x) for x in histories]
            assert got["history"].lengths().tolist() == got["action"].lengths().tolist() == lengths
            assert got["history"].offsets().tolist() == [sum(lengths[:i]) for i in range(samples + 1)]
            empty += lengths.count(0)
    assert empty


def test_rows_of_each_sample():
    run_ranks(rows_of_each_sample, 1)


def both_kinds_of_features() -> None:
    """Are the same batches."""
    from synthetic import SyntheticHistories

    keyed, native = (SyntheticHistories(1, 9, 50, 4, median=3.0, native=n).batch(0) for n in (False, True))
    assert torch.equal(keyed.labels, native.labels)
    jagged = keyed.features.to_dict()
    lengths = jagged["history"].lengths()
    assert torch.equal(native.features["item_lengths"], lengths + 1)
    assert torch.equal(native.features["action"], jagged["action"].values())
    samples = native.features["item"].split((lengths + 1).tolist())
    assert torch.equal(torch.cat([x[:-1] for x in samples]), jagged["history"].values())
    assert torch.equal(torch.cat([x[-1:] for x in samples]), jagged["candidate"].values())


def test_both_kinds_of_features():
    pytest.importorskip("torchrec")
    both_kinds_of_features()


def train(folder, device: str, **env: str) -> dict:
    """What the program says, in a process that cannot import TorchRec or FBGEMM."""
    for name in ("torchrec", "fbgemm_gpu"):
        (folder / f"{name}.py").write_text("raise ImportError('hidden')")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "train_hstu.py"), "--steps", "5", "--cap", "150", "--device", device],
        env={**os.environ, **rank, "PYTHONPATH": path, **env}, capture_output=True, text=True, timeout=250, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "it/s" not in done.stderr  # no progress bar where there is no terminal
    return json.loads(done.stdout.splitlines()[-1])


def check(said: dict, device: str, most: float) -> None:
    assert (said["tables"], said["device"], said["ranks"]) == ("native", device, 1)
    assert (said["graphs"], said["graph_breaks"], said["recompiles"]) == (1, 0, 0)
    assert said["exchanges"] == {"forward": 6, "backward": 2}
    assert 0 < said["loss_last"] < 1 and said["max_abs_diff"] < most
    untrained, eager, ours = said["held_out"].values()
    assert ours == pytest.approx(eager, abs=1e-3)
    assert ours[0] < untrained[0] - 0.03 and ours[1] > untrained[1] + 0.05, said["held_out"]


@pytest.mark.thorough
def test_without_torchrec(tmp_path):
    check(train(tmp_path, "cpu", OMP_NUM_THREADS="1", FREESCALE_CODEGEN="eager"), "cpu", 1e-5)


def test_the_progress_bar_shows_bubbles():
    import train_hstu

    shown = train_hstu.Bubbles()
    for name, value in (("step_seconds", 0.2), ("exposed_share", 0.125), ("compute_share", 0.8), ("straggler_share", 0.01)):
        shown.add_scalar(f"freescale/{name}", value, 3)
    assert shown == {"exposed": "12.5%", "straggler": "1.0%"}


class TestOnGpu:
    pytestmark = needs_gpu

    def test_without_torchrec(self, tmp_path):
        check(train(tmp_path, "cuda"), "cuda", 1e-4)
