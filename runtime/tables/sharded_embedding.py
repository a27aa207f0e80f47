"""Sharded tables in plain torch, for platforms without FBGEMM. Optimizer formulas match FBGEMM's exact optimizers.

Each rank draws only its own initial rows. A table is cut into blocks of rows, independent of its sharding and device,
each with a random stream of its own: NumPy's Philox on the CPU, keyed by the table's seed and the block number.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from freescale.compat import nn_modules
from freescale.kernels import row_kernels
from freescale.kernels.planning.owners import Shard
from freescale.kernels.transports import open_transports
from freescale.runtime.tables.table_exchange import Exchange

BLOCK_VALUES = 1 << 20  # approximate values per block; changing it changes the initial values


def draw_seed() -> int:
    """A table's seed: one draw from torch's default CPU generator, which torch.manual_seed seeds."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())  # regardless of `with torch.device`


def fill_uniform(rows: torch.Tensor, first: int, bound: float, seed: int) -> None:
    """Fill `rows`, [n, dim] starting at row `first` of a table, with uniform values between -bound and bound. They are
    drawn as float64 or float32, with a few megabytes of temporary memory per torch thread."""
    n, dim = rows.shape
    size = max(1, BLOCK_VALUES // dim)  # rows per block
    drawn = np.float64 if rows.dtype == torch.float64 else np.float32

    def draw(block: int) -> np.ndarray:
        needed = min(size, first + n - block * size)  # from the block's first row
        values = np.random.Generator(np.random.Philox(key=[seed, block])).random((needed, dim), dtype=drawn)
        values *= 2 * bound
        values -= bound
        return values

    blocks = range(first // size, -(-(first + n) // size)) if n else range(0)
    at_once = max(1, min(torch.get_num_threads(), len(blocks)))
    with ThreadPoolExecutor(at_once) as threads:  # NumPy releases the GIL while drawing
        for i in range(0, len(blocks), at_once):
            some = blocks[i : i + at_once]
            for block, values in zip(some, threads.map(draw, some) if at_once > 1 else map(draw, some), strict=True):
                begin, end = max(block * size, first), min((block + 1) * size, first + n)
                part = values[begin - block * size : end - block * size]
                rows[begin - first : end - first].copy_(torch.from_numpy(part))  # on the caller's stream


ADAM = ("adam", "partial_rowwise_adam")
OPTIMIZERS = (*row_kernels.OPTIMIZERS, *ADAM)


class _Table(NamedTuple):
    name: str
    rows: int
    sharding: str
    owner: int


class NativeTables(nn.Module):
    """Tables of one width and one optimizer, sharded over the ranks of a process group, that share one exchange. The
    weight, this rank's rows of all tables, has no `.grad` and is not a parameter: the backward pass updates it."""

    weight: torch.Tensor
    momentum: torch.Tensor
    squares: torch.Tensor  # Adam only
    steps: torch.Tensor

    def __init__(
        self,
        tables: Sequence[_Table],
        features: Sequence[tuple[str, int]],
        embedding_dim: int,
        optimizer: str,
        lr: float,
        eps: float,
        betas: tuple[float, float],
        weight_decay: float,
        gradient_division: bool,
        name: str,
        group: dist.ProcessGroup | None,
        device: torch.device | str | None,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        if not dist.is_initialized():
            raise RuntimeError(
                f"freescale: {type(self).__name__} {name!r} needs a process group: "
                "call torch.distributed.init_process_group first"
            )
        if optimizer not in OPTIMIZERS:
            legal = ", ".join(OPTIMIZERS)
            raise ValueError(f"freescale: optimizer must be one of {legal}, found {optimizer!r}")
        if weight_decay and optimizer not in ADAM:
            raise ValueError(f"freescale: weight_decay requires {' or '.join(ADAM)}, found {optimizer}")
        for table in tables:
            if table.rows < 1 or embedding_dim < 1:
                raise ValueError(f"freescale: table {table.name!r} is empty: {table.rows} x {embedding_dim}")
        group = group if group is not None else dist.group.WORLD
        assert group is not None
        self.embedding_dim, self.optimizer, self.lr, self.eps, self.name = embedding_dim, optimizer, lr, eps, name
        self.betas, self.weight_decay = betas, weight_decay
        self._tables, self._features = tuple(tables), tuple(features)
        self._divide_by, self._rank = group.size() if gradient_division else 1, group.rank()
        self.shards = _shards_of_all(tables, group.size())
        mine = [s for s in self.shards if s.owner == self._rank]
        local = torch.empty(sum(s.rows for s in mine), embedding_dim, dtype=dtype, device=device)
        for shard in mine:
            seed = draw_seed()  # on the meta device too, so that later draws are the same
            if not local.is_meta:
                part = local[shard.base : shard.base + shard.rows]
                fill_uniform(part, shard.first, tables[shard.table].rows ** -0.5, seed)
        self.register_buffer("weight", local)
        self._register_optimizer_state(local)
        self._exchange = Exchange(name, self, self.shards, [t.rows for t in tables], list(features), group)
        self.register_state_dict_pre_hook(open_transports.drain)
        self.register_state_dict_post_hook(_note_held_rows)
        self.register_load_state_dict_pre_hook(_require_held_rows)
        self.register_load_state_dict_post_hook(_update_anchor)

    def _register_optimizer_state(self, local: torch.Tensor) -> None:
        of_each_row = self.optimizer in ("rowwise_adagrad", "partial_rowwise_adam")
        shape = (0,) if self.optimizer == "sgd" else local.shape[:1] if of_each_row else local.shape
        if self.optimizer in ADAM:
            self.register_buffer("momentum", local.new_zeros(local.shape))
            self.register_buffer("squares", local.new_zeros(shape))
            # always on the CPU: the update reads it on the host
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64, device="cpu"))
        else:
            self.register_buffer("momentum", local.new_zeros(shape))

    def __getstate__(self) -> dict[str, Any]:
        self._exchange.before_read()
        return super().__getstate__()

    def count_step(self) -> None:
        """Count a step that starts to update rows. Its late updates belong to it too."""
        if self.optimizer in ADAM:
            self.steps += 1

    def _apply(self, fn: Callable[..., torch.Tensor], recurse: bool = True) -> NativeTables:
        super()._apply(fn, recurse)
        if self.optimizer in ADAM:
            self.steps = self.steps.cpu()
        self._exchange.update_anchor()
        return self

    def settings(self) -> tuple[Any, ...]:
        return self.lr, self.eps, self.betas, self.weight_decay, int(self.steps) if self.optimizer in ADAM else 0

    def set_settings(self, settings: tuple[Any, ...]) -> None:
        self.lr, self.eps, self.betas, self.weight_decay, steps = settings
        if self.optimizer in ADAM:
            self.steps.fill_(steps)

    def stored(self) -> tuple[torch.Tensor, ...]:
        return (self.weight, self.momentum, *((self.squares,) if self.optimizer in ADAM else ()))

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        return row_kernels.pack_rows(self.weight, rows)  # not the op: its overhead equals the kernel launch

    def apply_update(self, rows: torch.Tensor, grads: torch.Tensor) -> None:
        if self.optimizer in ADAM:
            row_kernels.adam_rows(
                self.weight, self.momentum, self.squares, rows, grads, self.lr, self.eps, self.betas, self.weight_decay,
                int(self.steps),
            )  # fmt: skip
            return
        momentum = None if self.optimizer == "sgd" else self.momentum
        row_kernels.step_rows(self.weight, momentum, rows, grads, self.lr, self.eps)

    def sum_and_update(self, grad: torch.Tensor, rows: torch.Tensor, order: torch.Tensor, ends: torch.Tensor) -> None:
        """apply_update with the sums of sum_rows. Each rank sends a row at most once."""
        if self.optimizer in ADAM:
            self.apply_update(rows, torch.ops.freescale.sum_rows.default(grad, order, ends))
            return
        momentum = None if self.optimizer == "sgd" else self.momentum
        ranks = len(self.shards) // len(self._tables)
        row_kernels.update_rows(
            self.weight, momentum, grad, rows, order, ends, self.lr, self.eps, self.optimizer, ranks
        )

    def held_rows(self) -> dict[str, list[int]]:
        """First row and end row that this rank holds of each table."""
        mine = [s for s in self.shards if s.owner == self._rank and s.rows]
        return {self._tables[s.table].name: [s.first, s.first + s.rows] for s in mine}

    def describe(self, feature: int) -> str:
        table = self._tables[self._features[feature][1]]
        return f"table {table.name!r}, which has {table.rows} rows"


nn_modules.leave_buffers_out_of_ddp(NativeTables)  # DDP would broadcast rank 0's rows in every forward


class ShardedEmbedding(NativeTables):
    """An embedding table whose rows are sharded over the ranks of a process group.

    `forward(ids)` takes any 1-D integer tensor and returns its rows. The backward pass updates the table, as in
    TorchRec's fused tables, so the table has no `.grad` and is not a parameter.

    sharding: "row_wise" (equal blocks of rows) or "table_wise" (all rows on rank `owner`).
    gradient_division: divide gradients by the number of ranks, as TorchRec does by default.
    optimizer: "sgd", "adagrad", "rowwise_adagrad", "adam" or "partial_rowwise_adam". `betas` and `weight_decay`
        (decoupled, applied to looked-up rows) are for the two Adam variants, which count steps per table.

    Initial values are uniform between -1/sqrt(num_embeddings) and 1/sqrt(num_embeddings). Each rank draws only its own
    rows, seeded by one draw from torch's CPU generator. With the same `torch.manual_seed` on all ranks, a table has the
    same initial values for any number of ranks, sharding and device.
    The learning rate is the attribute `lr` and may be changed at any time.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        optimizer: str = "sgd",
        lr: float = 0.01,
        eps: float = 1e-8,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        sharding: str = "row_wise",
        owner: int = 0,
        gradient_division: bool = True,
        name: str = "embedding",
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        table = _Table(name, num_embeddings, sharding, owner)
        super().__init__(
            [table], [(name, 0)], embedding_dim, optimizer, lr, eps, betas, weight_decay, gradient_division,
            name, group, device, dtype,
        )
        self.num_embeddings = num_embeddings

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self._exchange.lookup([ids], self._divide_by)
        return rows.split([ids.shape[0]])[0]  # in the caller's size: planned rows have one of their own

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, optimizer={self.optimizer!r}, lr={self.lr}"


class ShardedEmbeddingCollection(NativeTables):
    """Several tables of one width and one optimizer that share one exchange.

    `forward(ids)` takes 1-D ids per feature, {feature: ids}, and returns {feature: rows}. It ignores other entries of
    `ids`, so the caller may pass a whole batch. Compared with one exchange per table, this sends a few large messages
    instead of many small ones, and each step launches and waits for one exchange.

    tables: rows per table, {table: rows}.
    features: table per feature, {feature: table}; by default each table has one feature of the same name.
    sharding: "row_wise" or "table_wise", for all tables or as {table: sharding}. Table-wise tables go to ranks
        round-robin, starting at rank 0.

    All else is as in `ShardedEmbedding`. With the same seed, initial values are the same as for separate tables created
    in this order.
    """

    def __init__(
        self,
        tables: Mapping[str, int],
        embedding_dim: int,
        *,
        features: Mapping[str, str] | None = None,
        optimizer: str = "sgd",
        lr: float = 0.01,
        eps: float = 1e-8,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        sharding: str | Mapping[str, str] = "row_wise",
        gradient_division: bool = True,
        name: str = "embeddings",
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        names = list(tables)
        features = {n: n for n in names} if features is None else dict(features)
        of_each = {n: sharding for n in names} if isinstance(sharding, str) else dict(sharding)
        if not names:
            raise ValueError(f"freescale: {name!r} has no tables")
        for table in (*features.values(), *of_each):
            if table not in tables:
                raise ValueError(f"freescale: {name!r} has no table {table!r}; it has {', '.join(map(repr, names))}")
        if missing := [n for n in names if n not in features.values()]:
            raise ValueError(f"freescale: no feature of {name!r} looks up the table {missing[0]!r}")
        if missing := [n for n in names if n not in of_each]:
            raise ValueError(f"freescale: sharding has no entry for table {missing[0]!r}")
        world = (group if group is not None else dist.group.WORLD).size() if dist.is_initialized() else 1  # type: ignore
        by_table = [n for n in names if of_each[n] == "table_wise"]
        owners = {n: i % world for i, n in enumerate(by_table)}
        made = [_Table(n, tables[n], of_each[n], owners.get(n, 0)) for n in names]
        entries = [(feature, names.index(table)) for feature, table in features.items()]
        super().__init__(
            made, entries, embedding_dim, optimizer, lr, eps, betas, weight_decay, gradient_division,
            name, group, device, dtype,
        )

    def forward(self, ids: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        names = self._exchange.features
        for name in names:
            if name not in ids:
                raise KeyError(f"freescale: {self.name!r} looks up the feature {name!r}, which is missing in `ids`")
        looked_up = [ids[name] for name in names]
        rows = self._exchange.lookup(looked_up, self._divide_by).split([i.shape[0] for i in looked_up])
        return dict(zip(names, rows, strict=True))

    def local_rows(self, table: str) -> torch.Tensor:
        number = [t.name for t in self._tables].index(table)
        shard = next(s for s in self.shards if s.table == number and s.owner == self._rank)
        return self.weight[shard.base : shard.base + shard.rows]

    def extra_repr(self) -> str:
        tables = ", ".join(f"{t.name}: {t.rows}" for t in self._tables)
        return f"{tables}; {self.embedding_dim}, optimizer={self.optimizer!r}, lr={self.lr}"


_HELD_ROWS = "freescale_rows"  # in the metadata of a state_dict, which torch.save keeps; it has no key of its own


def _note_held_rows(table: NativeTables, state: object, prefix: str, metadata: dict[str, Any]) -> None:
    metadata[_HELD_ROWS] = table.held_rows()


def _require_held_rows(
    table: NativeTables, state: object, prefix: str, metadata: dict[str, Any], strict: bool, missing: object,
    unexpected: object, errors: list[str],
) -> None:  # fmt: skip
    """Rows of another rank often have the same shape, as when one rank saves for all."""
    saved, held = metadata.get(_HELD_ROWS), table.held_rows()
    if saved is None or saved == held:
        return
    name = next(n for n in [*held, *saved] if saved.get(n) != held.get(n))
    errors.append(
        f"freescale: this rank {_describe_rows(held.get(name))} of table {name!r}, the checkpoint "
        f"{_describe_rows(saved.get(name))}: it was saved by another rank or with another sharding. Save and load a "
        "state_dict on every rank. (A plain dict of tensors is loaded without this check)"
    )


def _describe_rows(bounds: list[int] | None) -> str:
    return "holds no rows" if bounds is None else f"holds rows {bounds[0]} to {bounds[1] - 1}"


def _update_anchor(table: NativeTables, _: object) -> None:
    """Needed after `load_state_dict(assign=True)`, which replaces tensors (meta device, mapped files)."""
    table._exchange.update_anchor()


def _shards_of_all(tables: Sequence[_Table], world: int) -> list[Shard]:
    """One shard per table and rank, ordered by table. A rank's shards are contiguous."""
    bases, shards = [0] * world, []
    for number, table in enumerate(tables):
        for rank, (first, end) in enumerate(_blocks(table, world)):
            shards.append(Shard(number, first, end - first, rank, bases[rank]))
            bases[rank] += end - first
    return shards


def _blocks(table: _Table, world: int) -> list[tuple[int, int]]:
    rows, owner = table.rows, table.owner
    if table.sharding == "row_wise":
        block = -(-rows // world)
        cuts = [min(r * block, rows) for r in range(world + 1)]
    elif table.sharding == "table_wise":
        if not 0 <= owner < world:
            raise ValueError(f"freescale: owner {owner} is not a rank in a group of {world}")
        cuts = [0 if r <= owner else rows for r in range(world + 1)]
    else:
        raise ValueError(f"freescale: sharding must be row_wise or table_wise, found {table.sharding!r}")
    return list(itertools.pairwise(cuts))
