"""A lookup that is not compiled although the model is, because its forward was called in place of the model."""

from __future__ import annotations

import logging
import weakref

import torch

from freescale.compat import compiled_modules

log = logging.getLogger(__name__)

_warned: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def warn_of_uncompiled_call() -> None:
    """Outside of torch.compile, by each lookup; once for each model."""
    module = compiled_modules.called_past_compile()
    if module is not None and module not in _warned:
        _warned.add(module)
        log.warning(
            "freescale: %s.forward(...) was called, which model.compile does not compile: this runs eagerly. Call the "
            "model itself, as in model(batch)",
            type(module).__name__,
        )
