"""Look-ahead is exact: with the loader, without it, passes on or off, the same bits; and equal to TorchRec."""

from __future__ import annotations

import itertools
import random
import threading
import time
from functools import cache, partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import trec
from ranks import HAS_TORCHREC, run_ranks
from shared_ranks import Outcomes, run_together
from two_tables import Trainer, same

SHARES = (0.0, 0.12, 0.7, 1.0)
# Of graphs, of batches of a few samples: with ids; without a history; with one tag or none; without any id; and with so
# few rows that Inductor multiplies their matrices in another way.
KINDS_OF_TINY = 5
KINDS = 2  # of graphs: for batches with ids, and for a rank without any, whose sizes of 0 torch takes as constants


@cache
def trainer(passes: str) -> Trainer:
    """Of this rank: one of a kind, since compiling takes longer than training."""
    return Trainer("rowwise_adagrad", passes)


def _exact(optimizer: str, steps: int, few: int, thorough: bool = True):
    """`steps` of look-ahead against as many plain ones; thoroughly, a few of every other combination."""
    plain, ahead = (trainer(passes).use(optimizer) for passes in ("none", "all"))
    fresh = plain.compilations == 0
    expected = {(share, n): plain.train(share, n, wrapped=False) for share in SHARES for n in (steps, few)}
    assert expected[0.12, steps][0][0] != expected[0.12, steps][0][-1]
    assert plain.compilations <= (KINDS if fresh else 2 * KINDS)
    if thorough:
        assert all(same(plain.train(share, few, wrapped=True), expected[share, few]) for share in SHARES)
        assert plain.compilations <= 2 * KINDS  # without a plan, and with one
    collisions = {}
    for share in SHARES:
        got = ahead.train(share, steps, wrapped=True)
        assert same(got, expected[share, steps]), share
        items = [s for s in got[2] if s["exchange"].startswith("item") and s["step"] > 0]
        collisions[share] = sum(s["colliding_rows"] for s in items) / sum(s["unique_rows"] for s in items)
    if thorough:
        assert all(same(ahead.train(share, few, wrapped=False), expected[share, few]) for share in SHARES)
        closed = trainer("-split_exchanges").use(optimizer)
        assert all(same(closed.train(share, few, wrapped=True), expected[share, few]) for share in SHARES)
    assert ahead.compilations <= (2 if thorough else 1) * KINDS
    return collisions


OPTIMIZERS = ("sgd", "rowwise_adagrad")
slow = pytest.mark.slow


def _expect_collisions(ranks: list[dict[float, float]]) -> None:
    for found in ranks:
        assert found[0.0] == 0.0 and 0.02 < found[0.12] < 0.25
        assert 0.5 < found[0.7] < 0.85 and found[1.0] == 1.0, found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_same_bits_with_and_without(optimizer, checked):
    """At unique-row collision rates of 0%, about 12%, about 70% and 100%."""
    _expect_collisions(checked.of(f"exact, {optimizer}"))


def _exact_with_every_optimizer(steps: int) -> list[dict[float, float]]:
    return [_exact(optimizer, steps, steps // 6) for optimizer in OPTIMIZERS]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("world, steps", (
    pytest.param(2, 60, marks=pytest.mark.thorough),
    pytest.param(2, 200, marks=slow),
    pytest.param(4, 200, marks=slow),
))  # fmt: skip
def test_same_bits_with_and_without_for_long(world, steps):
    for ranks in zip(*run_ranks(_exact_with_every_optimizer, world, steps, timeout=550), strict=True):
        _expect_collisions(list(ranks))


def _subsets() -> list[str]:
    """Every choice of passes that do something here, without code generation, as the flag says it."""
    from freescale.config import PASS_NAMES

    names = [name for name in PASS_NAMES if name not in ("gather_parts", "bucket_gradients")]
    chosen = itertools.product((False, True), repeat=len(names))
    return [",".join(p for p, on in zip(names, c, strict=True) if on) or "none" for c in chosen]


def _every_subset(optimizer: str):
    expected = Trainer(optimizer, "none").train(0.3, 20, wrapped=False)
    wrong = []
    for passes in _subsets():
        trainer = Trainer(optimizer, passes)
        for wrapped in (False, True):
            if not same(trainer.train(0.3, 20, wrapped), expected):
                wrong.append((passes, wrapped))
        torch._dynamo.reset()
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ("sgd", "rowwise_adagrad"))
@pytest.mark.timeout(600)
def test_every_subset_of_passes_gives_the_same_bits(optimizer):
    assert run_ranks(_every_subset, 2, optimizer, timeout=550) == [[], []]


