"""Which inputs of a Dynamo graph are parameters of a module, and who else takes care of them."""

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
    """A parameter that a graph takes."""

    index: int  # among the inputs
    node: fx.Node
    tensor: nn.Parameter
    name: str  # in the model, alike on every rank

    @property
    def is_trained(self) -> bool:
        return self.tensor.requires_grad and self.tensor.is_leaf


def parameter_inputs(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[ParameterInput]:
    """In the order of the inputs."""
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
    """L['self']._modules['mix']._parameters['weight'] -> mix.weight; what is not of this kind as it is."""
    parts = _PART.findall(source)
    return ".".join(p for p in parts if p not in _WRAPPERS) if parts else source


def copy_example(new: fx.Node, old: fx.Node) -> None:
    """A new node of a Dynamo graph has the value of another."""
    new.meta.update({k: old.meta[k] for k in ("example_value", "tensor_dict") if k in old.meta})


def live_modules(kinds: tuple[type, ...]) -> list[nn.Module]:
    """All modules of these classes in this process."""
    return [x for x in gc.get_objects() if issubclass(type(x), kinds)]


def live_optimizers() -> list[torch.optim.Optimizer]:
    """All in this process."""
    return [x for x in gc.get_objects() if issubclass(type(x), torch.optim.Optimizer)]


def averaged_by_ddp(wrapper: DistributedDataParallel) -> list[nn.Parameter]:
    ignored = getattr(wrapper, "parameters_to_ignore", ())  # none while it is being made
    return [p for n, p in wrapper.named_parameters() if p.requires_grad and n.removeprefix("module.") not in ignored]


def left_out_of_ddp(tensor: torch.Tensor) -> bool:
    """By DistributedDataParallel._set_params_and_buffers_to_ignore_for_model, as TorchRec does with sharded tables."""
    return bool(getattr(tensor, "_ddp_ignored", False))


def before_ddp_wraps(call: Callable[[DistributedDataParallel], None]) -> None:
    """From now on `call` gets each wrapper that is being made, before it sends anything."""
    # (With a function around __init__ its warnings would seem to be ours.)
    build = DistributedDataParallel._build_params_for_reducer

    @functools.wraps(build)
    def called_first(self: Any) -> Any:
        call(self)
        return build(self)

    DistributedDataParallel._build_params_for_reducer = called_first  # type: ignore[method-assign]


def leave_buffers_out_of_ddp(kind: type[nn.Module]) -> None:
    """From now on DDP neither sends nor casts the buffers of modules of this class. It does as always with all others.

    It takes the names to leave out from the very module that it wraps, so nothing can be set before that."""

    def leave_out(wrapper: Any) -> None:
        buffers = {id(b): b for m in wrapper.module.modules() if isinstance(m, kind) for b in m.buffers()}
        for buffer in buffers.values():
            buffer._ddp_ignored = True  # type: ignore[attr-defined]
        named = wrapper.module.named_buffers(remove_duplicate=False) if buffers else ()
        wrapper.parameters_to_ignore |= {name for name, b in named if id(b) in buffers}

    before_ddp_wraps(leave_out)
