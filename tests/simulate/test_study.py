"""Whole studies: the schedule of the passes, what comes out on two ranks, the command."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from freescale.__main__ import main
from freescale.simulate import findings, graphs
from freescale.simulate.cluster import PRESETS, to_toml
from freescale.simulate.events import Compute, Launch, Wait
from freescale.simulate.graphs import program_of
from freescale.simulate.study import Study
from freescale.simulate.variants import EVERYTHING, PEC, SYNCHRONOUS, TORCHREC, Traffic, Variant, freescale_variants
from freescale.simulate.workload import Generated, Workload
from ranks import run_ranks_apart

SMALL = Workload(ranks=16, batch=32, rows=100_000_000)
H100 = PRESETS["h100"]
PLAIN = replace(H100, jitter=0.0, host_ms=0.0, host_ms_look_ahead=0.0, sm_tax=0.0, copy_tax=0.0, latency_us=0.0, message_us=0.0)
BYTES = {"urgent rows": 100e6, "early rows": 90e6, "late gradients": 0.0, "urgent gradients": 10e6}


@pytest.fixture(scope="module")
def traced():
    return {ahead: graphs.trace(2, ahead) for ahead in (True, False)}


@pytest.fixture(scope="module")
def study(traced):
    """With two layers, whose graphs are traced once for all tests, as the batches of a workload are planned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("freescale.simulate.study._traced", lambda layers, ahead: traced[ahead])
        yield cache(_fresh_study)


def _fresh_study(workload=SMALL, cluster=H100, steps=3):
    return Study(Generated(workload), cluster, steps)


def shape(program):
    return [i if isinstance(i, Compute) else f"{type(i).__name__} {i.what} {i.of}" for i in program]


def test_the_program_is_the_order_of_the_passes(traced):
    """As docs/how-it-works.md draws it: late gradients and early rows under the forward pass, weight gradients behind the
    launch of the urgent gradients."""
    program = program_of(traced[True], 0.03, 0.03, BYTES, 25e9)
    assert [s for s in shape(program) if not isinstance(s, Compute)] == [
        "Launch urgent rows 0", "Wait early rows 0", "Wait urgent rows 0", "Launch late gradients -1",
        "Wait late gradients -1", "Launch early rows 1", "Launch urgent gradients 0", "Wait urgent gradients 0",
    ]  # fmt: skip
    kinds = [type(i) for i in program]
    assert kinds[3:] == [Launch, Compute, Wait, Launch, Compute, Launch, Compute, Wait]
    assert program[-2].per_token > 0 and program[-2].per_square == 0  # weight gradients
    for place in (0, 1):
        assert sum(i[place] for i in program if isinstance(i, Compute)) == pytest.approx(1.0)


def test_a_slow_link_moves_the_wait_for_late_gradients_back(traced):
    def before_the_wait(gigabytes_per_second):
        program = program_of(traced[True], 0.03, 0.03, BYTES, gigabytes_per_second * 1e9)
        return sum(sum(i) for i in program[: program.index(Wait("late gradients", -1))] if isinstance(i, Compute))

    assert before_the_wait(1.6) > before_the_wait(500)


def test_without_look_ahead_rows_are_requested_in_the_step(traced):
    program = program_of(traced[False], 0.03, 0.03, BYTES, 25e9)
    assert shape(program)[:4] == ["Launch requests 0", "Wait requests 0", "Launch urgent rows 0", "Wait urgent rows 0"]


def test_two_ranks_by_hand(study):
    """Two hosts of one GPU: half of each rank's values cross a link of 1 GB/s, ids, rows and then gradients.

    Owners have equal parts, so the link of the rank with more values is the slowest, both ways.
    """
    cluster = replace(PLAIN, ranks_per_host=1, between_gb_per_s=1.0)
    made = study(Workload(ranks=2, batch=4, rows=10_000_000), cluster, steps=1)
    outcome = made.run(TORCHREC[0])
    batches = made.batches(False)
    counts, seconds = batches.counts[2], batches.assignments[2].seconds.sum(1)
    row = cluster.dim * 4
    wire = counts.values.max() / 2 * (8 + 2 * row) / 1e9
    lengths = 2 * 4 / 2 / 1e9
    # Rows reach the rank with fewer values earlier; gradients leave when both are there.
    rows_there = (np.maximum(counts.values, counts.values.mean())) / 2 * row / 1e9
    ids_there = counts.values.max() / 2 * 8 / 1e9
    launched = lengths + ids_there + rows_there + seconds
    gradients = counts.values / 2 * row / 1e9
    end = (launched + gradients).max()
    assert outcome.step_ms == pytest.approx(end * 1e3, rel=1e-3)
    assert outcome.step_ms <= (wire + lengths + seconds.max()) * 1e3 * 1.001


