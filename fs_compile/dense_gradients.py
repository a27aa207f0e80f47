"""`FREESCALE_DENSE=allreduce`: the graph averages the gradients of dense parameters, instead of DDP.

In Dynamo's graph, each parameter goes through the op `averaged_parameter`, whose gradient is averaged over the ranks.
So the set of averaged parameters is part of the graph and of torch's cache keys. A parameter qualifies if it is a leaf
nn.Parameter that requires a gradient and has no other owner: DDP, a sharded table, or code that excluded it from DDP.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from freescale.compat import distributed, nn_modules, torchrec
from freescale.compat.nn_modules import ParameterInput
from freescale.config import DENSE_CHOICES, Config, ConfigError
from freescale.kernels import dense_average
from freescale.runtime import agreement, dense_parameters
from freescale.runtime.dense_parameters import AVERAGED_BY_TABLES, AVERAGED_IN_GRAPHS

log = logging.getLogger(__name__)

_warn_once = cache(log.warning)
_MOMENT = 5.0  # seconds


def average_in_graph(gm: fx.GraphModule, inputs: Sequence[Any], cfg: Config) -> Callable[[Sequence[Any]], None] | None:
    """Mark the parameters of a Dynamo graph. Returns a function to call with the graph's arguments before its first
    run; None if there is nothing to average."""
    if cfg.dense == "off" or not torch.is_grad_enabled() or not dist.is_initialized():
        return None
    group_name = _group_name(gm)
    if distributed.group_by_name(group_name).size() == 1:
        return None
    owners = _Owners()
    parameters = _unowned(nn_modules.parameter_inputs(gm, inputs), owners, cfg)
    trained = [p for p in parameters if p.is_trained]
    if cfg.compression().dense is not None:  # an op must find each one's unsent values
        trained = [replace(p, name=dense_average.register(p.tensor, p.name)) for p in trained]
    marked = _mark(gm, trained, group_name)
    if not marked:
        return None
    _refuse_ddp_from_now_on()
    for p in marked:
        AVERAGED_IN_GRAPHS[p.tensor] = None
    _watch_parameters_outside_graphs(marked, owners)
    places = [(p.name, p.index) for p in parameters]

    def before_first_run(args: Sequence[Any]) -> None:
        dense_parameters.begin_alike([(name, args[i]) for name, i in places], group_name, cfg.timeout)

    return before_first_run


def compare_settings(gm: fx.GraphModule, inputs: Sequence[Any], cfg: Config) -> None:
    """For a graph without exchanges: otherwise ranks that average would wait for ranks that do not."""
    if torch.is_grad_enabled() and any(p.is_trained for p in nn_modules.parameter_inputs(gm, inputs)):
        agreement.compare_soon("FREESCALE_DENSE", cfg.dense, DENSE_CHOICES, min(_MOMENT, cfg.timeout))


def before_each_run(gm: fx.GraphModule, cfg: Config) -> Callable[[Sequence[Any]], None] | None:
    """A function to call with the graph's arguments before each run, or None."""
    if cfg.compression().dense is None:
        return None
    place = {n: i for i, n in enumerate(gm.graph.find_nodes(op="placeholder"))}
    marks = [n for n in gm.graph.nodes if n.target is torch.ops.freescale.averaged_parameter.default]
    names, places = [n.args[1] for n in marks], [place[n.args[0]] for n in marks]
    return lambda args: dense_average.bind(names, [args[i] for i in places])


def _mark(gm: fx.GraphModule, parameters: list[ParameterInput], group_name: str) -> list[ParameterInput]:
    """Mark those that the graph uses. Their gradients are complete in the reverse order of first use."""
    position = {n: i for i, n in enumerate(gm.graph.nodes)}
    first_use = {p.index: min((position[u] for u in p.node.users if u.op != "output"), default=-1) for p in parameters}
    used = [p for p in parameters if first_use[p.index] >= 0]
    used.sort(key=lambda p: (-first_use[p.index], -p.index))
    behind_inputs = next(n for n in gm.graph.nodes if n.op != "placeholder")
    for place, p in enumerate(used):
        with gm.graph.inserting_before(behind_inputs):
            new = gm.graph.call_function(
                torch.ops.freescale.averaged_parameter.default, (p.node, p.name, place, group_name)
            )
        nn_modules.copy_example(new, p.node)
        # The graph's outputs keep the parameter itself.
        for user in [u for u in p.node.users if u is not new and u.op != "output"]:
            user.replace_input_with(p.node, new)
    gm.recompile()
    return used


