"""The loop around a LookaheadLoader is the user's: whatever it does gives the numbers of the same loop without it."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import trec
from listening import listen
from loops import DIM, ROWS, Model, Training, batch_of, compare, data, threads
from ranks import HAS_DRIVER, HAS_TORCHREC, run_ranks
from shared_ranks import Outcomes, run_together

# ---- loops that do what they like --------------------------------------------------------------------------------


def epochs(t: Training) -> None:
    batches = data(5)
    loader = t.loader(batches)
    assert len(loader) == 5
    for _ in range(2):
        seen = []
        for batch in loader:
            seen.append(batch)
            t.step(batch)
        assert len(seen) == 5 and all(x is y for x, y in zip(seen, batches, strict=True))
    for batch in t.loader(iter(data(4, 50))):
        t.step(batch)
    for batch in t.loader([]):
        raise AssertionError(batch)
    for batch in t.loader(data(1)):
        t.step(batch)


def break_anywhere(t: Training) -> None:
    for k in range(5):
        for i, batch in enumerate(t.loader(data(6, 10 * k))):
            if i == k:
                break  # before the step
            t.step(batch)
        t.losses.append(t.now()["table.weight"].sum().item())
        for i, batch in enumerate(t.loader(data(6, 10 * k))):
            t.step(batch)
            if i == k:
                break  # after it
        t.losses.append(t.now()["table.weight"].sum().item())
        t.step(batch_of(99))  # no loader at all


def exceptions(t: Training) -> None:
    for at in ("before", "forward", "inside", "between", "after"):
        with pytest.raises(IndexError if at == "inside" else ZeroDivisionError):
            for i, batch in enumerate(t.loader(data(6))):
                if i == 3 and at == "before":
                    _ = 1 / 0
                if i == 3 and at == "forward":
                    handle = t.run.register_forward_pre_hook(lambda *a: 1 / 0)
                    try:
                        t.run(batch)
                    finally:
                        handle.remove()
                if i == 3 and at == "inside":
                    t.run({**batch, "pick": torch.tensor([DIM])})
                if i == 3 and at == "between":
                    t.run(batch)
                    _ = 1 / 0
                t.step(batch)
                if i == 3 and at == "after":
                    _ = 1 / 0
        t.losses.append(t.now()["table.weight"].sum().item())
    for i, batch in enumerate(t.loader(data(8))):  # and on
        if i in (3, 5):
            with pytest.raises(IndexError):
                t.run({**batch, "pick": torch.tensor([DIM])})
            if i == 3:
                continue
        t.step(batch)  # after all, in 5


def evaluation(t: Training) -> None:
    for i, batch in enumerate(t.loader(data(8))):
        if i in (2, 3):
            t.evaluate(batch_of(70 + i))  # before the step
        t.step(batch)
        if i in (3, 5):
            t.evaluate(batch_of(80 + i))  # after it
            t.evaluate(batch)
        if i == 6:
            with torch.no_grad():
                t.losses.append(t.model(batch_of(90)).item())  # not through torch.compile


def evaluation_loader(t: Training) -> None:
    evaluated = t.loader(data(3, 40))
    for i, batch in enumerate(t.loader(data(7))):
        if i in (0, 3):
            for other in evaluated:
                t.evaluate(other)
        t.step(batch)
        if i == 5:
            for other in evaluated:
                t.evaluate(other)
                break
    with torch.no_grad():
        for batch in t.loader(data(5)):  # a whole loop that updates nothing
            t.losses.append(t.run(batch).item())


def checkpoints(t: Training) -> None:
    for i, batch in enumerate(t.loader(data(7))):
        if i == 2:
            t.losses += [v.sum().item() for v in t.model.state_dict().values()]
        t.step(batch)
        if i in (1, 4):
            state = {k.removeprefix("_orig_mod."): v.clone() for k, v in t.run.state_dict().items()}
            now = t.now()
            assert all(torch.equal(now[k], v) for k, v in state.items())
            t.losses += [v.sum().item() for v in state.values()]
        if i == 5 and dist.get_rank() == 0:  # one rank alone: it needs the others, who are on their way
            t.losses += [v.sum().item() for v in t.model.table.state_dict().values()]


def odd_steps(t: Training) -> None:
    for i, batch in enumerate(t.loader(data(12))):
        if i in (4, 5, 8, 11):
            continue  # this batch never reaches the model
        t.step(batch, backward=i not in (2, 7), clip=i % 3 == 0)
    previous = None
    for batch in t.loader(data(4)):
        if previous is not None:
            previous.backward()  # of the batch before, when the next is taken already
        previous = t.run(batch)
        t.losses.append(previous.item())
    previous.backward()


def learning_rates(t: Training) -> None:
    """Changed between steps, before a loop ends, before the tables are read: an update has that of its own step."""
    table = t.model.table
    for i, batch in enumerate(t.loader(data(9))):
        t.step(batch)
        table.lr, table.eps = 0.1 / (1 + i), 1e-8 * (1 + i)
        if i % 3 == 2:
            t.evaluate(batch_of(60 + i))
    t.step(batch_of(70)) if not t.wrapped else [t.step(b) for b in t.loader([batch_of(70)])]
    table.lr, table.eps = 0.1, 1e-8


# ---- loaders that fail -------------------------------------------------------------------------------------------


class Broken(RuntimeError):
    pass


def _loader_failures() -> None:
    rank = dist.get_rank()

    def failing(steps: int, change: Any) -> Any:
        for step in range(steps):
            yield change(step, batch_of(step))

    def raises(step: int, batch: Any) -> Any:
        if step == 4 and rank == 1:
            raise Broken("the disk is full")
        return batch

    def at(step: int, new: dict[str, Any]) -> Any:
        return lambda s, batch: {**batch, **new} if s == step and rank == 1 else batch

    def without(step: int) -> Any:
        return lambda s, batch: {"pick": batch["pick"]} if s == step and rank == 1 else batch

    def stops(error: BaseException) -> Any:
        def stop(step: int, batch: Any) -> Any:
            if step == 4 and rank == 1:
                raise error
            return batch

        return stop

    cases: list[tuple[Any, int, Any, str]] = [
        (stops(SystemExit("enough")), 4, SystemExit, "enough"),
        (stops(KeyboardInterrupt("by hand")), 4, KeyboardInterrupt, "by hand"),
        (raises, 4, Broken, "the disk is full"),
        (at(3, {"more": torch.zeros(2)}), 3, ValueError, "batch 3 is dict.*more.*the batches before it were dict"),
        (without(0), 0, ValueError, "no feature 'item', which the model looks up; found dict"),
        (at(0, {"x": {"item": torch.zeros(2, dtype=torch.int64)}}), 0, ValueError, "'item' is in the batch twice"),
        (at(0, {"item": torch.zeros(2, 2, dtype=torch.int64)}), 0, ValueError, "of 1 dimension, found 2"),
        (at(5, {"item": torch.tensor([3, ROWS])}), 5, IndexError, f"rank 1: id {ROWS} is outside table 'item'"),
    ]
    for change, good, kind, words in cases:
        plain = Training(False)
        for batch in data(good):
            plain.step(batch)
        t = Training(True)
        began = time.monotonic()
        everywhere = kind is IndexError
        expected = (kind, words) if rank == 1 or everywhere else (RuntimeError, f"rank 1 failed .* batch {good}: .*{words}")
        with pytest.raises(expected[0], match=expected[1]) as caught:
            for batch in t.loader(failing(8, change)):
                t.step(batch)
        assert time.monotonic() - began < 20
        assert threads() == []
        assert t.losses == plain.losses and torch.equal(t.model.table.weight, plain.model.table.weight)
        if kind is Broken and rank == 1:
            assert "raises" in [entry.name for entry in caught.traceback]


def _uneven() -> None:
    steps = 4 + 2 * dist.get_rank()
    plain = Training(False)
    for batch in data(4):
        plain.step(batch)
    heard = listen()
    t = Training(True)
    for batch in t.loader(data(steps), strict=False):
        t.step(batch)
    assert [h for h in heard if "ended" in h] == [
        "freescale: the loader of rank 0 ended after 4 batches, others have more; all ranks stop here"
    ]
    assert t.losses == plain.losses and torch.equal(t.model.table.weight, plain.model.table.weight)
    t = Training(True)
    with mock.patch.dict(os.environ, FREESCALE_STRICT="1"):
        strict = t.loader(data(steps))
        assert not t.loader(data(steps), strict=False).strict
    assert t.loader(data(steps), strict=True).strict
    with pytest.raises(RuntimeError, match="loader of rank 0 ended after 4 batches"):
        for batch in strict:
            t.step(batch)
    assert t.losses == plain.losses and torch.equal(t.model.table.weight, plain.model.table.weight)


def _strict_by_flag() -> str:
    t = Training(True)
    for batch in t.loader(data(1 + dist.get_rank())):
        t.step(batch)
    return "no error"


@pytest.mark.slow  # the same as above, with a flag of the processes
def test_uneven_loaders_are_an_error_under_the_strict_flag():
    for text in run_ranks(_strict_by_flag, 2, env={"FREESCALE_STRICT": "1"}, expect_errors=True):
        assert "RuntimeError: freescale: the loader of rank 0 ended after 1 batches" in text


# ---- ranks that do not do the same -------------------------------------------------------------------------------


def _leave_alone() -> None:
    """One rank leaves its loop (or brings a wrong batch): the others hear of it, and nothing is lost."""
    rank = dist.get_rank()
    plain = Training(False)
    for batch in data(4):
        plain.step(batch)

    def check(t: Training) -> None:
        assert t.losses == plain.losses and torch.equal(t.model.table.weight, plain.model.table.weight)
        assert threads() == []

    t = Training(True)
    if rank == 0:
        for batch in t.loader(data(8)):
            t.step(batch)
            if len(t.losses) == 4:
                break
    else:
        with pytest.raises(RuntimeError, match="rank 0: leaves its loop after batch 3; rank 1: trains at batch 4"):
            for batch in t.loader(data(8)):
                t.step(batch)
    check(t)
    t = Training(True)
    with pytest.raises(ZeroDivisionError if rank == 1 else RuntimeError, match="division|rank 1: leaves its loop at batch 4"):
        for i, batch in enumerate(t.loader(data(8))):
            if rank == 1 and i == 4:
                _ = 1 / 0
            t.step(batch)
    check(t)
    t = Training(True)
    with pytest.raises(RuntimeError, match="rank 0: the model expected batch 4, .*is not from the loader"):
        for i, batch in enumerate(t.loader(data(8))):
            t.step(batch_of(77) if rank == 0 and i == 4 else batch)
    check(t)
    t = Training(True)
    with pytest.raises(RuntimeError, match="rank 0: trains at batch 5; rank 1: trains at batch 4"):
        for i, batch in enumerate(t.loader(data(8))):
            if rank == 0 and i == 4:
                continue
            t.step(batch)
    check(t)


def _never_comes() -> bool:
    """A rank that does not come at all: the one that waits says what was not applied, and again at the next use."""
    from freescale.compat import distributed

    t = Training(True)
    for i, batch in enumerate(t.loader(data(8))):
        t.step(batch)
        if i == 3:
            while dist.get_rank() == 1 and not distributed.default_store().check(["gave up"]):
                time.sleep(0.05)
            break
    distributed.default_store().set("gave up", "")
    with pytest.raises(RuntimeError, match=r"gradients of step 3 for table item.* not applied: \d+ rows.*did not arrive"):
        t.run(batch_of(1))
    with pytest.raises(RuntimeError, match="did not arrive within 5 s, or have exited"):
        next(iter(t.loader(data(8))))
    return True


def test_a_rank_that_does_not_come_is_no_hang():
    assert run_ranks(_never_comes, 2, timeout=120, group_timeout=5) == [True, True]


def _group_gone() -> bool:
    t = Training(True)
    loop = iter(t.loader(data(8)))
    for _ in range(3):
        t.step(next(loop))
    dist.barrier()
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match=r"step 2 for table item.*: \d+ rows that this rank.*process group is gone"):
        loop.close()
    assert threads() == []
    return True


def test_without_the_process_group_the_error_counts_the_rows():
    assert run_ranks(_group_gone, 2) == [True, True]


# ---- bad input ---------------------------------------------------------------------------------------------------


def _bad_input() -> None:
    plain = Training(False)
    for batch in data(4):
        plain.step(batch)

    def check(words: str, misuse: Any) -> None:
        t = Training(True)
        loop = iter(t.loader(data(9)))
        for _ in range(4):
            t.step(next(loop))
        with pytest.raises(RuntimeError, match=words):
            misuse(t, loop)
        del loop
        assert t.losses == plain.losses, words
        assert torch.equal(t.model.table.weight, plain.model.table.weight), words
        assert threads() == []

    def taken_back(t: Training, loop: Any) -> None:
        four, _five = next(loop), next(loop)
        t.step(four)

    def twice(t: Training, loop: Any) -> None:
        batch = next(loop)
        t.run(batch)
        t.run(batch)

    def foreign(t: Training, loop: Any) -> None:
        t.step(batch_of(99))

    def foreign_instead(t: Training, loop: Any) -> None:
        next(loop)
        t.step(batch_of(99))

    def two_loaders(t: Training, loop: Any) -> None:
        for other in t.loader(data(3)):
            t.step(other)

    def zipped(t: Training, loop: Any) -> None:
        for _ in zip(loop, t.loader(data(3)), strict=False):
            pass

    def loads(t: Training, loop: Any) -> None:
        t.model.load_state_dict(t.model.state_dict())

    def without_compiled(t: Training, loop: Any) -> None:
        t.model(next(loop))

    check("expected batch 5, which the loader yielded last; it received batch 4, out of order", taken_back)
    check("expected batch 5, which has not been taken .* yet; it received batch 4 again", twice)
    check("expected batch 4, which has not been taken .* yet; it received a batch that is not from", foreign)
    check("expected batch 4, which the loader yielded last; it received a batch that is not", foreign_instead)
    check("a training step under a second LookaheadLoader while the first has not ended", two_loaders)
    check("used under two LookaheadLoaders at once", zipped)
    check("load_state_dict while a LookaheadLoader is being iterated", loads)
    check("a table is used in training without its compiled model", without_compiled)


def _late_backward() -> None:
    """A step whose backward comes when its gradients have missed the next one."""
    t = Training(True)
    losses = []
    with pytest.raises(RuntimeError, match="backward of step 0 after the forward pass of a later batch"):
        for batch in t.loader(data(5)):
            losses.append(t.run(batch))
            if len(losses) == 3:
                losses[0].backward()


LOOPS = (epochs, break_anywhere, exceptions, evaluation, evaluation_loader, checkpoints, odd_steps, learning_rates)
CHECKS = {
    **{loop.__name__: partial(compare, loop) for loop in LOOPS},
    **{f.__name__[1:]: f for f in (_loader_failures, _uneven, _leave_alone, _bad_input, _late_backward)},
}


def _quiet(check: Any) -> None:
    check()


@pytest.fixture(scope="module")
def checked() -> Outcomes:
    return run_together({name: partial(_quiet, check) for name, check in CHECKS.items()}, 2)


@pytest.mark.parametrize("name", CHECKS)
def test_loop(name, checked):
    checked.of(name)


def _bad_models() -> bool:
    import freescale

    with pytest.raises(TypeError, match="expects a compiled model.*found Model"):
        freescale.LookaheadLoader([], Model())
    with pytest.raises(ValueError, match="no sharded table"):
        freescale.LookaheadLoader([], torch.compile(nn.Linear(2, 2), backend="freescale"))
    with pytest.raises(TypeError, match="has no len"):
        len(freescale.LookaheadLoader(iter([]), torch.compile(Model(), backend="freescale")))
    return True


def test_bad_models_are_named():
    assert run_ranks(_bad_models, 1) == [True]


# ---- what stays behind -------------------------------------------------------------------------------------------


def _stays() -> list[dict[str, Any]]:
    import freescale
    from freescale.runtime.lookahead import hooks as model_hooks

    model = Model()
    run = torch.compile(model, backend="freescale", options={"codegen": "eager"})
    loader = freescale.LookaheadLoader(data(6), run)
    hooks = [len(m._state_dict_pre_hooks) + len(m._forward_pre_hooks) for m in run.modules()]
    for _ in range(2):
        for batch in loader:
            assert len(threads()) <= 1
            loss = run(batch)
            assert model.table._exchange.anchor.grad is None  # nothing to add to, which would take a launch
            loss.backward()
    stats = loader.stats()
    assert len(dist.distributed_c10d._world.pg_map) == 4  # training, background, planning, rendezvous
    assert hooks == [len(m._state_dict_pre_hooks) + len(m._forward_pre_hooks) for m in run.modules()]
    assert threads() == [] and len(model_hooks._hooks) == 1
    gone = weakref.ref(model)
    del model, run, loader, batch, loss
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None and len(model_hooks._hooks) == 0
    return stats


def test_nothing_stays_behind_and_stats_are_complete():
    for stats in run_ranks(_stays, 2):
        assert [s["step"] for s in stats] == list(range(6))
        keys = "step exchange values unique_rows colliding_rows bytes_urgent bytes_early bytes_back_urgent bytes_late "
        for s in stats:
            assert set(s) == set((keys + "bytes_urgent_per_value").split())
            assert s["bytes_urgent"] + s["bytes_early"] == s["unique_rows"] * DIM * 4
            assert s["bytes_back_urgent"] + s["bytes_late"] == s["unique_rows"] * DIM * 4


AT_EXIT = """
import os, torch, torch.distributed as dist, freescale
{prepare}
children = []
for last in {lasts}:
    child = os.fork()
    if child == 0:
        break
    children.append(child)