def _inductor():
    """Against the same without passes and look-ahead, by the same code generation and without any."""
    trained, worst = Trainer("rowwise_adagrad", "all", "inductor").use("sgd"), {}
    ahead = trained.train(0.3, 30, wrapped=True)
    for codegen in ("eager", "inductor"):
        plain = Trainer("rowwise_adagrad", "none", codegen).use("sgd").train(0.3, 30, wrapped=False)
        off = [abs(a - b) / max(1.0, abs(b)) for a, b in zip(ahead[0], plain[0], strict=True)]
        for name, value in plain[1].items():
            if value.numel():
                off.append(float((ahead[1][name] - value).abs().max() / value.abs().max().clamp_min(1e-6)))
        worst[codegen] = max(off)
    return worst, trained.compilations


@pytest.mark.thorough
def test_inductor_agrees():
    for worst, compiled in run_ranks(_inductor, 2):
        assert max(worst.values()) <= 1e-6 and compiled == KINDS, worst


def _delayed(steps: int):
    """A transport that shows what a launch brought only after a random delay, whatever was launched first."""
    from freescale.compat import distributed
    from freescale.kernels import launch

    plain = trainer("none").use("rowwise_adagrad").train(0.5, steps, wrapped=False)
    honest, rng, pending, most = launch.launch, random.Random(dist.get_rank()), [0], [0]

    class Late(dist.Work):
        def wait(self, timeout=None):
            self.thread.join()
            return True

    def launch_late(*args):
        arrived = torch.ops._c10d_functional.wait_tensor(honest(*args))
        shown, delay = torch.full_like(arrived, float("nan")), rng.random() * 0.01
        pending[0] += 1
        most[0] = max(most[0], pending[0])

        def show():
            time.sleep(delay)
            shown.copy_(arrived)
            pending[0] -= 1

        work = Late()
        work.thread = threading.Thread(target=show)
        work.thread.start()
        distributed.register_work(shown, work)
        return shown

    with mock.patch.object(launch, "launch", launch_late):
        got = trainer("all").use("rowwise_adagrad").train(0.5, steps, wrapped=True)
    return same(plain, got), most[0] > 1


def test_order_is_not_luck(checked):
    """Launches that finish late and out of order change nothing: everything that needs one waits for it."""
    assert checked.of("delayed") == [(True, True), (True, True)]


@slow
def test_order_is_not_luck_for_longer():
    assert run_ranks(_delayed, 2, 40) == [(True, True), (True, True)]


def _stop():
    """Ten steps at once, and runs that stop after each k < 10 with what a checkpoint would hold."""
    ahead = trainer("all").use("rowwise_adagrad")
    return ahead.train(0.4, 10, wrapped=True)[:2], [ahead.train(0.4, k, wrapped=True)[:2] for k in range(1, 10)]


def _go_on(checkpoints):
    ahead = trainer("all")
    mine = checkpoints[dist.get_rank()]
    return [ahead.train(0.4, 10 - k, wrapped=True, first=k, state=mine[k - 1])[:2] for k in range(1, 10)]


@pytest.mark.thorough
def test_stop_anywhere_and_go_on_in_a_fresh_process():
    stopped = run_ranks(_stop, 2)
    went_on = run_ranks(_go_on, 2, [[state for _, state in firsts] for _, firsts in stopped])
    for (whole, firsts), rests in zip(stopped, went_on, strict=True):
        for first, rest in zip(firsts, rests, strict=True):
            assert same((first[0] + rest[0], rest[1]), whole)


def _bytes_on_the_wire():
    """What the launches of a step send, counted at the launch, against the plan's figures and the design's law."""
    from freescale.kernels import launch

    sent: list[tuple[int, int]] = []
    honest = launch.launch

    def counting(what, x, send_counts, recv_counts, n_recv, priority, *names):
        sent.append((priority, int(recv_counts.sum()) * x.shape[1] * x.element_size()))
        return honest(what, x, send_counts, recv_counts, n_recv, priority, *names)

    with mock.patch.object(launch, "launch", counting):
        ahead = trainer("all").use("sgd").train(0.3, 20, wrapped=True)
    return sent, ahead[2]


CHECKS = {
    **{f"exact, {optimizer}": partial(_exact, optimizer, 16, 4, thorough=False) for optimizer in OPTIMIZERS},
    "delayed": partial(_delayed, 16),
    "bytes on the wire": _bytes_on_the_wire,
}


@pytest.fixture(scope="module")
def checked() -> Outcomes:
    return run_together(CHECKS, 2)


def test_bytes_on_the_wire_follow_the_law(checked):
    ranks = checked.of("bytes on the wire")
    stats = [s for _, mine in ranks for s in mine]
    sent = [s for mine, _ in ranks for s in mine]
    rows = sum(s["bytes_urgent"] for s in stats)
    early = sum(s["bytes_early"] for s in stats)
    back, late = (sum(s[k] for s in stats) for k in ("bytes_back_urgent", "bytes_late"))
    # urgent rows and urgent gradients, late gradients, early rows: every byte once, none more
    assert sum(b for p, b in sent if p == 0) == rows + back
    assert sum(b for p, b in sent if p == 1) == late and sum(b for p, b in sent if p == 2) == early
    for s in stats:
        width = (s["bytes_urgent"] + s["bytes_early"]) // max(s["unique_rows"], 1)
        assert s["bytes_urgent"] == s["colliding_rows"] * width
        assert s["bytes_urgent"] + s["bytes_early"] == s["bytes_back_urgent"] + s["bytes_late"] == s["unique_rows"] * width
        assert s["bytes_urgent"] <= s["bytes_urgent_per_value"]
    exposed, synchronous = rows + back, 2 * sum(s["bytes_urgent"] + s["bytes_early"] for s in stats)
    assert exposed < 0.75 * synchronous