def _group_name(gm: fx.GraphModule) -> str:
    """The group of the ranks that exchange rows in this graph, if it is not the world."""
    world = dist.group.WORLD
    assert world is not None
    nodes = (n for m in gm.modules() if isinstance(m, fx.GraphModule) for n in m.graph.nodes)
    names = dict.fromkeys(name for n in nodes if (name := _group_argument(n)) is not None)
    smaller = [name for name in names if distributed.group_by_name(name).size() < world.size()]
    members = {tuple(dist.get_process_group_ranks(distributed.group_by_name(name))) for name in smaller}
    if len(members) > 1:
        raise ConfigError("FREESCALE_DENSE=allreduce: the tables of a graph use different process groups")
    return smaller[0] if smaller else str(world.group_name)


def _group_argument(node: fx.Node) -> str | None:
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = target.default
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "freescale":
        return None
    names = [a.name for a in target._schema.arguments]
    found = node.args[names.index("group_name")] if "group_name" in names else None
    return found if isinstance(found, str) else None


# ---- ownership -------------------------------------------------------------------------------------------------------


class _Owners:
    """Current owners of a tensor's gradient other than the graph."""

    def __init__(self) -> None:
        self.modules = nn_modules.live_objects(nn.Module)
        sharded = [m for m in self.modules if torchrec.is_sharded_module(m)]  # our own tables have no parameters
        wrappers = [m for m in self.modules if isinstance(m, DistributedDataParallel)]
        self._of_tables = {id(p) for m in sharded for p in m.parameters()}
        self._of_ddp = {id(p) for m in wrappers for p in nn_modules.averaged_by_ddp(m)}

    def leave_alone(self, tensor: torch.Tensor) -> bool:
        of_tables = id(tensor) in self._of_tables or tensor in AVERAGED_BY_TABLES
        return of_tables or nn_modules.left_out_of_ddp(tensor)

    def ddp_averages(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._of_ddp


def _unowned(parameters: list[ParameterInput], owners: _Owners, cfg: Config) -> list[ParameterInput]:
    ours = [p for p in parameters if not owners.leave_alone(p.tensor)]
    if theirs := [p for p in ours if owners.ddp_averages(p.tensor)]:
        _say_that_ddp_averages(theirs, cfg)
    return [p for p in ours if not owners.ddp_averages(p.tensor)]


def _say_that_ddp_averages(theirs: list[ParameterInput], cfg: Config) -> None:
    message = (
        f"FREESCALE_DENSE=allreduce leaves {len(theirs)} parameters (first: {theirs[0].name}) to "
        "DistributedDataParallel, which averages their gradients after the backward pass; remove the DDP wrapper "
        "(for DistributedModelParallel: init_data_parallel=False) so the graph averages these gradients"
    )
    if cfg.strict:
        raise ConfigError(message)
    _warn_once(message)


@cache
def _refuse_ddp_from_now_on() -> None:
    def check(wrapper: DistributedDataParallel) -> None:
        for name, parameter in wrapper.module.named_parameters():
            if parameter in AVERAGED_IN_GRAPHS and not nn_modules.left_out_of_ddp(parameter):
                raise ConfigError(
                    f"FREESCALE_DENSE=allreduce: compiled graphs already average the gradient of {name}; "
                    "do not wrap it in DistributedDataParallel"
                )

    nn_modules.before_ddp_wraps(check)


def _watch_parameters_outside_graphs(marked: list[ParameterInput], owners: _Owners) -> None:
    """Raise if a parameter of the same model has a gradient but is in no graph: its gradient would not be averaged."""
    for name, parameter in _parameters_beside(marked, owners.modules):
        if parameter in _watched or owners.leave_alone(parameter) or owners.ddp_averages(parameter):
            continue
        _watched[parameter] = None

        def check(p: torch.Tensor, name: str = name) -> None:
            if p not in AVERAGED_IN_GRAPHS and p.grad is not None:
                raise RuntimeError(
                    f"freescale: FREESCALE_DENSE=allreduce: {name} has a gradient, but no compiled graph uses it: it "
                    "is used outside of them (fullgraph=True shows where), and its gradient would not be averaged"
                )

        parameter.register_post_accumulate_grad_hook(check)


_watched = WeakTensorKeyDictionary()


def _parameters_beside(marked: list[ParameterInput], modules: list[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """The other trainable parameters of all modules that contain a marked one. Calls no method of other modules of the
    process, which may override it."""
    ids = {id(p.tensor) for p in marked}
    around: set[int] = set()
    more = {id(m) for m in modules if any(id(p) in ids for p in m._parameters.values())}
    while more:
        around |= more
        more = {id(m) for m in modules if any(id(part) in more for part in m._modules.values())} - around
    found = {id(p): (n, p) for m in modules if id(m) in around for n, p in m.named_parameters() if p.requires_grad}
    return [(n, p) for i, (n, p) in found.items() if i not in ids]
