"""Finds the parameters among a Dynamo graph's inputs, and other owners of their gradients."""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn.parallel import DistributedDataParallel

_PART = re.compile(r"\._(?:modules|parameters)\['([^']+)'\]")
_WRAPPERS = ("_dmp_wrapped_module", "_orig_mod")


@dataclass(frozen=True)
class ParameterInput:
    """A parameter that is a graph input."""

    index: int  # index among the inputs
    node: fx.Node
    tensor: nn.Parameter
    name: str  # in the model; the same on every rank

    @property
    def is_trained(self) -> bool:
        return self.tensor.requires_grad and self.tensor.is_leaf


def parameter_inputs(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[ParameterInput]:
    """Parameters in the order of the inputs."""
    nodes = gm.graph.find_nodes(op="placeholder")
    return [
        ParameterInput(i, node, x, _short(_source_name(node)) or node.name)
        for i, (node, x) in enumerate(zip(nodes, inputs, strict=True))
        if isinstance(x, nn.Parameter)
    ]


def _source_name(node: fx.Node) -> str:
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        return ""
    return source.name() if callable(source.name) else source.name  # a method before 2.13


def _short(source: str) -> str:
    """L['self']._modules['mix']._parameters['weight'] -> mix.weight; other sources are unchanged."""
    parts = _PART.findall(source)
    return ".".join(p for p in parts if p not in _WRAPPERS) if parts else source


def copy_example(new: fx.Node, old: fx.Node) -> None:
    """Copy the example value of a node of a Dynamo graph to a new node."""
    new.meta.update({k: old.meta[k] for k in ("example_value", "tensor_dict") if k in old.meta})


def live_modules(kinds: tuple[type, ...]) -> list[nn.Module]:
    """All modules of these classes in this process."""
    return [x for x in gc.get_objects() if issubclass(type(x), kinds)]


def live_optimizers() -> list[torch.optim.Optimizer]:
    """All optimizers in this process."""
    return [x for x in gc.get_objects() if issubclass(type(x), torch.optim.Optimizer)]


def averaged_by_ddp(wrapper: DistributedDataParallel) -> list[nn.Parameter]:
    ignored = getattr(wrapper, "parameters_to_ignore", ())  # none during construction
    return [p for n, p in wrapper.named_parameters() if p.requires_grad and n.removeprefix("module.") not in ignored]


def left_out_of_ddp(tensor: torch.Tensor) -> bool:
    """Whether it was excluded by DDP._set_params_and_buffers_to_ignore_for_model, as TorchRec does for sharded
    tables."""
    return bool(getattr(tensor, "_ddp_ignored", False))


def before_ddp_wraps(call: Callable[[DistributedDataParallel], None]) -> None:
    """From now on, `call` gets each DDP wrapper during construction, before it sends anything."""
    # (Patching __init__ would attribute its warnings to freescale.)
    build = DistributedDataParallel._build_params_for_reducer

    @functools.wraps(build)
    def called_first(self: Any) -> Any:
        call(self)
        return build(self)

    DistributedDataParallel._build_params_for_reducer = called_first  # type: ignore[method-assign]


def leave_buffers_out_of_ddp(kind: type[nn.Module]) -> None:
    """From now on, DDP neither broadcasts nor casts the buffers of modules of this class. Others are unaffected.

    DDP reads the names to ignore from the module it wraps, so they cannot be set earlier."""

    def leave_out(wrapper: Any) -> None:
        buffers = {id(b): b for m in wrapper.module.modules() if isinstance(m, kind) for b in m.buffers()}
        for buffer in buffers.values():
            buffer._ddp_ignored = True  # type: ignore[attr-defined]
        named = wrapper.module.named_buffers(remove_duplicate=False) if buffers else ()
        wrapper.parameters_to_ignore |= {name for name, b in named if id(b) in buffers}

    before_ddp_wraps(leave_out)
