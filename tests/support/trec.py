"""TorchRec models and batches for tests: all kinds of tables in one small collection."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

ITEMS, USERS, TAGS, TINY = 97, 41, 23, 3


def tables(dim: int = 8) -> list[Any]:
    from torchrec import EmbeddingConfig

    return [
        EmbeddingConfig(
            name="item", num_embeddings=ITEMS, embedding_dim=dim, feature_names=["history", "candidate"]
        ),
        EmbeddingConfig(name="user", num_embeddings=USERS, embedding_dim=dim, feature_names=["user"]),
        EmbeddingConfig(name="tag", num_embeddings=TAGS, embedding_dim=dim, feature_names=["tag"]),
        # a feature shared by two tables, and a table with fewer rows than ranks
        EmbeddingConfig(name="tag2", num_embeddings=TAGS, embedding_dim=dim, feature_names=["tag"]),
        EmbeddingConfig(name="tiny", num_embeddings=TINY, embedding_dim=dim, feature_names=["tiny"]),
    ]


TABLES = ("item", "user", "tag", "tag2", "tiny")
LAYOUTS = {
    "row_wise": dict.fromkeys(TABLES, "row_wise"),
    "table_wise": dict.fromkeys(TABLES, "table_wise"),
    # Data-parallel tables here have one id per sample: eager TorchRec on CPU sums a longer list into one row, because
    # FBGEMM's dense CPU lookup only supports bags, so there would be no reference.
    "mixed": dict(
        zip(TABLES, ("row_wise", "data_parallel", "table_wise", "row_wise", "data_parallel"), strict=True)
    ),
    "column_wise": {**dict.fromkeys(TABLES, "row_wise"), "user": "column_wise"},
}


SMALL = ("item", "user")


class Model(nn.Module):
    """A collection and a small dense part; every feature affects the loss.

    `small`: two tables, for tests of other subjects; compiles in half the time.
    """

    def __init__(self, dim: int = 8, small: bool = False) -> None:
        super().__init__()
        from torchrec import EmbeddingCollection

        mine = [t for t in tables(dim) if t.name in SMALL or not small]
        self.ec = EmbeddingCollection(tables=mine, device=torch.device("cpu"))
        self.names = ("history", "candidate", "user") + (() if small else ("tag@tag", "tag@tag2", "tiny"))
        self.mix = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, 1)

    def forward(self, features, weight: torch.Tensor) -> torch.Tensor:
        found = self.ec(features)
        values = torch.cat([found[name].values() for name in self.names])
        hidden = torch.tanh(self.mix(values))
        return ((self.out(hidden) * values.sum(1, keepdim=True)).sum() + weight.sum() * 0.0) / 16.0


def build(
    layout: str, optimizer: str, ddp: bool = False, dim: int = 8, small: bool = False, device: str = "cpu", **fused: Any
) -> Any:
    """A sharded model, with the same weights for every layout."""
    torch.manual_seed(0)
    return shard(Model(dim, small), LAYOUTS[layout], optimizer, ddp, device, **fused)


def shard(
    model: nn.Module, kinds: dict[str, str], optimizer: str, ddp: bool = False, device: str = "cpu",
    quantized: Any = None, **fused: Any,
) -> Any:  # fmt: skip
    """A model in DistributedModelParallel; `kinds`: sharding of each table; `quantized`: a QCommsConfig; `fused`: for
    FBGEMM's optimizer. On a GPU, all ranks share the first one."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import ShardingEnv

    types = {
        "sgd": EmbOptimType.EXACT_SGD,
        "adagrad": EmbOptimType.EXACT_ADAGRAD,
        "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "ema": EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD,
        "adam": EmbOptimType.ADAM,  # on the CPU: adam_on_cpu.py
        "partial_rowwise_adam": EmbOptimType.PARTIAL_ROWWISE_ADAM,
    }
    fused_params = {"optimizer": types[optimizer], "learning_rate": 0.1, "eps": 1e-8, **fused}
    class AnySharding(EmbeddingBagCollectionSharder):
        """TorchRec plans row-wise kinds for GPUs only; they also work on a CPU."""

        def sharding_types(self, compute_device_type: str) -> list[str]:
            return super().sharding_types("cuda")

    codecs = None
    if quantized is not None:
        from torchrec.distributed.fbgemm_qcomm_codec import get_qcomm_codecs_registry

        codecs = get_qcomm_codecs_registry(quantized, device=torch.device(device))
    sharders = [EmbeddingCollectionSharder(fused_params, codecs), AnySharding(fused_params, codecs)]
    constraints = {
        name: ParameterConstraints(
            sharding_types=[kind],
            compute_kernels=["dense" if kind == "data_parallel" else "fused"],
            min_partition=4,
        )
        for name, kind in kinds.items()
    }
    world = dist.get_world_size()
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    compute_device = torch.device(device).type
    topology = Topology(world_size=world, local_world_size=per_host, compute_device=compute_device)
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    if compute_device == "cuda":
        _place_on_first_gpu(plan)
    return DistributedModelParallel(
        model if compute_device == "cpu" else model.to(device),  # tables may be on the meta device
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        plan=plan,
        sharders=sharders,
        device=torch.device(device),
        init_data_parallel=ddp,
    )


