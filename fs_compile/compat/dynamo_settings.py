"""What Dynamo is told so that a model with sharded tables becomes one graph, and which sizes it may keep symbolic."""

from __future__ import annotations

from typing import Any

import sympy


def _dynamo_config() -> Any:
    import torch._dynamo.config as dynamo

    return dynamo


def dynamo_settings(dynamic: bool) -> dict[str, Any]:
    """What Dynamo must be told so that a TorchRec model becomes one graph, as {attribute: value}."""
    settings: dict[str, Any] = {
        "capture_scalar_outputs": True,  # sizes that depend on the batch stay in the graph
        "capture_dynamic_output_shape_ops": True,  # and so do ops whose output sizes do (plan_now)
        "skip_torchrec": False,  # trace into TorchRec's modules
        "force_unspec_int_unbacked_size_like_on_torchrec_kjt": True,  # lengths per key are not constants
        "optimize_ddp": False,  # no cut of the graph at DDP's buckets
        # Training, evaluation, batches of one sample, with and without a plan: each has a graph. Torch gives up at 8.
        "recompile_limit": max(64, _dynamo_config().recompile_limit),
    }
    if dynamic:
        settings["assume_static_by_default"] = False
        settings["specialize_float"] = True  # else LayerNorm.eps and the like become inputs
    return settings


def shape_settings(dynamic: bool) -> dict[str, Any]:
    """The same for symbolic shapes."""
    if not dynamic:
        return {}
    return {
        "backed_size_oblivious": True,  # an empty batch does not make a graph of its own; see specialize_sizes_of_one
        "use_duck_shape": False,  # nor do two sizes that are equal by chance in the first batch
    }


def apply_dynamo_settings(dynamic: bool) -> dict[str, tuple[Any, Any]]:
    """Set them; return what changed as {name: (before, after)}."""
    import torch._dynamo.config as dynamo
    import torch.fx.experimental._config as shapes

    changed: dict[str, tuple[Any, Any]] = {}
    wanted = [(dynamo, k, v) for k, v in dynamo_settings(dynamic).items()]
    wanted += [(shapes, k, v) for k, v in shape_settings(dynamic).items()]
    for module, name, value in wanted:
        before = getattr(module, name)
        if before != value:
            setattr(module, name, value)
            changed[name] = (before, value)
    return changed

PLANNED = "freescale_plan"  # in the names by which Dynamo knows the tensors of a plan


def specialize_sizes_of_one() -> None:
    """A size of 1 in what the user passes makes a graph of its own, as it always does in torch.

    `backed_size_oblivious` lets sizes 0 and 1 stay symbolic, and takes every comparison with them for false without a
    guard. For 0 that is sound. For 1 it is not: what broadcasts, squeezes or is contiguous depends on it. So only the
    sizes of our own plans, which nothing broadcasts, may be anything.

    And a parameter's gradient has no symbolic size: Dynamo does not know its sources, so it cannot guard on them.
    (A view into one of DDP's buckets gets some.)
    """
    from torch._dynamo.source import TensorProperty, TensorPropertySource
    from torch.fx.experimental import _config as shapes
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    create = ShapeEnv.create_symbol
    if getattr(create, "_freescale", False):
        return

    def create_symbol(
        self: Any,
        val: Any,
        source: Any,
        dynamic_dim: Any = DimDynamic.DUCK,
        constraint_dim: Any = None,
        positive: Any = True,
        do_not_specialize_zero_one: bool = False,
        **kwargs: Any,
    ) -> Any:
        planned = PLANNED in source_name(source)
        is_base = getattr(getattr(source, "base", None), "member", None) == "_base"  # of a view
        not_asked_for = is_base or (dynamic_dim is DimDynamic.DYNAMIC and constraint_dim is None)
        if not_asked_for and _is_gradient(source) and not planned:
            dynamic_dim = DimDynamic.STATIC
        backed = type(val) is int and dynamic_dim is not DimDynamic.STATIC and shapes.backed_size_oblivious
        is_size = isinstance(source, TensorPropertySource) and source.prop is TensorProperty.SIZE
        theirs = backed and is_size and do_not_specialize_zero_one and not planned
        if theirs and val == 1:
            do_not_specialize_zero_one = False
        made = create(
            self, val, source, dynamic_dim, constraint_dim, positive, do_not_specialize_zero_one, **kwargs
        )
        if theirs and not is_base and made in self.backed_var_to_val:
            self.evaluate_expr(sympy.Ne(made, 1))
        return made

    create_symbol._freescale = True  # type: ignore[attr-defined]
    ShapeEnv.create_symbol = create_symbol  # type: ignore[method-assign, assignment]


def source_name(source: Any) -> str:
    return source.name() if callable(source.name) else source.name  # a method before 2.13


def _is_gradient(source: Any) -> bool:
    """A property of some tensor's `.grad`, or of what that is a view of."""
    tensor = getattr(source, "base", None)
    while getattr(tensor, "member", None) == "_base":
        tensor = tensor.base  # type: ignore[union-attr]
    return getattr(tensor, "member", None) == "grad"


def probe() -> None:
    """Raise if a private name that is used here is gone. Cheap, needs no process group."""
    import torch._dynamo.config as dynamo
    import torch.fx.experimental._config as shapes
    from torch._dynamo.source import TensorProperty, TensorPropertySource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    for name in dynamo_settings(True):
        getattr(dynamo, name)
    for name in shape_settings(True):
        getattr(shapes, name)
    assert ShapeEnv().backed_var_to_val == {}
    assert callable(ShapeEnv.create_symbol) and callable(ShapeEnv.evaluate_expr) and hasattr(DimDynamic, "DUCK")
    assert TensorProperty.SIZE and DimDynamic.STATIC and DimDynamic.DYNAMIC and isinstance(TensorPropertySource, type)
