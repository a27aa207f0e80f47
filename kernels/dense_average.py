"""Compressed average of dense gradients, with error feedback: only the largest values of each block (compression.py)
are sent, the others later. Every rank sums what it received in rank order, so the results are bit-identical.

The error of a parameter is the values not sent yet. It is part of the training state: after an optimizer step it is
stored in `optimizer.state[p]` as "freescale_error", next to "freescale_error_rank". From then on that is the source of
truth: what load_state_dict writes there is used next. If it has no error, or another rank's, the error starts at zero.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, MutableMapping, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from freescale.compat import distributed, nn_modules
from freescale.kernels import compression, row_packing


def start(
    gradients: list[torch.Tensor], parameters: str, group: dist.ProcessGroup, text: str
) -> tuple[torch.Tensor, dist.Work, int, Callable[[], None]]:
    """Return the average, its Work, the bytes to receive, and a function to call after the wait."""
    packing = compression.parse(text)
    errors = errors_of(parameters.split(", "), gradients, group.rank())
    sent = pack_with_error(gradients, errors, packing)
    received = sent.new_empty((group.size(), *sent.shape))
    work = distributed.start_all_gather(received.view(-1), sent.view(-1), group)
    out = torch.empty(sum(g.numel() for g in gradients), device=sent.device)
    return out, work, (group.size() - 1) * sent.nbytes, partial(average, received, out, packing)


def pack_with_error(
    gradients: list[torch.Tensor], errors: list[torch.Tensor], packing: compression.Packing
) -> torch.Tensor:
    """Return the packed values; `errors` becomes the rest. Nonfinite values that do not fit in this message are
    dropped, since they would stay in the error forever."""
    flat = torch.cat([(g + e).reshape(-1) for g, e in zip(gradients, errors, strict=True)])
    sent = row_packing.take_largest(flat[:, None], _one_slab(flat), packing, clear=True)
    flat.nan_to_num_(0.0, 0.0, 0.0)
    for error, rest in zip(errors, flat.split([e.numel() for e in errors]), strict=True):
        error.copy_(rest.view(error.shape))
    return sent


def _one_slab(x: torch.Tensor) -> compression.Slabs:
    return compression.Slabs.of(torch.tensor([x.shape[0]]))


def average(received: torch.Tensor, out: torch.Tensor, packing: compression.Packing) -> None:
    if received.is_cuda:
        received.record_stream(torch.cuda.current_stream(received.device))  # may differ from the launch's stream
    with torch.no_grad():
        out.zero_()
        for sent in received:  # one per rank
            row_packing.put_back(sent, out[:, None], _one_slab(out), packing, add=True)
        out.mul_(1.0 / received.shape[0])


log = logging.getLogger(__name__)

ERROR, RANK = "freescale_error", "freescale_error_rank"


class ParameterError:
    def __init__(self, name: str, parameter: torch.Tensor | None) -> None:
        self.name = name
        self.parameter = None if parameter is None else weakref.ref(parameter)
        self.error: torch.Tensor | None = None
        self.optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self.in_state = False  # whether it was in the optimizer's state at the last check
        self._searched = False

    def current(self, gradient: torch.Tensor, rank: int) -> torch.Tensor:
        """The error tensor itself, in the gradient's shape, to be updated in place."""
        if not self._searched:
            self._searched = True
            self._find_optimizer()
        state = self._state()
        if state is not None and state.get(ERROR) is not None:
            if not self.in_state or state[ERROR] is not self.error:
                self.error = self._loaded(state, gradient, rank)
            self.in_state = True
        elif self.in_state:  # the state was replaced by one without an error
            self.error, self.in_state = None, False
        if self.error is None:
            self.error = torch.zeros_like(gradient, memory_format=torch.contiguous_format)
        return self.error

    def put_into_state(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, rank: int) -> None:
        if self.error is not None:
            optimizer.state[parameter].update({ERROR: self.error, RANK: rank})
            self.optimizer, self.in_state = weakref.ref(optimizer), True

    def _state(self) -> dict[str, Any] | None:
        optimizer = None if self.optimizer is None else self.optimizer()
        parameter = None if self.parameter is None else self.parameter()
        if optimizer is None or parameter is None or parameter not in optimizer.state:
            return None
        return optimizer.state[parameter]  # type: ignore[no-any-return]

    def _find_optimizer(self) -> None:
        """Find the parameter's optimizer if it was created, and perhaps loaded, before the first step."""
        parameter = None if self.parameter is None else self.parameter()
        for optimizer in nn_modules.live_objects(torch.optim.Optimizer) if parameter is not None else ():
            if any(p is parameter for group in optimizer.param_groups for p in group["params"]):
                self.optimizer = weakref.ref(optimizer)

    def _loaded(self, state: dict[str, Any], gradient: torch.Tensor, rank: int) -> torch.Tensor | None:
        if int(state.get(RANK, rank)) != rank:
            _say_that_it_is_another_ranks(rank, int(state[RANK]))
            state.pop(ERROR)
            return None
        loaded: torch.Tensor = state[ERROR]
        if loaded.shape != gradient.shape or loaded.dtype != gradient.dtype or not loaded.is_contiguous():
            raise RuntimeError(
                f"freescale: expected the error of {self.name} in the optimizer's state to be a contiguous "
                f"{gradient.dtype} {list(gradient.shape)}, found {loaded.dtype} {list(loaded.shape)}"
            )
        return loaded


