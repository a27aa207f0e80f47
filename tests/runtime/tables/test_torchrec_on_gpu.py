"""TorchRec's tables on a GPU that ranks share, with FBGEMM's CUDA kernels: every optimizer, sharding and table type, pooled
beside sequences, and checkpoints both ways. The training of eager TorchRec, with look-ahead and without.

The same on the CPU, where FBGEMM has other kernels and no Adam: test_pooled.py, test_torchrec_collection.py,
test_torchrec_adam.py, test_half_rows.py. `device`: for a try on the CPU.
"""

from __future__ import annotations

import io
from functools import partial
from typing import Any

import pytest
import test_half_rows
import torch
import torch.distributed as dist

import on_gpu
import pooled
import trec
from on_gpu import DEVICE
from ranks import RankFailed, run_ranks
from shared_ranks import Outcomes, run_together

pytestmark = on_gpu.MARKS

STEPS = 6
OPTIONS = {"codegen": "eager", "strict": True}  # strict: nothing is left to TorchRec
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam")
# Dividing by the root of a sum of few squares makes rounding of small gradients large, unless eps is larger. FBGEMM's
# kernels round betas and their powers to float32, of which 1 - 0.999 leaves four digits.
ADAM = {"eps": 1e-2, "beta1": 0.8, "beta2": 0.95}
SETTINGS = {"adagrad": {"eps": 1e-2}, "adam": ADAM, "partial_rowwise_adam": ADAM}
HOSTS = {  # shardings that depend on which ranks share a host
    **pooled.KINDS, "item": "table_row_wise", "city": "table_column_wise", "shop": "table_column_wise",
    "liked": "table_row_wise", "seen": "table_row_wise", "history": "table_wise", "tag": "row_wise",
}  # fmt: skip
GRID = {**HOSTS, "item": "grid_shard", "city": "grid_shard"}
Result = tuple[list[float], dict[str, torch.Tensor]]  # losses, rows and state


def _result(model: Any, losses: list[float]) -> Result:
    return losses, {**trec.snapshot(model), **trec.optimizer_state(model)}


def _compiled(model: Any, fullgraph: bool = True) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="freescale", fullgraph=fullgraph, options=OPTIONS)


def _three_ways(build: Any, train: Any, batches: Any, fullgraph: bool = True) -> tuple[float, float, float]:
    """How much training changed, relative to eager TorchRec's rows; the largest difference to it; and what look-ahead
    changes. `batches(eager)`: of this rank."""
    import freescale

    eager = build()
    beginning = trec.snapshot(eager), trec.optimizer_state(eager)
    expected = _result(eager, train(eager, eager, batches(True)))
    model, results = build(), []
    run = _compiled(model, fullgraph)
    for ahead in (False, True):
        trec.put_back(model, *beginning)
        trec.set_optimizer_step(model, 0)
        data = batches(False)
        results.append(_result(model, train(model, run, freescale.LookaheadLoader(data, run) if ahead else data)))
    change = min(float((v - beginning[0][k]).abs().max()) for k, v in trec.snapshot(eager).items() if v.numel())
    return change, trec.difference(results[0], expected), trec.difference(results[1], results[0])


def _build_pooled(optimizer: str, kinds: dict[str, str], device: str) -> Any:
    return pooled.build(optimizer, kinds, device=device, **SETTINGS.get(optimizer, {}))


def pooled_beside_sequences(optimizer: str, kinds: dict[str, str], device: str) -> tuple[float, float, float]:
    batches = [pooled.batch_of(step) for step in range(STEPS)]
    return _three_ways(partial(_build_pooled, optimizer, kinds, device), pooled.train, lambda eager: batches)


def sequences(layout: str, optimizer: str, device: str) -> tuple[float, float, float]:
    """With DDP, which data-parallel tables need."""

    def batches(eager: bool) -> list[Any]:
        return [trec.batch(step, dist.get_rank(), eager, none=layout != "mixed") for step in range(STEPS)]

    build = partial(trec.build, layout, optimizer, True, device=device)
    return _three_ways(build, trec.train_on, batches, fullgraph=False)


def halves(optimizer: str, device: str) -> None:
    for ahead in (False, True):
        test_half_rows.compare(optimizer, "eager", ahead, False, device)


