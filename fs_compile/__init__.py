"""freescale: a torch.compile backend for sequence recommendation models on many GPUs.

Names are loaded lazily: TORCH_LOGS="+freescale" imports this module while torch itself is still being imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from freescale.backend import report
    from freescale.driver import observe
    from freescale.runtime.balance.sample_cost import FittedCost, LengthCost
    from freescale.runtime.balance.solver import balance
    from freescale.runtime.lookahead.loader import LookaheadLoader
    from freescale.runtime.meter import METER as meter
    from freescale.runtime.meter import log_to
    from freescale.runtime.samples.batch_balancer import BalanceOptions, loss_difference
    from freescale.runtime.tables.sharded_embedding import ShardedEmbedding, ShardedEmbeddingCollection

__version__ = "0.1.0"
__all__ = [
    "BalanceOptions",
    "FittedCost",
    "LengthCost",
    "LookaheadLoader",
    "ShardedEmbedding",
    "ShardedEmbeddingCollection",
    "__version__",
    "balance",
    "log_to",
    "loss_difference",
    "meter",
    "observe",
    "report",
]

_LAZY = {
    "BalanceOptions": "freescale.runtime.samples.batch_balancer:BalanceOptions",
    "FittedCost": "freescale.runtime.balance.sample_cost:FittedCost",
    "LengthCost": "freescale.runtime.balance.sample_cost:LengthCost",
    "LookaheadLoader": "freescale.runtime.lookahead.loader:LookaheadLoader",
    "ShardedEmbedding": "freescale.runtime.tables.sharded_embedding:ShardedEmbedding",
    "ShardedEmbeddingCollection": "freescale.runtime.tables.sharded_embedding:ShardedEmbeddingCollection",
    "balance": "freescale.runtime.balance.solver:balance",
    "log_to": "freescale.runtime.meter:log_to",
    "loss_difference": "freescale.runtime.samples.batch_balancer:loss_difference",
    "meter": "freescale.runtime.meter:METER",
    "observe": "freescale.driver:observe",
    "report": "freescale.backend:report",
}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        module, attribute = _LAZY[name].split(":")
        # stored, since importing a module of the same name (report) would shadow the attribute
        value = globals()[name] = getattr(import_module(module), attribute)
        return value
    raise AttributeError(f"module 'freescale' has no attribute {name!r}")
