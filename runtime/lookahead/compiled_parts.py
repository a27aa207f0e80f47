"""What a LookaheadLoader is given: the compiled modules in it that look up tables, or words that say what to write.

A step begins outside of what is compiled, so it is a *call* of a compiled module: of the model itself, whether
torch.compile returned it, model.compile() compiled it in place or its forward was compiled; or of modules inside it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch

from freescale.compat import compiled_modules
from freescale.runtime.lookahead import rank_meetings
from freescale.runtime.tables import torchrec_support

log = logging.getLogger(__name__)

_COMPILE = 'model.compile(backend="freescale"), or torch.compile(model, backend="freescale")'


def compiled_parts(model: Any) -> list[torch.nn.Module]:
    """The outermost compiled modules of `model` that hold a table which can be planned for, in the model's order."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(_no_module(model))
    parts = [m for m in _outermost(model, set()) if rank_meetings.exchanges_of(m)]
    left = [x for x in rank_meetings.exchanges_of(model) if not any(x in rank_meetings.exchanges_of(m) for m in parts)]
    if not parts and left:
        raise TypeError(
            f"freescale: LookaheadLoader wants the compiled model, as in {_COMPILE}; found {type(model).__name__}, in "
            f"which nothing that looks up table {left[0].name} is compiled. If a compiled function calls it, make that "
            "function the forward of a torch.nn.Module, compile this module and give it to the LookaheadLoader"
        )
    if not parts:
        why = _why(model)
        raise ValueError(f"freescale: the model has no sharded table that a LookaheadLoader could plan for{why}")
    if left:
        names = ", ".join(x.name for x in left)
        log.warning("freescale: not planned ahead, since what looks them up is not compiled: tables %s", names)
    return parts


def _outermost(module: torch.nn.Module, met: set[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    if module in met:
        return
    met.add(module)
    if compiled_modules.is_compiled(module):
        yield module
        return
    for child in module.children():
        yield from _outermost(child, met)


def _why(model: torch.nn.Module) -> str:
    found = [(m, torchrec_support.unsupported_reason(m)) for m in model.modules() if rank_meetings.is_collection(m)]
    reasons = [f"{m._module_fqn or 'a collection'}: {reason}" for m, reason in found if reason is not None]
    if not reasons:
        return ""
    return f", because TorchRec's own code serves it: {'; '.join(reasons)}. Loop over the loader itself"


def _no_module(given: Any) -> str:
    if not compiled_modules.is_compiled(given):
        return f"freescale: LookaheadLoader wants the compiled model, as in {_COMPILE}; found {type(given).__name__}"
    name = getattr(given, "__name__", "step")
    return (
        f"freescale: LookaheadLoader wants the compiled model; found the compiled function {name}, whose calls cannot "
        "be seen from outside. Make it the forward of a torch.nn.Module that holds the model:\n"
        "    class Step(torch.nn.Module):\n"
        "        def __init__(self, model): super().__init__(); self.model = model\n"
        f"        def forward(self, batch): ...  # what {name} does, with self.model\n"
        '    step = Step(model); step.compile(backend="freescale")\n'
        "    for batch in LookaheadLoader(loader, step): loss = step(batch)"
    )
