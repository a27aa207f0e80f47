"""What benchmarks/step_torchrec.py trains: real TorchRec tables under a dense part, and the batches."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor  # noqa: E402
from torchrec.streamable import Pipelineable  # noqa: E402

from hstu import HSTUBlock, attention_tiles, segment_sum  # noqa: E402

ITEM, HISTORY = "item", "history"  # the table and its feature
TABLE_LR, TABLE_EPS, INIT = 0.05, 1e-8, 0.05
ZIPF = 0.8
SCATTER = 2654435761  # a prime: popular rows are spread over the table, and so over the ranks


@dataclass(frozen=True)
class Size:
    """An experiment: the model and the batch of one rank."""

    name: str
    samples: int
    length: int  # of each history, or the median of lognormal ones
    rows: int
    dim: int
    heads: int
    layers: int
    cap: int = 0  # of lognormal lengths; 0: equal lengths
    sigma: float = 1.0
    bfloat16: bool = True

    @property
    def jagged(self) -> bool:
        return self.cap > 0

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bfloat16 else torch.float32


# ---- dense parts -----------------------------------------------------------------------------------------------------


class TransformerBlock(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, dim // heads
        self.norm, self.norm_out = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.project = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, dim = x.shape
        parts = self.qkv(self.norm(x)).view(samples, length, 3, self.heads, self.width)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.project(attended.reshape(samples, length, dim))
        return x + self.down(F.gelu(self.up(self.norm_out(x))))


class Transformer(nn.Module):
    """Softmax attention on histories of one length."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.length, self.dtype = size.length, size.dtype
        self.blocks = nn.ModuleList(TransformerBlock(size.dim, size.heads) for _ in range(size.layers))
        self.head = nn.Linear(size.dim, 1)

    def forward(self, rows: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = rows.view(labels.shape[0], self.length, -1).to(self.dtype)
        for block in self.blocks:
            x = block(x)
        return F.binary_cross_entropy_with_logits(self.head(x.mean(1)).squeeze(-1).float(), labels)


class JaggedHSTU(nn.Module):
    """The example's blocks on jagged histories; nothing is padded."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.normalizer, self.dtype = size.samples, size.dtype
        self.blocks = nn.ModuleList(HSTUBlock(size.dim, size.heads, 128) for _ in range(size.layers))
        self.head = nn.Linear(size.dim, 1)

    def forward(self, rows: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, lengths = rows.to(self.dtype), lengths.to(torch.int64)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        tiles = attention_tiles(offsets, x.shape[0])
        for block in self.blocks:
            x = block(x, offsets, tiles)
        pooled = segment_sum(x.float(), offsets) / lengths.clamp(min=1).unsqueeze(1)
        scores = self.head(pooled.to(self.dtype)).squeeze(-1).float()
        # balance gives ranks different numbers of samples; DDP averages over ranks
        return F.binary_cross_entropy_with_logits(scores, labels, reduction="sum") / self.normalizer


def dense_part(size: Size, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return (JaggedHSTU if size.jagged else Transformer)(size).to(device, size.dtype)


# ---- the model -------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, size: Size, device: torch.device, wrap: Any = None) -> None:
        super().__init__()
        table = EmbeddingConfig(
            name=ITEM, num_embeddings=size.rows, embedding_dim=size.dim, feature_names=[HISTORY]
        )
        tables = EmbeddingCollection([table], device=torch.device("meta"))
        self.tables = tables if wrap is None else wrap(tables)
        self.dense = dense_part(size, device)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, twice: TorchRec's pipelines want (loss, output)."""
        rows = self.tables(batch.features)[HISTORY]
        loss = self.dense(rows.values(), rows.lengths(), batch.labels)
        return loss, loss.detach()


def sharded(size: Size, device: torch.device, compile_dense: str = "", ddp: bool = True, pec: bool = False) -> Any:
    """A DistributedModelParallel with one row-wise table, fused row-wise Adagrad, and the dense part in DDP. The same
    weights every time. `compile_dense`: by this backend; else the dense part is left as it is."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints

    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": TABLE_LR, "eps": TABLE_EPS}
    wrap, sharder = None, EmbeddingCollectionSharder(fused_params=fused)
    if pec:  # TorchRec 1.9
        from torchrec.distributed.pec_embedding import PECEmbeddingCollectionSharder
        from torchrec.modules.pec_embedding_modules import PECEmbeddingCollection

        wrap, sharder = PECEmbeddingCollection, PECEmbeddingCollectionSharder(ec_sharder=sharder)
    model = Model(size, device, wrap)
    if compile_dense:
        model.dense.compile(dynamic=size.jagged, backend=compile_dense)
    # local_world_size: TorchRec places rank r on GPU r % local_world_size, and all ranks share one here
    topology = Topology(world_size=dist.get_world_size(), local_world_size=1, compute_device=device.type)
    constraints = {ITEM: ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])}
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    plan = planner.collective_plan(model, [sharder], dist.group.WORLD)
    model = DistributedModelParallel(model, device=device, plan=plan, sharders=[sharder], init_data_parallel=ddp)
    fill_tables(model)
    return model


def embedding_collection(model: nn.Module) -> nn.Module:
    return next(m for name, m in model.named_modules() if name.endswith("tables"))


@torch.no_grad()
def fill_tables(model: nn.Module) -> None:
    for shard in local_shards(model):
        generator = torch.Generator(shard.device).manual_seed(5 + dist.get_rank())
        shard.normal_(0, INIT, generator=generator)


def local_shards(model: nn.Module) -> list[torch.Tensor]:
    found = [v.local_shards() for v in model.state_dict().values() if hasattr(v, "local_shards")]
    return [shard.tensor for shards in found for shard in shards]


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if not hasattr(p, "_in_backward_optimizers")]


# ---- batches ---------------------------------------------------------------------------------------------------------


@dataclass
class Batch(Pipelineable):
    features: KeyedJaggedTensor
    labels: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        how: Any = {"device": device, "non_blocking": non_blocking}
        return Batch(self.features.to(**how), self.labels.to(**how))

    def pin_memory(self) -> Batch:
        return Batch(self.features.pin_memory(), self.labels.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        self.features.record_stream(stream)
        self.labels.record_stream(stream)

    def fresh(self) -> Batch:
        """With the same memory: a KeyedJaggedTensor keeps what was computed of it."""
        features = KeyedJaggedTensor([HISTORY], self.features.values(), lengths=self.features.lengths())
        return Batch(features, self.labels)


def zipf(random: np.random.Generator, count: int, rows: int, exponent: float) -> np.ndarray:
    """Ids of popularity rank^-exponent, by the inverse of the continuous distribution."""
    u, power = random.random(count), 1.0 - exponent
    ranks = rows**u if abs(power) < 1e-6 else ((float(rows) ** power - 1) * u + 1) ** (1 / power)
    return np.clip(ranks.astype(np.int64) - 1, 0, rows - 1) * SCATTER % rows


def batches(size: Size, count: int, pinned: bool) -> list[Batch]:
    """This rank's."""
    random = np.random.default_rng(7 + dist.get_rank())
    made = []
    for _ in range(count):
        lengths = np.full(size.samples, size.length)
        if size.jagged:
            drawn = np.rint(random.lognormal(np.log(size.length), size.sigma, size.samples))
            lengths = np.clip(drawn, 1, size.cap).astype(np.int64)
        ids = zipf(random, int(lengths.sum()), size.rows, ZIPF)
        features = KeyedJaggedTensor([HISTORY], torch.from_numpy(ids), lengths=torch.from_numpy(lengths))
        labels = torch.from_numpy((random.random(size.samples) < 0.5).astype(np.float32))
        batch = Batch(features, labels)
        made.append(batch.pin_memory() if pinned else batch)
    return made


def turn_of(distinct: list[Batch], warm_up: int, steps: int, tail: int) -> Iterator[Batch]:
    """The steps that count are the distinct batches, from the first on, in every turn."""
    for number in range(-warm_up, steps + tail):
        yield distinct[number % len(distinct)].fresh()
