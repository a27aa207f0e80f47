"""torch's current CUDA device and stream as plain numbers, without the objects around them."""

from __future__ import annotations

import torch

# A build for the CPU has no such functions, and nobody calls them.
current_stream_handle = getattr(torch._C, "_cuda_getCurrentRawStream", None)
current_device = getattr(torch._C, "_cuda_getDevice", None)
