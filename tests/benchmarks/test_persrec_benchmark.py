"""persrec_against_hstu.py: the idle share that is due to samples, and its prediction, on times that are made up."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from repo import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import persrec_against_hstu as benchmark  # noqa: E402


def rounds_of(
    variant: str, slower: float, owner_seconds: float, swaps: bool = True, beside: float = 0.0
) -> tuple[list[list[dict]], np.ndarray]:
    """What ranks would measure of which the last is slower and the first owns the popular rows; and the samples' times
    alone, [places, steps]. `beside`: what each row of the other rank adds, in rows."""
    from persrec import cost_features

    steps, random = 40, np.random.default_rng(3)
    features = cost_features(benchmark.VARIANTS[variant], benchmark.TOKENS, benchmark.RECENT)
    lengths = np.stack([benchmark.lengths_of(0, place, steps) for place in range(2)])
    of_samples = np.array([[0.03 + features(x).sum(1) @ (5e-5, 2e-7) for x in place] for place in lengths])
    of_samples = of_samples + beside * 5e-5 * lengths.sum(2)[::-1]
    speed, extra = np.array([1.0, 1 + slower]), np.array([owner_seconds, 0.0])
    rounds = []
    for n in range(benchmark.ROUNDS):
        ranks = [(place - n) % 2 if swaps else place for place in range(2)]
        times = of_samples * speed[ranks, None] + extra[ranks, None]
        times *= 1 + 0.01 * random.standard_normal(times.shape)
        rounds.append([{"cpu": t, "wall": t, "bytes": 0, "lengths": x} for t, x in zip(times, lengths, strict=True)])
    return rounds, of_samples


@pytest.mark.parametrize("variant", ("full", "4 segments"))
def test_a_slower_rank_and_an_owner_are_not_taken_for_samples(variant):
    for slower, owner_seconds in ((0.0, 0.0), (0.08, 0.0), (0.0, 0.02)):
        rounds, of_samples = rounds_of(variant, slower, owner_seconds)
        row, half = benchmark.training_row(variant, rounds), of_samples.shape[1] // 2
        true = benchmark.share(of_samples[:, half:])
        assert row["measured"] == pytest.approx(true, abs=0.006)
        assert row["by_mask"] == pytest.approx(row["measured"], abs=0.005)
        assert len(row["of_each_round"]) == benchmark.ROUNDS and benchmark.ROUNDS % benchmark.RANKS == 0


def test_without_changing_places_they_are():
    rounds, of_samples = rounds_of("full", 0.08, 0.0, swaps=False)
    true = benchmark.share(of_samples[:, 20:])
    assert abs(benchmark.training_row("full", rounds)["measured"] - true) > 0.01


def test_ranks_that_slow_each_other_down_are_predicted_with_the_rows_of_the_others():
    rounds, of_samples = rounds_of("full", 0.0, 0.0, beside=0.4)
    row = benchmark.training_row("full", rounds)
    assert row["measured"] == pytest.approx(benchmark.share(of_samples[:, 20:]), abs=0.006)
    assert row["by_mask_and_others"] == pytest.approx(row["measured"], abs=0.005)
    assert row["by_mask"] > row["measured"] + 0.005  # it takes for samples what they do to each other


def test_samples_alone_make_the_second_half_idler():
    """Whatever a row, a pair and a step cost: so a host that measures the contrary has ranks that are not alike."""
    from persrec import cost_features

    lengths = np.stack([benchmark.lengths_of(0, place, 43) for place in range(2)])[:, benchmark.SKIPPED : -1]
    features = cost_features(0, benchmark.TOKENS, benchmark.RECENT)
    sums = np.array([[features(x).sum(1) for x in place] for place in lengths])
    for of_step in (0.0, 500.0, 2000.0):
        for of_row, of_pair in ((1.0, 0.0), (0.0, 1 / 250), (1.0, 1 / 250), (1.0, 1 / 1000)):
            times = of_step + sums @ (of_row, of_pair)
            assert benchmark.share(times[:, 20:]) > benchmark.share(times[:, :20]) + 0.015
