"""Several ranks with real TorchRec and FBGEMM's CUDA kernels on one GPU: marks of such tests, and how their ranks run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ranks import HAS_TORCHREC


def _fbgemm_has_cuda() -> bool:
    if not (HAS_TORCHREC and torch.cuda.is_available()):
        return False
    import fbgemm_gpu

    return getattr(fbgemm_gpu, "__variant__", "cuda") != "cpu"


MARKS = [pytest.mark.gpu, pytest.mark.skipif(not _fbgemm_has_cuda(), reason="no FBGEMM for CUDA")]
DEVICE = "cuda:0"
# Arguments of run_ranks. cuBLAS: the same workspace on every stream, else what it sums in which order may differ.
RANKS: dict[str, Any] = {"backend": "cpu:gloo,cuda:nccl", "env": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}}
