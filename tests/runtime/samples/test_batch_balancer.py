"""A balanced loop has the numbers of the unbalanced one; every sample is trained once and its outputs come home."""

from __future__ import annotations

from collections import Counter
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import trec
from ragged_batches import DIM, ROWS, batch_of
from ranks import HAS_TORCHREC, run_ranks
from shared_ranks import Outcomes, run_together

TENSORS = ("item", "item_lengths", "user", "dense", "label")


class Model(nn.Module):
    """A loss per sample, in which all ids of the sample meet."""

    def __init__(self) -> None:
        super().__init__()
        import freescale

        torch.manual_seed(0)
        kwargs = {"lr": 0.1, "dtype": torch.float64}
        self.item = freescale.ShardedEmbedding(ROWS, DIM, name="item", **kwargs)
        self.user = freescale.ShardedEmbedding(9, DIM, name="user", sharding="table_wise", **kwargs)
        self.mix = nn.Linear(DIM, DIM, dtype=torch.float64)
        self.out = nn.Linear(3, DIM, dtype=torch.float64)

    def forward(self, batch: dict[str, torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
        items, lengths = self.item(batch["item"]), batch["item_lengths"]
        sample = torch.repeat_interleave(torch.arange(lengths.shape[0]), lengths, output_size=items.shape[0])
        users = self.user(batch["user"])
        pooled = users.new_zeros(users.shape).index_add(0, sample, torch.tanh(self.mix(items)))
        scores = (torch.tanh(pooled) * (users + self.out(batch["dense"]))).sum(1)
        return (((scores - batch["label"]) ** 2) * weight).sum()


# Samples of each rank and step: usual ones, one rank without any, nobody with any, fewer than ranks, uneven.
COUNTS = ((6, 6, 6, 6), (8, 8, 8, 8), (0, 6, 0, 3), (0, 0, 0, 0), (1, 0, 0, 0), (2, 9, 1, 5), (7, 7, 7, 7))
# One sample is a graph of its own, and none, on every rank and with a plan and without; so a quick test has more.
SEVERAL = tuple(c for c in COUNTS if min(c[:2]) > 1)


class Loop:
    """One compiled model; each run begins with the same weights."""

    def __init__(self) -> None:
        torch.set_default_dtype(torch.float64)
        self.model = Model()
        self.beginning = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.run = torch.compile(self.model, backend="freescale", fullgraph=True, options={"codegen": "eager", "strict": True})

    def train(self, loader, weight_of) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
        """What all ranks together see, step by step: loss, gradients; at the end tables. And the batches."""
        self.model.load_state_dict(self.beginning)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        seen, batches = [], []
        for batch in loader:
            weight = weight_of(len(batch["label"]))
            batches.append({**batch, "weight": weight})
            optimizer.zero_grad(set_to_none=False)
            loss = self.run({k: batch[k] for k in TENSORS}, weight)
            loss.backward()
            values = [loss.detach().clone(), *(p.grad for p in self.model.parameters())]
            for v in values:
                dist.all_reduce(v)
                v /= dist.get_world_size()
            seen += [v.clone() for v in values]
            optimizer.step()
        return seen + [v.clone() for v in self.model.state_dict().values()], batches


@cache
def shared_loop() -> Loop:
    """Of this rank: compiling takes longer than training."""
    return Loop()


def even(samples: int) -> torch.Tensor:
    return torch.full((samples,), 1 / 8, dtype=torch.float64)


def difference(a, b) -> float:
    assert len(a) == len(b) > 10
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True) if x.numel())


