"""A balanced loop has the numbers of the unbalanced one; every sample is trained once and its outputs come home."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import trec
from freescale.runtime import batches as structures
from freescale.runtime import columns, moving
from freescale.runtime.problem import BalanceError
from ranks import HAS_TORCHREC, run_ranks

ROWS, DIM = 50, 4
TENSORS = ("item", "item_lengths", "user", "dense", "label")


# ---- cut and build, without other ranks ----------------------------------------------------------------------------


class KeyedJaggedTensor:
    """What freescale uses of TorchRec's, for where that is not installed."""

    def __init__(self, keys, values, lengths, weights=None):
        self._keys, self._values, self._lengths, self._weights = keys, values, lengths, weights

    keys, values, lengths, weights_or_none = (lambda self, n=n: getattr(self, n) for n in ("_keys", "_values", "_lengths", "_weights"))
    variable = False

    def variable_stride_per_key(self):
        return self.variable

    def length_per_key(self):
        return self._lengths.view(len(self._keys), -1).sum(1).tolist()

    def device(self):
        return self._values.device

    def pin_memory(self):
        return self

    def to(self, device, non_blocking=False):
        tensors = [None if t is None else t.to(device) for t in (self._values, self._lengths, self._weights)]
        return KeyedJaggedTensor(self._keys, *tensors)


Pair = namedtuple("Pair", "left right")


@dataclass
class Sample:
    features: Any
    labels: torch.Tensor
    note: str = "kept"
    more: dict = field(default_factory=dict)


def whole_batch(samples: int = 4, first: int = 0) -> Sample:
    """Every kind of part that a batch may have; sample i can be told by its values."""
    n = torch.arange(first, first + samples)
    kjt = KeyedJaggedTensor(
        ["a", "b"],
        torch.cat([n.repeat_interleave(n), 100 + n]),
        torch.cat([n, torch.ones_like(n)]),
        torch.cat([n.repeat_interleave(n), n]).to(torch.float64),
    )
    more = {
        "ids": n.repeat_interleave(2 * n), "ids_lengths": (2 * n).int(), "ids_offsets": torch.cat([torch.tensor([0]), (2 * n).cumsum(0)]),
        "half": n.to(torch.bfloat16)[:, None].repeat(1, 3), "flag": n % 2 == 0, "words": [f"w{i}" for i in n.tolist()],
        "objects": tuple({"i": i, "long": "x" * i} for i in n.tolist()), "array": n.numpy() * 0.5,
        "pair": Pair(n + 7, None), "step": 3, "scale": torch.tensor(2.0), "nothing": None, "list": [n * 2, n * 3],
        "padded": torch.zeros(samples, 5), "padded_lengths": n, "wide": torch.zeros(samples, 0),
    }  # fmt: skip
    return Sample(kjt, n.float(), more=more)


def described(batch: Sample) -> list[Any]:
    """The batch sample by sample, in plain Python; and what belongs to it as a whole."""
    m, kjt = batch.more, batch.features
    count = len(batch.labels)
    bounds = np.concatenate(([0], np.cumsum(kjt.lengths().numpy())))
    ids = np.concatenate(([0], np.cumsum(m["ids_lengths"].numpy())))
    assert m["ids_offsets"].tolist() == ids.tolist() and len(kjt.lengths()) == 2 * count
    rows = []
    for i in range(count):
        spans = [slice(bounds[i + k * count], bounds[i + k * count + 1]) for k in range(2)]
        jagged = [(kjt.values()[s].tolist(), kjt.weights_or_none()[s].tolist()) for s in spans]
        dense = [m[k][i].tolist() for k in ("half", "flag", "array", "padded", "padded_lengths", "wide")]
        rows.append([jagged, m["ids"][ids[i] : ids[i + 1]].tolist(), dense, m["words"][i], m["objects"][i],
                     m["pair"].left[i].item(), [t[i].item() for t in m["list"]], batch.labels[i].item()])  # fmt: skip
    kinds = [type(m[k]) for k in ("words", "objects", "array", "pair", "list")]
    dtypes = [m[k].dtype for k in ("ids", "ids_lengths", "ids_offsets", "half", "flag", "array")]
    return [rows, kinds, dtypes, batch.note, m["step"], m["scale"].item(), m["nothing"], m["pair"].right, kjt.keys()]