def _restore(model: Any, saved: bytes, steps: int) -> None:
    state = torch.load(io.BytesIO(saved), weights_only=False)
    model.load_state_dict(state["model"])
    model.fused_optimizer.load_state_dict(state["fused"])
    trec.set_optimizer_step(model, steps)


def _save(model: Any) -> bytes:
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "fused": model.fused_optimizer.state_dict()}, file)
    return file.getvalue()


def checkpoints(optimizer: str, device: str) -> list[tuple[bool, float]]:
    """Eager TorchRec trains, a compiled model goes on, then eager TorchRec again. Of each restart: whether all that was
    saved was loaded, and the difference between the next steps of both models."""
    import freescale

    def part(model: Any, run: Any, steps: range) -> Result:
        data: Any = [pooled.batch_of(step) for step in steps]
        ahead = freescale.LookaheadLoader(data, run) if run is not model else data
        return _result(model, pooled.train(model, run, ahead, steps.start))

    def restarted(model: Any, saved: Any, steps: int) -> bool:
        before, expected = _result(model, []), _result(saved, [])
        _restore(model, _save(saved), steps)
        return not trec.same_bits(before, expected) and trec.same_bits(_result(model, []), expected)

    first, middle, last = (_build_pooled(optimizer, pooled.KINDS, device) for _ in range(3))
    part(first, first, range(2))
    run, found = _compiled(middle), []
    loaded = restarted(middle, first, 2)
    expected = part(first, first, range(2, 5))
    found.append((loaded, trec.difference(part(middle, run, range(2, 5)), expected)))
    loaded = restarted(last, run, 5)
    expected = part(last, last, range(5, 8))
    found.append((loaded, trec.difference(part(middle, run, range(5, 8)), expected)))
    return found


COMPARED = {
    **{f"{o}, pooled beside sequences": partial(pooled_beside_sequences, o, pooled.KINDS) for o in OPTIMIZERS},
    "rows and columns on a host": partial(pooled_beside_sequences, "adagrad", HOSTS),
    **{f"{layout}, sequences": partial(sequences, layout, "rowwise_adagrad") for layout in trec.LAYOUTS},
    "data-parallel, sgd": partial(sequences, "mixed", "sgd"),
}
HALVES = {f"float16, {o}": partial(halves, o) for o in ("sgd", "adagrad", "rowwise_adagrad")}
CHECKPOINTS = {f"checkpoints, {o}": partial(checkpoints, o) for o in ("rowwise_adagrad", "adam")}


@pytest.fixture(scope="module")
def checked(request: pytest.FixtureRequest) -> Outcomes:
    """Of the tests that were selected: pytest -k."""
    own = [item for item in request.session.items if item.module is request.module and "name" in item.fixturenames]
    every, names = COMPARED | HALVES | CHECKPOINTS, [item.callspec.params["name"] for item in own]
    checks = {name: partial(every[name], DEVICE) for name in names}
    return run_together(checks, 2, timeout=240, group_timeout=60, **on_gpu.RANKS)


def _hold(outcomes: list[tuple[float, float, float]]) -> None:
    for change, difference, by_look_ahead in outcomes:
        assert change > 1e-6, outcomes
        assert difference <= 1e-6 and by_look_ahead == 0.0, outcomes


@pytest.mark.parametrize("name", COMPARED)
def test_equals_eager_torchrec(name, checked):
    try:
        outcomes = checked.of(name)
    except RankFailed as failed:
        if "kernel image is invalid" in str(failed) and ("mixed" in name or "data-parallel" in name):
            pytest.skip("this build of FBGEMM has no kernels for data-parallel tables, which eager TorchRec needs")
        raise
    _hold(outcomes)


@pytest.mark.parametrize("name", HALVES)
def test_float16_rows_train_as_in_eager_torchrec(name, checked):
    checked.of(name)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_go_both_ways(name, checked):
    for found in checked.of(name):
        assert all(loaded and difference <= 1e-6 for loaded, difference in found), found


def test_grid_on_two_hosts_of_two_ranks():
    ranks = {**on_gpu.RANKS, "env": {**on_gpu.RANKS["env"], "LOCAL_WORLD_SIZE": "2"}}
    _hold(run_ranks(pooled_beside_sequences, 4, "rowwise_adagrad", GRID, DEVICE, timeout=240, group_timeout=60, **ranks))
