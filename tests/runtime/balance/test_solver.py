"""balance(): properties on random input, exact solutions of small instances, known instances, bad input."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.runtime.balance import assignment, integer_problem, solver, swaps
from freescale.runtime.balance.solver import METHODS, BalanceError, BalanceResult, balance

EQUAL = ("default", "zigzag", "lpt", "kk")  # methods that move samples and keep counts equal


class NeverEnds(BaseException):
    """Not an Exception: hypothesis would run the same example once more, without a limit."""


@pytest.fixture(autouse=True)
def _every_test_ends():
    """Within twenty seconds of its own CPU time, however busy the machine is."""

    def stop(*_):
        raise NeverEnds

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, 20)
    yield
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.signal(signal.SIGVTALRM, before)


def lognormal(samples: int, seed: int = 0, median: float = 1000.0, sigma: float = 1.0) -> np.ndarray:
    drawn = np.random.default_rng(seed).lognormal(np.log(median), sigma, samples)
    return np.minimum(drawn, 21_000).astype(np.int64).astype(np.float64)


def loads(b: BalanceResult, costs: np.ndarray, ranks: int) -> np.ndarray:
    return np.bincount(b.rank, costs, minlength=ranks)


def check(
    b: BalanceResult, costs: np.ndarray, ranks: int, counts: np.ndarray | None, home: np.ndarray | None = None
) -> None:
    """What holds for every result."""
    assert b.rank.shape == costs.shape and ((b.rank >= 0) & (b.rank < ranks)).all()
    assert sorted(b.order.tolist()) == list(range(len(costs)))  # every sample once
    assert np.concatenate([b.samples_of(r) for r in range(ranks)]).tolist() == b.order.tolist()
    assert all((b.rank[b.samples_of(r)] == r).all() for r in range(ranks))
    assert (b.counts == np.bincount(b.rank, minlength=ranks)).all()
    if counts is not None:
        assert (b.counts == counts).all()
    largest = loads(b, costs, ranks).max()
    np.testing.assert_allclose(b.straggler, 1 - costs.sum() / ranks / largest if largest else 0.0, atol=1e-12)
    assert b.bound <= b.straggler + 1e-12
    if home is not None:
        assert b.moved_bytes == (b.rank != home).sum()


def weighted_mean(b: BalanceResult, losses: np.ndarray, ranks: int) -> float:
    """Each rank averages loss * weight, then the ranks' results are averaged."""
    per_rank = [(losses * b.loss_weights)[b.samples_of(r)].mean() if b.counts[r] else 0.0 for r in range(ranks)]
    return float(np.mean(per_rank))


@st.composite
def instances(draw) -> tuple[np.ndarray, int]:
    ranks = draw(st.integers(1, 9))
    size = draw(st.integers(0, 60))
    kind = draw(st.sampled_from(("ties", "whole", "real", "tail")))
    if kind == "ties":
        values = draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    elif kind == "whole":
        values = draw(st.lists(st.integers(0, 10**6), min_size=size, max_size=size))
    elif kind == "real":
        values = draw(st.lists(st.floats(0, 1e300, allow_subnormal=False), min_size=size, max_size=size))
    else:
        values = [10.0**x for x in draw(st.lists(st.integers(0, 12), min_size=size, max_size=size))]
    return np.array(values, np.float64), ranks


@given(instances(), st.sampled_from(METHODS))
@settings(max_examples=300, deadline=None)
def test_every_sample_once_with_equal_counts(instance, method):
    costs, ranks = instance
    b = balance(costs, ranks, method=method)
    even = len(costs) // ranks + (np.arange(ranks) < len(costs) % ranks)
    check(b, costs, ranks, None if method == "variable" else even, np.repeat(np.arange(ranks), even))
    again = balance(costs.copy(), ranks, method=method)
    assert (again.rank == b.rank).all() and (again.order == b.order).all() and again.method == b.method


