"""What a LookaheadLoader can be given: however a model was compiled, the loop has the bits of the loop without it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import trec
from loops import DIM, Model, batch_of, data, threads
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
        return sum(m(*batch) for m in self.inner) * 0.5


NATIVE = {
    "in place": lambda: _in_place(Model()),
    "forward": lambda: _forward(Model()),
    "submodule": lambda: Outer(_compile(Model())),
    "submodule in place": lambda: Outer(_in_place(Model())),
    "two submodules": lambda: Outer(_in_place(Model()), _compile(Model())),
}


def _use(model: nn.Module, make: Any, loader: Any) -> list[Any]:
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
        if i == 2:
            look(make(40))
            look(batch)
        if i == 3:
            for other in loader([make(s) for s in range(30, 33)]):
                look(other)
        if i == 4:
            read()
        if i == 7:
            break
    optimizer.zero_grad(set_to_none=False)
    model(*make(50)).backward()  # and without a loader
    read()
    return seen


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b, strict=True)
    )


def _exact(ways: dict[str, Any], make: Any) -> dict[str, str]:
    import freescale

    said = {}
    for name, build in ways.items():
        torch._dynamo.reset()
        plain = _use(build(), make, list)
        torch._dynamo.reset()  # or it gives up: every model and every way to call it is a graph of its own
        model = build()
        wrapped = _use(model, make, lambda batches, m=model: freescale.LookaheadLoader(batches, m))
        said[name] = "same" if _same(plain, wrapped) else f"{plain} {wrapped}"
        assert threads() == [], name
    return said


def _native() -> dict[str, str]:
    return _exact(NATIVE, lambda step: (batch_of(step),))


def test_native_tables_however_they_are_compiled():
    for said in run_ranks(_native, 2):
        assert said == dict.fromkeys(NATIVE, "same")


def _sharded(inner: nn.Module, ddp: bool = False) -> Any:
    return trec.shard(inner, trec.LAYOUTS["mixed"], "rowwise_adagrad", ddp)


def _trec() -> nn.Module:
    torch.manual_seed(0)
    return trec.Model()


TORCHREC = {
    "in place": lambda: _in_place(_sharded(_trec())),
    "compiled before": lambda: _sharded(_compile(_trec())),
    "compiled before, ddp": lambda: _sharded(_compile(_trec()), ddp=True),
    "in place before, ddp": lambda: _sharded(_in_place(_trec()), ddp=True),
    "submodule": lambda: _sharded(Outer(_compile(_trec()))),
}


def _torchrec() -> dict[str, str]:
    return _exact(TORCHREC, lambda step: trec.batch(step, dist.get_rank(), none=False))


@needs_torchrec
def test_torchrec_tables_however_they_are_compiled():
    for said in run_ranks(_torchrec, 2):
        assert said == dict.fromkeys(TORCHREC, "same")


def _inductor() -> dict[str, str]:
    ways = {"in place": lambda: _in_place(_sharded(_trec(), ddp=True), codegen="inductor")}
    return _exact(ways, lambda step: trec.batch(step, dist.get_rank(), none=False))


@needs_torchrec
def test_in_place_under_inductor():
    assert run_ranks(_inductor, 2) == [{"in place": "same"}] * 2
