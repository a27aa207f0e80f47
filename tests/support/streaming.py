"""A ranking model and its training program with the traits of large public sequence recommenders.

Eleven tables, one of them row-wise; two KeyedJaggedTensors per batch (histories and candidates) and a third that repeats
every feature for a pipeline; histories and candidates concatenated and split as jagged tensors; several losses on rows
that depend on the data. The program trains on windows of a stream, evaluates between them, warms up the learning rates
of tables and dense part, clips gradients, and can stop in the middle of a window and go on from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import trec

DIM, HISTORY, SAMPLES = 8, 7, 3
WINDOWS, STEPS, EVALUATED = 2, 3, 2
CLIP = 0.5
HISTORIES = ("item", "artist", "album", "action")
CANDIDATES = ("c_item", "c_artist", "c_album")
CONTEXT = ("user", "country", "device", "hour", "plan", "age", "source")
# "item" and "c_item" share a table, as the others of that name; 11 tables
TABLES = {"item": 90, "artist": 40, "album": 50, "action": 5} | {name: 6 + 7 * i for i, name in enumerate(CONTEXT)}
LAYOUT = dict.fromkeys(TABLES, "table_wise") | {"item": "row_wise"}


@dataclass
class Sample:
    """What a batch of the stream is."""

    histories: Any  # KeyedJaggedTensor
    candidates: Any
    everything: Any  # the same features again, in one
    labels: Tensor  # [candidates]
    times: Tensor  # [ids of "item"], jagged as the histories: not an embedding

    def to(self, device: torch.device) -> Sample:
        parts = (self.histories, self.candidates, self.everything, self.labels, self.times)
        return Sample(*(x.to(device) for x in parts))


def batch(number: int, rank: int, samples: int = SAMPLES) -> Sample:
    from torchrec import KeyedJaggedTensor

    g = torch.Generator().manual_seed(1000 * number + rank)
    ones = torch.ones(samples, dtype=torch.int64)
    history, shown = torch.randint(0, HISTORY, (samples,), generator=g), torch.randint(1, 4, (samples,), generator=g)

    def kjt(keys: tuple[str, ...], lengths: list[Tensor]) -> Any:
        rows = [TABLES[k.removeprefix("c_")] for k in keys]
        ids = [torch.randint(0, n, (int(of.sum()),), generator=g) for n, of in zip(rows, lengths, strict=True)]
        return KeyedJaggedTensor(list(keys), torch.cat(ids), lengths=torch.cat(lengths))

    histories = kjt((*HISTORIES, *CONTEXT), [history] * len(HISTORIES) + [ones] * len(CONTEXT))
    candidates = kjt(CANDIDATES, [shown] * len(CANDIDATES))
    everything = KeyedJaggedTensor(
        [*histories.keys(), *candidates.keys()],
        torch.cat([histories.values(), candidates.values()]),
        lengths=torch.cat([histories.lengths(), candidates.lengths()]),
    )
    labels = torch.randint(0, 2, (int(shown.sum()),), generator=g).float()
    return Sample(histories, candidates, everything, labels, torch.rand(int(history.sum()), generator=g))


# ---- the model -------------------------------------------------------------------------------------------------------


def owners(lengths: Tensor, total: int) -> Tensor:
    """The sample of each element of a jagged tensor."""
    return torch.repeat_interleave(torch.arange(lengths.shape[0], device=lengths.device), lengths, output_size=total)


class Block(nn.Module):
    """HSTU's pointwise attention on padded sequences. Nothing depends on the other samples of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward, self.norm = nn.Linear(DIM, 4 * DIM), nn.Linear(DIM, DIM), nn.LayerNorm(DIM)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        u, v, q, k = F.silu(self.inward(self.norm(x))).chunk(4, -1)
        scores = F.silu(q @ k.transpose(1, 2)) * visible / visible.shape[-1]
        return x + self.outward(F.layer_norm(scores @ v, (DIM,)) * u)


