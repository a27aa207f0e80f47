"""A small model and its training loop, with and without a LookaheadLoader, to test what loops may do."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

ROWS, DIM = 31, 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        import freescale

        torch.manual_seed(0)
        self.table = freescale.ShardedEmbedding(ROWS, DIM, name="item", optimizer="rowwise_adagrad", lr=0.1)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        found = self.table(batch["item"])
        scale = self.out.bias.index_select(0, batch["pick"])  # a missing row fails inside the graph
        return (torch.tanh(self.out(found)) * found).sum() / 8 + scale.sum()


def batch_of(step: int) -> dict[str, torch.Tensor]:
    rank = dist.get_rank()
    g = torch.Generator().manual_seed(100 * step + rank)
    n = 0 if (step + rank) % 6 == 5 else 2 + (7 * step + rank) % 9  # (a single id would be a separate graph)
    return {"item": torch.randint(0, ROWS, (n,), generator=g), "pick": torch.tensor([step % DIM])}


def data(steps: int, first: int = 0) -> list[dict[str, torch.Tensor]]:
    return [batch_of(t) for t in range(first, first + steps)]


class Training:
    """One model and its loop, with or without the wrapper; `losses` is all that the loop observes."""

    kind: type[nn.Module] = Model
    # Compilation takes seconds: one model per kind is shared, and reset each time.
    compiled: dict[tuple[type, bool], Any] = {}
    options: dict[str, str] = {}  # additional ones

    def __init__(self, wrapped: bool) -> None:
        self.wrapped = wrapped
        if (self.kind, wrapped) not in self.compiled:
            model = self.kind()
            run = torch.compile(
                model, backend="freescale", fullgraph=True, options={"codegen": "eager", "strict": True, **self.options}
            )
            self.compiled[self.kind, wrapped] = run, model, {k: v.clone() for k, v in model.state_dict().items()}
        self.run, self.model, beginning = self.compiled[self.kind, wrapped]
        self.model.load_state_dict(beginning)
        self.model.train()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.losses: list[Any] = []

    def loader(self, batches: Any, **kwargs: Any) -> Any:
        import freescale

        return freescale.LookaheadLoader(batches, self.run, **kwargs) if self.wrapped else batches

    def step(self, batch: Any, backward: bool = True, clip: bool = False) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        loss = self.run(batch)
        self.losses.append(loss.item())
        if not backward:
            return
        loss.backward()
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
        if clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
        self.optimizer.step()

    @torch.no_grad()
    def evaluate(self, batch: Any) -> None:
        self.model.eval()
        self.losses.append(self.run(batch).item())
        self.model.train()

    def now(self) -> dict[str, torch.Tensor]:
        """The current state, not through state_dict."""
        return {n: t.detach().clone() for n, t in (*self.model.named_parameters(), *self.model.named_buffers())}


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("freescale")]


def compare(loop: Any, training: type[Training] = Training) -> Training:
    """`loop(training)` with and without the wrapper: same losses and weights, and no leaked thread."""
    plain, wrapped = training(False), training(True)
    loop(plain)
    loop(wrapped)
    assert plain.losses == wrapped.losses, (loop.__name__, plain.losses, wrapped.losses)
    a, b = plain.now(), wrapped.now()
    for name in a:
        assert torch.equal(a[name], b[name]), (loop.__name__, name)
    assert threads() == [], loop.__name__
    return wrapped