@pytest.mark.thorough
def test_compute_exposed_and_straggler_are_the_step(study):
    made = study()
    for outcome in made.run_all([*TORCHREC, *freescale_variants()]):
        total = outcome.compute_ms + outcome.exposed_ms + outcome.straggler_ms
        assert total == pytest.approx(outcome.step_ms, rel=1e-9), outcome.variant.name


def test_each_part_does_its_work(study):
    outcomes = study().run_all([*TORCHREC, *freescale_variants()])
    before, after = findings.before_and_after(outcomes)
    assert after.straggler < 0.2 * before.straggler and after.exposed_ms < 0.4 * before.exposed_ms
    of = findings.by_parts(outcomes)
    assert len(of) == 8
    assert of[True, True, True].compute_ms < of[True, True, False].compute_ms  # no SMs are taken
    assert of[True, False, False].straggler_ms < of[False, False, False].straggler_ms
    assert of[False, True, False].exposed_ms < of[False, False, False].exposed_ms
    shares = findings.part_shares(outcomes)
    saved = sum(s["step_ms"] for s in shares.values())
    assert saved == pytest.approx(before.step_ms - after.step_ms)
    pec = findings.named(outcomes, "TorchRec, PEC")
    assert after.exposed_ms < pec.exposed_ms < before.exposed_ms


@pytest.mark.thorough
def test_the_same_seed_gives_the_same_figures(study):
    def figures(seed):
        outcomes = _fresh_study(replace(SMALL, seed=seed)).run_all([TORCHREC[0], EVERYTHING])
        return [(o.step_ms, o.exposed_ms, o.straggler_ms) for o in outcomes]

    assert figures(0) == figures(0) != figures(1)


@pytest.mark.thorough
@pytest.mark.parametrize("variant", (TORCHREC[0], TORCHREC[1], EVERYTHING))
def test_a_slower_link_is_never_faster(study, variant):
    steps = [study(cluster=replace(H100, between_gb_per_s=s)).run(variant).step_ms for s in (100.0, 25.0, 6.0, 1.5)]
    assert steps == sorted(steps)


@pytest.mark.thorough
def test_where_it_does_not_pay_it_says_so(study):
    short = study(Workload(ranks=8, batch=16, median=10, cap=20, rows=1_000_000))
    outcomes = short.run_all([*TORCHREC, *freescale_variants()])
    assert not findings.pays(outcomes) and "NOT worth it here" in findings.verdict(outcomes)
    assert any(s.startswith("NOT worth it here: look-ahead with priorities") for s in findings.parts_that_do_not_pay(outcomes))
    assert findings.pays(study().run_all([*TORCHREC, EVERYTHING]))


def test_traffic_inside_and_between_hosts():
    """8 GB of each of 16 ranks on hosts of 8: 7/16 of it stays in the host, 8/16 leaves it."""
    size = np.full(1, 8e9)
    kernel, copies = (Traffic(PLAIN, 16, by_copies).seconds(size)[0] for by_copies in (False, True))
    assert kernel == pytest.approx(max(3.5 / 450, 4 / 25))
    assert copies == pytest.approx(max(4 / 25, 7.5 / 46.8))
    one_host = Traffic(PLAIN, 8, copies=True)
    assert one_host.seconds(size)[0] == pytest.approx(7 / 450) and not one_host.staged


def test_programs_compute_all_of_a_step():
    for program in (SYNCHRONOUS, PEC):
        for place in (0, 1):
            assert sum(i[place] for i in program if isinstance(i, Compute)) == pytest.approx(1.0)
    assert [v.name for v in freescale_variants()][1] == "freescale, balance"
    assert Variant("x").parts == ""


def _command(folder: str) -> tuple[int, str]:
    import contextlib
    import io

    said = io.StringIO()
    words = ["--ranks", "8", "--batch", "16", "--steps", "2", "--rows", "10000000", "--cluster", f"{folder}/c.toml"]
    with contextlib.redirect_stdout(said):
        code = main(["simulate", *words, "--json", f"{folder}/found.json", "--plots", f"{folder}/plots"])
    return code, said.getvalue()


@pytest.mark.thorough
def test_the_command(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "c.toml").write_text(to_toml(replace(H100, layers=1, name="mine"), []))
    ((code, said),) = run_ranks_apart(_command, [(str(tmp_path),)])
    assert code == 0
    assert said.startswith("SIMULATED, not measured: 8 ranks, mine")
    assert "savings of each part" in said and "elsewhere:" in said
    assert "PEC       Prioritized Embedding Communication" in said and "(no part enabled: one compiled graph" in said
    found = json.loads((tmp_path / "found.json").read_text())
    for headline in ("bubble_reduction", "straggler_before", "straggler_after", "exposed_reduction"):
        assert 0 <= found[headline] <= 1
    assert found["simulated"] and len(found["rows"]) == 11
    assert (tmp_path / "plots" / "variants.png").stat().st_size > 10_000


def test_plots_need_matplotlib(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert main(["simulate", "--plots", str(tmp_path / "p")]) == 2
    assert "pip install freescale[plots]" in capsys.readouterr().err
