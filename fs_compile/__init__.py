"""freescale: a torch.compile backend for sequence recommendation models on many GPUs.

`torch.compile(model, backend="freescale")` needs no import. This module stays light, because
TORCH_LOGS="+freescale" imports it while torch itself is still being imported; names load when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from freescale.report import report
    from freescale.runtime.lookahead import LookaheadLoader
    from freescale.runtime.meter import METER as meter
    from freescale.runtime.native import ShardedEmbedding

__version__ = "0.1.0"
__all__ = ["LookaheadLoader", "ShardedEmbedding", "__version__", "meter", "report"]

_LAZY = {
    "LookaheadLoader": "freescale.runtime.lookahead:LookaheadLoader",
    "ShardedEmbedding": "freescale.runtime.native:ShardedEmbedding",
    "meter": "freescale.runtime.meter:METER",
    "report": "freescale.report:report",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        module, attribute = _LAZY[name].split(":")
        return getattr(import_module(module), attribute)
    raise AttributeError(f"module 'freescale' has no attribute {name!r}")
