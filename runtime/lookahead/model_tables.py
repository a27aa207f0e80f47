"""The tables of a model that a LookaheadLoader plans for, and the compiled modules in it that look them up.

A step begins outside of what is compiled, so it is a *call* of a compiled module: of the model itself, whether
torch.compile returned it, model.compile() compiled it in place or its forward was compiled; or of modules inside it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch

from freescale.compat import compiled_modules, torchrec
from freescale.runtime.tables import torchrec_pooling, torchrec_support
from freescale.runtime.tables.sharded_embedding import NativeTables
from freescale.runtime.tables.table_exchange import Exchange

log = logging.getLogger(__name__)

_COMPILE = 'model.compile(backend="freescale"), or torch.compile(model, backend="freescale")'


def table_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules whose tables an exchange serves, in the model's order, the same on every rank."""
    return [m for m in _modules(model) if _own_exchanges(m)]


def exchanges_of(model: torch.nn.Module) -> list[Exchange]:
    """The exchanges of a model, in the order of its modules, the same on every rank."""
    return list(dict.fromkeys(x for m in _modules(model) for x in _own_exchanges(m)))


def _modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Of the model, without those inside TorchRec's sharded modules, which do not call their forward."""
    sharded = [m for m in model.modules() if torchrec.is_sharded_module(m)]
    inside = {m for outer in sharded for m in outer.modules() if m is not outer}
    return [m for m in model.modules() if m not in inside]


def _own_exchanges(module: torch.nn.Module) -> list[Exchange]:
    if isinstance(module, NativeTables):
        return [module._exchange]
    if torchrec.is_sharded_collection(module) and torchrec_support.unsupported_reason(module) is None:
        return torchrec_pooling.tables_of(module).exchanges
    return []


def compiled_parts(model: Any) -> list[torch.nn.Module]:
    """The outermost compiled modules of `model` that hold a table which can be planned for, in the model's order.

    Raises, with what to write instead, if there are none.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(_not_a_module(model))
    parts = [m for m in _outermost_compiled(model, set()) if exchanges_of(m)]
    compiled = {x for part in parts for x in exchanges_of(part)}
    uncompiled = [x for x in exchanges_of(model) if x not in compiled]
    if not parts and uncompiled:
        raise TypeError(
            f"freescale: LookaheadLoader wants the compiled model, as in {_COMPILE}; found {type(model).__name__}, in "
            f"which nothing that looks up table {uncompiled[0].name} is compiled. If a compiled function calls it, "
            "make that function the forward of a torch.nn.Module, compile this module and give it to the "
            "LookaheadLoader"
        )
    if not parts:
        why = _why_no_tables(model)
        raise ValueError(f"freescale: the model has no sharded table that a LookaheadLoader could plan for{why}")
    if uncompiled:
        names = ", ".join(x.name for x in uncompiled)
        log.warning("freescale: not planned ahead, since what looks them up is not compiled: tables %s", names)
    return parts


def _outermost_compiled(module: torch.nn.Module, visited: set[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    if module in visited:
        return
    visited.add(module)
    if compiled_modules.is_compiled(module):
        yield module
        return
    for child in module.children():
        yield from _outermost_compiled(child, visited)


def _why_no_tables(model: torch.nn.Module) -> str:
    reasons = []
    for module in filter(torchrec.is_sharded_collection, _modules(model)):
        if (reason := torchrec_support.unsupported_reason(module)) is not None:
            reasons.append(f"{torchrec.qualified_name(module) or 'a collection'}: {reason}")
    if not reasons:
        return ""
    return f", because TorchRec's own code serves it: {'; '.join(reasons)}. Loop over the loader itself"


def _not_a_module(given: Any) -> str:
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
