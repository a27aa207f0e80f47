"""PerSRec: an HSTU model that compresses long histories into a few learned tokens (arXiv 2601.03479).

A row attends to its own segment and to the tokens after earlier segments (`persrec_attention.py`). Training has one
stage: the loss is on items, and tokens learn what later items need. For serving, the long part of a history is run once
(`compress_history`), and only the keys and values of its tokens are kept. A request (`score`) then costs
recent x (recent + tokens) query-key products, independent of the history's length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hstu import HSTU, attention_tiles, hstu_attention, segment_sum
from persrec_attention import Cut, cut, put_tokens, segment_attention


def check_settings(segments: int, tokens: int, recent: int, longest: int | None = None) -> None:
    """Raise ValueError for invalid settings. `longest`: items of the longest history, if known."""
    for name, value, why in (
        ("segments", segments, "without segments the model is HSTU"),
        ("tokens", tokens, "later items see a segment only through its tokens"),
        ("recent", recent, "only recent items are scored"),
    ):
        if value < 1:
            raise ValueError(f"PerSRec requires {name} to be at least 1, found {value}: {why}")
    if longest is not None and longest - recent < segments:
        raise ValueError(
            f"PerSRec cannot cut a history into {segments} segments: the longest has {longest} items, and "
            f"{max(longest - recent, 0)} of them are before the {recent} recent ones"
        )


class Cache(NamedTuple):
    """Kept state of B compressed histories, T tokens each.

    keys, values  of each block, ``[B, T, heads, dim / heads]``
    distance      rows from each token to the first recent item, ``[B, T]``
    there         whether the history is long enough to have the token
    """

    keys: list[Tensor]
    values: list[Tensor]
    distance: Tensor
    there: Tensor


class PerSRec(HSTU):
    """HSTU whose recent items see the rest of the history only through tokens.

    Args:
        segments, tokens, recent: the last `recent` items of a history are recent. Earlier items are split into
            `segments` segments, each followed by `tokens` tokens. A history of at most `recent` items has no segments
            or tokens and is handled as in HSTU.
        others: as in HSTU.
    """

    def __init__(self, *args: Any, segments: int, tokens: int, recent: int, **others: Any) -> None:
        check_settings(segments, tokens, recent)
        super().__init__(*args, **others)
        self.segments, self.recent = segments, recent
        self.tokens = nn.Parameter(torch.empty(tokens, self.head.in_features))
        nn.init.normal_(self.tokens, std=0.02)

    def encode(self, x: Tensor, where: Cut) -> Tensor:
        """Run the blocks on the items' rows ``[N, dim]``."""
        x = put_tokens(x, self.tokens, where)
        tiles = attention_tiles(where.rows, x.shape[0])
        for block in self.blocks:
            x = block.around(x, lambda q, k, v, bias, alpha: segment_attention(q, k, v, where, bias, alpha, tiles))
        return x.index_select(0, where.of_item)

    def logits(self, features: Any) -> Tensor:
        """The score of each sample's candidate against its recent items, ``[B]``."""
        x, history, candidate = self.rows(features)
        where = cut(history.offsets(), x.shape[0], self.segments, self.tokens.shape[0], self.recent)
        sums = segment_sum(self.encode(x, where), where.items).index_select(0, where.recent)
        pooled = sums / where.items.diff()[where.recent].clamp(min=1).unsqueeze(1)
        return (self.head(pooled) * candidate.values()).sum(dim=1)

    @torch.no_grad()
    def compress_history(self, features: Any) -> Cache:
        """Compress features whose histories hold only the long parts, without the recent items; ignores candidates."""
        x, history, _ = self.rows(features)
        each = self.tokens.shape[0]
        where = cut(history.offsets(), x.shape[0], self.segments, each, 0)
        bounds = where.rows[:-1].view(-1, self.segments + 1)
        back = torch.arange(-each, 0, device=x.device)
        places = (bounds[:, 1:].unsqueeze(2) + back).flatten(1)  # [B, T]
        there = (bounds.diff() > 0).repeat_interleave(each, dim=1)
        at = torch.where(there, places, 0)
        cache = Cache([], [], bounds[:, -1:] - places, there)

        def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, alpha: float) -> Tensor:
            cache.keys.append(k[at] if k.shape[0] else k.new_zeros((*at.shape, *k.shape[1:])))
            cache.values.append(v[at] if v.shape[0] else v.new_zeros((*at.shape, *v.shape[1:])))
            return segment_attention(q, k, v, where, bias, alpha, tiles)

        x = put_tokens(x, self.tokens, where)
        tiles = attention_tiles(where.rows, x.shape[0])
        for block in self.blocks:
            x = block.around(x, attend)
        return cache

    @torch.no_grad()
    def score(self, cache: Cache, features: Any) -> Tensor:
        """``logits`` of histories in two parts: long ones, compressed, and the recent ones in `features`."""
        x, history, candidate = self.rows(features)
        offsets, lengths = history.offsets().to(torch.int64), history.lengths().clamp(min=1)
        tiles = attention_tiles(offsets, x.shape[0])
        for block, keys, values in zip(self.blocks, cache.keys, cache.values, strict=True):

            def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, alpha: float, kept=(keys, values)) -> Tensor:
                seen = cached_attention(q, *kept, cache, offsets, bias, alpha)
                return hstu_attention(q, k, v, offsets, bias, alpha, tiles) + seen

            x = block.around(x, attend)
        pooled = segment_sum(x, offsets) / lengths.unsqueeze(1)
        return (self.head(pooled) * candidate.values()).sum(dim=1)


