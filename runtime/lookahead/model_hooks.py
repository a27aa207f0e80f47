"""Hooks that see every use of a model's tables while a loop is open, and what each use needs.

A step goes on if all ranks are at it; a forward pass of another batch, or reading the tables, has pending gradients
applied first; training without the compiled model, and loading into the tables, are refused.
"""

from __future__ import annotations

from typing import Any

import torch

from freescale.compat import compiled_modules
from freescale.kernels.transports import open_transports
from freescale.runtime.lookahead.loop_stack import LoopStack
from freescale.runtime.lookahead.loop_state import LoopState
from freescale.runtime.lookahead.model_tables import table_modules
from freescale.runtime.lookahead.rank_status import Action
from freescale.runtime.meter import METER
from freescale.runtime.tables import torchrec_patch


class ModelHooks:
    """They live as long as a loop does, or as an error that it could not raise."""

    def __init__(self, stack: LoopStack) -> None:
        self._stack = stack
        self._handles: dict[tuple[str, torch.nn.Module], list[Any]] = {}
        self._calling: torch.nn.Module | None = None  # whose call is under way, of those that begin a step

    def __deepcopy__(self, memo: Any) -> ModelHooks:
        return self  # a copy of the model in the middle of a loop brings its hooks along

    def install(self, model: torch.nn.Module, parts: list[torch.nn.Module]) -> None:
        """`parts`: the compiled modules in `model` that look up the tables."""
        # A step is a call of what is compiled, wherever it comes from; of several, the call of the model around them.
        called = parts[0] if len(parts) == 1 else model
        if ("call", called) not in self._handles:
            self._handles["call", called] = self._hook_calls(called)
        if ("tables", model) not in self._handles:
            self._handles["tables", model] = self._hook_tables(model, parts)
        self._set_calling(None)

    def loop_closed(self, loop: LoopState) -> None:
        for x in loop.exchanges:
            x.outside_step = False
        self._set_calling(self._calling)

    def remove_if_idle(self) -> None:
        if self._stack.idle:
            for handle in (h for handles in self._handles.values() for h in handles):
                handle.remove()
            self._handles.clear()

    def raise_deferred(self) -> None:
        try:
            self._stack.raise_deferred()
        except RuntimeError:
            self.remove_if_idle()
            raise

    def _hook_calls(self, called: torch.nn.Module) -> list[Any]:
        if compiled_modules.compiled_in_place(called):
            return [compiled_modules.AroundCompiledCall(called, self._before_forward, self._after_forward)]
        return [
            called.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            called.register_forward_hook(self._after_forward, always_call=True),
        ]

    def _hook_tables(self, model: torch.nn.Module, parts: list[torch.nn.Module]) -> list[Any]:
        handles: list[Any] = []
        tables = list(dict.fromkeys(m for part in parts for m in table_modules(part)))
        inside_tables = {m for table in tables for m in table.modules()}
        for module in model.modules():
            # Whoever reads a dense part alone may be a single rank: only what holds rows needs the others.
            holds_rows = any(m in inside_tables for m in module.modules())
            before = self.before_read if holds_rows else open_transports.drain
            handles.append(module.register_state_dict_pre_hook(before))
        for table in tables:
            handles.append(table.register_forward_pre_hook(self.before_lookup))
            handles.append(table.register_load_state_dict_pre_hook(self._before_load))
        handles.append(torchrec_patch.watch_optimizers(tables, self.before_read, self._before_load))
        return handles

    def _set_calling(self, module: torch.nn.Module | None) -> None:
        """A call that begins a step is under way, or none is: then a lookup is one that no hook of ours has seen."""
        self._calling = module
        for x in (x for loop in self._stack.loops for x in loop.exchanges):
            x.outside_step = module is None

    def _ignores(self, module: torch.nn.Module) -> bool:
        # Nothing can be done in the graph of a caller that is compiled itself; its lookups tell
        # (`Exchange.outside_step`).
        return torch.compiler.is_compiling() or self._calling not in (None, module)

    # -- uses of the model -----------------------------------------------------------------------------------------

    def _before_forward(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Every call of the compiled model, outside the graph."""
        if self._ignores(module):
            return
        self.raise_deferred()
        loop = self._stack.innermost
        if loop is None:
            return
        loop.end_forward()  # of a step that something worse than an Exception has left
        if torch.is_grad_enabled():
            self._begin_training(loop, (args, kwargs))
        else:
            self._begin_evaluation(loop, (args, kwargs))
        self._set_calling(module)
        METER.graph_begins()

    def _begin_training(self, loop: LoopState, inputs: Any) -> None:
        if len(self._stack.loops) > 1:
            raise RuntimeError(
                "freescale: a training step under a second LookaheadLoader while the first has not ended: a model "
                "is trained under one loader at a time (evaluation under torch.no_grad() is fine)"
            )
        self._stack.synchronize(Action.TRAIN, loop.identify_batch(inputs))
        loop.begin_step()

    def _begin_evaluation(self, loop: LoopState, inputs: Any) -> None:
        """Of the batch that was handed out last, if every rank has it and has not used it: by its plan."""
        if loop.current is not None and not loop.current.used:
            statuses = self._stack.synchronize(Action.EVALUATE, loop.identify_batch(inputs))
            if all(s.received == s.batch for s in statuses):
                loop.begin_step()
                return
        self._stack.flush()

    def _after_forward(self, module: torch.nn.Module, *args: Any) -> None:
        if self._ignores(module):
            return
        self._set_calling(None)
        if (loop := self._stack.innermost) is not None:
            loop.end_forward()

    def before_lookup(self, *args: Any) -> None:
        """A table is used without the compiled model."""
        if torch.compiler.is_compiling() or self._calling is not None:
            return
        self.raise_deferred()
        if self._stack.loops and torch.is_grad_enabled():
            raise RuntimeError(
                "freescale: a table is used in training without its compiled model while a LookaheadLoader's loop "
                "is on; call what was compiled, as in model(batch), not model.forward(batch), or leave the loop first. "
                "(Activation checkpointing does so if the lookup is inside: it looks up again in the backward pass. "
                "Leave the lookup outside. So does a compiled function that calls the model: make it the forward of a "
                'torch.nn.Module `step`, and write step.compile(backend="freescale") and LookaheadLoader(loader, step))'
            )
        self._stack.flush()

    def before_read(self, *args: Any) -> None:
        self.raise_deferred()
        self._stack.flush()
        open_transports.drain()

    def _before_load(self, *args: Any) -> None:
        self.raise_deferred()
        if self._stack.loops:
            raise RuntimeError(
                "freescale: load_state_dict while a LookaheadLoader's loop is on: rows for the next batch were fetched "
                "already; leave the loop first"
            )
