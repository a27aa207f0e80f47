"""What a LookaheadLoader can be given: however a model was compiled, the loop has the bits of the loop without it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import trec
from freescale.compat import dynamo_settings
from listening import listen
from loops import Model, batch_of, data, threads
from ranks import HAS_TORCHREC, run_ranks

OPTIONS: dict[str, Any] = {"codegen": "eager", "strict": True}
needs_torchrec = pytest.mark.skipif(not HAS_TORCHREC, reason="torchrec or fbgemm_gpu is not installed")


def _compile(module: nn.Module, **options: Any) -> Any:
    return torch.compile(module, backend="freescale", options={**OPTIONS, **options})


def _in_place(module: nn.Module, **options: Any) -> nn.Module:
    module.compile(backend="freescale", options={**OPTIONS, **options})
    return module


def _forward(module: nn.Module) -> nn.Module:
    module.forward = torch.compile(module.forward, backend="freescale", options=OPTIONS)
    return module


class Outer(nn.Module):
    """Not compiled itself."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList(inner)

    def forward(self, *batch: Any) -> torch.Tensor:
        return sum(m(*batch) for m in self.inner)


# For each, the first one without a LookaheadLoader is what all of them must equal with one.
NATIVE = (
    {
        "in place": lambda: _in_place(Model()),
        "forward": lambda: _forward(Model()),
        "submodule": lambda: Outer(_compile(Model())),
        "submodule in place": lambda: Outer(_in_place(Model())),
    },
    {"two submodules": lambda: Outer(_in_place(Model()), _compile(Model()))},
)


def _use(model: nn.Module, make: Any, loader: Any, train_only: bool) -> list[Any]:
    """A loop with everything in it; what it sees. `make(step)` is a batch as the arguments of the model."""
    dense = [p for n, p in model.named_parameters() if not hasattr(p, "_in_backward_optimizers")]
    optimizer = torch.optim.SGD(dense, lr=0.05)
    seen: list[Any] = []

    def look(batch: Any) -> None:
        with torch.no_grad():
            seen.append(model(*batch).item())

    def read() -> None:
        values = (v.local_shards() if hasattr(v, "local_shards") else v for v in model.state_dict().values())
        seen.extend(t.detach().clone() for v in values for t in ([s.tensor for s in v] if isinstance(v, list) else [v]))

    for i, batch in enumerate(loader([make(s) for s in range(9)])):
        if i == 5:
            continue  # never reaches the model
        optimizer.zero_grad(set_to_none=False)
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
        if i == 2 and not train_only:
            look(make(40))
            look(batch)
        if i == 3 and not train_only:
            for other in loader([make(s) for s in range(30, 33)]):
                look(other)
        if i == 4:
            read()
        if i == 7:
            break
    if not train_only:
        optimizer.zero_grad(set_to_none=False)
        model(*make(50)).backward()  # and without a loader
    read()
    return seen


def _state(model: nn.Module) -> Any:
    if hasattr(model, "fused_optimizer"):
        return trec.snapshot(model), trec.optimizer_state(model)
    return {name: value.clone() for name, value in model.state_dict().items()}


def _put_back(model: nn.Module, start: Any) -> None:
    if hasattr(model, "fused_optimizer"):
        trec.put_back(model, *start)
    else:
        model.load_state_dict(start)


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b, strict=True)
    )


def _exact(groups: Any, make: Any) -> list[str]:
    """The ways whose bits are not those of the loop without a LookaheadLoader."""
    import freescale

    wrong = []
    for ways in groups:
        expected: list[Any] = []
        for name, build in ways.items():
            train_only = "DDP" in name or "Inductor" in name  # fewer graphs: compiling them takes long
            torch._dynamo.reset()  # or it gives up: every model and every way to call it is a graph of its own
            model = build()
            if not expected:  # by the same model, whose graphs without a plan the loop with a loader needs too
                start = _state(model)
                expected = _use(model, make, list, train_only)
                _put_back(model, start)
            seen = _use(model, make, lambda batches, m=model: freescale.LookaheadLoader(batches, m), train_only)
            if not _same(seen, expected):
                wrong.append(name)
            assert threads() == [], name
    return wrong


