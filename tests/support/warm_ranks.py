"""Preloaded by the forkserver of ranks.py: what every rank would import and prepare before its first compilation.

It knows nothing of freescale, and starts no thread that a fork would lose: so no gradients here.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util

import torch
import torch._dynamo
import torch._inductor.compile_fx  # noqa: F401
import torch.distributed  # noqa: F401
import tqdm
from torch._inductor.fx_passes import joint_graph, post_grad

if all(importlib.util.find_spec(name) is not None for name in ("torchrec", "fbgemm_gpu")):
    for name in ("torchrec", "torchrec.distributed.embedding", "torchrec.distributed.planner"):
        importlib.import_module(name)


def _warm_up() -> None:
    tqdm.tqdm.monitor_interval = 0  # else a thread
    torch.set_num_threads(1)
    torch.compile(lambda x: (x * 2).relu().sum(), backend="aot_eager")(torch.ones(3))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    joint_graph.lazy_init()
    post_grad.lazy_init()


_warm_up()
gc.freeze()  # a rank's garbage collector need not visit all of torch again and again
