"""Every change that freescale makes to torch and TorchRec, made once, when the backend's name is first used.

These are active only while a model is traced or compiled for freescale, in that thread, or for models compiled with it:

    CatchErrorsWrapper, ShapeEnv    settings and symbols of Dynamo while a model is traced (dynamo_settings.py)
    configs of torch                by their own `patch`, while a graph is compiled (compat/inductor.py,
                                    interpreted_graph.py)
    proxy_tensor                    skips memory formats while a graph is compiled (dynamo_settings.py)
    FakeTensorMode.from_tensor      torch 2.12: while a graph is compiled, reuses fakes (inductor.py)
    OptimizedModule.state_dict      and loading: checkpoints of what torch.compile(model, backend="freescale") returned
    torch.library lowerings         those of freescale's own ops (kernels/ops/schemas.py)
    TorchRec's sharded collections  a forward that Dynamo can trace, used in freescale's traces
    TorchRec's KeyedOptimizer       calls observers of the tables before state is read or loaded
    DistributedDataParallel         ignores rows and states of freescale's own tables (runtime/tables/
                                    sharded_embedding.py); rejects parameters that a graph averages (dense_gradients.py)

These affect other models too, and change no result:

    ShardedModule.__init__          when freescale leaves a module to TorchRec's own code, its callers are traced again,
                                    for every backend that compiled them (torchrec_support.py)
    Grid2DWithYZOverflow.generate   torch 2.11 and 2.12: the fix from 2.13 for launches that divide by zero
                                    (inductor.py)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from freescale import config
from freescale.compat import dynamo_settings, inductor, logs, nn_modules
from freescale.runtime import agreement
from freescale.runtime.tables import torchrec_collection, torchrec_patch


def install(backend: Callable[..., Any]) -> config.Config:
    """Return the flags of the process. `backend`: the function registered under the name."""
    logs.log_once("freescale")
    try:
        cfg = config.load()
    except config.ConfigError as error:
        agreement.post_failure(error)
        raise

    def context() -> AbstractContextManager[None]:
        torchrec_collection.trace_begins()
        return dynamo_settings.tracing(cfg.dynamic)

    dynamo_settings.enter_while_tracing(
        lambda compilation: nn_modules.backend_function(compilation) is backend,
        context,
        lambda error: torchrec_collection.trace_with_sizes() if dynamo_settings.depends_on_data(error) else None,
    )
    dynamo_settings.choose_symbols()
    dynamo_settings.leave_out_contiguity()
    inductor.backport_empty_grids()
    inductor.backport_fake_of_fake()
    nn_modules.load_eager_checkpoints(backend)
    torchrec_patch.patch_torchrec()
    return cfg
