"""Settings and symbolic sizes while Dynamo traces and compiles a model for freescale; other models keep torch's.

A plan holds the end of each key's values as the sizes of `value_counts.slots` (runtime/tables/step_plan.py), which grow
from key to key. For each split between two features torch asks whether they do; `drop_implied_guards` saves the checks.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import sympy
import torch
import torch._dynamo.config as dynamo_config
import torch.fx.experimental._config as shapes_config
from torch import fx
from torch._dynamo.utils import counters
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

PLANNED = "freescale_plan"  # in Dynamo's names of a plan's tensors
_SLOTS = ".slots["  # in names of tensors with the batch's own sizes, which user code computes with (step_plan.py)

log = logging.getLogger(__name__)

_UNBACKED = re.compile(r"\bu\d+\b|unbacked")  # in a torch error
_ASSUMPTION = re.compile(r"(Runtime assertion failed for expression )?(Eq|Ne)\(")  # the beginning of one
_FRAME = re.compile(r'File "(.+?)", line (\d+), in .+\n +(.+)')  # of a node's stack trace

_tracing: ContextVar[bool] = ContextVar("freescale_tracing", default=False)


def is_tracing() -> bool:
    """Whether this thread is tracing or compiling a model for freescale."""
    return _tracing.get()


def dynamo_settings(dynamic: bool) -> dict[str, Any]:
    """Those with which a TorchRec model becomes one graph."""
    settings: dict[str, Any] = {
        "capture_scalar_outputs": True,  # keep data-dependent sizes in the graph
        "capture_dynamic_output_shape_ops": True,  # and ops with data-dependent output sizes (plan_now)
        "skip_torchrec": False,  # trace into TorchRec's modules
        "force_unspec_int_unbacked_size_like_on_torchrec_kjt": True,  # lengths per key are not constants
        "optimize_ddp": False,  # do not split the graph at DDP's buckets; DDP still averages the gradients
        # Training, evaluation, batches of one sample, with and without a plan: each has its own graph. torch's limit is
        # 8.
        "recompile_limit": max(64, dynamo_config.recompile_limit),
    }
    if dynamic:
        settings["assume_static_by_default"] = False
        settings["specialize_float"] = True  # otherwise LayerNorm.eps and similar values become inputs
    return settings


def shape_settings(dynamic: bool) -> dict[str, Any]:
    return {"use_duck_shape": False} if dynamic else {}  # sizes may be equal by chance in the first batch


@contextlib.contextmanager
def tracing(dynamic: bool) -> Iterator[None]:
    """The settings hold inside, in this thread or process as torch's own `patch` does."""
    patch_shapes: Any = shapes_config.patch  # type: ignore[attr-defined]
    with compiling(), dynamo_config.patch(dynamo_settings(dynamic)), patch_shapes(shape_settings(dynamic)):
        yield


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """`is_tracing` inside, without the settings: torch compiles a backward graph later, in a thread of autograd's."""
    token = _tracing.set(True)
    try:
        yield
    finally:
        _tracing.reset(token)


def enter_while_tracing(
    is_ours: Callable[[Any], bool],
    context: Callable[[], Any],
    retries: Sequence[Callable[[Exception], Any]],
    failed: Callable[[Exception], Exception],
    tell: Callable[[GraphBreak], None],
) -> None:
    """From now on, each frame compilation for a backend that `is_ours` runs inside `context()`. If it fails, it runs
    again inside the context that each of `retries` gives for the error, if any; if all fail, what `failed` makes of the
    first error is raised. `tell` gets each new graph break."""
    from torch._dynamo.convert_frame import CatchErrorsWrapper

    convert = CatchErrorsWrapper.__call__
    if hasattr(convert, "_freescale"):
        return

    @functools.wraps(convert)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_ours(self):
            return convert(self, *args, **kwargs)
        with context(), _recording_breaks(tell) as converted:
            try:
                return converted(convert(self, *args, **kwargs), args[0])
            except Exception as error:
                first = error
            try:
                for retry in retries:
                    if (again := retry(first)) is not None:
                        try:
                            with again:
                                return converted(convert(self, *args, **kwargs), args[0])
                        except Exception as error:
                            log.info("freescale traced again with other settings, which failed too: %s", error)
                raise failed(first)
            finally:
                del first  # a cycle of error and frame would keep the user's loop open after the error

    call._freescale = True  # type: ignore[attr-defined]
    CatchErrorsWrapper.__call__ = call  # type: ignore[method-assign]


@contextlib.contextmanager
def breaking_at_reads() -> Iterator[None]:
    """Inside, Dynamo breaks the graph where a model reads a tensor's value (`.item()`, `int(x)`) or makes a tensor of a
    size that depends on values, as it does by default: the next graph then knows the size."""
    with dynamo_config.patch(capture_scalar_outputs=False, capture_dynamic_output_shape_ops=False):
        yield


class GraphBreak(NamedTuple):
    where: str  # "file:line"
    code: str  # that line; or the name of the function there, of which torch compiles nothing
    reason: str
    is_skipped: bool = False  # the latter

    def is_of_ddp(self) -> bool:
        """Whether it is in DDP's own forward, around the wrapped model: its logger, context manager or reducer."""
        names = ("set_runtime_stats_and_log", "_inside_ddp_forward")
        in_ddp = self.where.rpartition(":")[0] == torch.nn.parallel.distributed.__file__
        return in_ddp or any(name in self.reason for name in names)

    def is_at_read(self) -> bool:
        """Whether it is one of those that `breaking_at_reads` makes."""
        return "capture_scalar_outputs=False" in self.reason or self.reason.startswith("Dynamic shape operator")


# Each break of a model compiled for freescale: how often it was compiled.
GRAPH_BREAKS: Counter[GraphBreak] = Counter()


@contextlib.contextmanager
def _recording_breaks(tell: Callable[[GraphBreak], None]) -> Iterator[Callable[[Any, Any], Any]]:
    """Add the graph breaks of the frame compiled inside to GRAPH_BREAKS; `tell` of new ones. Yields a function that
    gets the frame and what it was converted to, which it returns. (Dynamo's counters omit breaks at a branch, and
    functions that it skips because of a break in a loop. It never compiles generators.)"""
    from torch._dynamo.output_graph import graph_break_reasons

    before, refused = len(graph_break_reasons), dict(counters["unimplemented"])
    skipped: list[GraphBreak] = []

    def converted(found: Any, frame: Any) -> Any:
        new = [reason for reason, n in counters["unimplemented"].items() if n > refused.get(reason, 0)]
        code = frame.f_code
        if found.guarded_code is None and new and not code.co_flags & inspect.CO_GENERATOR:
            skipped.append(GraphBreak(f"{code.co_filename}:{code.co_firstlineno}", code.co_name, new[-1], True))
        return found

    yield converted
    # One break has two reasons where Dynamo traced the frame again because of it.
    breaks = [*skipped, *map(_graph_break, graph_break_reasons[before:])]
    for place, one in {b.where or b.reason: b for b in reversed(breaks)}.items():
        same = next((b for b in GRAPH_BREAKS if place in (b.where, b.reason)), None)
        if same is None:
            tell(one)
        GRAPH_BREAKS[same or one] += 1


def _graph_break(reason: Any) -> GraphBreak:
    stack = list(reason.user_stack)
    if not stack:
        return GraphBreak("", "", reason.reason)
    return GraphBreak(f"{stack[-1].filename}:{stack[-1].lineno}", stack[-1].line or "", reason.reason)


def choose_symbols() -> None:
    """While a model is traced for freescale, make the sizes of plans unbacked symbols, so that no graph depends on
    their values, including 0 and 1. A parameter's gradient (a view into a DDP bucket) gets no symbolic size: Dynamo
    does not know its sources, so it cannot guard on them."""
    from torch._dynamo.source import TensorProperty, TensorPropertySource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    unbacked = DimDynamic.__members__.get("UNBACKED") or DimDynamic["SIZE_LIKE_UNBACKED"]  # before 2.14
    create = ShapeEnv.create_symbol
    if hasattr(create, "_freescale"):
        return

    @functools.wraps(create)
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
        if _tracing.get() and type(val) is int and dynamic_dim is not DimDynamic.STATIC:
            name = source_name(source)
            is_base = getattr(getattr(source, "base", None), "member", None) == "_base"  # of a view
            if PLANNED not in name:
                not_asked_for = is_base or (dynamic_dim is DimDynamic.DYNAMIC and constraint_dim is None)
                if not_asked_for and _is_gradient(source):
                    dynamic_dim = DimDynamic.STATIC
            elif isinstance(source, TensorPropertySource) and source.prop is TensorProperty.SIZE and _SLOTS not in name:
                made = create(self, val, source, unbacked, constraint_dim, positive, **kwargs)
                planned_hints(self)[made] = val
                return made
        return create(self, val, source, dynamic_dim, constraint_dim, positive, do_not_specialize_zero_one, **kwargs)

    create_symbol._freescale = True  # type: ignore[attr-defined]
    ShapeEnv.create_symbol = create_symbol  # type: ignore[method-assign, assignment]


def depends_on_data(error: BaseException) -> bool:
    """Whether a trace failed because something depends on an unbacked size."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, GuardOnDataDependentSymNode) or _UNBACKED.search(str(found)):
            return True
        found = found.__cause__ or found.__context__
    return False


def reason_of(error: BaseException) -> str:
    """The line of torch's message that names the size."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return next((line for line in lines if _UNBACKED.search(line)), lines[0])


def line_of(error: BaseException) -> str:
    """The user's line in which tracing failed, as "file:line (code)"; empty if torch does not know."""
    found: BaseException | None = error
    while found is not None:
        if stack := getattr(found, "real_stack", None):
            return f"{stack[-1].filename}:{stack[-1].lineno} ({stack[-1].line})"
        found = found.__cause__ or found.__context__
    return ""


def places_of_sizes(gm: fx.GraphModule) -> dict[str, str]:
    """For each symbol of a size that a Dynamo graph reads from a tensor, the user's line as "file:line (code)": the
    innermost outside freescale, where a lookup reads it."""
    found = {}
    ours = {getattr(m, "__file__", None) for name, m in list(sys.modules.items()) if name.split(".")[0] == "freescale"}
    for node in gm.graph.nodes:
        symbols = node.meta.get("unbacked_bindings") or ()
        frames = _FRAME.findall(node.meta.get("stack_trace") or "") if symbols else ()
        for file, line, code in [frame for frame in frames if frame[0] not in ours][-1:]:
            found.update(dict.fromkeys(map(str, symbols), f"{file}:{line} ({code})"))
    return found


def explain_assumption(error: BaseException, places: dict[str, str]) -> str:
    """What to do if a batch does not satisfy what torch assumed of sizes; empty if the error is another one."""
    words = str(error)
    lines = list(dict.fromkeys(places[symbol] for symbol in _UNBACKED.findall(words) if symbol in places))
    if not lines or not _ASSUMPTION.match(words):
        return ""
    assumed = words.partition("for expression ")[2].partition(" on node ")[0]
    return (
        f"freescale: torch compiled one graph by assuming {assumed or words}, which does not hold for this batch; "
        f"these are sizes read at {' and '.join(lines)}. If they may differ, call torch._dynamo.graph_break() before "
        "the line that uses them"
    )


def planned_hints(shape_env: Any) -> dict[Any, int]:
    """Sizes of plans in the traced batch. (torch's own hints of unbacked sizes are part of its cache keys, so ranks
    with different batches would miss each other's code.)"""
    return shape_env.__dict__.setdefault("_freescale_hints", {})


def source_name(source: Any) -> str:
    return source.name() if callable(source.name) else source.name  # a method before 2.13


def _is_gradient(source: Any) -> bool:
    """Whether the source is a property of some tensor's `.grad`, or of the base of that view."""
    tensor = getattr(source, "base", None)
    while getattr(tensor, "member", None) == "_base":
        tensor = tensor.base  # type: ignore[union-attr]
    return getattr(tensor, "member", None) == "grad"


_SLOT = re.compile(r"(.*\bfreescale_plan\b.*\.slots)\[(\d+)\]\.size\(\)\[0\]")


def leave_out_contiguity() -> None:
    """While a model is compiled for freescale, AOTAutograd omits memory formats, which Inductor does not read."""
    from torch.fx.experimental import proxy_tensor

    extract = proxy_tensor._extract_tensor_metadata
    if hasattr(extract, "_freescale"):
        return

    @functools.wraps(extract)
    def extract_metadata(*args: Any, **kwargs: Any) -> Any:
        return extract(*args, **{"include_contiguity": not is_tracing(), **kwargs})

    extract_metadata._freescale = True  # type: ignore[attr-defined]
    proxy_tensor._extract_tensor_metadata = extract_metadata


def drop_implied_guards() -> int:
    """Called by a backend after tracing: drop guards that follow from growing slots. Returns how many."""
    context = torch._guards.TracingContext.try_get()
    shape_env = None if context is None or context.fake_mode is None else context.fake_mode.shape_env
    if shape_env is None:
        return 0
    slots = _slots(shape_env)
    kept = [g for g in shape_env.guards if not any(_is_implied(g.expr, of_plan) for of_plan in slots)]
    dropped = len(shape_env.guards) - len(kept)
    shape_env.guards[:] = kept
    return dropped


def _slots(shape_env: Any) -> list[list[sympy.Symbol]]:
    plans: dict[str, dict[int, sympy.Symbol]] = {}
    for symbol, sources in shape_env.var_to_sources.items():
        for source in sources:
            if match := _SLOT.fullmatch(source_name(source)):
                plans.setdefault(match[1], {})[int(match[2])] = shape_env.replace(symbol)
    ordered = [[slots[i] for i in sorted(slots)] for slots in plans.values()]
    return [slots for slots in ordered if all(isinstance(s, sympy.Symbol) for s in slots)]


def _is_implied(relation: sympy.Basic, slots: list[sympy.Symbol]) -> bool:
    """Whether 0 <= slots[0] <= slots[1] <= ... implies `relation`: as a linear form in the steps between slots, which
    are nonnegative, it must have no negative coefficient."""
    if not isinstance(relation, (sympy.Ge, sympy.Le)):
        return False
    terms = dict((relation.gts - relation.lts).as_coefficients_dict())
    if terms.pop(sympy.S.One, 0) < 0:
        return False
    coefficient = 0  # of the step that ends at a slot: sum over that slot and all later ones
    for slot in reversed(slots):
        coefficient += terms.pop(slot, 0)
        if coefficient < 0:
            return False
    return not terms