@pytest.mark.parametrize("chosen", ([0, 1, 2, 3], [2, 0], [3, 3, 1], []))
def test_samples_are_selected_in_every_part_of_a_batch(chosen):
    batch = whole_batch()
    cut = moving.cut(batch)
    assert cut.samples == 4
    before, after = described(batch), described(cut.build(columns.select(cut.columns, np.array(chosen, np.int64))))
    assert after[1:] == before[1:] and after[0] == [before[0][i] for i in chosen]


def test_bytes_of_a_sample():
    batch = {"x": torch.zeros(3, 2), "id": torch.arange(3), "id_lengths": torch.tensor([2, 0, 1])}
    cut = moving.cut(batch)
    assert columns.sizes(cut.columns, 3).tolist() == [8 + 8 * n + 8 for n in (2, 0, 1)]


@pytest.mark.parametrize(
    "change, words",
    (
        ({"labels": torch.zeros(5)}, "'features' has 4, but feature 'labels' has 5"),
        ({"more": {"words": ["a"]}}, "feature 'more.words' has 1"),
        ({"more": {"what": {1, 2}}}, "feature 'more.what' is a set, which cannot be cut"),
        ({"more": {"x": torch.arange(5), "x_lengths": torch.tensor([1, 1, 1, 1])}}, "lengths of 'x' add up to 4, but there are 5"),
        ({"more": {"x": torch.arange(2), "x_lengths": torch.tensor([3, -1, 0, 0])}}, "lengths of 'x' must not be negative"),
        ({"more": {"x": torch.arange(2), "x_offsets": torch.tensor([1, 1, 1, 2, 2])}}, "'x_offsets' must begin with 0"),
        ({"more": {"x": torch.arange(2), "x_offsets": torch.tensor([0, 1, 1, 2, 2]), "x_lengths": torch.tensor([1, 1, 0, 0])}}, "feature 'x' disagree"),
        ({"more": {"x": np.array(["a"] * 4)}}, "feature 'more.x' is an array of <U1"),
        ({"more": {"x": torch.zeros(4, 4).to_sparse()}}, "'more.x' is a tensor of layout"),
        ({"features": KeyedJaggedTensor(["a", "b"], torch.arange(3), torch.ones(3, dtype=torch.int64))}, "features 'a', 'b' of a KeyedJaggedTensor must"),
        ({"features": None, "labels": torch.tensor(1.0)}, "nothing that could be cut"),
    ),
)  # fmt: skip
def test_what_is_wrong_with_a_batch_is_named(change, words):
    parts = {"features": whole_batch().features, "labels": torch.zeros(4), **change}
    with pytest.raises(BalanceError) as raised:
        moving.cut(Sample(**parts))
    assert words in str(raised.value) and str(raised.value).startswith("freescale: ")


def test_batch_sizes_that_differ_by_feature_cannot_be_cut():
    kjt = whole_batch().features
    kjt.variable = True
    with pytest.raises(BalanceError, match="KeyedJaggedTensor of 'a', 'b' has batch sizes that differ"):
        moving.cut(kjt)