else:
    print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
    os._exit(0)
name = "{folder}/" + str(len(children))
os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), 2)
dist.init_process_group("gloo", init_method="file://" + name + ".store", rank=0, world_size=1)
table = freescale.ShardedEmbedding(9, 2, name="item")
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = table
    def forward(self, batch):
        return self.table(batch["item"]).sum()
model = torch.compile(Model(), backend="freescale", options={{"codegen": "eager"}})
loop = iter(freescale.LookaheadLoader([{{"item": torch.tensor([t, t + 1])}} for t in range(6)], model))
model(next(loop)).backward()
exec(last)
"""


LAST = {"": 0, "raise SystemExit(3)": 3, "dist.destroy_process_group()": 0}
PREPARE = """
import freescale.driver, freescale.runtime.lookahead.loader
from torch._inductor.fx_passes import joint_graph, post_grad
joint_graph.lazy_init(torch.device("cpu"))
post_grad.lazy_init()
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict[str, tuple[int, str]]:
    """Exit code and words of processes that end so, side by side."""
    folder = tmp_path_factory.mktemp("at_exit")
    # What takes long, once for all; but one cannot fork what has loaded Inductor beside CUDA's driver (ranks.py).
    script = AT_EXIT.format(prepare="" if HAS_DRIVER else PREPARE, lasts=list(LAST), folder=folder)
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    said = [(folder / str(place)).read_text() for place in range(len(LAST))]
    return dict(zip(LAST, zip(json.loads(done.stdout), said, strict=True), strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("last", LAST)
def test_a_process_with_an_open_loop_ends(last, ended):
    code, said = ended[last]
    assert code == LAST[last], said
    assert ("gradients of step 0 for table item were not applied" in said) == ("destroy" in last), said


# ---- TorchRec ----------------------------------------------------------------------------------------------------


@dataclass
class Sample:
    features: Any
    weight: torch.Tensor
    names: list[str]


def _torchrec(small: bool) -> bool:
    import freescale

    def batches(steps: int, first: int = 0) -> list[Sample]:
        found = [trec.batch(t, dist.get_rank()) for t in range(first, first + steps)]
        return [Sample(kjt, weight, ["u"] * i) for i, (kjt, weight) in enumerate(found)]

    model = trec.build("mixed", "rowwise_adagrad", small=small)
    run = torch.compile(model, backend="freescale", options={"codegen": "eager", "strict": True})
    beginning = trec.snapshot(model), trec.optimizer_state(model)

    def loop(wrapped: bool) -> tuple[list[Any], dict[str, torch.Tensor]]:
        trec.put_back(model, *beginning)
        dense = [p for n, p in model.named_parameters() if not hasattr(p, "_in_backward_optimizers")]
        optimizer = torch.optim.SGD(dense, lr=0.05)
        seen: list[Any] = []

        def one(batch: Sample) -> None:
            optimizer.zero_grad(set_to_none=False)
            loss = run(batch.features, batch.weight)
            loss.backward()
            optimizer.step()
            seen.append(loss.item())

        def look(batch: Sample) -> None:
            with torch.no_grad():
                seen.append(run(batch.features, batch.weight).item())

        def loader(b: list[Sample]) -> Any:
            return freescale.LookaheadLoader(b, run) if wrapped else b

        for i, batch in enumerate(loader(batches(9))):
            one(batch)
            if i == 1:
                seen += [v.sum().item() for v in trec.optimizer_state(model).values()]
            if i == 3:
                seen += [v.sum().item() for v in trec.snapshot(model).values()]
            if i == 4 and wrapped:
                with pytest.raises(RuntimeError, match="load_state_dict while a LookaheadLoader is being iterated"):
                    model.fused_optimizer.load_state_dict(model.fused_optimizer.state_dict())
            if i == 5:
                for other in loader(batches(3, 30)):
                    look(other)
                look(batches(1, 40)[0])
            if i == 7:
                break
        return seen, {**trec.snapshot(model), **trec.optimizer_state(model)}

    plain, wrapped = loop(False), loop(True)
    assert plain[0] == wrapped[0]
    assert all(torch.equal(v, wrapped[1][k]) for k, v in plain[1].items())
    assert threads() == []
    return True


@pytest.mark.skipif(not HAS_TORCHREC, reason="no TorchRec")
@pytest.mark.thorough
@pytest.mark.parametrize("small", (True, pytest.param(False, marks=pytest.mark.slow)), ids=("two tables", "all"))
def test_torchrec_and_dataclass_batches(small):
    assert run_ranks(_torchrec, 2, small) == [True, True]
