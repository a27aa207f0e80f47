"""Several backward passes of one forward pass: each is an update of its own, as in TorchRec, or an error."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch.distributed as dist

import loops
import trec
from loops import batch_of, compare, data, threads
from ranks import HAS_TORCHREC, run_ranks


class TwoLosses(loops.Model):
    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        found = self.table(batch["item"])
        return (torch.tanh(self.out(found)) * found).sum() / 8, found.square().sum()


class Training(loops.Training):
    kind = TwoLosses

    def forward(self, batch: Any) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=False)
        loss = torch.add(*self.run(batch))
        self.losses.append(loss.item())
        return loss

    def step(self, batch: Any, *args: Any, **kwargs: Any) -> None:
        self.forward(batch).backward()
        self.optimizer.step()

    @torch.no_grad()
    def evaluate(self, batch: Any) -> None:
        self.losses += [loss.item() for loss in self.run(batch)]


# ---- loops -------------------------------------------------------------------------------------------------------


def same_loss(t: Training) -> None:
    for i, batch in enumerate(t.loader(data(9))):
        loss = t.forward(batch)
        for _ in range(i % 3):
            loss.backward(retain_graph=True)
        loss.backward()
        t.optimizer.step()


def different_losses(t: Training) -> None:
    for batch in t.loader(data(6)):
        t.optimizer.zero_grad(set_to_none=False)
        first, second = t.run(batch)
        first.backward(retain_graph=True)
        second.backward()
        t.optimizer.step()
        t.losses += [first.item(), second.item()]


def something_between(t: Training) -> None:
    """The tables are read, or the learning rate is changed, between the two; the loop is left after them."""
    for i, batch in enumerate(t.loader(data(9))):
        loss = t.forward(batch)
        loss.backward(retain_graph=True)
        if i % 3 == 0:
            t.losses += [v.sum().item() for v in t.model.state_dict().values()]
        if i % 3 == 1:
            t.evaluate(batch_of(50 + i))
        t.model.table.lr, before = 0.1 / (2 + i), t.model.table.lr
        loss.backward()
        t.model.table.lr = before
        if i == 7:
            break


def accumulation(t: Training) -> None:
    """Over batches, and a backward pass of a sum: one update each."""
    for i, batch in enumerate(t.loader(data(7))):
        torch.add(*t.run(batch)).backward()
        if i % 3 == 2:
            t.optimizer.step()
            t.optimizer.zero_grad(set_to_none=False)
    t.losses += [p.grad.sum().item() for p in t.model.parameters()]


# ---- what is not an update of its own ----------------------------------------------------------------------------


def gradients_of_some(t: Training, loss: torch.Tensor) -> None:
    torch.autograd.grad(loss, list(t.model.parameters()), retain_graph=True)


def refused() -> None:
    some = "rank 0, 1: the backward pass of step 3 has applied some of its gradients .* and lost the others"
    lost = r"gradients of step 3 for table item(#\d)? were not applied: \d+ rows that this rank computed, \d+ rows"
    for first in (True, False):
        t = Training(True)
        loop = iter(t.loader(data(9)))
        for _ in range(3):
            t.step(next(loop))
        loss = t.forward(next(loop))
        if first:
            gradients_of_some(t, loss)
        loss.backward(retain_graph=True)
        if not first:
            gradients_of_some(t, loss)
        with pytest.raises(RuntimeError, match=some):
            t.model.state_dict()
        for use in (loop.close, t.model.state_dict):
            with pytest.raises(RuntimeError, match=f"{lost} that it owns .*{some}") as caught:
                use()
            assert str(caught.value).count("were not applied") == 1
        t.model.state_dict()


def too_late() -> None:
    t = Training(True)
    with pytest.raises(RuntimeError, match="backward of step 2 after the forward pass of a later batch"):
        for i, batch in enumerate(t.loader(data(9))):
            loss = t.forward(batch)
            loss.backward(retain_graph=True)
            if i == 2:
                before = loss
            if i == 3:
                before.backward()
    with pytest.raises(RuntimeError, match="rank 0, 1: the backward pass of step 3 has applied some of its gradients"):
        t.model.state_dict()
    for again in (False, True):
        t = Training(True)
        for i, batch in enumerate(t.loader(data(9))):
            loss = t.forward(batch)
            if i < 3 or again:
                loss.backward(retain_graph=True)
            if i == 3:
                break
        with pytest.raises(RuntimeError, match="backward of step 3 after its loop has ended"):
            loss.backward()


def _cases() -> dict[str, str]:
    torch._functorch.config.donated_buffer = False  # as torch says where retain_graph=True meets a compiled graph
    said = {}
    for case in (same_loss, different_losses, something_between, accumulation, refused, too_late):
        try:
            case() if case in (refused, too_late) else compare(case, Training)
            assert threads() == []
            said[case.__name__] = "good"
        except BaseException:  # noqa: BLE001
            said[case.__name__] = traceback.format_exc()
            break  # the ranks may be at different places
    return said


@pytest.mark.thorough
def test_each_backward_is_an_update_or_an_error():
    for rank, said in enumerate(run_ranks(_cases, 2)):
        wrong = {name: words for name, words in said.items() if words != "good"}
        assert not wrong, f"rank {rank}:\n" + "\n".join(f"{name}: {words}" for name, words in wrong.items())


# ---- TorchRec ----------------------------------------------------------------------------------------------------


def _torchrec(codegen: str) -> tuple[bool, float]:
    """Bits with and without look-ahead; the greatest difference from eager TorchRec."""
    import freescale

    torch._functorch.config.donated_buffer = False

    def train(compiled: bool, wrapped: bool) -> dict[str, torch.Tensor]:
        model = trec.build("row_wise", "rowwise_adagrad", small=True)
        run: Any = model
        if compiled:
            run = torch.compile(model, backend="freescale", fullgraph=True, options={"codegen": codegen})
        batches: Any = [trec.batch(step, dist.get_rank(), not compiled) for step in range(8)]
        for features, weight in freescale.LookaheadLoader(batches, run) if wrapped else batches:
            loss = run(features, weight)
            loss.backward(retain_graph=True)
            loss.backward()
        return {**trec.snapshot(model), **trec.optimizer_state(model)}

    eager, plain, wrapped = train(False, False), train(True, False), train(True, True)
    bits = all(torch.equal(v, wrapped[k]) for k, v in plain.items())
    names = [k for k, v in eager.items() if v.numel() and k in wrapped]
    assert any("momentum" in n for n in names)
    return bits, max(float((wrapped[n] - eager[n]).abs().max() / eager[n].abs().max()) for n in names)


@pytest.mark.thorough
@pytest.mark.skipif(not HAS_TORCHREC, reason="no TorchRec")
@pytest.mark.parametrize("codegen", ("eager", pytest.param("inductor", marks=pytest.mark.slow)))
def test_torchrec_updates_once_per_backward(codegen):
    for bits, off in run_ranks(_torchrec, 2, codegen):
        assert bits and off <= 1e-6, off
