"""freescale: a torch.compile backend for sequence recommendation models on many GPUs.

`torch.compile(model, backend="freescale")` needs no import. This module stays light, because
TORCH_LOGS="+freescale" imports it while torch itself is still being imported; names load when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from freescale.driver import observe
    from freescale.report import report
    from freescale.runtime.balance import balance
    from freescale.runtime.balancing import BalanceOptions
    from freescale.runtime.cost import FittedCost, LengthCost
    from freescale.runtime.lookahead import LookaheadLoader
    from freescale.runtime.meter import METER as meter
    from freescale.runtime.native import ShardedEmbedding

__version__ = "0.1.0"
__all__ = [
    "BalanceOptions",
    "FittedCost",
    "LengthCost",
    "LookaheadLoader",
    "ShardedEmbedding",
    "__version__",
    "balance",
    "meter",
    "observe",
    "report",
]

_LAZY = {
    "BalanceOptions": "freescale.runtime.balancing:BalanceOptions",
    "FittedCost": "freescale.runtime.cost:FittedCost",
    "LengthCost": "freescale.runtime.cost:LengthCost",
    "LookaheadLoader": "freescale.runtime.lookahead:LookaheadLoader",
    "ShardedEmbedding": "freescale.runtime.native:ShardedEmbedding",
    "balance": "freescale.runtime.balance:balance",
    "meter": "freescale.runtime.meter:METER",
    "observe": "freescale.driver:observe",
    "report": "freescale.report:report",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        module, attribute = _LAZY[name].split(":")
        # kept, since importing a module of the same name (report) puts that in its place
        value = globals()[name] = getattr(import_module(module), attribute)
        return value
    raise AttributeError(f"module 'freescale' has no attribute {name!r}")