def _exact(method: str, of_step=COUNTS):
    """Balanced and unbalanced; with look-ahead and, on the same balanced batches, without; who got which sample."""
    import freescale

    rank, world, loop = dist.get_rank(), dist.get_world_size(), shared_loop()
    counts = [(6,) * world] * 6 if method == "variable" else [c[:world] for c in of_step]
    data = [batch_of(step, rank, c[rank]) for step, c in enumerate(counts)]

    def mean(samples: int) -> torch.Tensor:
        return torch.full((samples,), 1 / max(samples, 1), dtype=torch.float64)

    plain = mean if method == "variable" else even
    expected, _ = loop.train(data, plain)
    options = freescale.BalanceOptions(method=method, cost=freescale.LengthCost(1.0, 0.1))
    loader = freescale.LookaheadLoader(data, loop.run, balance=options)
    origins, home = [], []

    def weight_of(samples):
        origins.append(loader.origin.tolist())
        home.append(loader.restore({"rank": torch.full((samples, 2), float(rank)), "position": [[i] for i in range(samples)]}))
        return mean(samples) * loader.loss_weights if method == "variable" else plain(samples)

    seen, batches = loop.train(loader, weight_of)
    weights = iter([b["weight"] for b in batches])
    again, _ = loop.train([{k: b[k] for k in TENSORS} for b in batches], lambda samples: next(weights))
    return {
        "difference": difference(seen, expected),
        "same bits": all(torch.equal(a, b) for a, b in zip(seen, again, strict=True)),
        "words": [b["words"] for b in batches],
        "counts": [c[rank] for c in counts],
        "origins": origins,
        "home": [(h["rank"][:, 0].tolist(), [p for (p,) in h["position"]]) for h in home],
        "stats": loader.balance_stats(),
        "unbalanced": loop.train(freescale.LookaheadLoader(data, loop.run), plain)[0][-1].equal(expected[-1]),
    }


@pytest.mark.parametrize("method", ("default", "variable"))
def test_balanced_training_is_exact(method, checked):
    _expect_exact(method, checked.of(method))


@pytest.mark.thorough
def test_balanced_training_with_one_sample_and_none_is_exact():
    _expect_exact("default", run_ranks(_exact, 2, "default"))


@pytest.mark.slow
@pytest.mark.parametrize("method, world", (("default", 4), ("variable", 4), ("zigzag", 2), ("zigzag", 4)))
def test_balanced_training_is_exact_on_more_ranks(method, world):
    _expect_exact(method, run_ranks(_exact, world, method))


