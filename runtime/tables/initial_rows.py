"""The first values of a table's rows, made by the rank that holds them and by no other.

A table is cut into blocks of rows, whatever its shards. Each block has a random stream of its own: NumPy's Philox,
keyed by the table's seed and the block's number. So a rank draws the blocks that its rows are in, and gets the numbers
that they would have on any other rank. It does so on the CPU, so the numbers do not depend on the device either.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

BLOCK_VALUES = 1 << 20  # of a block, about; part of what decides the numbers


def draw_seed() -> int:
    """A table's seed: one number of torch's default CPU generator, which torch.manual_seed sets."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())  # whatever `with torch.device` says


def fill_uniform(rows: torch.Tensor, first: int, bound: float, seed: int) -> None:
    """Give `rows`, [n, dim] from row `first` of a table on, their values: uniform between -bound and bound.

    They are drawn as float64 or float32 and rounded to the type of `rows`. Besides `rows`, it takes a few megabytes for
    each of torch's threads.
    """
    n, dim = rows.shape
    size = max(1, BLOCK_VALUES // dim)  # of a block, in rows
    drawn = np.float64 if rows.dtype == torch.float64 else np.float32

    def draw(block: int) -> np.ndarray:
        needed = min(size, first + n - block * size)  # from the block's first row on
        values = np.random.Generator(np.random.Philox(key=[seed, block])).random((needed, dim), dtype=drawn)
        values *= 2 * bound
        values -= bound
        return values

    blocks = range(first // size, -(-(first + n) // size)) if n else range(0)
    at_once = max(1, min(torch.get_num_threads(), len(blocks)))
    with ThreadPoolExecutor(at_once) as threads:  # NumPy draws without Python's lock
        for i in range(0, len(blocks), at_once):
            some = blocks[i : i + at_once]
            for block, values in zip(some, threads.map(draw, some) if at_once > 1 else map(draw, some), strict=True):
                begin, end = max(block * size, first), min((block + 1) * size, first + n)
                part = values[begin - block * size : end - block * size]
                rows[begin - first : end - first].copy_(torch.from_numpy(part))  # here: on the caller's stream