@given(instances(), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_default_is_never_worse_than_no_balancing(instance, random):
    costs, ranks = instance
    home = np.repeat(np.arange(ranks), len(costs) // ranks + (np.arange(ranks) < len(costs) % ranks))
    random.shuffle(home)
    b = balance(costs, ranks, home=home)
    check(b, costs, ranks, np.bincount(home, minlength=ranks), home)
    before = np.bincount(home, costs, minlength=ranks)
    assert loads(b, costs, ranks).max() <= before.max() * (1 + 1e-9)
    assert b.straggler <= b.before + 1e-9
    if before.max() <= before.mean():
        assert b.moved_bytes == 0


@given(instances(), st.data(), st.sampled_from(("default", "zigzag", "lpt")))
@settings(max_examples=200, deadline=None)
def test_counts_as_asked(instance, data, method):
    costs, ranks = instance
    cuts = sorted(data.draw(st.lists(st.integers(0, len(costs)), min_size=ranks - 1, max_size=ranks - 1)))
    counts = np.diff([0, *cuts, len(costs)])
    home = np.array(data.draw(st.lists(st.integers(0, ranks - 1), min_size=len(costs), max_size=len(costs))), np.int64)
    b = balance(costs, ranks, counts, method, home=home)
    check(b, costs, ranks, counts, home)
    losses = np.cos(np.arange(len(costs)))
    if len(costs):
        np.testing.assert_allclose(weighted_mean(b, losses, ranks), losses.mean(), rtol=1e-12, atol=1e-12)


@given(instances(), st.floats(0, 2))
@settings(max_examples=100, deadline=None)
def test_variable_keeps_the_global_mean_and_leaves_no_rank_empty(instance, alpha):
    costs, ranks = instance
    costs = np.minimum(costs, 1e100)
    b = balance(costs, ranks, method="variable", alpha=alpha)
    losses = np.sin(np.arange(len(costs)))
    if len(costs) >= ranks:
        assert b.counts.min() >= 1
    if len(costs):
        np.testing.assert_allclose(weighted_mean(b, losses, ranks), losses.mean(), rtol=1e-12, atol=1e-12)


def every_assignment(samples: int, counts: list[int]):
    """All ways to give `samples` samples to ranks with these counts."""
    slots = [r for r, c in enumerate(counts) for _ in range(c)]
    return (np.array(p) for p in set(itertools.permutations(slots))) if samples else iter(())


@given(st.integers(1, 4), st.lists(st.integers(0, 40), min_size=1, max_size=7), st.booleans())
@settings(max_examples=60, deadline=None)
def test_small_instances_are_solved_exactly(ranks, values, squared):
    costs = np.array(values, np.float64) ** (2 if squared else 1)
    counts = (len(costs) // ranks + (np.arange(ranks) < len(costs) % ranks)).tolist()
    best = min(np.bincount(r, costs, minlength=ranks).max() for r in every_assignment(len(costs), counts))
    got = loads(balance(costs, ranks, tolerance=0.0), costs, ranks).max()
    assert got == best
    for method in ("zigzag", "lpt", "kk"):
        assert loads(balance(costs, ranks, method=method), costs, ranks).max() >= best


@given(
    st.integers(2, 3),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=7),
    st.integers(0, 40),
)
@settings(max_examples=150, deadline=None)
def test_memory_cap_is_kept_whenever_an_assignment_allows_it(ranks, samples, cap):
    costs, memory = (np.array(x, np.float64) for x in zip(*samples, strict=True))
    counts = (len(costs) // ranks + (np.arange(ranks) < len(costs) % ranks)).tolist()
    fitting = [r for r in every_assignment(len(costs), counts) if np.bincount(r, memory, minlength=ranks).max() <= cap]
    for method in EQUAL:
        if not fitting:
            with pytest.raises(BalanceError, match=f"memory cap of {cap} bytes"):
                balance(costs, ranks, method=method, memory=memory, memory_cap=cap)
            continue
        b = balance(costs, ranks, method=method, memory=memory, memory_cap=cap, tolerance=0.0)
        check(b, costs, ranks, np.array(counts))
        assert np.bincount(b.rank, memory, minlength=ranks).max() <= cap
        if method == "default":
            best = min(np.bincount(r, costs, minlength=ranks).max() for r in fitting)
            assert loads(b, costs, ranks).max() == best
    if not fitting:
        return
    b = balance(costs, ranks, method="variable", memory=memory, memory_cap=cap)
    assert np.bincount(b.rank, memory, minlength=ranks).max() <= cap


@given(
    st.integers(2, 8), st.integers(2, 12), st.integers(0, 10**6), st.sampled_from(("default", "lpt", "kk", "variable"))
)
@settings(max_examples=60, deadline=None)
def test_memory_cap_of_a_known_solution_is_kept(ranks, batch, seed, method):
    """A cap 3% above what a hidden assignment needs, with memory that has little to do with cost."""
    random = np.random.default_rng(seed)
    costs, memory = random.lognormal(3, 1, ranks * batch), np.ceil(random.lognormal(6, 1, ranks * batch))
    hidden = np.bincount(random.permutation(np.repeat(np.arange(ranks), batch)), memory).max()
    b = balance(costs, ranks, method=method, memory=memory, memory_cap=1.03 * hidden)
    assert np.bincount(b.rank, memory, minlength=ranks).max() <= 1.03 * hidden


@pytest.mark.parametrize("method", [*EQUAL, "variable", "none"])
def test_a_cap_that_only_home_keeps_to_the_byte(method):
    """128 samples whose memory fills every rank exactly where they are; hardly another assignment does."""
    random = np.random.default_rng(7)
    memory = random.integers(1, 10**9, (8, 16))
    memory[:, -1] = 16 * 10**9 - memory[:, :-1].sum(1)
    costs = random.lognormal(3, 1, 128)
    costs[5] = 2 * costs.sum()  # longer than the mean load: room is made for it, where the cap allows that
    b = balance(costs, 8, method=method, memory=memory.ravel(), memory_cap=16 * 10**9)
    assert np.bincount(b.rank, memory.ravel()).max() <= 16 * 10**9
    assert b.straggler <= b.before


def test_memory_cap_binds_and_costs_little():
    """Long samples are cheap here: balance of cost alone breaks the cap, a cap of 5% above the mean does not hurt."""
    costs = lognormal(64 * 32)
    memory = np.random.default_rng(1).permutation(costs) + 1
    free = balance(costs, 64, memory=memory, memory_cap=1e12)
    assert np.bincount(free.rank, memory).max() > 1.05 * memory.sum() / 64
    b = balance(costs, 64, memory=memory, memory_cap=1.05 * memory.sum() / 64)
    assert np.bincount(b.rank, memory).max() <= 1.05 * memory.sum() / 64
    assert b.straggler < 0.01 < 0.1 < b.before


def test_the_exhaustive_search_finds_what_swaps_cannot():
    """3 ranks of 3 samples, every one full to the byte: 9+5+1, 8+4+3, 7+6+2."""
    memory = [9, 8, 7, 6, 5, 4, 3, 2, 1]
    for seed in range(20):
        shuffled = np.random.default_rng(seed).permutation(memory)
        b = balance(np.ones(9), 3, memory=shuffled, memory_cap=15)
        assert np.bincount(b.rank, shuffled).max() == 15
    with pytest.raises(
        BalanceError, match="no assignment keeps 3 ranks within the memory cap of 14 bytes.*45 bytes, the largest 9.*15"
    ):
        balance(np.ones(9), 3, memory=memory, memory_cap=14)


@pytest.mark.parametrize("cost", [1, 2])
@pytest.mark.parametrize("ranks, batch, above", [(64, 128, 0.0005), (256, 128, 0.0005), (8, 32, 0.003)])
def test_default_comes_close_to_the_bound(ranks, batch, above, cost):
    for seed in range(2):
        costs = lognormal(ranks * batch, seed) ** cost
        b = balance(costs, ranks)
        check(b, costs, ranks, np.full(ranks, batch))
        assert b.straggler - b.bound <= above, (b.straggler, b.bound)
        assert b.before > 0.15


def test_known_shares_of_the_other_methods():
    """lognormal(1000, 1.0), 64x128: about 22-24% and 50% without, 2-3% and 18-20% for zigzag, nothing for lpt."""
    methods = ("none", "zigzag", "lpt", "kk", "variable")
    for power, none, zigzag in ((1, (0.17, 0.27), (0.015, 0.035)), (2, (0.45, 0.6), (0.12, 0.24))):
        costs = [lognormal(64 * 128, seed) ** power for seed in range(5)]
        share = {m: np.mean([balance(c, 64, method=m).straggler for c in costs]) for m in methods}
        assert none[0] < share["none"] < none[1] and zigzag[0] < share["zigzag"] < zigzag[1]
        assert share["lpt"] < 0.0005 and share["variable"] < 0.0005 and share["kk"] < share["zigzag"]


def test_lpt_is_longest_processing_time_first():
    """Against the loop that defines it."""
    for seed in range(5):
        random = np.random.default_rng(seed)
        costs, counts = random.integers(0, 50, 90).astype(float), random.multinomial(90, np.full(7, 1 / 7))
        load, room, expected = np.zeros(7), counts.copy(), np.zeros(90)
        for sample in np.argsort(-costs, kind="stable"):
            rank = min((r for r in range(7) if room[r]), key=lambda r: (load[r], r))
            load[rank] += costs[sample]
            room[rank] -= 1
            expected[sample] = costs[sample]
        got = balance(costs, 7, counts, "lpt")
        assert sorted(loads(got, costs, 7)) == sorted(load)  # groups may go to other ranks of equal count


def test_karmarkar_karp_of_a_known_instance():
    """8, 7, 6, 5, 4, 3 in pairs: differences 8-7, 6-5, 4-3, so 8+3, 7+4, 6+5 at the end."""
    b = balance([8.0, 7, 6, 5, 4, 3], 3, method="kk")
    assert sorted(b.loads) == [11, 11, 11]


def test_moves_few_bytes():
    costs = lognormal(64 * 128)
    sizes = 8 * costs
    b = balance(costs, 64, sizes=sizes)
    excess = np.maximum(b_home_loads(costs, 64) - costs.sum() / 64, 0).sum() * 8  # no assignment moves less
    assert excess <= b.moved_bytes < 2 * excess
    assert b.moved_bytes == int(sizes[b.rank != np.repeat(np.arange(64), 128)].sum())
    assert balance(costs, 64, method="lpt", sizes=sizes).moved_bytes > 5 * b.moved_bytes


def b_home_loads(costs: np.ndarray, ranks: int) -> np.ndarray:
    return costs.reshape(ranks, -1).sum(1)


def test_groups_and_equal_samples_stay_at_home():
    """Any group may go to any rank, and samples of one cost may take each other's places."""
    costs = np.array([5.0, 1, 1, 5, 3, 3])
    assert balance(costs, 3, method="lpt", home=[2, 2, 0, 0, 1, 1]).moved_bytes == 0
    random = np.random.default_rng(0)
    costs, home = random.integers(0, 5, 400).astype(float), random.permutation(np.repeat(np.arange(8), 50))
    bits = integer_problem.bits_for_index(400, 8)
    for memory in (None, random.integers(0, 3, 400)):
        p = integer_problem.Problem(
            costs.astype(np.int64), np.full(8, 50), home, random.integers(1, 9, 400), memory, 10**6, bits
        )
        rank = assignment.lpt(p)
        new = assignment.fewest_moves(p, rank)
        for values in (p.costs, np.zeros(400) if memory is None else memory):
            assert sorted(np.bincount(new, values)) == sorted(np.bincount(rank, values))
        assert p.sizes[new != home].sum() < 0.7 * p.sizes[rank != home].sum()


def test_a_tie_in_everything_moves_nothing():
    for ranks, samples in ((4, 20), (7, 3), (1, 5), (3, 0)):
        for value in (0.0, 7.5):
            b = balance(np.full(samples, value), ranks)
            assert b.moved_bytes == 0 and (b.step == 0).all()


def test_samples_longer_than_the_mean_load_are_reported():
    costs = np.array([100.0, 1, 1, 1, 1, 60, 1, 1])
    b = balance(costs, 4)
    assert b.oversized.tolist() == [0, 5]
    assert b.loads.max() == 101 and b.bound == pytest.approx(1 - 166 / 4 / 100)
    assert balance(costs, 1).oversized.tolist() == []


def test_local_is_deprecated_and_does_what_the_default_does(caplog):
    """It warns once per process. `base` and `steps` were for it."""
    solver._say_that_local_is_deprecated.cache_clear()
    costs = lognormal(3 * 20, 5)
    for more in ({}, {"base": np.arange(60) % 4, "steps": 2}):
        local, default = balance(costs, 3, method="local", **more), balance(costs, 3)
        assert (local.rank == default.rank).all() and local.method == default.method and not local.step.any()
    (warning,) = caplog.messages
    assert warning == "the balance method 'local' is deprecated, and will be an error in the next release; using 'default'"


def test_scale_of_costs_does_not_matter():
    costs = lognormal(16 * 20, 5) / 3
    expected = balance(costs, 16)
    assert expected.straggler < 2e-4
    for scale in (2.0**-900, 2.0**-60, 2.0**80, 2.0**900):
        assert (balance(costs * scale, 16).rank == expected.rank).all()


@given(st.lists(st.floats(0, 1e308), max_size=50), st.integers(1, 20))
@settings(max_examples=200, deadline=None)
def test_whole_costs_fit_and_are_close(values, bits):
    costs = np.array(values, np.float64)
    bits = max(bits, integer_problem.bits_for_index(len(costs), 1))
    whole = integer_problem.integer_costs(costs, bits)
    assert int(whole.sum()) < 2 ** (62 - bits) and (whole >= 0).all()
    if costs.max(initial=0) > 1e-280:
        scale = whole.max() / costs.max()
        np.testing.assert_allclose(whole / scale, costs, atol=costs.max() * 2.0 ** -(62 - 2 * bits - 1))


def test_budget_is_counted_in_operations():
    costs = lognormal(64 * 64)
    spent = [balance(costs, 64, budget=b).straggler for b in (0, 100_000, None)]
    assert spent[0] == balance(costs, 64, method="none").straggler
    assert spent[0] > spent[1] > spent[2]


def test_same_result_in_another_process():
    """Hash seeds, thread counts and the time of day are nothing to it."""
    code = (
        "import numpy as np; from freescale.runtime.balance.solver import balance;"
        "c = np.random.default_rng(0).lognormal(7, 1, 16 * 64);"
        "found = [balance(c ** 2, 16, method=m).rank.tobytes().hex() for m in ('default', 'kk', 'lpt', 'variable')]"
    )
    other = {**os.environ, "PYTHONHASHSEED": "2", "OMP_NUM_THREADS": "2"}
    asked = [sys.executable, "-c", f"{code}; print(found)"]
    answer = subprocess.run(asked, env=other, capture_output=True, text=True, check=True).stdout
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102
    assert answer.strip() == str(names["found"]) and len(answer) > 1000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(costs=[1.0, np.nan], ranks=2), "costs must be finite and not negative; sample 1 has nan"),
        (dict(costs=[np.inf, 1.0], ranks=2), "sample 0 has inf"),
        (dict(costs=[1.0, -2.0], ranks=2), "sample 1 has -2.0"),
        (dict(costs=[[1.0]], ranks=2), "costs must have 1 dimension, found 2"),
        (dict(costs=["a"], ranks=2), "costs must be numbers"),
        (dict(costs=[1.0], ranks=0), "integer number of ranks, at least 1; found 0"),
        (dict(costs=[1.0], ranks=1.5), "integer number of ranks"),
        (dict(costs=[1.0, 2.0], ranks=2, counts=[1, 2]), r"counts \[1, 2\] add up to 3, but there are 2 samples"),
        (dict(costs=[1.0, 2.0], ranks=2, counts=[3, -1]), "counts must be at least 0; found -1"),
        (dict(costs=[1.0, 2.0], ranks=2, counts=[2]), "counts must have 2 numbers"),
        (dict(costs=[1.0, 2.0], ranks=2, counts=[1.0, 1.0]), "counts must be integers, found float64"),
        (dict(costs=[1.0, 2.0], ranks=2, home=[0, 2]), "home must be between 0 and 1; found 2"),
        (dict(costs=[1.0, 2.0], ranks=2, home=[0]), "home must have 2 numbers"),
        (dict(costs=[1.0, 2.0], ranks=2, sizes=[1.0]), "sizes must have one number for each of the 2 samples, found 1"),
        (dict(costs=[1.0, 2.0], ranks=2, sizes=[1.0, np.nan]), "sizes must be finite"),
        (dict(costs=[1.0, 2.0], ranks=2, memory=[1, 1]), "both memory and memory_cap"),
        (dict(costs=[1.0, 2.0], ranks=2, memory=[1, 1], memory_cap=np.nan), "memory cap must be a finite number"),
        (dict(costs=[1.0, 2.0], ranks=2, memory=[1, 9], memory_cap=8), "no assignment keeps 2 ranks .* cap of 8 bytes.*largest 9"),
        (dict(costs=[1.0, 2.0], ranks=2, memory=[1, 9], memory_cap=8, method="none"), "'none' leaves 9 bytes .* cap of 8"),
        (dict(costs=[1.0, 2.0], ranks=2, method="best"), "default, none, zigzag, lpt, kk, variable; found 'best'"),
        (dict(costs=[1.0, 2.0, 3.0], ranks=2, counts=[3, 0], method="kk"), r"'kk' requires equal counts; found \[3, 0\]"),
        (dict(costs=[1.0, 2.0], ranks=2, home=[0, 0], counts=[1, 1], method="none"), "'none' moves nothing"),
        (dict(costs=[1.0, 2.0], ranks=2, method="variable", alpha=np.nan), "alpha must be a finite number"),
        (dict(costs=[1.0, 2.0], ranks=2, tolerance=-1.0), "tolerance must be a share"),
        (dict(costs=[1.0, 2.0], ranks=2, budget=-1), "budget must be a number of operations"),
    ],
)  # fmt: skip
def test_bad_input_is_named(arguments, words):
    with pytest.raises(BalanceError, match="^freescale: .*" + words):
        balance(**arguments)