def _native() -> list[str]:
    return _exact(NATIVE, lambda step: (batch_of(step),))


@pytest.mark.thorough
def test_native_tables_however_they_are_compiled():
    assert run_ranks(_native, 2) == [[], []]


def _sharded(inner: nn.Module, ddp: bool = False) -> Any:
    return trec.shard(inner, trec.LAYOUTS["mixed"], "rowwise_adagrad", ddp)


def _trec() -> nn.Module:
    torch.manual_seed(0)
    return trec.Model(small=True)


TORCHREC = (
    {
        "in place": lambda: _in_place(_sharded(_trec())),
        "compiled before": lambda: _sharded(_compile(_trec())),
    },
    {"in place before, DDP": lambda: _sharded(_in_place(_trec()), ddp=True)},
)


def _torchrec() -> list[str]:
    return _exact(TORCHREC, lambda step: trec.batch(step, dist.get_rank(), none=False))


@pytest.mark.thorough
@needs_torchrec
def test_torchrec_tables_however_they_are_compiled():
    assert run_ranks(_torchrec, 2) == [[], []]


def _inductor() -> list[str]:
    ways = {"in place, Inductor": lambda: _in_place(Model(), codegen="inductor")}
    return _exact([ways], lambda step: (batch_of(step),))


@pytest.mark.slow
def test_in_place_under_inductor():
    assert run_ranks(_inductor, 2) == [[], []]


def _torchrec_inductor() -> list[str]:
    ways = {"in place, Inductor": lambda: _in_place(_sharded(_trec()), codegen="inductor")}
    return _exact([ways], lambda step: trec.batch(step, dist.get_rank(), none=False))


@pytest.mark.slow
@needs_torchrec
def test_torchrec_tables_in_place_under_inductor():
    assert run_ranks(_torchrec_inductor, 2, timeout=280) == [[], []]


# ---- what cannot be served -----------------------------------------------------------------------------------------


def _unseen() -> bool:
    """A lookup by something compiled that the loader was not given: evaluation is exact, training is refused."""
    import freescale

    def losses(wrapped: bool) -> list[float]:
        torch._dynamo.reset()
        model = _in_place(Model())
        other = torch.compile(lambda batch: model(batch) * 1.0, backend="freescale", options=OPTIONS)
        with torch.no_grad():
            seen = [other(batch_of(70)).item()]  # a graph from before the loop
        for i, batch in enumerate(freescale.LookaheadLoader(data(8), model) if wrapped else data(8)):
            loss = model(batch)
            loss.backward()
            seen.append(loss.item())
            if i in (2, 4):
                with torch.no_grad():
                    seen.append(other(batch_of(71)).item())
            if i == 5 and wrapped:
                with pytest.raises(RuntimeError, match="used in training without its compiled model.*A compiled function"):
                    other(batch)
        return [*seen, model.table.weight.sum().item()]

    assert losses(True) == losses(False)
    return True


@pytest.mark.thorough
def test_a_lookup_that_the_loader_does_not_see():
    assert run_ranks(_unseen, 2) == [True, True]


def _not_compiled() -> bool:
    import freescale

    model = Model()
    step = torch.compile(lambda batch: model(batch) * 2, backend="freescale")
    with pytest.raises(TypeError, match="(?s)found the compiled function <lambda>.*step.compile.*LookaheadLoader.loader, step"):
        freescale.LookaheadLoader([], step)
    with pytest.raises(TypeError, match="expects a compiled model.*found function"):
        freescale.LookaheadLoader([], lambda batch: batch)
    with pytest.raises(TypeError, match="found Outer, in which no module that looks up table item#?2? is compiled. If a compiled"):
        freescale.LookaheadLoader([], Outer(Model(), _in_place(nn.Linear(2, 2))))
    with pytest.raises(TypeError, match="expects a compiled model"):
        freescale.LookaheadLoader([], torch.compiler.disable(Model()))
    return True


def test_what_is_not_compiled_is_told_what_to_write():
    assert run_ranks(_not_compiled, 1) == [True]


