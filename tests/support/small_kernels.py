"""Kernels to test the interpreter itself. Requires Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_apart(source, to, count, behind: tl.constexpr):
    """Copy `count` of four numbers, from offset `behind`, to every second element of `to`."""
    at = tl.arange(0, 4)
    tl.store(to + 2 * at, tl.load(source + at + behind, mask=at < count), mask=at < count)