class Ranker(nn.Module):
    """Called as `model(histories, candidates, ...)`; the collection looks up all features at once."""

    def __init__(self) -> None:
        super().__init__()
        from torchrec import EmbeddingCollection, EmbeddingConfig

        def config(name: str, rows: int) -> Any:
            features = [f for f in (*HISTORIES, *CONTEXT, *CANDIDATES) if f.removeprefix("c_") == name]
            return EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=features)

        tables = [config(name, rows) for name, rows in TABLES.items()]
        self._embedding_collection = EmbeddingCollection(tables=tables, device=torch.device("cpu"))
        self.action, self.context = nn.Linear(2 * DIM + 1, DIM), nn.Linear(len(CONTEXT) * DIM, DIM)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.click, self.dwell = nn.Linear(DIM, 1), nn.Linear(DIM, 1)

    def forward(self, batch: Sample) -> tuple[Tensor, Tensor]:
        """The loss, and the click logits of the candidates."""
        from torchrec import KeyedJaggedTensor

        both = KeyedJaggedTensor(
            [*batch.histories.keys(), *batch.candidates.keys()],
            torch.cat([batch.histories.values(), batch.candidates.values()]),
            lengths=torch.cat([batch.histories.lengths(), batch.candidates.lengths()]),
        )
        found = self._embedding_collection(both)
        lengths, shown = found["item"].lengths(), found["c_item"].lengths()
        seen = found["item"].values() + found["artist"].values() + found["album"].values()
        seen = self.action(torch.cat([seen, found["action"].values(), batch.times[:, None]], 1))
        offered = sum(found[name].values() for name in CANDIDATES)
        context = self.context(torch.cat([found[name].values() for name in CONTEXT], 1))
        # candidates after the history of their sample
        of_seen, of_offered = owners(lengths, seen.shape[0]), owners(shown, offered.shape[0])
        order = torch.argsort(torch.cat([of_seen, of_offered]), stable=True)
        x = torch.cat([seen, offered])[order] + context[torch.cat([of_seen, of_offered])[order]]
        is_offered = (torch.arange(order.shape[0], device=x.device) >= seen.shape[0])[order]
        x = self.encode(x, lengths + shown, is_offered)
        offered = x[order.argsort()[seen.shape[0] :]]
        clicks = self.click(offered).squeeze(1)
        loss = F.binary_cross_entropy_with_logits(clicks, batch.labels, reduction="sum")
        dwell = self.dwell(offered).squeeze(1)
        return (loss + 0.1 * ((dwell - batch.labels) ** 2).sum()) / 10.0, clicks.detach()

    def encode(self, x: Tensor, lengths: Tensor, is_offered: Tensor) -> Tensor:
        samples, longest = lengths.shape[0], HISTORY + 3
        sample = owners(lengths, x.shape[0])
        place = torch.arange(x.shape[0], device=x.device) - (lengths.cumsum(0) - lengths)[sample]
        at = sample * longest + place
        padded = x.new_zeros(samples * longest, DIM).index_add(0, at, x).view(samples, longest, DIM)
        alone = torch.zeros(samples * longest, dtype=torch.bool, device=x.device).index_fill(0, at, True)
        offered = torch.zeros_like(alone).index_put((at,), is_offered).view(samples, 1, longest)
        causal = torch.ones(longest, longest, dtype=torch.bool, device=x.device).tril()
        itself = torch.eye(longest, dtype=torch.bool, device=x.device)
        visible = (causal & ~offered | itself) & alone.view(samples, 1, longest)  # a candidate sees no other one
        for block in self.blocks:
            padded = block(padded, visible)
        return padded.view(samples * longest, DIM)[at]


# ---- the program -----------------------------------------------------------------------------------------------------


class Program:
    """`how`: "eager"; "whole" or "collection", what freescale compiles. `ahead`: with a LookaheadLoader, and its
    arguments."""

    def __init__(
        self, how: str, ahead: dict[str, Any] | None, options: dict[str, Any], device: str = "cpu", quantized: Any = None
    ) -> None:
        from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
        from torchrec.optim.optimizers import in_backward_optimizer_filter
        from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

        torch.manual_seed(0)
        self.how, self.ahead, self.device = how, ahead, torch.device(device)
        self.model = trec.shard(Ranker(), LAYOUT, "rowwise_adagrad", True, device, quantized)
        self.dense = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        self.adam = KeyedOptimizerWrapper(self.dense, lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3))
        both = CombinedOptimizer([self.model.fused_optimizer, self.adam])
        warm = [WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=5, value=0.2)]
        self.optimizer = WarmupOptimizer(both, warm, lr=0.02)
        if how == "whole":
            self.model.compile(backend="freescale", options=options)
        elif how == "collection":
            self.model.module._embedding_collection.compile(backend="freescale", options=options)

    def __call__(self, data: Sample) -> tuple[Tensor, Tensor]:
        # as programs do whose modules have hooks; who compiles the model calls it
        return self.model(data) if self.how == "whole" else self.model.forward(data)

    def stream(self, numbers: Iterator[int] | list[int]) -> Iterator[Sample]:
        from freescale import LookaheadLoader

        batches = [batch(n, dist.get_rank()).to(self.device) for n in numbers]
        return iter(batches if self.ahead is None else LookaheadLoader(batches, self.model, **self.ahead))

    def train(self, numbers: list[int]) -> list[float]:
        self.model.train()
        losses = []
        for data in self.stream(numbers):
            self.optimizer.zero_grad()
            loss, _ = self(data)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.dense.values(), CLIP)
            self.optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    @torch.no_grad()
    def evaluate(self, window: int) -> list[float]:
        self.model.eval()
        numbers = [100 + EVALUATED * window + i for i in range(EVALUATED)]
        return [float(self(data)[1].sum()) for data in self.stream(numbers)]

    def save(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, saved: dict[str, Any]) -> None:
        self.adam.init_state()  # these two make the state that is loaded in place
        self.optimizer.step()
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.optimizer.post_load_state_dict()


def run(stop: tuple[int, int] | None = None, **arguments: Any) -> tuple[list[float], dict[str, Tensor]]:
    """All figures, and the state at the end. `stop`: window and step after which another program goes on."""
    program, figures = Program(**arguments), []
    for window in range(WINDOWS):
        numbers = [STEPS * window + i for i in range(STEPS)]
        cut = stop[1] if stop is not None and stop[0] == window else len(numbers)
        figures += program.train(numbers[:cut])
        if cut < len(numbers):
            saved, program = program.save(), Program(**arguments)
            program.load(saved)
            figures += program.train(numbers[cut:])
        figures += program.evaluate(window)
    return figures, trec.snapshot(program.model)