def _place_on_first_gpu(plan: Any) -> None:
    """TorchRec places the shards of rank r on GPU r % LOCAL_WORLD_SIZE."""
    from torch.distributed.remote_device import _remote_device

    for tables in plan.plan.values():
        for sharding in tables.values():
            for part in sharding.sharding_spec.shards if sharding.sharding_spec is not None else ():
                part.placement = _remote_device(f"rank:{part.placement.rank()}/cuda:0")


def on(device: torch.device, *inputs: Any) -> tuple[Any, ...]:
    """`inputs` on `device`: those of plain loops, since a LookaheadLoader has moved its own."""
    where = (x.device if isinstance(x.device, torch.device) else x.device() for x in inputs)
    return tuple(x if current == device else x.to(device) for x, current in zip(inputs, where, strict=True))


def fbgemm_modules(model: Any) -> list[Any]:
    """Those with a fused optimizer."""
    from freescale.compat import torchrec

    collections = [m for m in model.modules() if torchrec.is_sharded_collection(m)]
    lookups = [lookup for c in collections for kind, _, lookup in torchrec.shardings(c) if kind != "data_parallel"]
    return [emb for lookup in lookups for emb in torchrec.fbgemm_modules(lookup)]


def set_optimizer_step(model: Any, steps: int) -> None:
    """As in a new process whose checkpoint was written after so many steps: TorchRec's checkpoints of Adam do not hold
    their number, so one calls set_optimizer_step."""
    model.fused_optimizer.set_optimizer_step(steps)
    for emb in fbgemm_modules(model):
        emb.iter_cpu.zero_()


def difference(found: tuple[list[float], Any], expected: tuple[list[float], Any]) -> float:
    """The largest, of a loss or of a tensor, each relative to the largest number of its kind."""
    assert found[1].keys() == expected[1].keys()
    scale = max(map(abs, expected[0]))
    worst = [abs(x - y) / scale for x, y in zip(found[0], expected[0], strict=True)]
    worst += [float((found[1][k] - v).abs().max() / v.abs().max()) for k, v in expected[1].items() if v.numel()]
    return max(worst)


def same_bits(a: tuple[list[float], Any], b: tuple[list[float], Any]) -> bool:
    """Of losses and tensors."""
    return a[0] == b[0] and a[1].keys() == b[1].keys() and all(torch.equal(v, b[1][k]) for k, v in a[1].items())


