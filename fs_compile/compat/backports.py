"""What newer releases of torch mend, for the older ones that freescale supports."""

from __future__ import annotations

import sys
from typing import Any

import torch

from freescale.compat import version


def backport_empty_grids() -> None:
    """Before 2.13 a tiled Triton kernel over no elements divides by zero when it is launched."""
    from torch._inductor.runtime.triton_heuristics import Grid2DWithYZOverflow

    generate = Grid2DWithYZOverflow.generate
    if getattr(generate, "_freescale", False):
        return

    def guarded(self: Any, *args: Any, **kwargs: Any) -> None:
        generate(self, *args, **kwargs)
        if self.mode == "python" and "== 0" not in str(self.y_grid):
            self.y_grid = f"(0 if y_grid_div_ == 0 else {self.y_grid})"

    guarded._freescale = True  # type: ignore[attr-defined]
    Grid2DWithYZOverflow.generate = guarded  # type: ignore[method-assign]


def backport_fake_of_fake() -> None:
    """2.12's pattern matcher makes fakes of fakes, which asks whether a size that is not known yet is 0."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    from_tensor = FakeTensorMode.from_tensor
    if version.torch_version() != "2.12" or getattr(from_tensor, "_freescale", False):
        return

    def keep_fakes(self: Any, tensor: torch.Tensor, **kwargs: Any) -> Any:
        if not kwargs and isinstance(tensor, FakeTensor) and tensor.fake_mode is self:
            return tensor
        return from_tensor(self, tensor, **kwargs)

    keep_fakes._freescale = True  # type: ignore[attr-defined]
    FakeTensorMode.from_tensor = keep_fakes  # type: ignore[method-assign]


def backport_open_slices() -> None:
    """Before 2.13 the lowering of `x[1:]` asks whether the largest integer is beyond the end of x. If the size of x is
    dynamic and may be 0 that is not known, and it fails."""
    from torch._inductor.lowering import lowerings

    op = torch.ops.aten.slice.Tensor
    lower = lowerings[op]
    if version.torch_version() not in ("2.11", "2.12") or getattr(lower, "_freescale", False):
        return

    def closed(x: Any, dim: int = 0, start: Any = 0, end: Any = sys.maxsize, *args: Any, **kwargs: Any) -> Any:
        is_open = end is None or isinstance(end, int) and end >= sys.maxsize
        return lower(x, dim, start, x.get_size()[dim] if is_open else end, *args, **kwargs)

    closed._freescale = True  # type: ignore[attr-defined]
    lowerings[op] = closed


def probe() -> None:
    """Raise if a private name that is used here is gone. Cheap, needs no process group."""
    backport_empty_grids()
    backport_fake_of_fake()
    backport_open_slices()
