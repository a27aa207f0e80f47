"""Report and explain on what real ranks recorded: two collections, no passes, graphs out of the cache, a killed run."""

from __future__ import annotations

import html
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import trec
import zoo
from freescale.views import page, records, summary, timeline
from freescale.views.records import compilations
from ranks import HAS_TORCHREC, RankFailed, run_ranks

pytestmark = pytest.mark.skipif(not HAS_TORCHREC, reason="torchrec or fbgemm_gpu is not installed")
STEPS = 5


def _train(folder: str, killed: int | None = None) -> None:
    """A model with two collections; it evaluates before its first backward pass. All ranks but `killed` write down that
    they have ended."""
    import freescale
    from freescale.runtime import recording

    torch.manual_seed(0)
    model = trec.shard(zoo.MODELS["DLRM"](), zoo.LAYOUT, "rowwise_adagrad", ddp=True)
    call = torch.compile(model, backend="freescale")
    batches = [zoo.batch(step, dist.get_rank(), 4) for step in range(STEPS)]
    for i, batch in enumerate(freescale.LookaheadLoader(batches, call)):
        loss = call(batch)
        if i == 0:
            with torch.no_grad():
                call(zoo.batch(100, dist.get_rank(), 4))
        loss.backward()
    path = next(Path(folder).glob(f"*-rank{dist.get_rank():05d}.jsonl"))
    deadline = time.monotonic() + 60
    while path.read_text().count('"kind": "step"') < STEPS and time.monotonic() < deadline:
        time.sleep(0.1)
    if killed == dist.get_rank():
        os.kill(os.getpid(), signal.SIGKILL)
    recording.recorder(folder)._end()  # these ranks do not run what is to be done at exit


def shown(folder: Path) -> tuple[dict, str, str]:
    run = records.read(folder)
    found = summary.summarize(run)
    return found, summary.text_report(found), html.unescape(page.page(run))


def env(folder: Path, **more: str) -> dict[str, str]:
    return {"FREESCALE_RECORD": str(folder), "FREESCALE_CODEGEN": "eager", **more}


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> dict[str, str]:
    return {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, cache) -> Path:
    folder = tmp_path_factory.mktemp("record")
    run_ranks(_train, 2, str(folder), env=env(folder, **cache))
    return folder


@pytest.mark.thorough
def test_two_collections(trained):
    found, said, made = shown(trained)
    tables = {name.rpartition(" of ")[2] for name in found["waits"] if " of " in name}
    assert {"ebc.table_wise", "ec.row_wise", "ec.table_wise"} <= tables
    for words in ("forward graph", "9 exchanges", "backward graph", "3 exchanges", "unique rows of ebc.table_wise"):
        assert words in said and words in made
    assert said.startswith("Ranks waited ") and f"<b>{' '.join(found['verdict'])}</b>" in made
    assert "GPU idle" not in said and "GPU idle" not in made
    assert "urgent rows of ec.row_wise" in timeline.text_timeline(records.read(trained).ranks[0].graph)
    assert "kB received per step and rank" in made  # some hundred bytes are not 0.000 MB


@pytest.mark.thorough
def test_training_and_evaluation_are_told_apart(trained):
    """The last forward graph is the evaluation's, the last backward graph the training's."""
    run = records.read(trained)
    for rank in run.ranks.values():
        assert [g["direction"] for g in rank.graph] == ["forward", "backward", "forward"]
        named = compilations(rank.graph)
        assert [[g["exchanges"] for g in of_one] for of_one in (named["train"], named["eval"])] == [[9, 3], [3]]
    said = timeline.text_timeline(run.ranks[0].graph)
    assert said.index("train, backward graph") < said.index("train, predicted") < said.index("eval, forward graph")
    assert said.count("predicted for the traced batch") == 2
    made = page.explain_page(run)
    assert made.count("<svg") == 2 and "train: two steps" in made and "eval: two steps" in made


@pytest.mark.thorough
def test_graphs_out_of_the_cache(trained, cache, tmp_path):
    """In an empty cache one rank finds nothing and may compile for both; the next run compiles nothing."""
    found, said, made = shown(trained)
    assert {g["compiled_on"] for g in found["graphs"]} <= {1, 2}
    assert "graph, loaded from torch's cache in" not in said and "graph, compiled" in said and "graph, compiled" in made
    run_ranks(_train, 2, str(tmp_path), env=env(tmp_path, **cache))
    again, said, made = shown(tmp_path)
    assert [g["compiled_on"] for g in again["graphs"]] == [0, 0, 0]
    for words in (said, made):
        assert words.count("graph, loaded from torch's cache in") == 3 and "9 exchanges" in words
    kept = records.read(tmp_path).ranks[0].graph
    assert timeline.text_timeline(kept) == timeline.text_timeline(records.read(trained).ranks[0].graph)


@pytest.mark.thorough
def test_passes_off(tmp_path):
    """Exchanges are there, waited for and counted, but nobody looked for them in the graph."""
    run_ranks(_train, 2, str(tmp_path), env=env(tmp_path, FREESCALE_PASSES="none"))
    found, said, made = shown(tmp_path)
    assert found["waits"]["urgent rows of ec.row_wise"] > 0
    for words in (said, made, timeline.text_timeline(records.read(tmp_path).ranks[0].graph)):
        assert "passes are off, exchanges were not counted" in words and "0 exchanges" not in words


@pytest.mark.thorough
def test_a_killed_rank(tmp_path):
    """All of its steps are there, since a second has passed; that it did not end by itself is said, of it alone."""
    with pytest.raises(RankFailed, match="exited unexpectedly"):
        run_ranks(_train, 2, str(tmp_path), 1, env=env(tmp_path))
    found, said, made = shown(tmp_path)
    assert found["ranks"][1]["steps"] == STEPS and found["not_ended"] == [1]
    for words in (said, made):
        assert "Rank 1 did not exit normally: killed, or still training." in words