def _vbe(step: int, rank: int) -> Any:
    """A batch in which 'user' has one sample, the others two."""
    from torchrec import KeyedJaggedTensor

    keys = ["history", "candidate", "user", "tag", "tiny"]
    g = torch.Generator().manual_seed(10 * step + rank)
    strides = [[1 if k == "user" else 2] for k in keys]
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.randint(0, 3, (sum(s[0] for s in strides),), generator=g),
        lengths=torch.ones(sum(s[0] for s in strides), dtype=torch.int64),
        stride_per_key_per_rank=strides,
        inverse_indices=(keys, torch.tensor([[0, 0 if k == "user" else 1] for k in keys])),
    )


def _sentences() -> bool:
    import freescale

    said, rank = listen(), dist.get_rank()
    torch.manual_seed(0)
    ema = trec.shard(trec.Model(), trec.LAYOUTS["row_wise"], "ema")
    with pytest.raises(ValueError, match="no sharded table that can be prefetched: .* runs ec: tables .* optimizer is ema.* Iterate"):
        freescale.LookaheadLoader([], _in_place(ema))
    indices = trec.Model()
    from torchrec import EmbeddingCollection

    indices.ec = EmbeddingCollection(tables=trec.tables(), device=torch.device("cpu"), need_indices=True)
    indices = trec.shard(indices, trec.LAYOUTS["row_wise"], "sgd")
    with pytest.raises(ValueError, match="ec: tables 'item', .*'tiny' return their indices .need_indices"):
        freescale.LookaheadLoader([], _compile(indices))

    # One rank brings a batch of another kind: a sentence on every rank, and nothing is lost.
    from torchrec import KeyedJaggedTensor

    torch.manual_seed(0)
    model = trec.shard(trec.Model(), trec.LAYOUTS["row_wise"], "sgd")
    run = torch.compile(model, backend="freescale", options={"codegen": "eager"})
    start = {k: v.clone() for k, v in trec.snapshot(model).items()}
    good = [trec.batch(s, rank, none=False) for s in range(3)]
    kjt = good[2][0]
    weighted = KeyedJaggedTensor(kjt.keys(), kjt.values(), torch.rand(kjt.values().shape[0]), kjt.lengths())
    for bad, words in (
        (_vbe(2, rank), "batch 2: the number of samples differs by feature .'history' has 2, 'user' has 1"),
        (weighted, "batch 2: the features 'history', .* are weighted"),
    ):
        for balance in (False, True):
            trained = 0
            kind = ValueError if rank == 1 else RuntimeError
            with pytest.raises(kind, match=words + ".*iterate the loader directly"):
                batches = [*good[:2], (bad, torch.ones(2)) if rank == 1 else good[2]]
                for batch in freescale.LookaheadLoader(batches, run, balance=balance):
                    run(*batch).backward()
                    trained += 1
            assert trained == 2 and threads() == []
    assert any(not torch.equal(v, start[k]) for k, v in trec.snapshot(model).items())

    # Dynamo gives up, so that TorchRec's own code runs in a planned step.
    torch._dynamo.reset()
    run(*good[0]).backward()
    settings = {**dynamo_settings.dynamo_settings(True), "recompile_limit": 1}
    with mock.patch.object(dynamo_settings, "dynamo_settings", lambda dynamic: settings):
        with pytest.raises(RuntimeError, match="of ec in a step that .* has planned, .*recompile_limit"):
            for batch in freescale.LookaheadLoader(good, run):
                run(*batch).backward()

    # Without a LookaheadLoader TorchRec's own code serves such a batch.
    torch._dynamo.reset()
    expected = model(_vbe(5, rank), torch.ones(2))
    found = run(_vbe(5, rank), torch.ones(2))
    found.backward()
    assert abs(float(found) - float(expected)) <= 1e-6
    assert any("batch size varies per feature" in words for words in said)
    return True


@pytest.mark.thorough
@needs_torchrec
def test_what_cannot_be_planned_is_named():
    assert run_ranks(_sentences, 2) == [True, True]
