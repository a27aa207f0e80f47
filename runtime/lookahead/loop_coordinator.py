"""What the LookaheadLoaders of all models that share tables have in common: process groups, open loops, hooks."""

from __future__ import annotations

import logging
import weakref
from typing import cast

import torch
import torch.distributed as dist

from freescale.compat import distributed
from freescale.kernels.transports import link_speed
from freescale.runtime.lookahead.loop_stack import LoopStack
from freescale.runtime.lookahead.loop_state import LoopState
from freescale.runtime.lookahead.model_hooks import ModelHooks
from freescale.runtime.tables.table_exchange import Exchange

log = logging.getLogger(__name__)


class LoopCoordinator:
    """Opens and closes loops over tables."""

    def __init__(self, exchanges: list[Exchange], link_gbps: float) -> None:
        training_group = distributed.group_by_name(exchanges[0].group_name)
        timeout = distributed.timeout_of(training_group)
        self.stack = LoopStack(timeout)
        self._hooks = ModelHooks(self.stack)
        # Early rows and late gradients: a group of the same kind as the training's, so that urgent ones overtake them.
        self._background_group = cast(dist.ProcessGroup, dist.new_group(timeout=timeout))
        reaches_hosts = "cpu" in distributed.devices_of_group(training_group)
        self._host_group = training_group if reaches_hosts else self.stack.new_cpu_group()
        self._restore_group: dist.ProcessGroup | None = None
        bytes_per_second = link_speed.measure(self._background_group, exchanges[0].anchor.device, link_gbps)
        log.info("the link carries %.3g Gbit/s per rank", bytes_per_second * 8 / 1e9)

    def attach(self, exchange: Exchange) -> None:
        """What nobody waits for travels on the background group; lookups that no step makes are noticed."""
        exchange.background_group_name = self._background_group.group_name
        exchange.host_group_name = self._host_group.group_name
        exchange.before_lookup_outside_step = self._hooks.before_lookup
        exchange.before_read = self._hooks.before_read
        speeds = link_speed.bytes_per_second
        speeds[exchange.group_name] = speeds[self._background_group.group_name]

    def open_loop(
        self, model: torch.nn.Module, parts: list[torch.nn.Module], exchanges: list[Exchange]
    ) -> LoopState:
        """`parts`: the compiled modules in `model` that look up the tables."""
        self._hooks.raise_deferred()
        loop = self.stack.open(exchanges)
        self._hooks.install(model, parts)
        return loop

    def close_loop(self, loop: LoopState, defer_errors: bool, exception: str = "") -> None:
        """End a loop, and those inside it. `defer_errors`: Python will not raise what is raised here, so the next use
        of the tables does. `exception`: what leaves the loop, which the user is to see first."""
        while loop in self.stack.loops:
            innermost = self.stack.loops[-1]
            failure = self.stack.close_innermost(exception)
            self._hooks.loop_closed(innermost)
            if failure is not None and (defer_errors or innermost is not loop):
                self.stack.defer(failure)
            self._hooks.remove_if_idle()
            if failure is not None and exception:
                log.warning("%s", failure)
            elif failure is not None and innermost is loop:
                raise failure

    def restore_group(self) -> dist.ProcessGroup:
        """For LookaheadLoader.restore, in the user's thread: nothing comes between its collectives and those of the
        training or of planning."""
        if self._restore_group is None:
            self._restore_group = self.stack.new_cpu_group()
        return self._restore_group


_coordinators: weakref.WeakKeyDictionary[Exchange, LoopCoordinator] = weakref.WeakKeyDictionary()


def coordinator_of(exchanges: list[Exchange], link_gbps: float) -> LoopCoordinator:
    """One for all models that share a table."""
    existing = next((_coordinators[x] for x in exchanges if x in _coordinators), None)
    coordinator = existing or LoopCoordinator(exchanges, link_gbps)
    for x in exchanges:
        if _coordinators.setdefault(x, coordinator) is coordinator:
            coordinator.attach(x)
    return coordinator
