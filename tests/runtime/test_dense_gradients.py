"""FREESCALE_DENSE=allreduce: the graph averages dense gradients, with the numbers of DistributedDataParallel."""

from __future__ import annotations

import time
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import trec
from freescale import dense_gradients
from freescale.compat.version import torch_version
from listening import listen
from ranks import HAS_TORCHREC, run_ranks
from shared_ranks import Outcomes, run_together

STEPS = 10
thorough = pytest.mark.thorough
needs_torchrec = pytest.mark.skipif(not HAS_TORCHREC, reason="torchrec or fbgemm_gpu is not installed")
State = dict[str, torch.Tensor]


# ---- models ---------------------------------------------------------------------------------------------------------


class Native(nn.Module):
    """A sharded table, tied and frozen parameters, a buffer, two data types, and a layer that is used twice."""

    def __init__(self, table: bool = True, second_dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        import freescale

        self.table = freescale.ShardedEmbedding(64, 8, name="item") if table else None
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.narrow = nn.Linear(8, 8, dtype=second_dtype)
        self.tied = self.layers[0].weight
        self.frozen = nn.Parameter(torch.rand(8), requires_grad=False)
        self.register_buffer("scale", torch.rand(8))

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if self.table is not None:
            x = x + self.table(ids)
        for layer in (*self.layers, self.layers[1]):
            x = torch.tanh(layer(x)) * self.frozen
        x = x + self.narrow(x.to(self.narrow.weight.dtype)).float()
        return (x @ self.tied * self.scale).square().mean()


def _device() -> torch.device:
    return torch.device("cuda" if "nccl" in dist.get_backend() else "cpu")


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of other sizes on every rank, and now and then of one sample, which has a graph of its own."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    n = 1 if step % 5 == 3 + dist.get_rank() % 2 else 4 + step % 3 + dist.get_rank()
    ids, x = torch.randint(0, 64, (n,), generator=generator), torch.randn(n, 8, generator=generator)
    return ids.to(_device()), x.to(_device())


def _compiled(model: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="freescale", fullgraph=True, options={"strict": True, **options})


def _train(model: nn.Module, run: Any, steps: int = STEPS, backwards: int = 1) -> State:
    optimizer = torch.optim.Adagrad([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for part in range(backwards):
            run(*_batch(backwards * step + part)).backward()
        optimizer.step()
    return {n: t.detach().clone() for n, t in model.state_dict().items()}


def _model(table: bool, backwards: int) -> Native:
    """Every rank draws values of its own. bfloat16 where nothing depends on the order in which things are added up."""
    torch.manual_seed(7 * dist.get_rank())
    any_order = backwards == 1 and dist.get_world_size() == 2
    return Native(table, torch.bfloat16 if any_order else torch.float32).to(_device())


@cache
def _native_with_ddp(codegen: str, backwards: int, table: bool, steps: int) -> State:
    """The reference: DDP around the same model, compiled inside it. One for all that differ in other options."""
    model = _model(table, backwards)
    wrapped = DistributedDataParallel(model, broadcast_buffers=False)
    torch._dynamo.reset()
    run = torch.compile(wrapped, backend="freescale", options={"codegen": codegen})
    return _train(model, run, steps, backwards)


def _native(codegen: str, backwards: int, table: bool, steps: int, **options: Any) -> State:
    model = _model(table, backwards)
    return _train(model, _compiled(model, codegen=codegen, dense="allreduce", **options), steps, backwards)


def _worst(a: State, b: State) -> float:
    assert a.keys() == b.keys()
    return max(float((a[n].float() - b[n].float()).abs().max()) for n in a if a[n].numel())


def _native_against_ddp(
    codegen: str = "eager", backwards: int = 1, table: bool = True, steps: int = STEPS, **options: Any
) -> float:
    expected = _native_with_ddp(codegen, backwards, table, steps)
    found = _native(codegen, backwards, table, steps, **options)
    assert float(expected["layers.0.weight"].abs().sum()) > 0
    return _worst(found, expected)


# ---- the numbers of DDP ----------------------------------------------------------------------------------------------


def test_a_native_model_trains_as_with_ddp_bit_for_bit(checked):
    assert max(checked.of("native, three steps")) == 0.0


@thorough
@pytest.mark.parametrize("case", ("eager", "inductor", "without a table", "small buckets", "not bucketed", "no passes"))
def test_native_models_train_as_with_ddp_bit_for_bit(case, thoroughly_checked):
    assert max(thoroughly_checked.of(f"native, {case}")) == 0.0


@thorough
def test_gradients_of_two_backward_passes_are_averages_too(thoroughly_checked):
    """DDP averages the sum, here the averages are added up."""
    assert max(thoroughly_checked.of("native, two backward passes")) <= 1e-6


@pytest.mark.slow
def test_a_native_model_trains_as_with_ddp_on_four_ranks():
    assert max(run_ranks(partial(_native_against_ddp, "inductor"), 4)) <= 1e-6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("codegen", ("eager", "inductor"))
def test_a_native_model_trains_as_with_ddp_over_nccl(codegen):
    # With Inductor's kernels on a GPU, DDP itself has other bits now and then: two runs of it differ as much.
    allowed = 0.0 if codegen == "eager" else 1e-6
    assert max(run_ranks(partial(_native_against_ddp, codegen), 2, backend="nccl")) <= allowed


@cache
def _torchrec_with_ddp(layout: str, codegen: str) -> tuple[list[float], State]:
    """The reference, with look-ahead and without."""
    return _torchrec(layout, False, codegen, False)[:2]


def _torchrec(layout: str, dense: bool, codegen: str, look_ahead: bool) -> tuple[list[float], State, dict[str, Any]]:
    import freescale
    from freescale import backend, driver
    from freescale.compat import dynamo_settings

    backend.COMPILED.clear()
    dynamo_settings.GRAPH_BREAKS.clear()
    driver.REPORT.dense_buckets = 0
    torch._dynamo.reset()
    model = trec.build(layout, "rowwise_adagrad", ddp=not dense)
    options = {"codegen": codegen, "dense": "allreduce" if dense else "off", "strict": True}
    run = torch.compile(model, backend="freescale", fullgraph=dense, options=options)
    batches = [trec.batch(step, dist.get_rank(), none=False) for step in range(STEPS)]
    losses = trec.train_on(model, run, freescale.LookaheadLoader(batches, run) if look_ahead else batches)
    state = {**trec.snapshot(model), **trec.optimizer_state(model)}
    return losses, state, freescale.report()


def _torchrec_against_ddp(layout: str, codegen: str = "eager", look_ahead: bool = False) -> dict[str, Any]:
    losses, expected = _torchrec_with_ddp(layout, codegen)
    found_losses, found, report = _torchrec(layout, True, codegen, look_ahead)
    difference = max(abs(a - b) for a, b in zip(losses, found_losses, strict=True))
    return {"difference": max(difference, _worst(found, expected)), "report": report}


@needs_torchrec
@thorough
@pytest.mark.parametrize("case", ("row_wise", "mixed", "look-ahead"))
def test_a_whole_dmp_is_one_graph_and_trains_as_with_ddp_bit_for_bit(case, thoroughly_checked):
    _expect_one_graph(thoroughly_checked.of(case))


@needs_torchrec
@pytest.mark.slow
def test_a_whole_dmp_under_inductor_trains_as_with_ddp_bit_for_bit():
    _expect_one_graph(run_ranks(_torchrec_against_ddp, 2, "row_wise", "inductor"))


def _expect_one_graph(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["difference"] == 0.0
        report = rank["report"]
        assert (report["graphs"], report["graph_breaks"]) == (1, 0)
        assert report["dense_buckets"] == 1 + report["recompiles"]  # one of each compilation


@needs_torchrec
@pytest.mark.slow
def test_a_whole_dmp_trains_as_with_ddp_on_four_ranks():
    for rank in run_ranks(_torchrec_against_ddp, 4, "mixed", "inductor"):
        assert rank["difference"] <= 1e-6


# ---- graph breaks, other groups, one rank ----------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Its first layer is computed anew in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.b(checkpoint(lambda y: torch.tanh(self.a(y)), x, use_reentrant=False)).square().mean()


class Broken(nn.Module):
    """Two graphs that share a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x = self.b(torch.tanh(self.a(x)))
        torch._dynamo.graph_break()
        return torch.tanh(self.a(x)).square().mean()


def _dense_against_ddp(make: type[nn.Module], steps: int = STEPS) -> float:
    results = []
    for dense in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(7 * dist.get_rank())
        model = make()
        wrapped = model if dense else DistributedDataParallel(model)
        options = {"codegen": "eager", "dense": "allreduce" if dense else "off"}
        results.append(_train(model, torch.compile(wrapped, backend="freescale", options=options), steps))
    return _worst(*results)


@thorough
def test_a_parameter_in_two_graphs_is_averaged_in_parts(thoroughly_checked):
    assert max(thoroughly_checked.of("graph break")) <= 1e-6


@thorough
def test_checkpointed_activations(thoroughly_checked):
    assert max(thoroughly_checked.of("checkpointed")) <= 1e-6


def _gradients_of_other_tensors() -> tuple[list[float], ...]:
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 1), torch.full((2, 4), 1.0 + dist.get_rank(), requires_grad=True)
    run = _compiled(lambda x: (layer(x) * (1.0 + dist.get_rank())).sum(), codegen="eager", dense="allreduce")
    run(x).backward()
    return x.grad[0].tolist(), (layer.weight[0] * (1.0 + dist.get_rank())).tolist(), layer.weight.grad[0].tolist()


def test_gradients_of_what_is_no_parameter_stay_as_they_are(checked):
    for found, expected, weight in checked.of("other tensors"):
        assert found == expected and weight == [(2 * 1.0 + 2 * 4.0) / 2] * 4


def _in_a_group_of_two() -> list[float]:
    """Ranks 0, 1 and ranks 2, 3 train models of their own."""
    import freescale

    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[dist.get_rank() // 2]
    torch.manual_seed(dist.get_rank())
    model = nn.ModuleDict({"table": freescale.ShardedEmbedding(64, 8, group=mine), "out": nn.Linear(8, 1)})

    def loss(ids: torch.Tensor) -> torch.Tensor:
        return model["out"](model["table"](ids)).sum()

    run = _compiled(loss, codegen="eager", dense="allreduce")
    run(torch.arange(3 + dist.get_rank())).backward()
    return model["out"].weight.grad.flatten().tolist() + model["out"].weight.flatten().tolist()


@thorough
def test_the_ranks_of_a_table_are_those_that_average():
    a, b, c, d = run_ranks(_in_a_group_of_two, 4)
    assert a == b and c == d and a != c


def _alone() -> dict[str, Any]:
    import freescale

    model = Native()
    _compiled(model, codegen="eager", dense="allreduce")(*_batch(0)).backward()
    return freescale.report()


@thorough
def test_one_rank_has_nothing_to_average():
    (report,) = run_ranks(_alone, 1)
    assert report["dense_buckets"] == 0


# ---- what is refused -------------------------------------------------------------------------------------------------


def _one_step(**options: Any) -> None:
    model = Native()
    run = torch.compile(model, backend="freescale", fullgraph=True, options={"codegen": "eager", **options})
    run(*_batch(0)).backward()


@thorough
def test_different_settings_raise_on_every_rank():
    for error in run_ranks(_one_step, 2, env_of={1: {"FREESCALE_DENSE": "allreduce"}}, expect_errors=True):
        assert "ranks disagree: FREESCALE_DENSE is 'off' on rank 0 and 'allreduce' on rank 1" in error


def _step_without_tables(late: int, moment: float) -> None:
    """One rank comes a second later than the other."""
    from freescale import dense_gradients

    dense_gradients._MOMENT = moment
    run = torch.compile(nn.Linear(8, 1), backend="freescale", options={"codegen": "eager"})
    if dist.get_rank() == late:
        time.sleep(1)
    run(torch.ones(3, 8)).sum().backward()


# One that averages hears of it even where it has stopped to look and waits for the other one's gradients.
@pytest.mark.parametrize("late, moment", ((0, 5.0), *(pytest.param(*x, marks=thorough) for x in ((1, 5.0), (0, 0.1)))))
def test_different_settings_without_tables_raise_on_every_rank(late, moment):
    env = {1: {"FREESCALE_DENSE": "allreduce"}}
    for error in run_ranks(_step_without_tables, 2, late, moment, env_of=env, expect_errors=True):
        assert "ranks disagree: FREESCALE_DENSE is 'off' on rank 0 and 'allreduce' on rank 1" in error


def _only_one_trains() -> None:
    if dist.get_rank() == 0:
        _step_without_tables(1, 0.5)


def test_a_rank_that_trains_alone_goes_on():
    run_ranks(_only_one_trains, 2)


class Sometimes(nn.Module):
    """Rank 1 does not use one of the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return (self.b(self.a(x)) if both else self.a(x)).sum()


def _unused_on_one_rank(no_gradient: bool) -> None:
    model = Sometimes()
    if no_gradient and dist.get_rank() == 1:
        model.b.weight.requires_grad_(False)
    run = _compiled(model, codegen="eager", dense="allreduce")
    run(torch.ones(2, 8), no_gradient or dist.get_rank() == 0).backward()


def test_a_parameter_that_one_rank_does_not_use_raises_on_every_rank():
    for error in run_ranks(_unused_on_one_rank, 2, False, expect_errors=True):
        assert "ranks disagree: dense parameters" in error and "b.weight [8, 8] torch.float32" in error


@thorough
def test_a_parameter_that_one_rank_does_not_train_raises_on_every_rank():
    for error in run_ranks(_unused_on_one_rank, 2, True, expect_errors=True):
        assert "ranks disagree: what the backward graph launches" in error and "b.weight" in error


def _with_ddp_too(strict: bool, wrapped_later: bool) -> Any:
    import freescale

    model = Broken()
    options = {"codegen": "eager", "dense": "allreduce", "strict": strict}
    if wrapped_later:
        torch.compile(model, backend="freescale", options=options)(*_batch(0)).backward()
        return DistributedDataParallel(model)
    said = listen()
    wrapped = DistributedDataParallel(model)
    torch.compile(wrapped, backend="freescale", options=options)(*_batch(0)).backward()
    found = [p.grad for p in model.parameters()]
    eager = DistributedDataParallel(Broken())
    eager.module.load_state_dict(model.state_dict())
    eager(*_batch(0)).backward()
    worst = max(float((p.grad - g).abs().max()) for p, g in zip(eager.parameters(), found, strict=True))
    return worst, freescale.report()["dense_buckets"], [s for s in said if "leaves" in s]


@thorough
def test_what_ddp_averages_is_left_to_it_with_one_sentence():
    for worst, buckets, said in run_ranks(_with_ddp_too, 2, False, False):
        assert worst <= 1e-6 and buckets == 0
        assert len(said) == 2  # one for each graph, which have different parameters
        assert "leaves 4 parameters (first: a.weight) to DistributedDataParallel" in said[0]


def test_ddp_and_the_flag_together_are_an_error_under_strict():
    for error in run_ranks(_with_ddp_too, 2, True, False, expect_errors=True):
        assert "to DistributedDataParallel, which averages their gradients" in error


@thorough
def test_ddp_around_what_graphs_average_already_is_refused():
    for error in run_ranks(_with_ddp_too, 2, False, True, expect_errors=True):
        assert "compiled graphs already average the gradient of a.weight" in error


class PartlyEager(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(self._outside(x)).sum()

    @torch.compiler.disable
    def _outside(self, x: torch.Tensor) -> torch.Tensor:
        return self.outside(x)


def _partly_outside() -> None:
    options = {"codegen": "eager", "dense": "allreduce"}
    torch.compile(PartlyEager(), backend="freescale", options=options)(torch.ones(2, 8)).backward()


def test_a_gradient_that_no_graph_averages_is_an_error():
    for error in run_ranks(_partly_outside, 2, expect_errors=True):
        assert "outside.weight has a gradient, but no compiled graph uses it" in error or "outside.bias" in error


# ---- the meter -------------------------------------------------------------------------------------------------------


def _metered() -> dict[str, Any]:
    import freescale

    torch.manual_seed(0)
    model = Native()
    run = _compiled(model, codegen="eager", dense="allreduce")
    freescale.meter.mark(0)
    run(*_batch(0)).backward()
    freescale.meter.mark()
    step = freescale.meter.steps()[-1]
    size = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return {"bytes": step["bytes"]["dense gradients"], "parameters": size, "waits": list(step["waits"])}


@thorough
def test_the_meter_counts_dense_gradients_by_themselves():
    for found in run_ranks(_metered, 2):
        assert found["bytes"] == found["parameters"] and "dense gradients" in found["waits"]


CHECKS = {
    "native, three steps": partial(_native_against_ddp, steps=3),  # (the fourth is of one sample: more graphs)
    "other tensors": _gradients_of_other_tensors,
}
THOROUGH = {
    "native, eager": _native_against_ddp,
    "native, inductor": partial(_native_against_ddp, "inductor", steps=3),
    "native, without a table": partial(_native_against_ddp, table=False),
    "native, two backward passes": partial(_native_against_ddp, backwards=2),
    "native, small buckets": partial(_native_against_ddp, bucket_mb=1e-4),
    "native, not bucketed": partial(_native_against_ddp, passes="-bucket_gradients"),
    "native, no passes": partial(_native_against_ddp, passes="none"),
    "graph break": partial(_dense_against_ddp, Broken),
    # Inductor of 2.14 and 2.15 fails on this model and one sample, without freescale too; the fourth batch is of one.
    "checkpointed": partial(_dense_against_ddp, Checkpointed, 3 if torch_version() in ("2.14", "2.15") else STEPS),
}
WITH_TORCHREC = {
    "row_wise": partial(_torchrec_against_ddp, "row_wise"),
    "mixed": partial(_torchrec_against_ddp, "mixed"),
    "look-ahead": partial(_torchrec_against_ddp, "row_wise", "eager", True),
}


@pytest.fixture(scope="module")
def checked() -> Outcomes:
    return run_together(CHECKS, 2)


@pytest.fixture(scope="module")
def thoroughly_checked() -> Outcomes:
    return run_together({**THOROUGH, **(WITH_TORCHREC if HAS_TORCHREC else {})}, 2, timeout=500)


def test_modules_without_an_averaged_parameter_are_not_asked():
    class Other(nn.Module):
        def named_parameters(self, *args, **kwargs):
            raise AssertionError("another model of the process is asked")

        named_modules = named_parameters

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    marked: Any = [SimpleNamespace(tensor=model[0].weight)]
    beside = dense_gradients._parameters_beside(marked, [Other(), model, *model])
    assert {id(p) for _, p in beside} == {id(p) for p in (model[0].bias, *model[1].parameters())}
