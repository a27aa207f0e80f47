"""Tables that the user's loop writes between steps (decay, eviction, a maximum norm): the numbers of the loop without the
wrapper, or the same sentence on every rank."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

import keyed_batches
import trec
from loops import Training, compare, data
from ranks import HAS_TORCHREC, run_ranks
from shared_ranks import Outcomes, run_together

REFUSED = (
    r"{ranks}: something other than training wrote to a table before the gradients of step {step} were applied.*"
    r"Call model.state_dict\(\) on every rank"
)


def after_state_dict(t: Training) -> None:
    """Also on one rank alone, to the optimizer's state, and where the batch is evaluated first or left out."""
    for i, batch in enumerate(t.loader(data(12))):
        if i in (3, 8):
            t.model.state_dict()
        if i == 3 or (i == 8 and dist.get_rank() == 1):
            with torch.no_grad():
                t.model.table.weight.mul_(0.5)
        if i == 5:
            t.model.state_dict()["table.momentum"].add_(1.0)
        if i == 7:
            t.model.state_dict()["table.weight"].clamp_(-0.2, 0.2)
            t.evaluate(batch)
            continue
        if i == 9:
            t.model.state_dict()["table.weight"].neg_()
            continue
        t.step(batch)


class WithoutOverlap(Training):
    compiled: dict[Any, Any] = {}

    def loader(self, batches: Any, **kwargs: Any) -> Any:
        return super().loader(batches, **({"overlap": False} if self.wrapped else {}), **kwargs)


def at_any_time(t: Training) -> None:
    for batch in t.loader(data(6)):
        t.step(batch)
        with torch.no_grad():
            t.model.table.weight.mul_(0.9)


def _refused() -> None:
    """Rank 1 writes; then both train, one reads the tables, or both leave their loop."""

    def write(t: Training) -> None:
        if dist.get_rank() == 1:
            t.model.table.weight.detach().mul_(0.5)

    def train(t: Training, loop: Any) -> None:
        t.step(next(loop))

    def read(t: Training, loop: Any) -> None:
        t.model.state_dict() if dist.get_rank() == 0 else t.step(next(loop))

    def leave(t: Training, loop: Any) -> None:
        loop.close()

    for then in (train, read, leave):
        t = Training(True)
        loop = iter(t.loader(data(9)))
        for _ in range(4):
            t.step(next(loop))
        write(t)
        with pytest.raises(RuntimeError, match=REFUSED.format(ranks="rank 1", step=3)):
            then(t, loop)
        lost = "gradients of step 3 for table item.* were not applied"
        if then is not leave:
            with pytest.raises(RuntimeError, match=lost):
                loop.close()
        with pytest.raises(RuntimeError, match=lost):  # nobody may have seen what closing raised
            t.model.state_dict()


def _after_state_dict() -> None:
    compare(after_state_dict)


def _at_any_time() -> None:
    compare(at_any_time, WithoutOverlap)


CHECKS = {f.__name__[1:]: f for f in (_after_state_dict, _refused, _at_any_time)}


@pytest.fixture(scope="module")
def checked() -> Outcomes:
    return run_together(CHECKS, 2)


@pytest.mark.parametrize("name", CHECKS)
def test_written(name, checked):
    checked.of(name)


# ---- TorchRec ----------------------------------------------------------------------------------------------------


def shards(model: Any) -> list[torch.Tensor]:
    found = [v.local_shards() for v in model.state_dict().values() if hasattr(v, "local_shards")]
    return [shard.tensor for shards in found for shard in shards]


def _torchrec(layout: str) -> str:
    """Rank 0 writes through the shards of state_dict(), then to a parameter. What it says then."""
    import freescale

    rank = dist.get_rank()
    if layout == "pooled":
        torch.manual_seed(0)
        model = trec.shard(keyed_batches.Model(), dict.fromkeys(keyed_batches.KEYS, "row_wise"), "rowwise_adagrad")
        batches = [(keyed_batches.batch(t),) for t in range(6)]
    else:
        model = trec.build(layout, "rowwise_adagrad", small=True)
        batches = [trec.batch(t, rank) for t in range(6)]
    run = torch.compile(model, backend="freescale", options={"codegen": "eager", "strict": True})
    beginning = trec.snapshot(model), trec.optimizer_state(model)
    results = []
    for wrapped in (False, True):
        trec.put_back(model, *beginning)
        losses = []
        for i, batch in enumerate(freescale.LookaheadLoader(batches, run) if wrapped else batches):
            if i in (2, 4):
                for shard in shards(model):
                    shard.mul_(0.5 if rank == 0 else 1.0)
            loss = run(*batch)
            loss.backward()
            losses.append(loss.item())
        results.append((losses, trec.snapshot(model)))
    (plain, rows), (ahead, same_rows) = results
    assert plain == ahead
    assert all(torch.equal(v, same_rows[k]) for k, v in rows.items())
    with pytest.raises(RuntimeError) as refused:
        for i, batch in enumerate(freescale.LookaheadLoader(batches, run)):
            if i == 3 and rank == 0:
                with torch.no_grad():
                    next(p for n, p in model.named_parameters() if "item" in n or "liked" in n).mul_(0.5)
            run(*batch).backward()
    return str(refused.value)


@pytest.mark.skipif(not HAS_TORCHREC, reason="no TorchRec")
@pytest.mark.parametrize("layout", ("pooled", *(pytest.param(x, marks=pytest.mark.thorough) for x in ("row_wise", "mixed"))))
def test_torchrec(layout):
    for words in run_ranks(_torchrec, 2, layout):
        assert re.search(REFUSED.format(ranks="rank 0", step=2), words)
