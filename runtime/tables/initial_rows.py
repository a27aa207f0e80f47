"""Initial values of a table's rows. Each rank draws only its own rows.

A table is cut into blocks of rows, independent of its sharding. Each block has its own random stream: NumPy's Philox,
keyed by the table's seed and the block number. A rank draws the blocks that contain its rows and gets the same values
as any other rank would. Drawing is on the CPU, so values do not depend on the device.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

BLOCK_VALUES = 1 << 20  # approximate values per block; changing it changes the initial values


def draw_seed() -> int:
    """A table's seed: one draw from torch's default CPU generator, which torch.manual_seed seeds."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())  # regardless of `with torch.device`


def fill_uniform(rows: torch.Tensor, first: int, bound: float, seed: int) -> None:
    """Fill `rows`, [n, dim] starting at row `first` of a table, with uniform values between -bound and bound.

    Values are drawn as float64 or float32 and cast to the dtype of `rows`. Temporary memory: a few megabytes per
    torch thread.
    """
    n, dim = rows.shape
    size = max(1, BLOCK_VALUES // dim)  # rows per block
    drawn = np.float64 if rows.dtype == torch.float64 else np.float32

    def draw(block: int) -> np.ndarray:
        needed = min(size, first + n - block * size)  # from the block's first row
        values = np.random.Generator(np.random.Philox(key=[seed, block])).random((needed, dim), dtype=drawn)
        values *= 2 * bound
        values -= bound
        return values

    blocks = range(first // size, -(-(first + n) // size)) if n else range(0)
    at_once = max(1, min(torch.get_num_threads(), len(blocks)))
    with ThreadPoolExecutor(at_once) as threads:  # NumPy releases the GIL while drawing
        for i in range(0, len(blocks), at_once):
            some = blocks[i : i + at_once]
            for block, values in zip(some, threads.map(draw, some) if at_once > 1 else map(draw, some), strict=True):
                begin, end = max(block * size, first), min((block + 1) * size, first + n)
                part = values[begin - block * size : end - block * size]
                rows[begin - first : end - first].copy_(torch.from_numpy(part))  # on the caller's stream