def cached_attention(
    q: Tensor, keys: Tensor, values: Tensor, cache: Cache, offsets: Tensor, bias: Tensor, alpha: float
) -> Tensor:
    """The contribution of the kept tokens to the attention of the recent rows, ``[N, H, D]``."""
    row = torch.arange(q.shape[0], device=q.device)
    sample = torch.searchsorted(offsets, row, right=True) - 1
    distance = (row - offsets[sample]).unsqueeze(1) + cache.distance[sample]
    scores = torch.einsum("nhd,nthd->hnt", q, keys[sample]) * alpha
    scores = scores + bias[:, distance.clamp(max=bias.shape[1] - 1)]
    weights = F.silu(scores) * cache.there[sample] / offsets.diff()[sample].unsqueeze(1)
    return torch.einsum("hnt,nthd->nhd", weights, values[sample])


def segment_lengths(length: np.ndarray, segments: int, tokens: int, recent: int) -> np.ndarray:
    """Rows per segment of histories of these lengths, including tokens, recent last: ``[segments + 1, samples]``."""
    length = np.asarray(length, np.int64)
    before = np.maximum(length - recent, 0)
    used = np.minimum(before, segments)
    part = np.minimum(np.arange(segments + 1)[:, None], used)
    first = before * part // np.maximum(used, 1) + part * tokens
    return np.concatenate([np.diff(first, axis=0), [np.minimum(length, recent)]])


def attention_pairs(length: np.ndarray, segments: int, tokens: int, recent: int) -> np.ndarray:
    """Number of query-key pairs in each history's attention; 0 segments: that of HSTU."""
    if not segments:
        length = np.asarray(length, np.int64)
        return length * (length + 1) // 2
    rows = segment_lengths(length, segments, tokens, recent)
    own = (rows * (rows + 1) // 2).sum(0)
    seen = np.cumsum(rows[:-1] > 0, axis=0) * tokens  # tokens of earlier segments
    return own + (rows[1:] * seen).sum(0)


def cost_features(segments: int, tokens: int, recent: int) -> Callable[..., np.ndarray]:
    """For `freescale.FittedCost`: rows per sample, and query-key pairs of its attention. The history is the feature
    with the most ids."""

    def features(*lengths: np.ndarray) -> np.ndarray:
        length = np.max(np.stack(lengths), axis=0)
        rows = segment_lengths(length, segments, tokens, recent).sum(0) if segments else length
        return np.stack([rows, attention_pairs(length, segments, tokens, recent)]).astype(np.float64)

    return features
