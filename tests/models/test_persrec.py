"""PerSRec: its attention against a boolean mask in float64, its model, kept tokens, and what it refuses."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from repo import ROOT

sys.path.insert(0, str(ROOT / "examples"))

import hstu  # noqa: E402
import persrec  # noqa: E402
import persrec_attention as pa  # noqa: E402

LENGTHS = {
    "ragged": [3, 0, 20, 7, 8, 40, 1, 6],
    "empty": [0, 0],
    "nothing": [],
    "single": [1],
    "long": [600],
    "shorter than recent": [2, 5, 6],
}


def dense_layout(lengths, segments, tokens, recent):
    """Row by row of each history: (item or None, segment); written without anything of the model."""
    made = []
    for length in lengths:
        before = max(length - recent, 0)
        used = min(before, segments)
        bounds = [before * i // used for i in range(used + 1)] if used else [0]
        rows = []
        for s in range(used):
            rows += [(item, s) for item in range(bounds[s], bounds[s + 1])] + [(None, s)] * tokens
        made.append(rows + [(item, used) for item in range(before, length)])
    return made


def dense_attention(q, k, v, layout, bias, alpha):
    """By a matrix of all pairs and a boolean mask."""
    out, start = 0 * (q + k + v + bias.sum()), 0
    for rows in layout:
        n = len(rows)
        segment, token = torch.tensor([s for _, s in rows]), torch.tensor([i is None for i, _ in rows], dtype=torch.bool)
        at = torch.arange(n)
        distance = at[:, None] - at
        allowed = (distance >= 0) & ((segment[:, None] == segment) | token)
        size = torch.bincount(segment)[segment] if n else segment
        scores = torch.einsum("ihd,jhd->hij", q[start : start + n], k[start : start + n]) * alpha
        scores = scores + bias[:, distance.clamp(0, bias.shape[1] - 1)]
        weights = torch.nn.functional.silu(scores) * allowed / size[:, None]
        out = torch.cat([out[:start], torch.einsum("hij,jhd->ihd", weights, v[start : start + n]), out[start + n :]])
        start += n
    return out


@pytest.mark.parametrize("segments, tokens, recent", ((1, 4, 6), (3, 2, 6), (8, 1, 1)))
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("distances", (1, 9, 700))
def test_the_mask_against_a_dense_one(lengths, segments, tokens, recent, distances):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    where = pa.cut(offsets, sum(lengths), segments, tokens, recent)
    layout = dense_layout(lengths, segments, tokens, recent)
    real, count = sum(map(len, layout)), len(where.number)
    assert count == sum(lengths) + len(lengths) * segments * tokens >= real
    make = [torch.randn(count, 2, 5, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    bias, grad = torch.randn(2, distances, dtype=torch.float64, requires_grad=True), torch.randn(count, 2, 5).double()
    grad[real:] = 0
    out = pa.segment_attention(*make, where, bias, 0.4)
    expected = dense_attention(*make, layout, bias, 0.4)
    assert not out[real:].any()
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    inputs = (*make, bias)
    for a, b in zip(torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    pairs = persrec.attention_pairs(np.array(lengths, np.int64), segments, tokens, recent)
    for one, rows in zip(pairs.tolist(), layout, strict=True):
        seen = [s == t or i is None for at, (_, t) in enumerate(rows) for i, s in rows[: at + 1]]
        assert one == sum(seen)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_items_and_tokens_are_where_they_belong(lengths):
    offsets, layout = torch.tensor([0, *lengths]).cumsum(0), dense_layout(lengths, 3, 2, 6)
    where = pa.cut(offsets.to(torch.int32), sum(lengths), 3, 2, 6)
    x = torch.arange(1.0, sum(lengths) + 1).unsqueeze(1)
    got = pa.put_tokens(x, torch.tensor([[-1.0], [-2.0]]), where)
    right = []
    for begin, rows in zip(offsets.tolist(), layout, strict=False):
        for at, (item, _) in enumerate(rows):
            second = item is None and rows[at - 1][0] is None
            right.append(begin + item + 1.0 if item is not None else -2.0 if second else -1.0)
    assert got[: len(right), 0].tolist() == right
    assert torch.equal(got.index_select(0, where.of_item), x)
    assert where.items.diff()[where.recent].tolist() == [min(n, 6) for n in lengths]
    assert (where.number[len(right) :] == 4 * len(lengths)).all()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_operators():
    where = pa.cut(torch.tensor([0, 3, 3, 30]), 30, 2, 3, 5)
    q, k, v = (torch.randn(len(where.number), 2, 8, requires_grad=True) for _ in range(3))
    bias = torch.randn(2, 9, requires_grad=True)
    torch.library.opcheck(pa._attention, (q, k, v, where.rows, where.number, bias, 0.3, 2, 3))
    grads = (torch.randn(v.shape), q.detach(), k.detach(), v.detach(), where.rows, where.number, bias.detach(), 0.3, 2, 3)
    torch.library.opcheck(pa._attention_backward, grads)


class Jagged:
    def __init__(self, values, lengths) -> None:
        self.values, self.lengths = lambda: values, lambda: lengths
        self.offsets = lambda: torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


class Tables(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.item = torch.nn.Embedding(50, 16)

    def forward(self, features):
        return {name: Jagged(self.item(ids), lengths) for name, (ids, lengths) in features.items()}


def features(histories) -> dict:
    lengths = torch.tensor([len(h) for h in histories], dtype=torch.int64)
    ids = torch.cat([torch.empty(0, dtype=torch.int64), *histories])
    candidates = torch.arange(len(histories)) % 50
    return {"history": (ids, lengths), "candidate": (candidates, torch.ones_like(candidates))}


def model(kind=persrec.PerSRec, **others):
    torch.manual_seed(3)
    made = kind(Tables(), 16, 2, 3, max_distance=20, **others)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    return made


def histories(lengths) -> list:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(50, (n,), generator=generator) for n in lengths]


@pytest.mark.parametrize("segments, tokens", ((1, 4), (3, 2)))
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_score_with_kept_tokens_is_that_of_the_whole(lengths, segments, tokens):
    recommender, given = model(segments=segments, tokens=tokens, recent=6), histories(lengths)
    whole = recommender.logits(features(given))
    cache = recommender.compress_history(features([h[: max(len(h) - 6, 0)] for h in given]))
    assert [tuple(k.shape) for k in (*cache.keys, *cache.values)] == 6 * [(len(lengths), segments * tokens, 2, 8)]
    got = recommender.score(cache, features([h[max(len(h) - 6, 0) :] for h in given]))
    torch.testing.assert_close(got, whole.detach(), rtol=0, atol=1e-5)


def test_old_items_count_through_the_tokens_alone():
    recommender, (given,) = model(segments=2, tokens=2, recent=6), histories([30])
    changed = given.clone()
    changed[0] = (given[0] + 1) % 50
    one, other = (recommender.logits(features([h])) for h in (given, changed))
    assert not torch.equal(one, other)
    ((grad,),) = (torch.autograd.grad(one.sum(), [recommender.tokens]),)
    assert grad.abs().min() > 0
    cache = recommender.compress_history(features([given[:24]]))
    for kept in (*cache.keys, *cache.values):
        kept.zero_()
    without = recommender.score(cache, features([given[24:]]))
    assert not torch.allclose(without, one.detach(), atol=1e-4)


def test_short_histories_are_those_of_hstu():
    made, plain = model(segments=2, tokens=3, recent=40), model(hstu.HSTU)
    plain.load_state_dict({n: p for n, p in made.state_dict().items() if n != "tokens"})
    given = features(histories(LENGTHS["ragged"]))
    torch.testing.assert_close(made.logits(given), plain.logits(given), rtol=0, atol=1e-5)


def test_1024_and_4_and_256():
    """What the mask leaves of the pairs of 1280 items: most with one segment, few with several."""
    full = persrec.attention_pairs([1280], 0, 0, 0)[0]
    assert full == 1280 * 1281 // 2
    shares = {s: persrec.attention_pairs(np.array([1280]), s, 4, 256)[0] / full for s in (1, 2, 3, 4)}
    assert {s: round(x, 3) for s, x in shares.items()} == {1: 0.687, 2: 0.371, 3: 0.268, 4: 0.218}


@pytest.mark.parametrize(
    "settings, sentence",
    (
        ({"segments": 0}, "segments to be at least 1, found 0: without segments the model is HSTU"),
        ({"tokens": 0}, "tokens to be at least 1, found 0: later items see a segment only through its tokens"),
        ({"recent": 0}, "recent to be at least 1, found 0: only recent items are scored"),
        ({"tokens": -2}, "tokens to be at least 1, found -2"),
        ({"segments": -1}, "segments to be at least 1, found -1"),
        ({"recent": -5}, "recent to be at least 1, found -5"),
        ({"longest": 40}, "into 3 segments: the longest has 40 items, and 0 of them are before the 64 recent ones"),
        ({"longest": 66}, "into 3 segments: the longest has 66 items, and 2 of them are before the 64 recent ones"),
    ),
)
def test_bad_settings(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        persrec.check_settings(**{"segments": 3, "tokens": 4, "recent": 64, **settings})
    if "longest" not in settings:
        with pytest.raises(ValueError, match=sentence):
            model(**{"segments": 3, "tokens": 4, "recent": 64, **settings})
    persrec.check_settings(3, 4, 64, longest=67)
