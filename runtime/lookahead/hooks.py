"""Hooks on every use of a model's tables while a loop is open. A training step starts once all ranks are at it. A
forward pass of another batch, or reading the tables, first applies pending gradients.

A step begins outside the compiled code, so it is a *call* of a compiled module: of the model itself (returned by
torch.compile, compiled in place, or with a compiled forward) or of modules inside it.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch

from freescale.compat import nn_modules, torchrec
from freescale.kernels.transports import open_transports
from freescale.runtime.lookahead.rendezvous import Action
from freescale.runtime.lookahead.session import Session
from freescale.runtime.lookahead.step import Loop
from freescale.runtime.meter import METER
from freescale.runtime.tables import torchrec_patch, torchrec_pooling, torchrec_support
from freescale.runtime.tables.sharded_embedding import NativeTables
from freescale.runtime.tables.table_exchange import Exchange

log = logging.getLogger(__name__)

_COMPILE = 'model.compile(backend="freescale"), or torch.compile(model, backend="freescale")'


class ModelHooks:
    """Installed while a loop is open, or an error of one is deferred."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._deferred_error: RuntimeError | None = None  # one that Python could not raise where it happened
        self._handles: dict[tuple[str, torch.nn.Module], list[Any]] = {}
        self._calling: torch.nn.Module | None = None  # the module whose call, which begins a step, is running

    def __deepcopy__(self, memo: Any) -> ModelHooks:
        return self  # a copy of the model made inside a loop keeps its hooks

    def add(self, exchange: Exchange) -> None:
        """Also see its lookups outside of steps."""
        self.session.add(exchange)
        exchange.before_lookup_outside_step = self.before_lookup
        exchange.before_read = self.before_read

    def install(self, model: torch.nn.Module, parts: list[torch.nn.Module]) -> None:
        """Call this when a loop is open. `parts`: the compiled modules in `model` that look up the tables."""
        # Each call of a compiled part is a step; if there are several parts, each call of the model around them.
        called = parts[0] if len(parts) == 1 else model
        if ("call", called) not in self._handles:
            self._handles["call", called] = self._hook_calls(called)
        if ("tables", model) not in self._handles:
            self._handles["tables", model] = self._hook_tables(model, parts)
        self._set_calling(None)

    def close_loop(self, loop: Loop, defer_errors: bool, exception: str = "") -> None:
        """End a loop, and those inside it. `defer_errors`: Python would not raise an error here, so the next use of the
        tables does. `exception`: what leaves the loop, which the user is to see first."""
        while loop in self.session.loops:
            innermost = self.session.loops[-1]
            failure = self.session.close_innermost(exception)
            for x in innermost.exchanges:
                x.outside_step = False
            self._set_calling(self._calling)
            if failure is not None and (defer_errors or innermost is not loop):
                self._deferred_error = failure
            self._remove_if_idle()
            if failure is not None and exception:
                log.warning("%s", failure)
            elif failure is not None and innermost is loop:
                raise failure

    def _remove_if_idle(self) -> None:
        if not self.session.loops and self._deferred_error is None:
            for handle in (h for handles in self._handles.values() for h in handles):
                handle.remove()
            self._handles.clear()

    def raise_deferred(self) -> None:
        error, self._deferred_error = self._deferred_error, None
        if error is not None:
            self._remove_if_idle()
            raise error

    def _hook_calls(self, called: torch.nn.Module) -> list[Any]:
        if nn_modules.compiled_in_place(called):
            return [nn_modules.AroundCompiledCall(called, self._before_forward, self._after_forward)]
        return [
            called.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            called.register_forward_hook(self._after_forward, always_call=True),
        ]

    def _hook_tables(self, model: torch.nn.Module, parts: list[torch.nn.Module]) -> list[Any]:
        handles: list[Any] = []
        tables = list(dict.fromkeys(m for part in parts for m in _modules(part) if _own_exchanges(m)))
        inside_tables = {m for table in tables for m in table.modules()}
        for module in model.modules():
            # A single rank may read a dense part alone; only modules that hold rows need the other ranks.
            holds_rows = any(m in inside_tables for m in module.modules())
            before = self.before_read if holds_rows else open_transports.drain
            handles.append(module.register_state_dict_pre_hook(before))
        for table in tables:
            handles.append(table.register_forward_pre_hook(self.before_lookup))
            handles.append(table.register_load_state_dict_pre_hook(self._before_load))
        handles.append(torchrec_patch.watch_optimizers(tables, self.before_read, self._before_load))
        return handles

    def _set_calling(self, module: torch.nn.Module | None) -> None:
        """While no call that begins a step is running, no hook has seen the cause of a lookup."""
        self._calling = module
        for x in (x for loop in self.session.loops for x in loop.exchanges):
            x.outside_step = module is None

    def _ignores(self, module: torch.nn.Module) -> bool:
        # The hooks can do nothing in the graph of a compiled caller; the lookups do (`Exchange.outside_step`).
        return torch.compiler.is_compiling() or self._calling not in (None, module)

    # -- uses of the model -----------------------------------------------------------------------------------------

    def _before_forward(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Every call of the compiled model, outside the graph."""
        if self._ignores(module):
            return
        self.raise_deferred()
        loop = self.session.innermost
        if loop is None:
            return
        loop.end_forward()  # of a step that ended with a BaseException
        if torch.is_grad_enabled():
            self._begin_training(loop, (args, kwargs))
        else:
            self._begin_evaluation(loop, (args, kwargs))
        self._set_calling(module)
        METER.graph_begins()

    def _begin_training(self, loop: Loop, inputs: Any) -> None:
        if len(self.session.loops) > 1:
            raise RuntimeError(
                "freescale: a training step under a second LookaheadLoader while the first has not ended: a model "
                "is trained under one loader at a time (evaluation under torch.no_grad() is fine)"
            )
        self.session.synchronize(Action.TRAIN, loop.identify_batch(inputs))
        loop.begin_step()

    def _begin_evaluation(self, loop: Loop, inputs: Any) -> None:
        """If every rank evaluates the batch yielded last before it is used, its plan serves."""
        if loop.current is not None and not loop.current.used:
            statuses = self.session.synchronize(Action.EVALUATE, loop.identify_batch(inputs))
            if all(s.received == s.batch for s in statuses):
                loop.begin_step()
                return
        self.session.flush()

    def _after_forward(self, module: torch.nn.Module, *args: Any) -> None:
        if self._ignores(module):
            return
        self._set_calling(None)
        if (loop := self.session.innermost) is not None:
            loop.end_forward()

    def before_lookup(self, *args: Any) -> None:
        """A table is used without the compiled model."""
        if torch.compiler.is_compiling() or self._calling is not None:
            return
        self.raise_deferred()
        if self.session.loops and torch.is_grad_enabled():
            raise RuntimeError(
                "freescale: a table is used in training without its compiled model while a LookaheadLoader is being "
                "iterated; call what was compiled, as in model(batch), not model.forward(batch), or leave the loop "
                "first. (Activation checkpointing does so if the lookup is inside: it looks up again in the backward "
                "pass. Keep the lookup outside. A compiled function that calls the model does so, too: make it the "
                "forward of a torch.nn.Module `step`, and write step.compile(backend=\"freescale\") and "
                "LookaheadLoader(loader, step))"
            )
        self.session.flush()

    def before_read(self, *args: Any) -> None:
        self.raise_deferred()
        self.session.flush()
        open_transports.drain()

    def _before_load(self, *args: Any) -> None:
        self.raise_deferred()
        if self.session.loops:
            raise RuntimeError(
                "freescale: load_state_dict while a LookaheadLoader is being iterated: rows for the next batch are "
                "prefetched already; leave the loop first"
            )


_hooks: weakref.WeakKeyDictionary[Exchange, ModelHooks] = weakref.WeakKeyDictionary()


def hooks_of(exchanges: list[Exchange], link_gbps: float) -> ModelHooks:
    """One for all models that share a table. Collective the first time."""
    existing = next((_hooks[x] for x in exchanges if x in _hooks), None)
    hooks = existing or ModelHooks(Session(exchanges, link_gbps))
    for x in exchanges:
        if _hooks.setdefault(x, hooks) is hooks:
            hooks.add(x)
    return hooks


# ---- which modules -------------------------------------------------------------------------------------------------


def exchanges_of(model: torch.nn.Module) -> list[Exchange]:
    """In the order of the model's modules, which is the same on every rank."""
    return list(dict.fromkeys(x for m in _modules(model) for x in _own_exchanges(m)))


def _modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Without those inside TorchRec's sharded modules, whose forward is not called."""
    sharded = [m for m in model.modules() if torchrec.is_sharded_module(m)]
    inside = {m for outer in sharded for m in outer.modules() if m is not outer}
    return [m for m in model.modules() if m not in inside]


def _own_exchanges(module: torch.nn.Module) -> list[Exchange]:
    if isinstance(module, NativeTables):
        return [module._exchange]
    if torchrec.is_sharded_collection(module) and torchrec_support.unsupported_reason(module) is None:
        return torchrec_pooling.tables_of(module).exchanges
    return []


def compiled_parts(model: Any) -> list[torch.nn.Module]:
    """The outermost compiled modules of `model` that hold a supported table, in the model's order. If there are none,
    raises an error that says what to write instead."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(_not_a_module(model))
    outermost: list[torch.nn.Module] = []
    for module in model.modules():  # outer ones come first
        if nn_modules.is_compiled(module) and not any(module in outer.modules() for outer in outermost):
            outermost.append(module)
    parts = [m for m in outermost if exchanges_of(m)]
    compiled = {x for part in parts for x in exchanges_of(part)}
    uncompiled = [x for x in exchanges_of(model) if x not in compiled]
    if not parts and uncompiled:
        raise TypeError(
            f"freescale: LookaheadLoader expects a compiled model, as in {_COMPILE}; found {type(model).__name__}, in "
            f"which no module that looks up table {uncompiled[0].name} is compiled. If a compiled function calls it, "
            "make that function the forward of a torch.nn.Module, compile this module and pass it to the "
            "LookaheadLoader"
        )
    if not parts:
        raise ValueError(f"freescale: the model has no sharded table{_why_no_tables(model)}")
    if uncompiled:
        names = ", ".join(x.name for x in uncompiled)
        log.warning("freescale: not prefetched, because the modules that look them up are not compiled: %s", names)
    return parts


def _why_no_tables(model: torch.nn.Module) -> str:
    reasons = []
    for module in filter(torchrec.is_sharded_collection, _modules(model)):
        if (reason := torchrec_support.unsupported_reason(module)) is not None:
            reasons.append(f"{torchrec.qualified_name(module) or 'a collection'}: {reason}")
    if not reasons:
        return "; wrap it in DistributedModelParallel first"
    return f" that can be prefetched: TorchRec's own code runs {'; '.join(reasons)}. Iterate the loader directly"


def _not_a_module(given: Any) -> str:
    if not nn_modules.is_compiled(given):
        return f"freescale: LookaheadLoader expects a compiled model, as in {_COMPILE}; found {type(given).__name__}"
    name = getattr(given, "__name__", "step")
    return (
        f"freescale: LookaheadLoader expects a compiled model; found the compiled function {name}, whose calls cannot "
        "be seen from outside. Make it the forward of a torch.nn.Module that holds the model:\n"
        "    class Step(torch.nn.Module):\n"
        "        def __init__(self, model): super().__init__(); self.model = model\n"
        f"        def forward(self, batch): ...  # what {name} does, with self.model\n"
        '    step = Step(model); step.compile(backend="freescale")\n'
        "    for batch in LookaheadLoader(loader, step): loss = step(batch)"
    )