TWO_LAYOUTS = (("row_wise", "adagrad"), ("mixed", "rowwise_adagrad"))
EVERY_LAYOUT = tuple(itertools.product(("row_wise", "mixed"), ("sgd", "adagrad", "rowwise_adagrad")))


@pytest.mark.skipif(not HAS_TORCHREC, reason="torchrec or fbgemm_gpu is not installed")
@pytest.mark.parametrize("world, layouts, small", (
    pytest.param(2, TWO_LAYOUTS, False, marks=pytest.mark.thorough),
    pytest.param(2, TWO_LAYOUTS[1:], True, marks=slow),
    pytest.param(2, EVERY_LAYOUT, False, marks=slow),
    pytest.param(4, EVERY_LAYOUT, False, marks=slow),
), ids=("2-two", "2-small", "2-all", "4-all"))  # fmt: skip
@pytest.mark.timeout(600)
def test_torchrec_tables_with_look_ahead(world, layouts, small):
    for found in run_ranks(_torchrec, world, layouts, small, timeout=550):
        assert found["bits"] and found["eager"] <= 1e-6 and found["compilations"] <= KINDS_OF_TINY, found


def _looking_at_the_optimizer(loader, model, seen):
    """Its state after three steps, read through TorchRec: late gradients are applied before that."""
    for step, batch in enumerate(loader):
        if step == 3:
            seen.update({f"after 3 steps {name}": value for name, value in trec.optimizer_state(model).items()})
        yield batch


def _torchrec(layouts, small):
    import freescale
    import freescale.backend as backend

    found = {"bits": True, "eager": 0.0, "compilations": 0}
    for layout, optimizer in layouts:
        none = layout != "mixed"
        eager = trec.build(layout, optimizer, small=small)
        expected = trec.train(eager, eager, 20, none=none)
        runs = []
        for wrapped in (False, True):
            torch._dynamo.reset()
            backend.COMPILED.clear()
            model = trec.build(layout, optimizer, small=small)
            run = torch.compile(model, backend="freescale", fullgraph=True, options={"codegen": "eager"})
            batches = [trec.batch(step, dist.get_rank(), none=none) for step in range(20)]
            loader = freescale.LookaheadLoader(batches, run) if wrapped else batches
            middle: dict[str, torch.Tensor] = {}
            losses = trec.train_on(model, run, _looking_at_the_optimizer(loader, model, middle))
            found["compilations"] = max(found["compilations"], *backend.COMPILED.values())
            runs.append((losses, trec.snapshot(model), {**middle, **trec.optimizer_state(model)}))
        (plain, rows, moments), (ahead, rows_ahead, moments_ahead) = runs
        found["bits"] &= plain == ahead and all(torch.equal(rows[n], rows_ahead[n]) for n in rows)
        found["bits"] &= all(torch.equal(moments[n], moments_ahead[n]) for n in moments)
        found["eager"] = max(found["eager"], max(abs(a - b) for a, b in zip(ahead, expected, strict=True)) / max(map(abs, expected)))
        theirs = trec.snapshot(eager)
        for name, value in theirs.items():
            if value.numel() and "user" not in name and "tiny" not in name:
                found["eager"] = max(found["eager"], float((rows_ahead[name] - value).abs().max() / value.abs().max()))
    return found


def _torchrec_subsets():
    import freescale

    expected, wrong = None, []
    for passes in _subsets():
        torch._dynamo.reset()
        model = trec.build("mixed", "rowwise_adagrad")
        options = {"codegen": "eager", "passes": passes}
        run = torch.compile(model, backend="freescale", fullgraph=True, options=options)
        batches = [trec.batch(step, dist.get_rank(), none=False) for step in range(10)]
        losses = trec.train_on(model, run, freescale.LookaheadLoader(batches, run) if expected else batches)
        got = losses, {**trec.snapshot(model), **trec.optimizer_state(model)}
        expected = expected or got
        if not same(got, expected):
            wrong.append(passes)
    return wrong


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not HAS_TORCHREC, reason="TorchRec is not installed")
def test_every_subset_of_passes_gives_the_same_bits_with_torchrec():
    """The first, no pass and no look-ahead, is what the others are compared with."""
    assert run_ranks(_torchrec_subsets, 2, timeout=550) == [[], []]