@given(st.integers(2, 40), st.integers(1, 6), st.integers(0, 10**6), st.booleans(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_swaps_keep_the_books_and_never_raise_the_largest_load(ranks, batch, seed, uneven, capped):
    """Round by round: the loads are those of the samples, the cap holds, counts stay, no load passes the largest."""
    random = np.random.default_rng(seed)
    samples = ranks * batch
    rank = random.integers(0, ranks, samples) if uneven else np.repeat(np.arange(ranks), batch)
    costs = np.ceil(random.lognormal(4, 2, samples)).astype(np.int64)
    costs[rank == ranks // 2] *= int(random.integers(1, 200))  # one rank with a lot to give, in few samples
    memory = random.integers(0, 50, samples)
    cap = int(np.bincount(rank, memory, minlength=ranks).max())
    counts = np.bincount(rank, minlength=ranks)
    p = integer_problem.Problem(
        costs, counts, rank, np.ones_like(costs), memory if capped else None, cap, integer_problem.bits_for_index(samples, ranks)
    )
    split = swaps.Partition(p, rank)
    for _ in range(12):
        before = int(split.loads.max())
        swaps.improve(split, p.load_lower_bound(), 0, swaps.OperationBudget(60_000))
        now = split.sample_ranks()
        assert (np.bincount(now, minlength=ranks) == counts).all()
        assert (np.bincount(now, costs, minlength=ranks) == split.loads).all()
        assert split.loads.max() <= before
        assert (np.diff(split.keys, axis=1) >= 0).all()
        if capped:
            assert (np.bincount(now, memory, minlength=ranks) == split.memory).all() and split.memory.max() <= cap
