"""Batches are cut into samples and built again, here and between ranks; on a device as on the host."""

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

from freescale.runtime import batch_structure as structures
from freescale.runtime.balance.integer_problem import BalanceError
from freescale.runtime.samples import sample_columns, split_batch
from interpreted import needs_gpu
from ragged_batches import DIM, ROWS, batch_of
from ranks import run_ranks

# ---- cut and build, without other ranks ----------------------------------------------------------------------------


class KeyedJaggedTensor:
    """What freescale uses of TorchRec's, for where that is not installed."""

    def __init__(self, keys, values, lengths, weights=None):
        self._keys, self._values, self._lengths, self._weights = keys, values, lengths, weights

    keys, values, lengths, weights_or_none = (lambda self, n=n: getattr(self, n) for n in ("_keys", "_values", "_lengths", "_weights"))
    variable = False

    def offsets_or_none(self):
        return None

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
    split = split_batch.split(batch)
    assert split.samples == 4
    before, after = described(batch), described(split.rebuild([sample_columns.select(c, np.array(chosen, np.int64)) for c in split.columns]))
    assert after[1:] == before[1:] and after[0] == [before[0][i] for i in chosen]


def test_bytes_of_a_sample():
    batch = {"x": torch.zeros(3, 2), "id": torch.arange(3), "id_lengths": torch.tensor([2, 0, 1])}
    split = split_batch.split(batch)
    assert sample_columns.sizes(split.columns, 3).tolist() == [8 + 8 * n + 8 for n in (2, 0, 1)]


@pytest.mark.parametrize(
    "change, words",
    (
        ({"labels": torch.zeros(5)}, "'features' has 4, but feature 'labels' has 5"),
        ({"more": {"words": ["a"]}}, "feature 'more.words' has 1"),
        ({"more": {"what": {1, 2}}}, "feature 'more.what' is a set, which cannot be split"),
        ({"more": {"x": torch.arange(5), "x_lengths": torch.tensor([1, 1, 1, 1])}}, "lengths of 'x' add up to 4, but there are 5"),
        ({"more": {"x": torch.arange(2), "x_lengths": torch.tensor([3, -1, 0, 0])}}, "lengths of 'x' must not be negative"),
        ({"more": {"x": torch.arange(2), "x_offsets": torch.tensor([1, 1, 1, 2, 2])}}, "'x_offsets' must start with 0"),
        ({"more": {"x": torch.arange(2), "x_offsets": torch.tensor([0, 1, 1, 2, 2]), "x_lengths": torch.tensor([1, 1, 0, 0])}}, "feature 'x' do not match"),
        ({"more": {"x": np.array(["a"] * 4)}}, "feature 'more.x' is an array of <U1"),
        ({"more": {"x": torch.zeros(4, 4).to_sparse()}}, "'more.x' is a tensor of layout"),
        ({"features": KeyedJaggedTensor(["a", "b"], torch.arange(3), torch.ones(3, dtype=torch.int64))}, "features 'a', 'b' of a KeyedJaggedTensor must"),
        ({"features": None, "labels": torch.tensor(1.0)}, "nothing to split by sample"),
    ),
)  # fmt: skip
def test_what_is_wrong_with_a_batch_is_named(change, words):
    parts = {"features": whole_batch().features, "labels": torch.zeros(4), **change}
    with pytest.raises(BalanceError) as raised:
        split_batch.split(Sample(**parts))
    assert words in str(raised.value) and str(raised.value).startswith("freescale: ")


def test_batch_sizes_that_differ_by_feature_cannot_be_cut():
    kjt = whole_batch().features
    kjt.variable = True
    with pytest.raises(BalanceError, match="KeyedJaggedTensor of 'a', 'b' has batch sizes that differ"):
        split_batch.split(kjt)


def _exchange():
    """Random samples to random ranks; ranks without any, everything to one rank, nothing at all."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for seed in range(25):
        random = np.random.default_rng(seed)
        counts = random.integers(0, 6, world) * (random.random(world) > 0.2)
        to = [random.integers(0, world if seed % 5 else 1, n) for n in counts]
        batches = [whole_batch(int(n), 6 * r) for r, n in enumerate(counts)]
        split = split_batch.split(batches[rank])
        arriving = np.array([(t == rank).sum() for t in to])
        got = described(split.rebuild(sample_columns.exchange(split.columns, to[rank], arriving, dist.group.WORLD)))
        everyone = [described(b)[0] for b in batches]
        expected = [row for rows, t in zip(everyone, to, strict=True) for row, r in zip(rows, t, strict=True) if r == rank]
        assert got[0] == expected and got[1:] == described(batches[rank])[1:], seed
    return True


@pytest.mark.parametrize("world", (1, 3))
def test_every_part_of_a_batch_arrives(world):
    assert all(run_ranks(_exchange, world))


# ---- batches on a device -------------------------------------------------------------------------------------------

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
    honest = sample_columns._on_device

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
            sample_columns._on_device = on_device
            try:
                split = split_batch.split(given_batch)
                with Sent() as sent:
                    came = sample_columns.exchange(split.columns, to[rank], arriving, dist.group.WORLD)
            finally:
                sample_columns._on_device = honest
            results.append(split.rebuild(came))
            turned = split.rebuild([sample_columns.select(c, np.arange(arriving.sum())[::-1].copy()) for c in came])
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
            sample_columns._on_device = lambda rows: True
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
        split = counted(lambda: split_batch.split(batch))
        came = counted(lambda c=split: sample_columns.exchange(c.columns, to, np.bincount(to)[[rank] * world], dist.group.WORLD))
        new = counted(lambda c=split, x=came: c.rebuild(x))
        counted(lambda b=new: structures.feature_ids_and_counts(b, ["x11.0", "x11.2", "x12.1", "label"]))
    return found


class TestOnGpu:
    pytestmark = needs_gpu

    @pytest.mark.parametrize("world", (2, 3))
    def test_samples_packed_on_the_gpu_are_those_packed_on_the_host(self, world):
        assert max(run_ranks(_same_bits, world, "cuda", 60)) > 10

    def test_loader_packs_on_the_gpu(self):
        for same, *home, moved in run_ranks(_loader_on, 2, "cuda"):
            assert same and all(home) and moved > 0

    def test_waits_for_the_device(self):
        for found in run_ranks(_waits, 2):
            assert len(found) == 4 and all(n <= most for n, most in zip(found, (1, 1, 0, 1), strict=True)), found
