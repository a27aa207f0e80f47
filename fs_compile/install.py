"""Every change that freescale makes to torch and TorchRec. Made once, when the backend's name is first used.

Each acts while a model is traced or compiled for freescale, in that thread alone, or on what was compiled with it:

    CatchErrorsWrapper, ShapeEnv    settings and symbols of Dynamo while a model is traced (dynamo_settings.py)
    configs of torch                by their own `patch`, while a graph is compiled (compat/inductor.py,
                                    interpreted_graph.py)
    proxy_tensor                    memory formats are not noted while a graph is compiled (planned_sizes.py)
    FakeTensorMode.from_tensor      torch 2.12: while a graph is compiled, fakes are not made anew (backports.py)
    OptimizedModule.state_dict      and loading: checkpoints of what torch.compile(model, backend="freescale") returned
    torch.library lowerings         those of freescale's own ops (kernels/ops/schemas.py)
    TorchRec's sharded collections  a forward that Dynamo can trace, taken where the trace is freescale's
    TorchRec's KeyedOptimizer       whoever watches the tables is called before state is read or loaded
    DistributedDataParallel         leaves the rows and states of freescale's own tables alone (runtime/tables/
                                    sharded_embedding.py); refuses parameters that a graph averages (dense_gradients.py)

These reach other models too, and change no result:

    ShardedModule.__init__          after freescale has left a module to TorchRec's own code, the code that calls it is
                                    traced anew, for every backend that has compiled it (torchrec_support.py)
    Grid2DWithYZOverflow.generate   torch 2.11 and 2.12: torch's own repair, in 2.13, of launches that divide by zero
                                    (backports.py)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from freescale import config
from freescale.compat import backports, compiled_modules, dynamo_settings, logs, planned_sizes
from freescale.runtime import agreement
from freescale.runtime.tables import torchrec_collection, torchrec_patch


def install(backend: Callable[..., Any]) -> config.Config:
    """Return the flags of the process. `backend`: the function behind the name."""
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
        lambda compilation: compiled_modules.backend_function(compilation) is backend,
        context,
        lambda error: torchrec_collection.trace_with_sizes() if dynamo_settings.depends_on_data(error) else None,
    )
    dynamo_settings.choose_symbols()
    planned_sizes.leave_out_contiguity()
    backports.backport_empty_grids()
    backports.backport_fake_of_fake()
    compiled_modules.load_eager_checkpoints(backend)
    torchrec_patch.patch_torchrec()
    return cfg