def _exchange():
    """Random samples to random ranks; ranks without any, everything to one rank, nothing at all."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for seed in range(25):
        random = np.random.default_rng(seed)
        counts = random.integers(0, 6, world) * (random.random(world) > 0.2)
        to = [random.integers(0, world if seed % 5 else 1, n) for n in counts]
        batches = [whole_batch(int(n), 6 * r) for r, n in enumerate(counts)]
        cut = moving.cut(batches[rank])
        arriving = np.array([(t == rank).sum() for t in to])
        got = described(cut.build(columns.exchange(cut.columns, to[rank], arriving, dist.group.WORLD)))
        everyone = [described(b)[0] for b in batches]
        expected = [row for rows, t in zip(everyone, to, strict=True) for row, r in zip(rows, t, strict=True) if r == rank]
        assert got[0] == expected and got[1:] == described(batches[rank])[1:], seed
    return True


@pytest.mark.parametrize("world", (1, 3))
def test_every_part_of_a_batch_arrives(world):
    assert all(run_ranks(_exchange, world))


# ---- batches on a device -------------------------------------------------------------------------------------------

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DENSE = (  # type, shape of a row
    (torch.float32, ()), (torch.float64, (3,)), (torch.bfloat16, (2, 2)), (torch.bool, ()), (torch.int8, (3,)), (torch.int16, ()),
    (torch.complex64, ()), (torch.complex128, (2,)), (torch.complex128, ()), (torch.int64, (0,)), (torch.float16, (5,)),
)  # fmt: skip
JAGGED = (torch.int64, torch.int32, torch.uint8, torch.float64, torch.bfloat16)
part = st.one_of(
    st.tuples(st.just("dense"), st.sampled_from(DENSE)),
    st.tuples(st.just("jagged"), st.sampled_from(JAGGED), st.sampled_from(("lengths", "offsets"))),
    st.tuples(st.just("kjt"), st.integers(1, 3), st.sampled_from(JAGGED), st.sampled_from((None, torch.float32, torch.float64))),
    st.tuples(st.just("words")),
)  # fmt: skip


def drawn(dtype: torch.dtype, shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    return (torch.rand(shape, generator=g) * 100).to(dtype) * (1j if dtype.is_complex else 1)


def drawn_batch(parts, samples: int, seed: int) -> dict[str, Any]:
    """A batch of the given parts; same structure for any number of samples."""
    g, batch = torch.Generator().manual_seed(seed), {}
    for i, (kind, *of) in enumerate(parts):
        lengths = torch.randint(0, 5, (of[0] if kind == "kjt" else 1, samples), generator=g)
        n, offsets = int(lengths.sum()), torch.cat([torch.zeros(1, dtype=torch.int64), lengths[0].cumsum(0)])
        if kind == "dense":
            batch[f"x{i}"] = drawn(of[0][0], (samples, *of[0][1]), g)
        elif kind == "jagged":
            batch[f"x{i}"] = drawn(of[0], (n,), g)
            batch[f"x{i}_{of[1]}"] = lengths[0].int() if of[1] == "lengths" else offsets
        elif kind == "kjt":
            weights = None if of[2] is None else drawn(of[2], (n,), g)
            keys = [f"x{i}.{k}" for k in range(of[0])]
            batch[f"x{i}"] = KeyedJaggedTensor(keys, drawn(of[1], (n,), g), lengths.view(-1), weights)
        else:
            batch[f"x{i}"] = [f"{seed} {s}" for s in range(samples)]
    return {**batch, "turned": drawn(torch.float32, (2, samples), g).t(), "label": torch.arange(samples)}


def bits(batch: Any) -> list[Any]:
    """Every part of a batch, with nothing lost; the same where both batches have the same bits at the same places."""
    if structures.is_kjt(batch):
        return [batch.keys(), *map(bits, (batch.values(), batch.lengths(), batch.weights_or_none()))]
    if isinstance(batch, torch.Tensor):
        return [batch.dtype, tuple(batch.shape), batch.numel() and batch.cpu().flatten().view(torch.uint8).tolist()]
    parts = list(structures.children(batch))
    return [(name, bits(child)) for name, child in parts] if parts else [batch]


def devices(batch: Any) -> list[str]:
    return [t.device.type for x in structures.leaves(batch) for t in ((x.values(), x.lengths()) if structures.is_kjt(x) else (x,))]


def to_device(batch: Any, device: str, host=()) -> Any:
    """The batch with everything on the device that is not named in `host`."""
    if structures.is_kjt(batch) or isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return {k: v if k in host else to_device(v, device) for k, v in batch.items()}
    return batch


class Sent:
    """The all-to-alls of a block: (sent, received) of each rank."""

    def __enter__(self):
        self.honest, self.found = dist.all_to_all_single, []

        def noted(out, x, recv, send, **more):
            self.found.append((recv, send))
            return self.honest(out, x, recv, send, **more)

        dist.all_to_all_single = noted
        return self.found

    def __exit__(self, *error):
        dist.all_to_all_single = self.honest


def _same_bits(device: str, examples: int) -> int:
    """Packed on the device (the predicate says so of CPU tensors too) against packed on the host.

    The same examples on every rank: hypothesis does not shrink here, since ranks would shrink differently.
    """
    rank, world, seen = dist.get_rank(), dist.get_world_size(), []
    honest = columns._on_device

    @settings(max_examples=examples, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(
        st.lists(part, max_size=6), st.lists(st.integers(0, 6), min_size=world, max_size=world),
        st.integers(0, 2**30), st.sampled_from(("anywhere", "stays", "rank 0")), st.integers(0, 7),
    )  # fmt: skip
    def check(parts, samples, seed, where, chosen):
        random = np.random.default_rng(seed)
        to = [random.integers(0, world, n) if where == "anywhere" else np.full(n, r if where == "stays" else 0) for r, n in enumerate(samples)]
        batch = drawn_batch(parts, samples[rank], seed + rank)
        arriving = np.array([(t == rank).sum() for t in to])
        # On rank 0 some are on the host all the same.
        theirs = to_device(batch, device, [f"x{i}" for i in range(len(parts)) if rank == 0 and chosen >> i & 1])
        results, messages = [], []

        def chosen_sizes(rows):
            return rank != 0 or rows.element_size() & chosen == 0

        for given_batch, on_device in ((batch, honest), (theirs, honest if device != "cpu" else chosen_sizes)):
            columns._on_device = on_device
            try:
                cut = moving.cut(given_batch)
                with Sent() as sent:
                    came = columns.exchange(cut.columns, to[rank], arriving, dist.group.WORLD)
            finally:
                columns._on_device = honest
            results.append(cut.build(came))
            turned = cut.build(columns.select(came, np.arange(arriving.sum())[::-1].copy()))
            assert devices(results[-1]) == devices(turned) == devices(given_batch)
            results.append(turned)
            messages.append(sent)
        assert bits(results[0]) == bits(results[2]) and bits(results[1]) == bits(results[3])
        assert messages[0] == messages[1]  # as many bytes for each rank: nothing for itself
        seen.append(sum(to[rank] != rank))

    check()
    return sum(n > 0 for n in seen)


@pytest.mark.parametrize("world", (2, 3))
def test_samples_packed_on_their_device_are_those_packed_on_the_host(world):
    assert max(run_ranks(_same_bits, world, "cpu", 80)) > 20


class Tables(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        import freescale

        self.item = freescale.ShardedEmbedding(ROWS, DIM, name="item", device=device)
        self.user = freescale.ShardedEmbedding(9, DIM, name="user", device=device)


def _loader_on(device: str):
    """The loop over batches on the host, and on the device: what is handed out and what comes home."""
    import freescale

    rank, found = dist.get_rank(), {}
    model = torch.compile(Tables(device), backend="freescale", options={"codegen": "eager"})
    data = [{**batch_of(step, rank, 6), "more": whole_batch(6, 6 * rank + step).features} for step in range(6)]
    theirs = [to_device(b, device, ("dense", "words")) for b in data]
    for name, batches in (("host", data), ("device", theirs)):
        if device == "cpu" and name == "device":
            columns._on_device = lambda rows: True
        options = freescale.BalanceOptions(cost=freescale.LengthCost(1.0, 0.1))
        loader = freescale.LookaheadLoader(batches, model, balance=options)
        found[name] = []
        stream = torch.cuda.Stream() if device == "cuda" and name == "device" else None
        with torch.cuda.stream(stream):  # not the one of the loader's thread
            for batch in loader:
                outputs = {"score": batch["label"] * 2, "where": batch["dense"].cpu(), "ids": batch["more"], "words": batch["words"]}
                home = loader.restore(outputs)
                assert devices(home) == devices(outputs) and devices(batch) == [device] * len(devices(batch))
                found[name].append((bits(batch), bits(home), loader.origin.tolist()))
        found[name, "moved"] = sum(s["moved_samples"] for s in loader.balance_stats())
        expected = [bits({"score": b["label"] * 2, "where": b["dense"], "ids": b["more"], "words": b["words"]}) for b in data]
        found[name, "home"] = [home for _, home, _ in found[name]] == expected
    return found["host"] == found["device"], found["host", "home"], found["device", "home"], found["device", "moved"]


def test_loader_packs_on_the_device():
    for same, *home, moved in run_ranks(_loader_on, 2, "cpu"):
        assert same and all(home) and moved > 0


def _waits() -> list[int]:
    """How often a thread waits for the device: while it reads a batch, while it exchanges, while it finds the ids."""
    import warnings

    rank, world, found = dist.get_rank(), dist.get_world_size(), []
    batch = to_device(drawn_batch([("dense", d) for d in DENSE] + [("kjt", 3, torch.int64, torch.float32)] * 2, 6, rank), "cuda")
    to = np.arange(6) % world

    def counted(act):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            result = act()
            torch.cuda.set_sync_debug_mode("default")
        found.append(sum("called a synchronizing" in str(w.message) for w in caught))
        return result

    for _ in range(2):  # the first time compiles
        found.clear()
        cut = counted(lambda: moving.cut(batch))
        came = counted(lambda c=cut: columns.exchange(c.columns, to, np.bincount(to)[[rank] * world], dist.group.WORLD))
        new = counted(lambda c=cut, x=came: c.build(x))
        counted(lambda b=new: structures.features(b, ["x11.0", "x11.2", "x12.1", "label"]))
    return found


class TestOnGpu:
    pytestmark = needs_gpu

    @pytest.mark.parametrize("world", (2, 3))
    def test_samples_packed_on_the_gpu_are_those_packed_on_the_host(self, world):
        assert max(run_ranks(_same_bits, world, "cuda", 40)) > 10

    def test_loader_packs_on_the_gpu(self):
        for same, *home, moved in run_ranks(_loader_on, 2, "cuda"):
            assert same and all(home) and moved > 0

    def test_waits_for_the_device(self):
        for found in run_ranks(_waits, 2):
            assert len(found) == 4 and all(n <= most for n, most in zip(found, (1, 1, 0, 1), strict=True)), found


# ---- training on several ranks -------------------------------------------------------------------------------------


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


def batch_of(step: int, rank: int, samples: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(1000 * step + rank)
    lengths = (torch.rand(samples, generator=g) * 3).exp().long() - 1
    return {
        "item": torch.randint(0, ROWS, (int(lengths.sum()),), generator=g),
        "item_lengths": lengths,
        "user": torch.randint(0, 9, (samples,), generator=g),
        "dense": torch.randn(samples, 3, generator=g, dtype=torch.float64),
        "label": torch.rand(samples, generator=g, dtype=torch.float64),
        "words": [f"{step} {rank} {i}" for i in range(samples)],
    }


# Samples of each rank and step: usual ones, one rank without any, nobody with any, fewer than ranks, uneven.
COUNTS = ((6, 6, 6, 6), (8, 8, 8, 8), (0, 6, 0, 3), (0, 0, 0, 0), (1, 0, 0, 0), (2, 9, 1, 5), (7, 7, 7, 7))


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


def even(samples: int) -> torch.Tensor:
    return torch.full((samples,), 1 / 8, dtype=torch.float64)


def difference(a, b) -> float:
    assert len(a) == len(b) > 10
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True) if x.numel())


def _exact(method: str):
    """Balanced and unbalanced; with look-ahead and, on the same balanced batches, without; who got which sample."""
    import freescale

    rank, world, loop = dist.get_rank(), dist.get_world_size(), Loop()
    counts = [(6,) * world] * 6 if method == "variable" else [c[:world] for c in COUNTS]
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


@pytest.mark.parametrize("world", (2, pytest.param(4, marks=pytest.mark.slow)))
@pytest.mark.parametrize("method", ("default", "variable", pytest.param("zigzag", marks=pytest.mark.slow)))
def test_balanced_training_is_exact(method, world):
    ranks = run_ranks(_exact, world, method)
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


def _fitted():
    """The cost is fitted to what the ranks measured; the meter here is made to say 2 ms + 1 us * L + 10 ns * L**2."""
    import freescale
    from freescale.runtime import meter

    rank, loop = dist.get_rank(), Loop()
    data = [batch_of(step, rank, 6) for step in range(30)]
    lengths: dict[int, torch.Tensor] = {}
    honest = meter.summary

    def summary(name, seconds, records):
        length = lengths[name].double() + 1  # ids of the item and of the user
        compute = 2e-3 + float((1e-6 * length + 1e-8 * length**2).sum())
        return {**honest(name, seconds, records), "compute": compute, "seconds": 3e-3}

    meter.summary = summary
    loader = freescale.LookaheadLoader(data, loop.run, balance=True)
    for step, batch in enumerate(loader):
        lengths[step] = batch["item_lengths"]
        loop.run({k: batch[k] for k in TENSORS}, even(6)).backward()
    stats = loader.balance_stats()
    first = loader.cost.stats()
    list(loader)  # a second loop goes on with the fit; it does not train, so it measures nothing
    return stats, first, loader.cost.stats()


def test_cost_is_fitted_to_measured_times():
    ranks = run_ranks(_fitted, 2)
    for stats, first, second in ranks:
        assert (first, second) == ranks[0][1:]
        assert first["steps"] == 25 and second["steps"] == 25  # steps 1 to 25 of 30: the first one compiles
        assert abs(first["constant"] - 2e-3) < 3e-4 and 0 < first["a"] < 4e-6
        assert stats[0]["fit"]["steps"] == 0 and stats[-1]["fit"]["steps"] == 25
        assert [s["measured"] is not None for s in stats] == [True] * 26 + [False] * 4
        assert all(0 <= s["measured"] < 1 for s in stats[:26])


def _bad_input():
    import freescale

    rank, loop, found = dist.get_rank(), Loop(), {}
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
    "nan": ("the cost function my_cost must return finite numbers that are not negative; sample 0 (lengths: 'item'", "rank 0 failed while it loaded batch 0", 0),
    "inf": ("has inf, 4 of 4 are wrong", "has inf, 4 of 4 are wrong", 0),
    "negative": ("has -1.0, 4 of 4 are wrong", "has -1.0, 4 of 4 are wrong", 0),
    "short": ("must return one number for each of the 4 samples", None, 0),
    "counts": ("counts [3, 3] add up to 6, but there are 8 samples", None, 0),
    "user lengths": ("lengths of feature 'seq' must be one for each of the 4 samples; found 3", None, 0),
    "memory": ("15", None, 0),
    "one alone": ("some ranks balance and others do not", None, 0),
    "restore": ("restore wants one output for each of the 4 samples of the last batch; found 3", "restore failed on rank 1", 0),
    "origin": ("the loader does not balance", None, 0),
}  # fmt: skip


def test_bad_input_is_an_error_on_every_rank_and_the_loader_stays_usable():
    ranks = run_ranks(_bad_input, 2)
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


@pytest.mark.skipif(not HAS_TORCHREC, reason="torchrec or fbgemm_gpu is not installed")
def test_torchrec_batches():
    """Table rows agree with unbalanced training; with look-ahead the bits of training on the same balanced batches."""
    ranks = run_ranks(_torchrec, 2)
    for found in ranks:
        assert found["same bits"] and found["difference"] < 1e-5 < 1e-2 < found["trained"] and found["moved"] > 0, found
    balanced, unbalanced = (np.sum([r["losses"][i] for r in ranks], axis=0) for i in (0, 1))
    assert np.allclose(balanced, unbalanced, rtol=1e-4, atol=1e-4)
