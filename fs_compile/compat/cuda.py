"""torch's current CUDA device and stream as plain numbers, without wrapper objects."""

from __future__ import annotations

import torch

# CPU builds lack these functions and never call them.
current_stream_handle = getattr(torch._C, "_cuda_getCurrentRawStream", None)
current_device = getattr(torch._C, "_cuda_getDevice", None)
