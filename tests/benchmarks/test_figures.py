"""The figures of docs/paper.md and docs/benchmarks.md: the numbers behind them, that drawing twice gives the same bytes,
that the pages are what the committed numbers say."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from repo import ROOT

pytest.importorskip("matplotlib")
sys.path.insert(0, str(ROOT / "benchmarks"))

import figures
import figures_data
import figures_draw
import figures_words
import movielens

TINY = replace(
    figures_data.QUICK, ranks=8, batch=64, caps=(1000, 8000), straggler_ranks=(4, 8), values=(2000, 20_000), movielens_batches=(1, 2)
)
COMMITTED = json.loads(figures.RESULTS.read_text())


@pytest.fixture
def points(monkeypatch, tmp_path):
    """Without MovieLens, which is not here; and with a stand-in of 30 users."""
    path = tmp_path / "h.npz"
    random = np.random.default_rng(0)
    lengths = random.integers(5, 60, 30)
    np.savez(path, lengths=lengths, ids=random.integers(0, 100, lengths.sum()))
    monkeypatch.setattr(movielens, "histories", lambda: path)
    return figures_data.Points(TINY)


def test_long_histories_make_stragglers(points):
    found = figures_data.stragglers(points)["rows"]
    assert [(r["ranks"], r["cap"]) for r in found] == [(4, 1000), (4, 8000), (8, 1000), (8, 8000)]
    for r in found:
        parts = r["compute_ms"] + r["exposed_ms"] + r["straggler_ms"]
        assert parts == pytest.approx(r["step_ms"], rel=1e-4)
        assert r["straggler_share"] == pytest.approx(r["straggler_ms"] / r["step_ms"], rel=1e-4)
    short, long = (next(r["straggler_share"] for r in found if r["ranks"] == 8 and r["cap"] == cap) for cap in (1000, 8000))
    assert long > short + 0.05


def test_popular_rows_collide_and_values_more_than_rows(points):
    found = figures_data.collisions(points)
    of = {(r["exponent"], r["values"]): r for r in found["synthetic"]}
    assert of[1.05, 20_000]["rows_share"] > 20 * of[0.0, 20_000]["rows_share"]
    assert of[1.05, 20_000]["values_share"] > of[1.05, 20_000]["rows_share"]
    few, many = found["movielens"]
    assert (few["samples"], many["samples"], few["items"]) == (8, 16, 100)
    assert 0 < few["rows_share"] < many["rows_share"] <= 1


def test_without_movielens_the_synthetic_ids_remain(points, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(movielens, "histories", lambda: None)
    found = figures_data.collisions(points)
    assert found["movielens"] is None and len(found["synthetic"]) == 4
    assert "MovieLens" not in "\n".join(figures_words.collisions(found))
    assert figures_draw.collisions(found).axes[0].lines
    monkeypatch.undo()
    monkeypatch.setattr(movielens, "_interactions", lambda cache: None)
    assert movielens.histories(tmp_path / "none") is None and "cannot be had here" in capsys.readouterr().out


def test_interactions_become_histories_in_the_order_of_time():
    head = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
    lengths, ids = movielens.by_user(head + "7\t50\t3\t20\n3\t10\t1\t5\n7\t10\t2\t10\n7\t99\t5\t15\n")
    assert lengths.tolist() == [1, 3] and ids.tolist() == [0, 0, 2, 1]


def test_measured_figures_are_those_of_the_files():
    points = figures_data.Points(TINY)
    assert figures_data.dispatch(points) == COMMITTED["dispatch"]
    assert figures_data.contention(points) == COMMITTED["contention"]
    assert figures_data.gpu_steps(points) == COMMITTED["gpu_steps"]
    besides = {r["beside"] for r in COMMITTED["contention"]["rows"]}
    assert besides == {"NCCL, both ranks", "copy kernel, blocks: 32", "staged"}
    assert figures_data.exposed.__doc__ and figures_data._r2([(0, 1), (1, 3), (2, 5)]) == pytest.approx(1)


@pytest.mark.thorough
def test_the_same_numbers_give_the_same_bytes(tmp_path):
    """(Other releases of matplotlib may draw other bytes.)"""
    once, twice = (figures.drawn(COMMITTED, tmp_path / name) for name in ("a", "b"))
    assert [p.read_bytes() for p in once] == [p.read_bytes() for p in twice]
    for path in once:
        text = path.read_text()
        assert len(text) < 60_000 and "<dc:date>" not in text and "fill: #ffffff" in text
        assert (ROOT / "docs" / "figures" / path.name).is_file()


@pytest.mark.parametrize("name", ("balance", "contention", "ranks", "ablation", "gpu_steps"))
def test_bars_begin_at_0(name):
    """Else their lengths say nothing."""
    figure = figures_draw.DRAWN[name](COMMITTED[name])
    for axes in figure.axes:
        across = axes.containers[0].orientation == "horizontal"
        assert (axes.get_xlim() if across else axes.get_ylim())[0] == 0
    figures_draw.pyplot().close(figure)


def test_the_page_is_what_the_numbers_say():
    assert set(COMMITTED) == set(figures_data.FIGURES) == set(figures_draw.DRAWN) == set(figures_words.WORDS)
    for name, data in COMMITTED.items():
        page = (ROOT / "docs" / figures.PAGES[name]).read_text()
        assert figures.with_tables(page, {name: data}) == page and f"(figures/{name}.svg)" in page
    with pytest.raises(ValueError, match="no place for the figure ranks"):
        figures.with_tables("# nothing", {"ranks": COMMITTED["ranks"]})


def test_the_command(tmp_path, monkeypatch, capsys):
    """Draws what is asked for, writes its table into the page, and its numbers beside those that are there already."""
    (tmp_path / "paper.md").write_text("# Mine\n<!-- dispatch -->\nold\n<!-- /dispatch -->\n")
    (tmp_path / "n.json").write_text('{"ranks": {"rows": []}}')
    words = ["--only", "dispatch", "--out", str(tmp_path), "--json", str(tmp_path / "n.json")]
    monkeypatch.setattr(sys, "argv", ["figures.py", "--quick", *words])
    figures.main()
    page = (tmp_path / "paper.md").read_text()
    assert "old" not in page and "| 512 | " in page and (tmp_path / "figures" / "dispatch.svg").stat().st_size > 1000
    assert list(json.loads((tmp_path / "n.json").read_text())) == ["dispatch", "ranks"]
    monkeypatch.setattr(sys, "argv", ["figures.py", "--redraw", *words, "--only", "ablation"])
    with pytest.raises(SystemExit, match="no numbers of ablation"):
        figures.main()


def test_the_ablation_adds_up():
    """Of the committed numbers: the parts together take away what freescale saves."""
    data = COMMITTED["ablation"]
    of = {r["variant"]: r for r in data["rows"]}
    saved = of["TorchRec, synchronous"]["step_ms"] - of["freescale"]["step_ms"]
    assert sum(p["step_ms"] for p in data["parts"].values()) == pytest.approx(saved, rel=1e-3)
    assert len(of) == 11
