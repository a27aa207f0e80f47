"""Warn about a lookup that is not compiled because the model's forward was called instead of the model."""

from __future__ import annotations

import logging
import weakref

import torch

from freescale.compat import nn_modules

log = logging.getLogger(__name__)

_warned: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def warn_of_uncompiled_call() -> None:
    """Called by each lookup outside torch.compile. Warns once per model."""
    module = nn_modules.called_past_compile()
    if module is not None and module not in _warned:
        _warned.add(module)
        log.warning(
            "freescale: %s.forward(...) was called, which model.compile does not compile, so it runs eagerly. Call the "
            "model itself: model(batch)",
            type(module).__name__,
        )
