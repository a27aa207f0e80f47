"""Kernels for tests of the interpreter itself. Needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_apart(source, to, count, behind: tl.constexpr):
    """To every second place the `count` numbers, of four, that begin `behind` places behind the start."""
    at = tl.arange(0, 4)
    tl.store(to + 2 * at, tl.load(source + at + behind, mask=at < count), mask=at < count)
