"""Small models in the style of TorchRec users, and batches for all of them.

Every model takes a `Batch` and returns the sum over samples of loss times weight. The models do not depend on
freescale. `hypothesis` draws more models from the same parts (test_zoo_random.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ITEMS, USERS, GENRES, DIM, LENGTH = 67, 29, 13, 8, 6
KEYS = ("history", "target", "user", "genre")
ROWS = {"history": ITEMS, "target": ITEMS, "user": USERS, "genre": GENRES}


@dataclass
class Batch:
    """`features`: a history, one target item and one user per sample, and some genres."""

    features: Any  # KeyedJaggedTensor
    dense: Tensor  # [samples, DIM]
    weight: Tensor  # [samples]

    @property
    def device(self) -> torch.device:
        return self.dense.device

    def to(self, device: torch.device) -> Batch:
        return Batch(self.features.to(device), self.dense.to(device), self.weight.to(device))


def batch(step: int, rank: int, samples: int, padded_to: int = 0) -> Batch:
    """`samples` samples, padded to `padded_to` with samples that have no ids and zero weight.

    (Eager TorchRec requires the same number of samples on every rank, and at least one.)
    """
    from torchrec import KeyedJaggedTensor

    g = torch.Generator().manual_seed(1000 * step + rank)
    history = torch.randint(0, LENGTH + 1, (samples,), generator=g)
    ones = torch.ones(samples, dtype=torch.int64)
    lengths = {"history": history, "target": ones, "user": ones, "genre": torch.randint(0, 3, (samples,), generator=g)}
    values = [torch.randint(0, ROWS[k], (int(lengths[k].sum()),), generator=g) for k in KEYS]
    dense, weight = torch.randn(samples, DIM, generator=g), torch.rand(samples, generator=g)
    more = max(padded_to - samples, 0)
    features = KeyedJaggedTensor(
        keys=list(KEYS),
        values=torch.cat(values),
        lengths=torch.cat([F.pad(lengths[k], (0, more)) for k in KEYS]),
    )
    return Batch(features, F.pad(dense, (0, 0, 0, more)), F.pad(weight, (0, more)))


# ---- parts -------------------------------------------------------------------------------------------------


def sequences(name: str = "item") -> Any:
    from torchrec import EmbeddingCollection, EmbeddingConfig

    tables = [
        EmbeddingConfig(
            name=name, num_embeddings=ITEMS, embedding_dim=DIM, feature_names=["history", "target"]
        ),
        EmbeddingConfig(name="user", num_embeddings=USERS, embedding_dim=DIM, feature_names=["user"]),
    ]
    return EmbeddingCollection(tables=tables, device=torch.device("cpu"))


def bags() -> Any:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    table = EmbeddingBagConfig(name="genre", num_embeddings=GENRES, embedding_dim=DIM, feature_names=["genre"])
    return EmbeddingBagCollection(tables=[table], device=torch.device("cpu"))


def first_rows(jagged: Any) -> Tensor:
    """The row of each sample; zeros if it has none."""
    return jagged.to_padded_dense(1).squeeze(1)


def pooled(jagged: Any) -> Tensor:
    """The mean row of each sample."""
    return jagged.to_padded_dense(LENGTH).sum(1) / jagged.lengths().clamp(min=1)[:, None]


class Attention(nn.Module):
    """As nn.MultiheadAttention, but supports a batch without samples."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inward, self.outward, self.dropout = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM), dropout

    def forward(self, x: Tensor, *_: Tensor, key_padding_mask: Tensor, attn_mask: Tensor | None, **__: Any) -> Any:
        samples, places, _ = x.shape
        q, k, v = (y.view(samples, places, 2, DIM // 2).transpose(1, 2) for y in self.inward(x).chunk(3, -1))
        hidden = key_padding_mask[:, None, None, :].expand(samples, 1, places, places)
        hidden = hidden if attn_mask is None else hidden | attn_mask
        found = F.scaled_dot_product_attention(q, k, v, ~hidden, self.dropout if self.training else 0.0)
        return self.outward(found.transpose(1, 2).reshape(samples, places, DIM)), None


class Encoder(nn.Module):
    """Self-attention over padded histories; the mask is modified in place."""

    def __init__(self, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.positions = nn.Embedding(LENGTH, DIM)
        self.norm, self.last = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention: nn.Module = Attention(dropout)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.dropout, self.causal = nn.Dropout(dropout), causal

    def forward(self, jagged: Any) -> tuple[Tensor, Tensor]:
        x = jagged.to_padded_dense(LENGTH)
        place = torch.arange(LENGTH, device=x.device)
        pad = place[None, :] >= jagged.lengths()[:, None]
        pad[:, 0] = False  # an empty history still attends to one position
        x = self.dropout(x * math.sqrt(DIM) + self.positions(place))
        x = x.masked_fill(pad[..., None], 0.0)
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).triu(1) if self.causal else None
        y = self.norm(x)
        attended, _ = self.attention(y, y, y, key_padding_mask=pad, attn_mask=causal, need_weights=False)
        x = x + self.dropout(attended)
        x = x + self.dropout(self.down(F.gelu(self.up(self.last(x)))))
        return x, pad


# ---- models ------------------------------------------------------------------------------------------------


class TwoTowers(nn.Module):
    """Dot products of all users with all items of the batch; other samples' items are negatives."""

    def __init__(self) -> None:
        super().__init__()
        self.ec = sequences()
        self.user = nn.Sequential(nn.Linear(2 * DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))
        self.item = nn.Linear(DIM, DIM)

    def forward(self, b: Batch) -> Tensor:
        found = self.ec(b.features)
        users = self.user(torch.cat([pooled(found["history"]), first_rows(found["user"])], 1))
        items = self.item(first_rows(found["target"]))
        users, items = F.normalize(users, dim=1), F.normalize(items, dim=1)
        # a sample with zero weight is not a negative either
        scores = users @ items.T + torch.where(b.weight > 0, 0.0, -1e4)[None, :]
        return ((scores.logsumexp(1) - scores.diagonal()) * b.weight).sum()


class SASRec(nn.Module):
    """Next item at every position, with one negative: padding, dropout, masks modified in place."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.ec = sequences()
        self.encoder = Encoder(causal=True, dropout=dropout)

    def forward(self, b: Batch) -> Tensor:
        found = self.ec(b.features)
        x, pad = self.encoder(found["history"])
        rows = found["history"].to_padded_dense(LENGTH)
        following = rows.roll(-1, 1)
        good, bad = (x * following).sum(-1), (x * rows).sum(-1)
        loss = F.softplus(bad - good).masked_fill(pad, 0.0).sum(1)
        return (loss * b.weight).sum()


class BERT4Rec(nn.Module):
    """Bidirectional; some items are masked and predicted from a vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.ec = sequences()
        self.mask = nn.Parameter(torch.zeros(DIM))
        self.encoder = Encoder(causal=False)
        self.encoder.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.words = nn.Linear(DIM, ITEMS)

    def forward(self, b: Batch) -> Tensor:
        found = self.ec(b.features)
        history = found["history"]
        hidden = torch.arange(history.values().shape[0], device=b.dense.device) % 3 == 1
        values = torch.where(hidden[:, None], self.mask, history.values())
        from torchrec import JaggedTensor

        x, pad = self.encoder(JaggedTensor(values=values, lengths=history.lengths()))
        ids = b.features["history"].to_padded_dense(LENGTH).long()
        told = F.cross_entropy(self.words(x).flatten(0, 1), ids.flatten(), reduction="none")
        return (told.view(ids.shape).masked_fill(pad, 0.0).mean(1) * b.weight).sum()


class GRU4Rec(nn.Module):
    """A recurrent network, which Dynamo does not trace."""

    def __init__(self) -> None:
        super().__init__()
        self.ec = sequences()
        self.gru = nn.GRU(DIM, DIM, batch_first=True)

    def forward(self, b: Batch) -> Tensor:
        found = self.ec(b.features)
        x, _ = self.gru(found["history"].to_padded_dense(LENGTH))
        last = (found["history"].lengths() - 1).clamp(min=0)
        state = x.gather(1, last[:, None, None].expand(-1, 1, DIM)).squeeze(1)
        score = (state * first_rows(found["target"])).sum(1)
        return (F.softplus(-score) * b.weight).sum()


class DLRM(nn.Module):
    """Pooled features and sequences, and their products."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc, self.ec = bags(), sequences()
        self.bottom = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU())
        self.top = nn.Linear(6, 1)

    def forward(self, b: Batch) -> Tensor:
        genres = self.ebc(b.features)["genre"]
        found = self.ec(b.features)
        parts = [self.bottom(b.dense), genres, pooled(found["history"]), first_rows(found["user"])]
        stacked = torch.stack(parts, 1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        i, j = torch.triu_indices(4, 4, offset=1, device=products.device)
        return (F.softplus(self.top(products[:, i, j])).squeeze(1) * b.weight).sum()


class HSTU(nn.Module):
    """Pointwise attention on jagged histories, with the example's own op."""

    def __init__(self) -> None:
        super().__init__()
        import hstu

        self.ec = sequences()
        self.block = hstu.HSTUBlock(DIM, 2, LENGTH)
        self.out = nn.Linear(2 * DIM, 1)

    def forward(self, b: Batch) -> Tensor:
        found = self.ec(b.features)
        history = found["history"]
        x = self.block(history.values(), history.offsets())
        from torchrec import JaggedTensor

        state = pooled(JaggedTensor(values=x, lengths=history.lengths()))
        score = self.out(torch.cat([state, first_rows(found["target"])], 1)).squeeze(1)
        return (F.softplus(score) * b.weight).sum()


class LooksUpTwice(nn.Module):
    """The same collection for two sets of features."""

    def __init__(self) -> None:
        super().__init__()
        self.ec = sequences()
        self.out = nn.Linear(DIM, 1)

    def forward(self, b: Batch) -> Tensor:
        past = self.ec(b.features)
        again = self.ec(b.features)
        x = pooled(past["history"]) * first_rows(again["target"]) + first_rows(again["user"])
        return (torch.tanh(self.out(x)).squeeze(1) * b.weight).sum()


class Tied(nn.Module):
    """The last state is scored against rows of the table that the history comes from."""

    def __init__(self) -> None:
        super().__init__()
        self.ec = sequences()
        self.encoder = Encoder(causal=True)

    def forward(self, b: Batch) -> Tensor:
        found = self.ec(b.features)
        x, _ = self.encoder(found["history"])
        state = x[:, -1]
        candidates = torch.cat([found["target"].values(), found["history"].values()])
        scores = state @ candidates.T
        own = (state * first_rows(found["target"])).sum(1)
        return ((scores.square().sum(1) / LENGTH - own) * b.weight).sum()


class ManyTasks(nn.Module):
    """A shared body and heads of width 1."""

    def __init__(self) -> None:
        super().__init__()
        self.ec = sequences()
        self.body = nn.Linear(3 * DIM, DIM)
        self.heads = nn.ModuleList(nn.Linear(DIM, 1) for _ in range(3))

    def forward(self, b: Batch) -> Tensor:
        found = self.ec(b.features)
        x = torch.cat([pooled(found["history"]), first_rows(found["user"]), first_rows(found["target"])], 1)
        x = torch.relu(self.body(x) + b.dense)
        losses = [F.binary_cross_entropy_with_logits(head(x), (b.dense[:, i : i + 1] > 0).float(), reduction="none")
                  for i, head in enumerate(self.heads)]  # fmt: skip
        return (torch.cat(losses, 1).sum(1) * b.weight).sum()


class Autocast(nn.Module):
    """Mixed precision around the dense part."""

    def __init__(self) -> None:
        super().__init__()
        self.ec = sequences()
        self.encoder = Encoder(causal=True)
        self.out = nn.Linear(DIM, 1)

    def forward(self, b: Batch) -> Tensor:
        found = self.ec(b.features)
        with torch.autocast(b.dense.device.type, dtype=torch.bfloat16):
            x, _ = self.encoder(found["history"])
            score = self.out(x[:, -1] * first_rows(found["target"]))
        return (F.softplus(score.float()).squeeze(1) * b.weight).sum()


MODELS: dict[str, Callable[[], nn.Module]] = {
    m.__name__: m
    for m in (TwoTowers, SASRec, BERT4Rec, GRU4Rec, DLRM, HSTU, LooksUpTwice, Tied, ManyTasks, Autocast)
}
# A typical plan: items row-wise, users on one rank.
LAYOUT = {"item": "row_wise", "user": "table_wise", "genre": "table_wise"}
