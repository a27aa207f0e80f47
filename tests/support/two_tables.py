"""A model of two exchanges, batches with a given share of common rows, and its training."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

ROWS, DIM = 600, 4


class Model(nn.Module):
    """Two exchanges of different width, one row-wise, one on a single rank."""

    def __init__(self, optimizer: str, device: str = "cpu") -> None:
        super().__init__()
        import freescale

        torch.manual_seed(0)
        world = dist.get_world_size()
        kwargs = {"optimizer": optimizer, "lr": 0.1, "device": device}
        self.item = freescale.ShardedEmbedding(ROWS, DIM, name="item", **kwargs)
        self.user = freescale.ShardedEmbedding(
            7, 2 * DIM, name="user", sharding="table_wise", owner=world - 1, **kwargs
        )
        self.mix = nn.Linear(DIM, DIM)
        self.out = nn.Linear(2 * DIM, DIM)
        self.to(device)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        items = torch.tanh(self.mix(self.item(batch["item"])))
        users = torch.tanh(self.out(self.user(batch["user"])))
        return ((items**2).sum() + (users**2).sum() + items.sum() * users.sum()) / 64


class Batches:
    """Consecutive batches share about `share` of their unique rows: ids from a window that moves over the table."""

    def __init__(self, steps: int, share: float, first: int = 0) -> None:
        self.steps, self.share, self.first = steps, share, first

    def __len__(self) -> int:
        return self.steps

    def __iter__(self):
        width = 40
        for step in range(self.first, self.first + self.steps):
            g = torch.Generator().manual_seed(100 * step + dist.get_rank())
            start = int(step * width * (1 - self.share))
            n = 0 if (step + dist.get_rank()) % 9 == 8 else 20 + (7 * step + dist.get_rank()) % 60
            window = torch.randint(0, width, (n,), generator=g)
            if self.share == 1.0:  # every row of the window, some twice, so that all collide
                window = torch.cat([torch.randperm(width, generator=g), window])
            items = (start + window) % ROWS
            users = max(n // 10, 2 * bool(items.numel()))  # (both are empty or neither: each case is a separate graph)
            yield {"item": items, "user": torch.randint(0, 7, (users,), generator=g)}


@torch.no_grad()
def average_gradients(model: nn.Module) -> None:
    """Averages over ranks in rank order; the order of an all-reduce depends on the backend."""
    grads = [p.grad for p in model.parameters()]
    mine = torch.cat([g.flatten() for g in grads])
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    mean = sum(every[1:], every[0]) / dist.get_world_size()
    for grad, part in zip(grads, mean.split([g.numel() for g in grads]), strict=True):
        grad.copy_(part.view_as(grad))


class Trainer:
    """One model, compiled once; every run starts from the same weights unless others are given.

    Optimizers with a state can be swapped for "sgd" and back: graphs do not depend on the optimizer.
    """

    def __init__(
        self, optimizer: str, passes: str = "all", codegen: str = "eager", device: str = "cpu",
        transport: str | None = None, **more: str,
    ) -> None:  # fmt: skip
        self.device, self.compilations = device, 0
        self.model = Model(optimizer, device)
        self.start = {k: v.clone() for k, v in self.model.state_dict().items()}
        options = {"codegen": codegen, "passes": passes, "strict": True, **more}
        if transport is not None:
            options["transport"] = transport
        self.compiled = torch.compile(self.model, backend="freescale", fullgraph=True, options=options)

    def use(self, optimizer: str) -> Trainer:
        self.model.item.optimizer = self.model.user.optimizer = optimizer
        return self

    def train(self, share: float, steps: int, wrapped: bool, first: int = 0, state=None, overlap: bool | None = True):
        """A plain loop. Returns losses; all parameters, rows and optimizer state; and the loader's stats."""
        import freescale
        import freescale.backend as backend

        before = sum(backend.COMPILED.values())
        self.model.load_state_dict(self.start if state is None else state)
        loader = Batches(steps, share, first)
        loader = freescale.LookaheadLoader(loader, self.compiled, overlap=overlap) if wrapped else loader
        dense = torch.optim.SGD(self.model.parameters(), lr=0.05)
        losses = []
        for number, batch in enumerate(loader, first):
            for table in (self.model.item, self.model.user):
                table.lr = 0.1 / (1 + number % 7)  # a schedule: every step has its own learning rate
            dense.zero_grad(set_to_none=False)
            loss = self.compiled({k: v.to(self.device) for k, v in batch.items()})
            loss.backward()
            average_gradients(self.model)
            dense.step()
            losses.append(float(loss.detach()))
        self.compilations += sum(backend.COMPILED.values()) - before
        state = {k: v.clone() for k, v in self.model.state_dict().items()}
        return losses, state, loader.stats() if wrapped else []


def same(a, b) -> bool:
    return a[0] == b[0] and all(torch.equal(a[1][k], b[1][k]) for k in a[1])
