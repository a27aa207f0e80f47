"""torch's current CUDA stream as a plain handle, without the object around it."""

from __future__ import annotations

import torch

# A build for the CPU has no such function, and nobody asks it for a stream.
current_stream_handle = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def probe() -> None:
    """Raise if a private name that is used here is gone. Cheap, needs no process group."""
    assert callable(current_stream_handle) or not torch.backends.cuda.is_built()
