"""Compiled code calls our ops as functions, without torch's dispatcher, unless somebody watches ops."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from freescale.compat.direct_calls import DirectOps
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
    ops.call_from(compiled)
    ops.call_from(compiled)  # of a second graph with the same code
    call = compiled.compiled_fn_runner.call
    assert call(SimpleNamespace(is_cuda=False)) == ["any", "elsewhere"]
    assert call(SimpleNamespace(is_cuda=True)) == ["any", "on a GPU"]


def test_everything_else_is_as_it_was():
    ops = DirectOps("freescale")
    ops.add("sum_rows", lambda x: x)
    names = "float32", "ops.aten.add.Tensor", "ops.freescale.update_.default", "ops.freescale.sum_rows"
    compiled = code_of(", ".join(f"torch.{name}" for name in names), {"torch": torch})
    ops.call_from(compiled)
    kind, add, update, packet = compiled.compiled_fn_runner.call(None)
    assert kind is torch.float32 and add is torch.ops.aten.add.Tensor and update is torch.ops.freescale.update_.default
    assert packet.overloads() == ["default"]


def test_code_that_is_not_pythons_is_left_alone():
    DirectOps("freescale").call_from(SimpleNamespace())
    DirectOps("freescale").call_from(SimpleNamespace(compiled_fn_runner=SimpleNamespace(call=print)))
    names: dict[str, Any] = {}
    DirectOps("freescale").call_from(code_of("x", names))
    assert "torch" not in names