def _expect_exact(method: str, ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["difference"] < 1e-12 and found["same bits"] and found["unbalanced"], found["difference"]
    for step in range(len(ranks[0]["words"])):
        words = [r["words"][step] for r in ranks]
        brought = [f"{step} {rank} {i}" for rank, r in enumerate(ranks) for i in range(r["counts"][step])]
        assert sorted(w for mine in words for w in mine) == sorted(brought)  # every sample once
        for rank, r in enumerate(ranks):
            if method != "variable":
                assert len(words[rank]) == r["counts"][step]
            assert words[rank] == [f"{step} {a} {b}" for a, b in r["origins"][step]]
            assert words[rank] == sorted(words[rank], key=lambda w: [int(n) for n in w.split()])
            # what was sent home: by whom and at which place this rank's samples were trained
            for i, (trained_by, place) in enumerate(zip(*r["home"][step], strict=True)):
                assert ranks[int(trained_by)]["words"][step][place] == f"{step} {rank} {i}"
            assert len(r["home"][step][0]) == r["counts"][step]
    stats = ranks[0]["stats"]
    assert [s["step"] for s in stats] == list(range(len(ranks[0]["words"])))
    assert sum(s["moved_bytes"] for s in stats) > 0 and sum(s["moved_samples"] for s in stats) > 0
    assert all(s["predicted_after"] <= s["predicted_before"] + 1e-12 for s in stats)
    assert stats[0]["predicted_after"] < 0.8 * stats[0]["predicted_before"]
    for r in ranks[1:]:
        assert [{**s, "seconds": 0} for s in r["stats"]] == [{**s, "seconds": 0} for s in stats]


def _fitted(steps: int = 30, asked_until_known: int = 1):
    """The cost is fitted to what the ranks measured; the meter here is made to say 2 ms + 1 us * L + 10 ns * L**2. Rank
    1 knows the times of a step when asked for them so many times, as with a GPU that is behind its host; what the meter
    says before is wrong."""
    import freescale
    from freescale.runtime import meter
    from freescale.runtime.samples import batch_balancer

    rank, loop = dist.get_rank(), shared_loop()
    data = [batch_of(step, rank, 6) for step in range(steps)]
    lengths: dict[int, torch.Tensor] = {}
    honest, asked = meter.summary, Counter[int]()

    def is_known(step):
        asked[step.name] += 1
        return rank != 1 or asked[step.name] >= asked_until_known

    def summary(step):
        name = step.name
        length = lengths[name].double() + 1  # ids of the item and of the user
        compute = 2e-3 + float((1e-6 * length + 1e-8 * length**2).sum())
        if rank == 1 and asked[name] < asked_until_known:
            compute = 2e-3 * (1 + name % 3)
        return {**honest(step), "compute": compute, "seconds": 3e-3}

    loader = freescale.LookaheadLoader(data, loop.run, balance=True)
    as_balancer_sees_it = SimpleNamespace(summary=summary, is_known=is_known)
    with mock.patch.object(batch_balancer, "meter", as_balancer_sees_it):
        for step, batch in enumerate(loader):
            lengths[step] = batch["item_lengths"]
            loop.run({k: batch[k] for k in TENSORS}, even(6)).backward()
    stats = loader.balance_stats()
    first = loader.cost.stats()
    fitted_to = [ranks[rank].tolist() for ranks, _ in loader.cost.rows]
    mine = [(n.double() + 1) for n in lengths.values()]
    sums = [[float(n.sum()), float((n**2).sum())] for n in mine]
    list(loader)  # a second loop goes on with the fit; it does not train, so it measures nothing
    return stats, first, loader.cost.stats(), (fitted_to, sums)


def test_cost_is_fitted_to_measured_times(checked):
    ranks = checked.of("fitted")
    for stats, first, second, (fitted_to, sums) in ranks:
        assert (first, second) == ranks[0][1:3]
        assert fitted_to == sums[1:26]  # sum(L), sum(L**2) of this rank's samples in each step
        assert first["steps"] == 25 and second["steps"] == 25  # steps 1 to 25 of 30: the first one compiles
        assert abs(first["constant"] - 2e-3) < 3e-4 and 0 < first["a"] < 4e-6
        assert stats[0]["fit"]["steps"] == 0 and stats[-1]["fit"]["steps"] == 25
        assert [s["measured"] is not None for s in stats] == [True] * 26 + [False] * 4
        assert all(0 <= s["measured"] < 1 for s in stats[:26])


def test_times_that_a_gpu_tells_late_are_waited_for(checked):
    """None is used before it is known on every rank, none is lost."""
    ranks = checked.of("fitted late")
    for stats, first, second, _ in ranks:
        assert (first, second) == ranks[0][1:3]
        assert first["steps"] == 6 and second["steps"] == 6
        assert [s["measured"] is not None for s in stats] == [True] * 7 + [False] * 7
        assert abs(first["constant"] - 2e-3) < 3e-4 and 0 < first["a"] < 4e-6


def _bad_input():
    import freescale

    rank, loop, found = dist.get_rank(), shared_loop(), {}
    good = [batch_of(step, rank, 4) for step in range(4)]

    def attempt(name, change=None, balance=True, on=1, after=1, wrapper=None):
        """A loop whose batch number `after` is bad on rank `on` (None: on all); then one that works."""
        data = [dict(b) for b in good]
        if change is not None and on in (None, rank):
            change(data[after])
        trained = 0
        try:
            for batch in freescale.LookaheadLoader(data, loop.run, balance=balance):
                loop.run({k: batch[k] for k in TENSORS}, even(len(batch["label"]))).backward()
                trained += 1
        except Exception as error:  # noqa: BLE001
            found[name] = f"{type(error).__name__}: {error}", trained
        assert sum(1 for _ in freescale.LookaheadLoader(good, loop.run, balance=True)) == 4, name

    def costing(value, on=0):
        def my_cost(*lengths):
            return np.full(len(lengths[0]), value if rank == on else 1.0)

        return freescale.BalanceOptions(cost=my_cost)

    attempt("sizes", lambda b: b.update(label=b["label"][:3]))
    attempt("lengths", lambda b: b.update(item_lengths=b["item_lengths"] + 1))
    attempt("no lengths", lambda b: b.pop("item_lengths"), on=None, after=0)
    attempt("object", lambda b: b.update(words={1}), on=None, after=0)
    attempt("schema", lambda b: b.update(dense=torch.zeros(4, 5)))
    attempt("id", lambda b: b.update(user=b["user"] + 100))
    for name, value in (("nan", float("nan")), ("inf", float("inf")), ("negative", -1.0)):
        attempt(name, balance=costing(value))
    attempt("short", balance=freescale.BalanceOptions(cost=lambda *lengths: np.ones(3)))
    attempt("counts", balance=freescale.BalanceOptions(counts=[3, 3]))
    attempt("user lengths", balance=freescale.BalanceOptions(lengths=lambda batch: {"seq": np.ones(3)}))
    cap = freescale.BalanceOptions(memory=lambda *lengths: np.full(len(lengths[0]), 10.0), memory_cap=15)
    attempt("memory", balance=cap)
    attempt("one alone", balance=rank == 0)
    loader = freescale.LookaheadLoader(good, loop.run, balance=True)
    for _ in loader:
        try:
            loader.restore(torch.zeros(4 - rank))
        except Exception as error:  # noqa: BLE001
            found["restore"] = f"{type(error).__name__}: {error}", 0
        assert loader.restore(torch.zeros(4)).shape == (4,)
    try:
        _ = freescale.LookaheadLoader(good, loop.run).origin
    except RuntimeError as error:
        found["origin"] = f"RuntimeError: {error}", 0
    return found


BAD = {  # what the rank says that has the bad input, what the other one says, batches before it
    "sizes": ("BalanceError: freescale: the features of a batch must have equally many samples; feature 'item' has 4, but feature 'label' has 3", "rank 1 failed while it loaded batch 1: BalanceError: freescale: the features", 1),
    "lengths": ("BalanceError: freescale: the lengths of 'item' add up to", "rank 1 failed while it loaded batch 1", 1),
    "no lengths": ("but feature 'item' has", None, 0),
    "object": ("feature 'words' is a set", None, 0),
    "schema": ("rank 0 has 'dense(dense): float64[3]', rank 1 has 'dense(dense): float64[5]'", None, 1),
    "id": ("is outside table 'user'", None, 1),
    "nan": ("the cost function my_cost must return finite, non-negative numbers; sample 0 (lengths: 'item'", "rank 0 failed while it loaded batch 0", 0),
    "inf": ("has inf, 4 of 4 are wrong", "has inf, 4 of 4 are wrong", 0),
    "negative": ("has -1.0, 4 of 4 are wrong", "has -1.0, 4 of 4 are wrong", 0),
    "short": ("must return one number for each of the 4 samples", None, 0),
    "counts": ("counts [3, 3] add up to 6, but there are 8 samples", None, 0),
    "user lengths": ("lengths of feature 'seq' must have one number for each of the 4 samples; found 3", None, 0),
    "memory": ("15", None, 0),
    "one alone": ("some ranks balance and others do not", None, 0),
    "restore": ("restore expects one output for each of the 4 samples of the last batch; found 3", "restore failed on rank 1", 0),
    "origin": ("the loader does not balance", None, 0),
}  # fmt: skip


def _shared():
    """Class weights as many as samples: found, and named."""
    import freescale

    rank, loop = dist.get_rank(), shared_loop()
    weights, own = torch.arange(6.0), torch.arange(6.0) + 100 * rank
    data = [{**batch_of(step, rank, 6), "weights": weights.clone(), "own": own} for step in range(6)]
    seen = []
    options = freescale.BalanceOptions(cost=freescale.LengthCost(1.0, 0.1), shared=["own"])
    loader = freescale.LookaheadLoader(data, loop.run, balance=options)
    for batch in loader:
        labels = dict(zip(batch["words"], batch["label"].tolist(), strict=True))
        seen.append((torch.equal(batch["weights"], weights), torch.equal(batch["own"], own), labels))
    moved = [s["moved_samples"] for s in loader.balance_stats()]
    options = freescale.BalanceOptions(cost=options.cost, shared=["own", "weights"])
    loader = freescale.LookaheadLoader(data, loop.run, balance=options)
    named = [torch.equal(b["weights"], weights) and torch.equal(b["own"], own) for b in loader]
    brought = [dict(zip(b["words"], b["label"].tolist(), strict=True)) for b in data]
    return seen, moved, named, [s["moved_samples"] for s in loader.balance_stats()], brought


def test_class_weights_are_not_cut(checked):
    ranks = checked.of("shared")
    for seen, moved, named, moved_named, _ in ranks:
        assert [(a, b) for a, b, _ in seen] == [(True, True)] * 6 and named == [True] * 6
        assert moved[:2] == [0, 0] and all(moved[2:]) and all(moved_named)  # found out in the third batch
    for step in range(6):
        brought = {**ranks[0][4][step], **ranks[1][4][step]}
        assert {**ranks[0][0][step][2], **ranks[1][0][step][2]} == brought  # labels go with their samples


@pytest.fixture(scope="module")
def checked() -> Outcomes:
    exact = {method: partial(_exact, method, SEVERAL) for method in ("default", "variable")}
    fitted = {"fitted": _fitted, "fitted late": partial(_fitted, 14, asked_until_known=4)}
    return run_together({**exact, **fitted, "shared": _shared, "bad input": _bad_input}, 2)


def test_bad_input_is_an_error_on_every_rank_and_the_loader_stays_usable(checked):
    ranks = checked.of("bad input")
    for name, (words, elsewhere, trained) in BAD.items():
        mine = [r.get(name, ("no error", 0)) for r in ranks]
        assert any(words in m[0] for m in mine), (name, mine)
        assert all(words in m[0] or (elsewhere or words) in m[0] for m in mine), (name, mine)
        assert [m[1] for m in mine] == [trained] * 2, (name, mine)
    assert ranks[0].keys() == ranks[1].keys() == BAD.keys()


# ---- TorchRec ------------------------------------------------------------------------------------------------------


def _torchrec():
    import freescale

    batches, handed, runs = [trec.batch(step, dist.get_rank()) for step in range(10)], [], {}
    model = trec.build("row_wise", "sgd")
    start = trec.snapshot(model)
    run = torch.compile(model, backend="freescale", fullgraph=True, options={"codegen": "eager"})
    options = freescale.BalanceOptions(cost=freescale.LengthCost())
    loader = freescale.LookaheadLoader(batches, run, balance=options)
    for name, data, keep in (("balanced", loader, handed), ("again", handed, []), ("unbalanced", batches, [])):
        put_back(model, start)
        runs[name] = losses_of(model, run, data, keep), trec.snapshot(model)
    (losses, rows), (losses_again, rows_again), (losses_unbalanced, rows_unbalanced) = runs.values()
    return {
        "same bits": losses == losses_again and all(torch.equal(rows[n], rows_again[n]) for n in rows),
        "difference": max(float((rows_unbalanced[n] - v).abs().max()) for n, v in rows.items() if v.numel()),
        "trained": max(float((start[n] - v).abs().max()) for n, v in rows.items() if v.numel()),
        "losses": (losses, losses_unbalanced),
        "moved": sum(s["moved_samples"] for s in loader.balance_stats()),
    }


def put_back(model, start) -> None:
    for name, value in model.state_dict().items():
        for i, shard in enumerate(value.local_shards() if hasattr(value, "local_shards") else ()):
            shard.tensor.detach().copy_(start[f"{name}/{i}"])


def losses_of(model, run, loader, handed) -> list[float]:
    def noted():
        for batch in loader:
            handed.append(batch)
            yield batch

    return trec.train_on(model, run, noted(), lr=0.0)  # there is no DDP here: the dense part stays as it is


@pytest.mark.thorough
@pytest.mark.skipif(not HAS_TORCHREC, reason="torchrec or fbgemm_gpu is not installed")
def test_torchrec_batches():
    """Table rows agree with unbalanced training; with look-ahead the bits of training on the same balanced batches."""
    ranks = run_ranks(_torchrec, 2)
    for found in ranks:
        assert found["same bits"] and found["difference"] < 1e-5 < 1e-2 < found["trained"] and found["moved"] > 0, found
    balanced, unbalanced = (np.sum([r["losses"][i] for r in ranks], axis=0) for i in (0, 1))
    assert np.allclose(balanced, unbalanced, rtol=1e-4, atol=1e-4)


def _loss_differences() -> list[Any]:
    import freescale

    torch.set_default_dtype(torch.float64)
    model, rank = Model(), dist.get_rank()
    batch = batch_of(0, rank, 6)
    weight = torch.full((6,), 1 / 6)

    def divided_by_the_longest(b: dict[str, Any]) -> tuple[torch.Tensor, str]:
        return model(b, weight) / b["item_lengths"].max(), "an output"

    found: list[Any] = [freescale.loss_difference(lambda b: model(b, weight), batch)]
    found.append(freescale.loss_difference(divided_by_the_longest, batch))
    with pytest.raises(ValueError, match=r"equally many samples on all ranks; found \[6, 6, 5\]"):
        freescale.loss_difference(lambda b: model(b, weight), batch_of(0, rank, 6 - (rank == 2)))
    return found


def test_samples_that_depend_on_their_batch_are_found():
    for independent, dependent in run_ranks(_loss_differences, 3):
        assert independent < 1e-12 and dependent > 1e-3, (independent, dependent)
