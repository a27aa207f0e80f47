"""What a LookaheadLoader can be given: however a model was compiled, the loop has the bits of the loop without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import trec
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
            # Gradients that are views of DDP's buckets: Dynamo fails to compile a second time. Inductor: takes long.
            train_only = "DDP" in name or "Inductor" in name
            torch._dynamo.reset()  # or it gives up: every model and every way to call it is a graph of its own
            expected = expected or _use(build(), make, list, train_only)
            torch._dynamo.reset()
            model = build()
            seen = _use(model, make, lambda batches, m=model: freescale.LookaheadLoader(batches, m), train_only)
            if not _same(seen, expected):
                wrong.append(name)
            assert threads() == [], name
    return wrong


def _native() -> list[str]:
    return _exact(NATIVE, lambda step: (batch_of(step),))


def test_native_tables_however_they_are_compiled():
    assert run_ranks(_native, 2) == [[], []]


def _sharded(inner: nn.Module, ddp: bool = False) -> Any:
    return trec.shard(inner, trec.LAYOUTS["mixed"], "rowwise_adagrad", ddp)


def _trec() -> nn.Module:
    torch.manual_seed(0)
    return trec.Model()


TORCHREC = (
    {
        "in place": lambda: _in_place(_sharded(_trec())),
        "compiled before": lambda: _sharded(_compile(_trec())),
    },
    {"in place before, DDP": lambda: _sharded(_in_place(_trec()), ddp=True)},
)


def _torchrec() -> list[str]:
    return _exact(TORCHREC, lambda step: trec.batch(step, dist.get_rank(), none=False))


@needs_torchrec
def test_torchrec_tables_however_they_are_compiled():
    assert run_ranks(_torchrec, 2) == [[], []]


def _inductor() -> list[str]:
    ways = {"in place, Inductor": lambda: _in_place(Model(), codegen="inductor")}
    return _exact([ways], lambda step: (batch_of(step),))


def test_in_place_under_inductor():
    assert run_ranks(_inductor, 2) == [[], []]
