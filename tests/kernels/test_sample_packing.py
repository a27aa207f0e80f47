"""Samples packed for peers and made into a batch again: the kernels against their definitions, and back and forth."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from device_syncs import no_device_syncs
from freescale.kernels import sample_packing as d
from interpreted import in_the_interpreter, needs_gpu, on_a_gpu, run_cases

MIXED = (  # type, shape of an entry, most entries of a sample
    (torch.int64, (), 9),
    (torch.float32, (), 5),
    (torch.float32, (3,), 1),
    (torch.bfloat16, (2, 2), 4),
    (torch.int64, (), 0),
    (torch.bool, (), 2),
)


def batch(samples: int, features, device: str) -> list[d.Jagged]:
    made = []
    for dtype, shape, most in features:
        lengths = torch.randint(0, most + 1, (samples,)) if most > 1 else torch.full((samples,), most)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        values = (torch.randn(int(offsets[-1]), *shape) * 100).to(dtype)
        made.append(d.Jagged(values.to(device), offsets.to(device)))
    return made


def peers(samples: int, many: int, device: str) -> torch.Tensor:
    """Uneven shares, some of them empty."""
    ends = torch.randint(0, samples + 1, (many,)).sort().values
    ends[-1] = samples
    return ends.to(device)


def same(got: list[d.Jagged], expected: list[d.Jagged]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert a.values.dtype == b.values.dtype
        assert torch.equal(a.values, b.values) and torch.equal(a.offsets, b.offsets)


def check(samples: int, many: int, features, device: str) -> None:
    fs, ends = batch(samples, features, device), peers(samples, many, device)
    perm, again = (torch.randperm(samples).to(device) for _ in range(2))
    kinds, entries = [d.spec_of(f) for f in fs], [f.values.shape[0] for f in fs]
    slabs, expected = d.dispatch_on_device(fs, perm, ends), d.dispatch_reference(fs, perm, ends)
    assert torch.equal(slabs.lengths, expected.lengths) and slabs.data.keys() == expected.data.keys()
    assert all(torch.equal(slabs.data[size], expected.data[size]) for size in expected.data)
    same(d.combine_on_device(slabs, again, ends, kinds, entries), d.combine_reference(slabs, again, ends, kinds))
    home = torch.argsort(perm)  # every sample where it was
    same(d.combine_on_device(slabs, home, ends, kinds, entries), fs)


# ---- cases: each runs in the interpreter and on a GPU --------------------------------------------------------------


def all_kinds_of_features(device: str) -> None:
    for samples, many in ((7, 3), (1, 1), (5, 9), (20, 4)):
        check(samples, many, MIXED, device)


def nothing_to_send(device: str) -> None:
    check(0, 2, MIXED, device)
    check(3, 2, (), device)
    check(4, 2, ((torch.int64, (), 0),), device)


def long_and_single_entries_side_by_side(device: str) -> None:
    # tiles within one piece, tiles with some, and tiles with hundreds
    check(40, 5, ((torch.int64, (), 900), *((torch.float32, (), 1),) * 30), device)


def pieces_over_many_tiles(device: str) -> None:
    most = 20_000  # bytes of a sample
    types = (torch.int64, torch.float32, torch.bfloat16, torch.bool)
    check(5, 3, [(t, (), most // t.itemsize) for t in types], device)
    check(3, 2, ((torch.bool, (), most), (torch.uint8, (3,), most // 3)), device)


def more_entries_than_there_are(device: str) -> None:
    """The offsets tell what there is; nothing is taken from behind the slab."""
    mark, spare = 0x5A17_C0DE_5A17_C0DE, 2000
    fs, ends = batch(6, ((torch.int64, (), 300), (torch.int64, (), 5)), device), peers(6, 3, device)
    perm, kinds, entries = torch.randperm(6).to(device), [d.spec_of(f) for f in fs], [f.values.shape[0] for f in fs]
    packed, n = d.dispatch_on_device(fs, perm, ends), sum(entries)
    marked = torch.full((n + 2 * spare,), mark, device=device)
    marked[:n] = packed.data[8]
    slabs = d.PackedSamples({8: marked[:n]}, packed.lengths)
    expected = d.combine_reference(slabs, perm, ends, kinds)
    for more in ((0, spare), (spare, 0), (spare, spare)):
        got = d.combine_on_device(slabs, perm, ends, kinds, [n + m for n, m in zip(entries, more, strict=True)])
        for number, (mine, right) in enumerate(zip(got, expected, strict=True)):
            assert torch.equal(mine.offsets, right.offsets)
            assert not (mine.values == mark).any()
            if not any(more[:number]):
                assert torch.equal(mine.values[: entries[number]], right.values)


def random_batches(device: str) -> None:
    @settings(max_examples=8 if device == "cpu" else 100, deadline=None, database=None)
    @given(st.integers(0, 12), st.integers(1, 6), st.lists(st.sampled_from(MIXED), max_size=4), st.integers(0, 2**31))
    def run(samples, many, features, seed):
        torch.manual_seed(seed)
        check(samples, many, features, device)

    run()


CASES = [
    all_kinds_of_features, nothing_to_send, long_and_single_entries_side_by_side, pieces_over_many_tiles,
    more_entries_than_there_are, random_batches,
]  # fmt: skip
test_in_the_interpreter = in_the_interpreter(__file__, CASES)
test_on_a_gpu = on_a_gpu(CASES)


# ---- definitions ---------------------------------------------------------------------------------------------------


def test_layout_in_small():
    """By peer, then by feature, then by sample; one buffer for each size of element."""
    ids = d.Jagged(torch.tensor([10, 11, 20, 30, 31, 32]), torch.tensor([0, 2, 3, 6]))
    label = d.Jagged(torch.tensor([1.0, 2.0, 3.0]), torch.arange(4))
    tag = d.Jagged(torch.tensor([7, 8]), torch.tensor([0, 0, 2, 2]))
    slabs = d.dispatch([ids, label, tag], torch.tensor([2, 0, 1]), torch.tensor([1, 3]))
    assert slabs.data[8].tolist() == [30, 31, 32, *(10, 11, 20, 7, 8)]
    assert slabs.data[4].view(torch.float32).tolist() == [3.0, 1.0, 2.0]
    assert slabs.lengths.tolist() == [3, 1, 0, *(2, 1), *(1, 1), *(0, 2)]
    specs = [d.spec_of(f) for f in (ids, label, tag)]
    assert elements_per_peer(slabs.lengths, [1, 2], specs) == {8: [3, 5], 4: [1, 2]}


def elements_per_peer(lengths: torch.Tensor, samples: list[int], specs: list[d.FeatureSpec]) -> dict[int, list[int]]:
    """Of every buffer: what an all-to-all of them has to know."""
    counts: dict[int, list[int]] = {spec.dtype.itemsize: [] for spec in specs}
    for part in lengths.split([n * len(specs) for n in samples]):
        per_feature = part.view(len(specs), -1).sum(1).tolist()
        for size, of_peer in counts.items():
            of_size = [(n, s) for n, s in zip(per_feature, specs, strict=True) if s.dtype.itemsize == size]
            of_peer.append(sum(n * s.width for n, s in of_size))
    return counts


def test_four_ranks_exchange_all_samples():
    """What every rank sends to every other, combined there: each sample once, where it was meant to go."""
    torch.manual_seed(5)
    world, samples = 4, 6
    batches = [batch(samples, MIXED, "cpu") for _ in range(world)]
    kinds = [d.spec_of(f) for f in batches[0]]
    counts = [torch.bincount(torch.randint(0, world, (samples,)), minlength=world) for _ in range(world)]
    perms = [torch.randperm(samples) for _ in range(world)]
    sent = [d.dispatch(b, p, c.cumsum(0)) for b, p, c in zip(batches, perms, counts, strict=True)]
    found = 0
    for rank in range(world):
        parts: dict[int, list[torch.Tensor]] = {size: [] for size in sent[0].data}
        lengths, expected = [], []
        for peer in range(world):
            n, first = counts[peer].tolist(), int(counts[peer][:rank].sum())
            lengths.append(sent[peer].lengths.split([c * len(kinds) for c in n])[rank])
            sizes = elements_per_peer(sent[peer].lengths, n, kinds)
            for size, part in parts.items():
                part.append(sent[peer].data[size].split(sizes[size])[rank])
            expected += [(peer, int(s)) for s in perms[peer][first : first + n[rank]]]
        arrived = d.PackedSamples({size: torch.cat(p) for size, p in parts.items()}, torch.cat(lengths))
        ends = torch.stack([c[rank] for c in counts]).cumsum(0)
        got = d.combine(arrived, torch.arange(len(expected)), ends, kinds, [0] * len(kinds))
        for place, (peer, sample) in enumerate(expected):
            for f, mine in enumerate(got):
                theirs = batches[peer][f]
                cut, there = (x.offsets[i : i + 2].tolist() for x, i in ((mine, place), (theirs, sample)))
                assert torch.equal(mine.values[slice(*cut)], theirs.values[slice(*there)])
        found += len(expected)
    assert found == world * samples


@pytest.mark.parametrize("feature, words", (
    ((torch.zeros(3), torch.arange(4)), "feature 0 has offsets of 3 samples, expected 2"),
    ((torch.zeros(2), torch.arange(3).int()), "the offsets of feature 0 as contiguous int64, found torch.int32"),
    ((torch.zeros(2, dtype=torch.complex128), torch.arange(3)), "feature 0 must have entries of 1, 2, 4 or 8-byte"),
    ((torch.zeros(2, 0), torch.arange(3)), r"found torch.float32\[entries, 0\]"),
))  # fmt: skip
def test_bad_input(feature, words):
    with pytest.raises(ValueError, match="freescale: .*" + words):
        d.dispatch([d.Jagged(*feature)], torch.arange(2), torch.tensor([2]))


# ---- on a GPU ------------------------------------------------------------------------------------------------------


class TestOnGpu:
    pytestmark = needs_gpu

    @pytest.mark.parametrize("world", (1, 32, 512))
    def test_long_histories(self, world):
        torch.manual_seed(7)
        check(512, world, ((torch.int64, (), 3000), (torch.float32, (), 700), (torch.float16, (), 64), *MIXED), "cuda")

    def test_nothing_waits_for_the_device(self):
        fs, ends, perm = batch(64, MIXED, "cuda"), peers(64, 4, "cuda"), torch.randperm(64, device="cuda")
        kinds, entries = [d.spec_of(f) for f in fs], [f.values.shape[0] for f in fs]
        d.combine(d.dispatch(fs, perm, ends), perm, ends, kinds, entries)  # compiles, which does wait
        with no_device_syncs():
            d.combine(d.dispatch(fs, perm, ends), perm, ends, kinds, entries)


if __name__ == "__main__":
    run_cases(CASES, check_bounds=False)  # `sources` has addresses
