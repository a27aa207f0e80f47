"""A torch-only sharded table, for where FBGEMM has no build. Optimizer formulas are FBGEMM's exact ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from freescale.kernels import row_kernels
from freescale.kernels.planning import exchange_plan
from freescale.kernels.transports import open_transports
from freescale.runtime.tables import initial_rows
from freescale.runtime.tables.table_exchange import Exchange


class ShardedEmbedding(nn.Module):
    """An embedding table whose rows are spread over the ranks of a process group.

    `forward(ids)` takes any 1-D integer tensor and returns its rows; the backward pass updates the table, as
    TorchRec's fused tables do, so the table has no `.grad` and is not among the module's parameters.

    sharding: "row_wise" (equal blocks of rows) or "table_wise" (all rows on rank `owner`).
    gradient_division: divide gradients by the number of ranks, as TorchRec does by default.

    Values begin uniform between -1/sqrt(num_embeddings) and 1/sqrt(num_embeddings). Each rank makes its own rows alone.
    They follow from one number of torch's CPU generator: with the same `torch.manual_seed` on all ranks, a table begins
    with the same numbers on any number of ranks, however it is sharded, and on any device.
    The learning rate is the attribute `lr` and may be changed at any time.
    """

    weight: torch.Tensor
    momentum: torch.Tensor

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        optimizer: str = "sgd",
        lr: float = 0.01,
        eps: float = 1e-8,
        sharding: str = "row_wise",
        owner: int = 0,
        gradient_division: bool = True,
        name: str = "embedding",
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if not dist.is_initialized():
            raise RuntimeError(
                f"freescale: ShardedEmbedding {name!r} needs a process group: "
                "call torch.distributed.init_process_group first"
            )
        if optimizer not in row_kernels.OPTIMIZERS:
            legal = ", ".join(row_kernels.OPTIMIZERS)
            raise ValueError(f"freescale: optimizer must be one of {legal}, found {optimizer!r}")
        if num_embeddings < 1 or embedding_dim < 1:
            raise ValueError(f"freescale: table {name!r} is empty: {num_embeddings} x {embedding_dim}")
        group = group if group is not None else dist.group.WORLD
        assert group is not None
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.optimizer, self.lr, self.eps, self.name = optimizer, lr, eps, name
        self._divide_by = group.size() if gradient_division else 1
        self.shards = _shards(num_embeddings, sharding, owner, group.size())
        own_shard = self.shards[group.rank()]
        local = torch.empty(own_shard.rows, embedding_dim, dtype=dtype, device=device)
        seed = initial_rows.draw_seed()  # on the meta device too, so that what is drawn next is the same
        if not local.is_meta:
            initial_rows.fill_uniform(local, own_shard.first, num_embeddings**-0.5, seed)
        self.register_buffer("weight", local)
        momentum_shape = {"adagrad": local.shape, "rowwise_adagrad": local.shape[:1]}.get(optimizer, (0,))
        self.register_buffer("momentum", local.new_zeros(momentum_shape))
        self._exchange = Exchange(name, self, list(self.shards), [num_embeddings], [(name, 0)], group)
        self.register_state_dict_pre_hook(open_transports.drain)
        self.register_load_state_dict_post_hook(_update_anchor)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self._exchange.lookup([ids], self._divide_by)[0]

    def _apply(self, fn: Callable[..., torch.Tensor], recurse: bool = True) -> ShardedEmbedding:
        """`double()`, `to(device)` and the like."""
        super()._apply(fn, recurse)
        self._exchange.update_anchor()
        return self

    def settings(self) -> tuple[float, float]:
        return self.lr, self.eps

    def set_settings(self, settings: tuple[float, float]) -> None:
        self.lr, self.eps = settings

    def apply_update(self, rows: torch.Tensor, grads: torch.Tensor) -> None:
        momentum = None if self.optimizer == "sgd" else self.momentum
        row_kernels.step_rows(self.weight, momentum, rows, grads, self.lr, self.eps)

    def sum_and_update(
        self, grad: torch.Tensor, rows: torch.Tensor, order: torch.Tensor, ends: torch.Tensor
    ) -> None:
        """As apply_update with the sums of sum_rows. A row comes at most once from each rank."""
        momentum = None if self.optimizer == "sgd" else self.momentum
        row_kernels.update_rows(
            self.weight, momentum, grad, rows, order, ends, self.lr, self.eps, self.optimizer, len(self.shards)
        )

    def describe(self, feature: int) -> str:
        return f"table {self.name!r}, which has {self.num_embeddings} rows"

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, optimizer={self.optimizer!r}, lr={self.lr}"


def _update_anchor(table: ShardedEmbedding, _: object) -> None:
    """`load_state_dict(assign=True)` brings other tensors: to a table on the meta device, or from a mapped file."""
    table._exchange.update_anchor()


def _shards(rows: int, sharding: str, owner: int, world: int) -> list[exchange_plan.Shard]:
    if sharding == "row_wise":
        block = -(-rows // world)
        cuts = [min(r * block, rows) for r in range(world + 1)]
    elif sharding == "table_wise":
        if not 0 <= owner < world:
            raise ValueError(f"freescale: owner {owner} is not a rank of a group of {world}")
        cuts = [0 if r <= owner else rows for r in range(world + 1)]
    else:
        raise ValueError(f"freescale: sharding must be row_wise or table_wise, found {sharding!r}")
    return [exchange_plan.Shard(0, cuts[r], cuts[r + 1] - cuts[r], r, 0) for r in range(world)]