def batch(
    step: int, rank: int, eager: bool = False, none: bool = True, samples: int | None = None
) -> tuple[Any, torch.Tensor]:
    """Random lengths, including empty histories; some ranks have no samples or only empty histories.

    Eager TorchRec requires the same number of samples on every rank, and at least one. Where a rank has none, it
    gets samples without ids, which is equivalent. `none=False`: every rank always has samples.
    """
    from torchrec import KeyedJaggedTensor

    g = torch.Generator().manual_seed(1000 * step + rank)
    full = samples = 2 + (step * 5) % 6 if samples is None else samples
    if none and step % 7 == 3 and rank == step % 2:
        samples = 0
    lengths = torch.randint(0, 7, (samples,), generator=g) * (torch.rand(samples, generator=g) > 0.2)
    if step % 5 == 4:
        lengths = torch.zeros_like(lengths)
    ones = torch.ones(samples, dtype=torch.int64)
    tags = torch.randint(0, 3, (samples,), generator=g)
    sizes = [(lengths, ITEMS), (ones, ITEMS), (ones, USERS), (tags, TAGS), (ones, TINY)]
    values = [torch.randint(0, size, (int(n.sum()),), generator=g) for n, size in sizes]
    if eager and samples == 0:
        sizes = [(torch.zeros(full, dtype=torch.int64), size) for _, size in sizes]
    kjt = KeyedJaggedTensor(
        keys=["history", "candidate", "user", "tag", "tiny"],
        values=torch.cat(values),
        lengths=torch.cat([n for n, _ in sizes]),
    )
    return kjt, torch.rand(samples, generator=g)


def snapshot(model: Any) -> dict[str, torch.Tensor]:
    """All dense parameters and local table rows."""
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    found = {}
    for name, value in model.state_dict().items():
        if isinstance(value, ShardedTensor):
            for i, shard in enumerate(value.local_shards()):
                found[f"{name}/{i}"] = shard.tensor.detach().clone()
        else:
            found[name] = value.detach().clone()
    return found


def optimizer_state(model: Any) -> dict[str, torch.Tensor]:
    """The state of TorchRec's fused optimizer for the local rows."""
    found = {}
    for name, state in model.fused_optimizer.state_dict()["state"].items():
        for key, value in state.items():
            for i, shard in enumerate(value.local_shards() if hasattr(value, "local_shards") else ()):
                found[f"{name}.{key}.{i}"] = shard.tensor.clone()
    return found


@torch.no_grad()
def put_back(model: Any, rows: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> None:
    """Restore results of `snapshot` and `optimizer_state`: faster than compiling another model."""
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    for name, value in model.state_dict().items():
        if isinstance(value, ShardedTensor):
            for i, shard in enumerate(value.local_shards()):
                shard.tensor.copy_(rows[f"{name}/{i}"])
        else:
            value.copy_(rows[name])
    for name, kept in model.fused_optimizer.state_dict()["state"].items():
        for key, value in kept.items():
            for i, shard in enumerate(value.local_shards() if hasattr(value, "local_shards") else ()):
                shard.tensor.copy_(state[f"{name}.{key}.{i}"])


def train(
    model: Any, run: Any, steps: int, first: int = 0, none: bool = True, lr: float = 0.05, scheduled: bool = True
) -> list[float]:
    """`steps` plain steps of `run`, which is the model itself (eager) or compiled from it."""
    rank = dist.get_rank()
    batches = (batch(s, rank, run is model, none) for s in range(first, first + steps))
    return train_on(model, run, batches, lr, first, scheduled)


def train_on(
    model: Any, run: Any, batches: Any, lr: float = 0.05, first: int = 0, scheduled: bool = True
) -> list[float]:
    """`scheduled`: the tables have another learning rate in every step, as set by a scheduler."""
    dense = [p for n, p in model.named_parameters() if not hasattr(p, "_in_backward_optimizers")]
    optimizer = torch.optim.SGD(dense, lr=lr)
    device = dense[0].device
    losses = []
    for step, (features, weight) in enumerate(batches, first):
        for group in model.fused_optimizer.param_groups if scheduled else ():
            group["lr"] = 0.1 / (1 + step % 7)
        model.fused_optimizer.zero_grad()  # copies the learning rate to FBGEMM
        optimizer.zero_grad(set_to_none=False)
        loss = run(*on(device, features, weight))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses
