"""Compiled code calls our ops as functions, without torch's dispatcher, unless somebody watches ops."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import freescale.kernels  # noqa: F401  (registers the ops)
from freescale.compat.direct_calls import DirectOps, names_of
from ranks import run_ranks


class Watch(TorchDispatchMode):
    """Writes down the ops of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "freescale":
            self.ops.append(op.name())
        return op(*args, **(kwargs or {}))


def _train() -> tuple[list[bool], list[str], set[str], bool]:
    """Whether the update of each step was an op; the ops that a mode has seen, and a profiler; whether all steps have
    changed the table in the same way."""
    import freescale

    table = freescale.ShardedEmbedding(20, 4, name="item", lr=0.5)
    model = torch.nn.Sequential(table, torch.nn.Linear(4, 1))
    run = torch.compile(model, backend="freescale", fullgraph=True, options={"codegen": "inductor", "strict": True})
    ids, was_op, results = torch.tensor([3, 5, 3]), [], []
    apply_update, start = table.apply_update, table.weight.clone()

    def update(*args: Any) -> None:
        was_op.append(any(frame.filename.endswith("torch/_ops.py") for frame in inspect.stack()))
        apply_update(*args)

    table.apply_update = update

    def step(around_backward: Any = None) -> None:
        table.weight.copy_(start)
        loss = run(ids).sum()
        with around_backward or nullcontext():
            loss.backward()
        results.append(table.weight.clone())

    step()  # torch runs the first one under a mode of its own
    step()
    with torch.profiler.profile() as profile:
        step()
    step(watch := Watch())
    step()
    names = {event.name for event in profile.events() if event.name.startswith("freescale::")}
    same = all(torch.equal(result, results[0]) for result in results) and not torch.equal(start, results[0])
    return was_op[1:], watch.ops, names, same


def test_ops_are_functions_unless_they_are_watched():
    ((was_op, watched, profiled, same),) = run_ranks(_train, 1)
    assert was_op == [False, True, True, False] and same
    assert {"freescale::sum_rows", "freescale::update_"} <= set(watched) & profiled
    assert "freescale::plan_now" in profiled


def code_of(expression: str, names: dict[str, Any]) -> Any:
    """As if Inductor had generated it."""
    exec(f"class Runner:\n    def call(self, x): return {expression}", names)  # noqa: S102
    return SimpleNamespace(compiled_fn_runner=names["Runner"]())


def test_a_function_for_the_gpu_and_one_for_everything_else():
    ops = DirectOps("freescale")
    ops.add("pack_rows", lambda x: "any")
    ops.add("sum_rows", lambda x: "elsewhere")
    ops.add("sum_rows", lambda x: "on a GPU", on_gpu=True)
    calls = (f"torch.ops.freescale.{name}.default(x)" for name in ("pack_rows", "sum_rows"))
    compiled = code_of(f"[{', '.join(calls)}]", {"torch": torch})
    ops.call_from(names_of(compiled))
    ops.call_from(names_of(compiled))  # of a second graph with the same code
    call = compiled.compiled_fn_runner.call
    assert call(SimpleNamespace(is_cuda=False)) == ["any", "elsewhere"]
    assert call(SimpleNamespace(is_cuda=True)) == ["any", "on a GPU"]


def test_everything_else_is_as_it_was():
    ops = DirectOps("freescale")
    ops.add("sum_rows", lambda x: x)
    names = "float32", "ops.aten.add.Tensor", "ops.freescale.update_.default", "ops.freescale.sum_rows"
    compiled = code_of(", ".join(f"torch.{name}" for name in names), {"torch": torch})
    ops.call_from(names_of(compiled))
    kind, add, update, packet = compiled.compiled_fn_runner.call(None)
    assert kind is torch.float32 and add is torch.ops.aten.add.Tensor and update is torch.ops.freescale.update_.default
    assert packet.overloads() == ["default"]


def test_code_that_is_not_pythons_is_left_alone():
    assert names_of(SimpleNamespace()) == {}
    assert names_of(SimpleNamespace(compiled_fn_runner=SimpleNamespace(call=print))) == {}
    names: dict[str, Any] = {}
    DirectOps("freescale").call_from(names_of(code_of("x", names)))
    assert "torch" not in names


# ---- the user's ops (in a model: test_custom_ops.py) ------------------------------------------------------------------


def was_called_as_op() -> bool:
    return any(frame.filename.endswith("torch/_ops.py") for frame in inspect.stack())


def define(name: str, mutates: tuple[str, ...] = ()) -> tuple[Any, list[Any]]:
    """An op that writes down its arguments, and whether it was called as an op."""
    calls: list[Any] = []

    def scale(x: torch.Tensor, by: float, bias: torch.Tensor | None = None, *, times: int = 1) -> torch.Tensor:
        calls.append((was_called_as_op(), by, bias is not None, times))
        for t in (x,) if mutates else ():
            t.add_(1)
        return x * by * times if bias is None else x * by * times + bias

    op = torch.library.custom_op(f"freescale_tests::{name}", scale, mutates_args=mutates)
    op.register_fake(lambda x, by, bias=None, *, times=1: torch.empty_like(x))
    return op, calls


def calls_of(op: Any, arguments: str, names: dict[str, Any]) -> Any:
    """As Inductor would call it."""
    compiled = code_of(f"torch.ops.freescale_tests.{op._name}.default({arguments})", names | {"torch": torch})
    DirectOps("freescale").call_from(names_of(compiled))
    return compiled.compiled_fn_runner.call


def test_a_custom_op_is_a_function_behind_its_first_call():
    op, calls = define("scale")
    call = calls_of(op, "x, 2.0, bias=bias, times=3", {"bias": torch.ones(2)})
    results = [call(torch.ones(2)) for _ in range(3)]
    with Watch():
        results.append(call(torch.ones(2)))
    assert [c[0] for c in calls] == [True, False, False, True] and len({c[1:] for c in calls}) == 1
    assert all(torch.equal(r, torch.full((2,), 7.0)) for r in results)


def test_what_the_dispatcher_does_to_arguments():
    """It makes floats of integers, hands over by position what has one, and leaves defaults to the function."""
    op, calls = define("scale_by_integers")
    for arguments in ("x, 2", "x, by=2", "x, by=2.0", "x, 2.0, bias=None"):
        call = calls_of(op, arguments, {})
        call(torch.ones(2))
        calls.clear()
        call(torch.ones(2))
        (_, by, biased, times), = calls  # fmt: skip
        assert (type(by), by, biased, times) == (float, 2.0, False, 1), arguments


def test_the_kernel_of_a_device_is_chosen_at_each_call():
    op, _ = define("scale_on_device")
    call = calls_of(op, "x, 2.0", {})
    call(torch.ones(2))
    op.register_kernel("cpu", lambda x, by, bias=None, *, times=1: x - 1)
    assert torch.equal(call(torch.ones(2)), torch.zeros(2)) and torch.equal(call(torch.ones(2)), torch.zeros(2))
    with op.set_kernel_enabled("cpu", enabled=False):
        assert torch.equal(call(torch.ones(2)), torch.full((2,), 2.0))


def test_an_op_without_a_kernel_says_so_each_time():
    schema = "(Tensor x) -> Tensor"
    op = torch.library.custom_op(
        "freescale_tests::on_gpu", torch.clone, mutates_args=(), schema=schema, device_types="cuda"
    )
    call = calls_of(op, "x", {})
    for _ in range(3):
        with pytest.raises(NotImplementedError, match="freescale_tests::on_gpu"):
            call(torch.ones(2))


def test_what_is_more_than_a_function_stays_an_op():
    changing, changed = define("scale_and_change", mutates=("x",))
    cast, casts = define("scale_with_autocast")
    cast.register_autocast("cpu", torch.bfloat16)
    overridden, seen = define("scale_elsewhere")
    lists: list[Any] = []

    @torch.library.custom_op("freescale_tests::shaped", mutates_args=())
    def shaped(x: torch.Tensor, shape: list[int]) -> torch.Tensor:
        lists.append((was_called_as_op(), type(shape)))
        return x.clone().view(shape)

    call = calls_of(shaped, "x, (2, 1)", {})
    assert all(call(torch.ones(2)).shape == (2, 1) for _ in range(3)) and lists == [(True, list)] * 3
    library = torch.library.Library("freescale_tests", "FRAGMENT")
    library.impl("scale_elsewhere", lambda x, by, bias=None, *, times=1: x - 5, "CPU")
    elsewhere, of_elsewhere = define("scale_on_other_devices")
    elsewhere.register_kernel("xpu", lambda x, by, bias=None, *, times=1: x)  # which we know nothing of
    for op in (changing, cast, overridden, elsewhere):
        call, x = calls_of(op, "x, 2.0", {}), torch.ones(2)
        before = x._version
        for _ in range(3):
            result = call(x)
        assert op is not changing or x._version > before
        assert op is not overridden or torch.equal(result, torch.full((2,), -4.0))
    assert all(c[0] for c in (*changed, *casts, *of_elsewhere)) and not seen
    assert len(changed) == len(casts) == len(of_elsewhere) == 3
