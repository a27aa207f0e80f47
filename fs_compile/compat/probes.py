"""Whether every private name that freescale uses is there: each file of this folder probes its own.

A new release of torch, TorchRec or FBGEMM breaks this folder and nothing else.
tests/compile/test_compat.py runs the probes on every version that is supported, `python -m freescale doctor` on the one
that is installed.
"""

from __future__ import annotations

from freescale.compat import (
    backports,
    compiled_modules,
    cuda,
    direct_calls,
    distributed,
    dlpack,
    dynamo,
    dynamo_settings,
    fbgemm,
    fx_values,
    inductor,
    interpreted_graph,
    kernel_launches,
    logs,
    module_state,
    nixl,
    planned_sizes,
    torchrec,
    triton_launch,
    version,
)

PROBED = (
    version, distributed, dynamo, dynamo_settings, planned_sizes, compiled_modules, inductor, interpreted_graph,
    direct_calls, kernel_launches, fx_values, logs, cuda, module_state, dlpack, triton_launch, backports, fbgemm,
    torchrec, nixl,
)  # fmt: skip


def self_test() -> None:
    """Raise if one is gone. Cheap, needs no process group."""
    for module in PROBED:
        module.probe()
