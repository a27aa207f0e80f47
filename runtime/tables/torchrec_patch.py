"""Patches of TorchRec's classes, applied once per process when the backend's name is first used. Sharded collections
get a forward that Dynamo can trace; an unsupported one keeps TorchRec's own, outside the graph. Outside torch.compile
nothing changes. Watchers of TorchRec's optimizers are called before optimizer state is read or loaded."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from freescale.compat import dynamo, dynamo_settings, torchrec
from freescale.runtime import batch_structure
from freescale.runtime.tables import torchrec_collection, torchrec_pooling, torchrec_support
from freescale.runtime.tables.fbgemm import FbgemmTable
from freescale.runtime.tables.table_exchange import warn_of_uncompiled_call

MANY_FEATURES = 16  # from here on torch's fake tensor cache costs more than it saves: each feature has its own size

_original_forward: Any = None


def patch_torchrec() -> None:
    """Patch TorchRec's classes, once; nothing if it cannot be imported."""
    global _original_forward
    try:
        from torchrec.distributed.types import ShardedModule
        from torchrec.optim.keyed import KeyedOptimizer
    except (ImportError, OSError):  # not installed, or FBGEMM's library does not load
        return
    if _original_forward is None:
        KeyedOptimizer.state_dict = _call_watchers_first(KeyedOptimizer.state_dict, "before_read")
        KeyedOptimizer.load_state_dict = _call_watchers_first(KeyedOptimizer.load_state_dict, "before_load")
        _original_forward = ShardedModule.forward
        ShardedModule.forward = _forward
        ShardedModule.__init__ = _forget_callers_first(ShardedModule.__init__)
        # Dynamo finds it by its name.
        ShardedModule._freescale_prepare_tables = dynamo.assume_constant_result(_freescale_prepare_tables)


# ---- forward ------------------------------------------------------------------------------------------------


@dynamo.assume_constant_result
def _is_traced_for_freescale() -> bool:
    """False for other backends and for export: they trace TorchRec's own forward."""
    return dynamo_settings.is_tracing()


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling():
        warn_of_uncompiled_call()
        _must_not_be_planned(self)
        return _original_forward(self, *args, **kwargs)
    if not _is_traced_for_freescale():
        return _original_forward(self, *args, **kwargs)
    features: Any = args[0] if args else kwargs.get("features")
    is_kjt = batch_structure.is_kjt(features)
    weights = features.weights_or_none() if is_kjt else None
    odd_weights = weights is not None and not weights.is_floating_point()
    variable_stride = is_kjt and features.variable_stride_per_key()
    if not self._freescale_prepare_tables(is_kjt, weights is not None, odd_weights, variable_stride):
        assert self._freescale_left_to_torchrec  # adds a guard, so that no supported collection reuses this graph
        return _torchrec_forward(self, *args, **kwargs)
    return self._freescale.look_up(features, _gradient_division())


def _freescale_prepare_tables(
    self: Any, is_kjt: bool, weighted: bool, odd_weights: bool, variable_stride: bool
) -> bool:
    """Return whether freescale supports this module. Runs while Dynamo traces; the result is a constant."""
    reason = _unsupported_reason(self, is_kjt, weighted, odd_weights, variable_stride)
    if reason is not None:
        torchrec_support.report_unsupported(self, reason)
        return False
    tables = torchrec_pooling.tables_of(self)
    if not tables.pooled and sum(len(x.features) for x in tables.exchanges) >= MANY_FEATURES:
        dynamo.recompute_fakes()
    return True


def _unsupported_reason(
    module: Any, is_kjt: bool, weighted: bool, odd_weights: bool, variable_stride: bool
) -> str | None:
    from torchrec.distributed.embedding import ShardedEmbeddingCollection
    from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

    if not isinstance(module, (ShardedEmbeddingCollection, ShardedEmbeddingBagCollection)):
        names = ", ".join(repr(c.name) for c in torchrec.pooled_configs(module))
        return f"pooled tables {names} are not supported" if names else f"{type(module).__name__} is not supported"
    table = torchrec.embedding_configs(module)[0].name
    if not is_kjt:
        return f"features of table {table!r} are not a KeyedJaggedTensor"
    if variable_stride:
        return f"the batch size varies per feature of table {table!r}"
    if weighted and not torchrec.is_pooled_collection(module):
        return f"features of table {table!r} are weighted"
    if odd_weights:
        return f"weights of features of table {table!r} are not floating-point"
    return torchrec_support.unsupported_reason(module)


@torch._dynamo.disable
def _torchrec_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    _must_not_be_planned(self)
    result = _original_forward(self, *args, **kwargs)
    return result.wait() if hasattr(result, "wait") else result


def _must_not_be_planned(module: Any) -> None:
    """Raise if the step is planned: TorchRec's lookup would read rows whose gradients are still pending."""
    tables = torchrec_collection.existing_tables_of(module)
    if tables is not None and any(x.freescale_plan is not None for x in tables.exchanges):
        name = torchrec.qualified_name(module) or "a collection"
        raise RuntimeError(
            f"freescale: TorchRec's own forward looks up the tables of {name} in a step that a LookaheadLoader has "
            "planned, because this lookup is not compiled. Check for a hit of torch._dynamo.config.recompile_limit "
            "(torch logs it), torch.compiler.disable around the lookup, or weighted features. Fix this, or iterate the "
            "loader directly"
        )


def _forget_callers_first(init: Any) -> Any:
    @functools.wraps(init)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        torchrec_support.forget_callers()
        init(self, *args, **kwargs)

    return call


def _gradient_division() -> bool:
    from torchrec.distributed.comm_ops import get_gradient_division

    return get_gradient_division()


# ---- optimizers ---------------------------------------------------------------------------------------------


class _Watcher(NamedTuple):
    modules: list[Any]
    before_read: Callable[[], None]
    before_load: Callable[[], None]


_watchers: OrderedDict[int, _Watcher] = OrderedDict()


def watch_optimizers(
    modules: list[Any], before_read: Callable[[], None], before_load: Callable[[], None]
) -> RemovableHandle:
    """Register callbacks for before the state of the modules' TorchRec optimizers is read or loaded."""
    handle = RemovableHandle(_watchers)
    _watchers[handle.id] = _Watcher(modules, before_read, before_load)
    return handle


def _call_watchers_first(method: Any, callback: str) -> Any:
    @functools.wraps(method)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        for watcher in tuple(_watchers.values()):
            if _updates_any(self, watcher.modules):
                getattr(watcher, callback)()
        return method(self, *args, **kwargs)

    return watched


def _updates_any(optimizer: Any, modules: list[Any]) -> bool:
    """Whether the optimizer updates rows of these modules; the same on every rank, since a collection's own optimizer
    exists even on a rank that holds none of its rows."""
    parts = list(torchrec.optimizers_within(optimizer))
    for module in modules:
        tables = torchrec_collection.existing_tables_of(module)
        if tables is None:
            continue
        held = [x.table.emb for x in tables.exchanges if isinstance(x.table, FbgemmTable)]
        for part in parts:
            updated = torchrec.fbgemm_module_updated_by(part)
            if part is module.fused_optimizer or (updated is not None and any(updated is emb for emb in held)):
                return True
    return False
