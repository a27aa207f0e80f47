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

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist

from freescale import config
from freescale.compat import dynamo_settings, inductor, logs, nn_modules
from freescale.runtime import agreement
from freescale.runtime.tables import torchrec_collection, torchrec_patch

log = logging.getLogger(__name__)


class DependsOnData(RuntimeError):
    """Something in a model depends on a size that only the batch decides, and torch cannot compile it."""


def install(backend: Callable[..., Any]) -> config.Config:
    """Return the flags of the process. `backend`: the function registered under the name."""
    logs.log_once("freescale")
    try:
        cfg = config.load()
    except config.ConfigError as error:
        agreement.post_failure(error)
        raise

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        torchrec_collection.trace_begins()
        with dynamo_settings.tracing(cfg.dynamic):
            yield

    dynamo_settings.enter_while_tracing(
        lambda compilation: nn_modules.backend_function(compilation) is backend,
        context,
        (_with_sizes, _with_breaks),
        _failed,
        _tell,
    )
    dynamo_settings.choose_symbols()
    dynamo_settings.leave_out_contiguity()
    inductor.backport_empty_grids()
    inductor.backport_fake_of_fake()
    nn_modules.load_eager_checkpoints(backend)
    torchrec_patch.patch_torchrec()
    return cfg


def _tell(found: dynamo_settings.GraphBreak) -> None:
    if found.is_of_ddp() or "torch.compiler.disable" in found.reason:  # asked for, by the user or by freescale
        return
    level = logging.INFO if dist.is_initialized() and dist.get_rank() else logging.WARNING
    says = f"torch says: {found.reason.strip().splitlines()[0]}"
    if found.is_skipped:
        message = "freescale: torch does not compile %s (%s) and runs it as it is. %s"
        log.log(level, message, found.code, found.where, says)
        return
    if found.is_at_read():
        says = "torch cannot compile in one graph what depends on the size that is read there"
    where = found.where or "an unknown line"
    message = "freescale: the graph breaks at %s, `%s`, so exchanges do not overlap with compute beyond that line. %s"
    log.log(level, message, where, found.code, says)


def _with_sizes(error: Exception) -> AbstractContextManager[None] | None:
    """The collections' sizes as numbers that torch may ask about, if that would change anything."""
    changed = torchrec_collection.collections_to_trace_again() if dynamo_settings.depends_on_data(error) else []
    return torchrec_collection.tracing_with_sizes(changed) if changed else None


@contextlib.contextmanager
def _breaking() -> Iterator[None]:
    changed = torchrec_collection.collections_to_trace_again()
    with torchrec_collection.tracing_with_sizes(changed), dynamo_settings.breaking_at_reads():
        yield


def _with_breaks(error: Exception) -> AbstractContextManager[None] | None:
    """Several graphs, as torch makes by default."""
    return _breaking() if dynamo_settings.depends_on_data(error) else None


def _failed(error: Exception) -> Exception:
    """After all attempts. Of errors that depend on data, the other ranks were not told yet."""
    if not dynamo_settings.depends_on_data(error):
        return error
    where = dynamo_settings.line_of(error) or "something in the model"
    reason = DependsOnData(
        f"freescale: {where} depends on a size that only the batch decides, and torch cannot compile it. Compile the "
        'embedding collections alone, for example model.module.embeddings.compile(backend="freescale") if `embeddings` '
        f"is one, and leave the rest as it is. torch says: {dynamo_settings.reason_of(error)}"
    )
    reason.__cause__ = error
    agreement.post_failure(reason)
    return reason
