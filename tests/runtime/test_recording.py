"""FREESCALE_RECORD: what ranks write while they train, also without code generation and out of torch's caches."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from freescale.runtime import meter, recording
from freescale.views import records, summary
from ranks import run_ranks
from two_tables import Trainer


def _trained(folder: str):
    trainer = Trainer("sgd")
    *_, stats = trainer.train(0.3, 6, wrapped=True)
    import freescale

    path = next(Path(folder).glob(f"*-rank{dist.get_rank():05d}.jsonl"))
    deadline = time.monotonic() + 60
    while path.read_text().count('"kind": "step"') < 6 and time.monotonic() < deadline:
        time.sleep(0.1)  # nobody tells it to write
    return freescale.meter.steps(), stats


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("record")
    return folder, run_ranks(_trained, 2, str(folder), env={"FREESCALE_RECORD": str(folder)})


def test_the_record_is_what_the_meter_and_the_loader_say(trained):
    folder, ranks = trained
    run = records.read(folder)
    assert run.world == 2 and run.missing == []
    for number, (steps, stats) in enumerate(ranks):
        record = run.ranks[number]
        launches = [s.pop("launches") for s in record.step]
        assert all(s.pop("at") > 1e9 for s in record.step)
        assert [s.keys() for s in record.step] == [s.keys() for s in steps]
        for recorded, known in zip(record.step, steps, strict=True):
            # How a wait for others splits, the record of all ranks says exactly; the meter says what ranks told each other.
            waited, recorded_waited = (s.pop("exposed") + s.pop("straggler") for s in (known, recorded))
            assert recorded_waited == pytest.approx(waited, rel=0, abs=4e-7)
            for name, value in known.items():
                assert recorded[name] == pytest.approx(value, rel=0, abs=2e-7), name  # written in tenths of microseconds
        assert record.plan == json.loads(json.dumps(stats))
        assert all(any(label == "urgent rows of item" for label, *_ in of) for of in launches)


def test_the_record_has_the_graphs(trained):
    folder, _ = trained
    for record in records.read(folder).ranks.values():
        assert [g["direction"] for g in record.graph] == ["forward", "backward"]
        forward = record.graph[0]
        assert forward["sites"]["find_exchanges"] > 0 and forward["exchanges"] == 6
        assert list(forward["texts"]) == ["before", *forward["sites"]]
        done = [(e["do"], e["what"]) for e in forward["timeline"] if e["do"] != "compute"]
        assert done.index(("launch", "urgent rows of item")) < done.index(("wait", "urgent rows of item"))
        assert any(e["do"] == "compute" and e["seconds"] > 0 for e in forward["timeline"])


def test_shares_add_up(trained):
    folder, _ = trained
    assert sum(summary.summarize(records.read(folder))["shares"].values()) == pytest.approx(1)


@pytest.fixture
def recorder(tmp_path):
    made = recording.Recorder(str(tmp_path / "new" / "folder"))
    yield made
    made._failed = True
    meter.METER._listeners.clear()


def test_balance_is_written_when_it_was_measured(recorder):
    stats = recording.RecordedStats(maxlen=5)
    stats.to = recorder
    first, second = ({"step": n, "predicted_before": 0.5, "predicted_after": 0.1, "measured": None} for n in range(2))
    stats.append(first)
    stats.append(second)
    recorder.flush(last=False)
    assert records.read_rank(recorder.path).balance == []
    first["measured"] = 0.2
    recorder.flush(last=False)
    assert records.read_rank(recorder.path).balance == [first]
    recorder.flush()
    assert records.read_rank(recorder.path).balance == [first, second] and list(stats) == [first, second]


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "freescale"):
        recorder = recording.Recorder(str(tmp_path / "file" / "folder"))
    recorder.add("plan", {"step": 0, "exchange": "x"})
    recorder.flush()
    assert [r.message for r in caplog.records if "cannot write" in r.message] and not recorder._queue
    meter.METER._listeners.clear()


def test_nothing_is_recorded_unless_asked():
    assert recording.recorder("") is None