_by_parameter: MutableMapping[torch.Tensor, ParameterError] = WeakTensorKeyDictionary()
_by_name: dict[str, ParameterError] = {}
_times_registered: Counter[str] = Counter()


def register(parameter: torch.Tensor, preferred_name: str) -> str:
    """Register a parameter and return the name by which ops find its error: unique in this process, and the same on
    every rank if all ranks build their models in the same order."""
    _keep_errors_in_states()
    known = _of(parameter, preferred_name)
    if _by_name.get(known.name) is known:
        return known.name
    _times_registered[preferred_name] += 1
    times = _times_registered[preferred_name]
    known.name = preferred_name if times == 1 else f"{preferred_name}#{times}"
    _by_name[known.name] = known
    return known.name


def bind(names: Sequence[str], parameters: Sequence[torch.Tensor]) -> None:
    """Bind a graph's names to these parameters before it runs: two models may share a graph."""
    for name, parameter in zip(names, parameters, strict=True):
        known = _by_name[name].parameter
        if known is None or known() is not parameter:
            _by_name[name] = _of(parameter, name)


def _of(parameter: torch.Tensor, name: str) -> ParameterError:
    if parameter not in _by_parameter:
        _by_parameter[parameter] = ParameterError(name, parameter)
    return _by_parameter[parameter]


def errors_of(names: Sequence[str], gradients: Sequence[torch.Tensor], rank: int) -> list[torch.Tensor]:
    global _rank
    _rank = rank
    for name in names:
        if name not in _by_name:
            _by_name[name] = ParameterError(name, None)
    return [_by_name[n].current(g, rank) for n, g in zip(names, gradients, strict=True)]


_rank = 0  # in the group of the last launch


@cache
def _keep_errors_in_states() -> None:
    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            # Wait until the optimizer has created its own state: some optimizers take any state for a complete one.
            if p.grad is not None and (known := _by_parameter.get(p)) is not None:
                known.put_into_state(optimizer, p, _rank)

    register_optimizer_step_post_hook(after_step)


@cache
def _say_that_it_is_another_ranks(rank: int, other: int) -> None:
    log.warning(
        "freescale: rank %d loaded the optimizer state of rank %d; the values that rank had not sent yet are dropped. "
        "Save and load the optimizer state on every rank",
        rank, other,
    )  # fmt: skip
