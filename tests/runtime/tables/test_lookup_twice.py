"""A table that a model looks up twice in a step: two updates, as in TorchRec. Under look-ahead it is refused, at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import loops
import trec
from loops import ROWS, batch_of, threads
from ranks import HAS_TORCHREC, run_ranks

REFUSED = "{} is looked up twice in a step, which cannot be planned ahead: look up all ids in one call, or train without"


class Twice(loops.Model):
    again = True

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        found = self.table(batch["item"])
        loss = (torch.tanh(self.out(found)) * found).sum()
        return loss + self.table(batch["other"]).square().sum() if self.again else loss


def data(steps: int) -> list[dict[str, torch.Tensor]]:
    return [{**batch_of(t), "other": batch_of(t + 40)["item"]} for t in range(steps)]


# ---- without look-ahead ------------------------------------------------------------------------------------------


def _reference(dense: torch.nn.Linear, weight: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All ranks' batches against the whole table; backward comes to the second lookup first."""
    momentum, world = torch.zeros(ROWS), dist.get_world_size()
    for mine in data(steps):
        batches: list[Any] = [None] * world
        dist.all_gather_object(batches, mine)
        found = [[weight[b[key]].requires_grad_() for key in ("item", "other")] for b in batches]
        for item, other in found:
            loss = (torch.tanh(dense(item)) * item).sum() + other.square().sum()
            loss.backward(inputs=[item, other])
        for i, key in ((1, "other"), (0, "item")):
            grad = torch.zeros_like(weight)
            for b, pair in zip(batches, found, strict=True):
                grad.index_add_(0, b[key], pair[i].grad / world)
            momentum += grad.square().mean(1)
            weight = weight - 0.1 / (momentum.sqrt() + 1e-8)[:, None] * grad
    return weight, momentum


def _native() -> None:
    model = Twice()
    run = torch.compile(model, backend="freescale", fullgraph=True, options={"codegen": "eager", "strict": True})
    shard = model.table.shards[dist.get_rank()]
    whole: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(whole, model.table.weight)
    weight, momentum = _reference(model.out, torch.cat(whole), 6)
    for batch in data(6):
        run(batch).backward()
    mine = slice(shard.first, shard.first + shard.rows)
    torch.testing.assert_close(model.table.weight, weight[mine], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.table.momentum, momentum[mine], rtol=1e-5, atol=1e-6)


class TwiceTorchRec(trec.Model):
    again = True

    def forward(self, features: Any, weight: torch.Tensor, other: Any) -> torch.Tensor:  # type: ignore[override]
        loss = super().forward(features, weight)
        return loss + super().forward(other, weight).square() if self.again else loss


def _build() -> Any:
    torch.manual_seed(0)
    return trec.shard(TwiceTorchRec(small=True), trec.LAYOUTS["row_wise"], "rowwise_adagrad")


def _pairs(steps: int, eager: bool = False) -> list[tuple[Any, torch.Tensor, Any]]:
    rank = dist.get_rank()
    return [(*trec.batch(t, rank, eager), trec.batch(t + 42, rank, eager)[0]) for t in range(steps)]


def _eager_torchrec() -> float:
    """The greatest difference from eager TorchRec."""
    ends = []
    for compiled in (False, True):
        model = _build()
        run: Any = model
        if compiled:
            run = torch.compile(model, backend="freescale", fullgraph=True, options={"codegen": "eager"})
        for features, weight, other in _pairs(8, not compiled):
            run(features, weight, other).backward()
            run(features, weight, features).backward()
        ends.append({**trec.snapshot(model), **trec.optimizer_state(model)})
    eager, ours = ends
    names = [k for k, v in eager.items() if v.numel()]
    return max(float((ours[n] - eager[n]).abs().max() / eager[n].abs().max()) for n in names)


# ---- with look-ahead ---------------------------------------------------------------------------------------------


def _end(model: Any) -> dict[str, torch.Tensor]:
    return {k: v.detach().clone() for k, v in (*model.named_parameters(), *model.named_buffers())}


def _refused_native(codegen: str, fullgraph: bool, good: int) -> None:
    """`good` steps look up once, then one does twice."""
    import freescale

    ends = []
    for wrapped in (False, True):
        torch._dynamo.reset()
        model = Twice()
        run = torch.compile(model, backend="freescale", fullgraph=fullgraph, options={"codegen": codegen})

        def steps(batches: Any, model: Any = model, run: Any = run) -> None:
            for i, batch in enumerate(batches):
                model.again = i == good
                run(batch).backward()

        if wrapped:
            with pytest.raises(RuntimeError, match=REFUSED.format("item.*")):
                steps(freescale.LookaheadLoader(data(good + 3), run))
        else:
            steps(data(good))
        assert threads() == []
        ends.append(_end(model))
    assert all(torch.equal(v, ends[1][k]) for k, v in ends[0].items())


def _refused_torchrec(codegen: str, fullgraph: bool, same: bool, good: int) -> None:
    import freescale

    ends = []
    for wrapped in (False, True):
        torch._dynamo.reset()
        model = _build()
        run = torch.compile(model, backend="freescale", fullgraph=fullgraph, options={"codegen": codegen})

        def steps(batches: Any, model: Any = model, run: Any = run) -> None:
            for i, (features, weight, other) in enumerate(batches):
                model.module.again = i == good
                run(features, weight, features if same else other["features"]).backward()

        batches = [(kjt, weight, {"features": other}) for kjt, weight, other in _pairs(good + 3)]
        if wrapped:
            # the planner wants each feature once: the other ids come beside the batch
            others = iter([b[2] for b in batches])
            loader = freescale.LookaheadLoader([b[:2] for b in batches], run)
            with pytest.raises(RuntimeError, match=REFUSED.format("ec.row_wise.*")):
                steps((*b, next(others)) for b in loader)
        else:
            steps(batches[:good])
        assert threads() == []
        ends.append({**trec.snapshot(model), **trec.optimizer_state(model)})
    assert all(torch.equal(v, ends[1][k]) for k, v in ends[0].items())


def _some_native() -> bool:
    _native()
    _refused_native("eager", True, 0)
    return True


def _all_native() -> bool:
    for codegen, fullgraph, good in (("eager", True, 3), ("eager", False, 3), ("inductor", False, 0)):
        _refused_native(codegen, fullgraph, good)
    return True


def _all_torchrec() -> float:
    off = _eager_torchrec()
    for codegen, fullgraph, same, good in (
        ("eager", False, False, 4), ("eager", True, True, 0), ("eager", False, True, 0), ("inductor", False, False, 0),
    ):  # fmt: skip
        _refused_torchrec(codegen, fullgraph, same, good)
    return off


def test_native_tables():
    assert run_ranks(_some_native, 2, env={"FREESCALE_TIMEOUT": "20"}) == [True, True]


@pytest.mark.thorough
def test_native_tables_in_other_graphs():
    assert run_ranks(_all_native, 2, env={"FREESCALE_TIMEOUT": "20"}) == [True, True]


@pytest.mark.thorough
@pytest.mark.skipif(not HAS_TORCHREC, reason="no TorchRec")
def test_torchrec_tables():
    for off in run_ranks(_all_torchrec, 2, env={"FREESCALE_TIMEOUT": "20"}):
        assert off <= 1e-6
