"""Backports of torch fixes to the older releases that freescale supports."""

from __future__ import annotations

from typing import Any

import torch

from freescale.compat import dynamo_settings, version


def backport_empty_grids() -> None:
    """Before 2.13 a tiled Triton kernel over no elements divides by zero at launch. The patch applies to all models:
    launch code may be generated long after the kernel was compiled, and nothing else in it changes."""
    from torch._inductor.runtime.triton_heuristics import Grid2DWithYZOverflow

    generate = Grid2DWithYZOverflow.generate
    if version.torch_version() not in ("2.11", "2.12") or getattr(generate, "_freescale", False):
        return

    def guarded(self: Any, *args: Any, **kwargs: Any) -> None:
        generate(self, *args, **kwargs)
        if self.mode == "python":
            self.y_grid = f"(0 if y_grid_div_ == 0 else {self.y_grid})"

    guarded._freescale = True  # type: ignore[attr-defined]
    Grid2DWithYZOverflow.generate = guarded  # type: ignore[method-assign]


def backport_fake_of_fake() -> None:
    """2.12's pattern matcher makes fakes of fakes, which checks whether an unknown size is 0. While a model is compiled
    for freescale, existing fakes are returned."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    from_tensor = FakeTensorMode.from_tensor
    if version.torch_version() != "2.12" or getattr(from_tensor, "_freescale", False):
        return

    def keep_fakes(self: Any, tensor: torch.Tensor, **kwargs: Any) -> Any:
        is_own = not kwargs and isinstance(tensor, FakeTensor) and tensor.fake_mode is self
        if is_own and dynamo_settings.is_tracing():
            return tensor
        return from_tensor(self, tensor, **kwargs)

    keep_fakes._freescale = True  # type: ignore[attr-defined]
    FakeTensorMode.from_tensor = keep_fakes  # type: ignore[method-assign]
