"""Native tables in a model that DDP with its defaults or FSDP2 wraps: each rank keeps its own rows and trains on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ranks import run_ranks

DIM, STEPS = 4, 4
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # gloo ends the process where FSDP2 scatters on a GPU
DEVICES = ("cpu", pytest.param("cuda", marks=[
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]))  # fmt: skip


class Model(nn.Module):
    """Tables deep inside, of optimizers with every kind of state, beside a buffer that DDP is to send."""

    def __init__(self) -> None:
        super().__init__()
        import freescale

        torch.manual_seed(0)
        kwargs: Any = {"lr": 0.1, "dtype": torch.float64}
        user = freescale.ShardedEmbedding(9, DIM, name="user", optimizer="adam", **kwargs)
        shops = {"item": 31, "shop": 7}
        tables = freescale.ShardedEmbeddingCollection(shops, DIM, optimizer="rowwise_adagrad", **kwargs)
        self.deep = nn.ModuleList([nn.ModuleDict({"user": user, "tables": tables})])
        self.out = nn.Linear(DIM, DIM, dtype=torch.float64)
        # (Because of a float64 of no dimension on the CPU, Dynamo traces once more, which is no failure of this rank.)
        self.register_buffer("scale", torch.full((), 1.0 + dist.get_rank(), dtype=torch.float64))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        (deep,) = self.deep
        rows = torch.cat([deep["user"](batch["user"]), *deep["tables"](batch).values()])
        return (torch.tanh(self.out(rows)) * rows).sum() * self.scale

    def buffers_of_tables(self) -> dict[str, torch.Tensor]:
        return {n: b.detach().clone().cpu() for n, b in self.named_buffers() if n.startswith("deep")}


def batch_of(step: int, device: str) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(10 * step + dist.get_rank())
    sizes = {"user": 9, "item": 31, "shop": 7}
    return {name: torch.randint(0, rows, (3 + step,), generator=g).to(device) for name, rows in sizes.items()}


def train(model: Model, run: Any, device: str, look_ahead: Any = None, average: bool = False) -> tuple[Any, ...]:
    """Losses, tables and dense parameters. `look_ahead`: what a LookaheadLoader is given."""
    import freescale

    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    batches: Any = [batch_of(step, device) for step in range(STEPS)]
    for batch in batches if look_ahead is None else freescale.LookaheadLoader(batches, look_ahead):
        optimizer.zero_grad()
        loss = run(batch)
        loss.backward()
        for p in model.parameters() if average else ():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()
        losses.append(float(loss.detach()))
    dense = [getattr(p, "full_tensor", lambda p=p: p)().detach().clone().cpu() for p in model.parameters()]
    return losses, model.buffers_of_tables(), dense


def check(
    name: str, device: str, wrap: Callable[[Model], tuple[Any, Any]], ways: tuple[bool, ...] = (False, True), sends: bool = True
) -> None:
    """`wrap(model)`: what is called, and what a LookaheadLoader is given. Training as in eager without a wrapper; with
    look-ahead and without, to the bit. `sends`: the wrapper sends buffers."""
    plain = Model().to(device)
    plain.scale.fill_(1.0)  # rank 0's
    expected = train(plain, plain, device, average=True)
    model = Model().to(device)
    run, loaded = wrap(model)
    beginning, found = {k: v.clone() for k, v in model.state_dict().items()}, []
    for look_ahead in ways:
        model.load_state_dict(beginning)
        model.scale.fill_(1.0 + sends * dist.get_rank())
        found.append(train(model, run, device, loaded if look_ahead else None))
        for a, b in zip(_tensors(found[-1]), _tensors(expected), strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-12), (name, look_ahead, found[-1], expected)
    assert all(map(torch.equal, _tensors(found[0]), _tensors(found[-1]))), (name, found)


def _tensors(trained: tuple[Any, ...]) -> list[torch.Tensor]:
    losses, tables, dense = trained
    return [torch.tensor(losses), *tables.values(), *dense]


OPTIONS: dict[str, Any] = {"backend": "freescale", "options": {"codegen": "eager", "strict": True}}


def _compiled_inside(model: Model) -> tuple[Any, Any]:
    model.compile(**OPTIONS)
    wrapper = DistributedDataParallel(model)
    return wrapper, wrapper


def _compiled_around(model: Model) -> tuple[Any, Any]:
    wrapper = DistributedDataParallel(model, static_graph=True, gradient_as_bucket_view=True)
    wrapper.compile(**OPTIONS)
    return wrapper, wrapper


def _returned(model: Model) -> tuple[Any, Any]:
    wrapper = DistributedDataParallel(torch.compile(model, **OPTIONS))
    return wrapper, wrapper


def _deep_inside(model: Model) -> tuple[Any, Any]:
    """As Lightning does: around a module that holds the compiled one."""
    model.compile(**OPTIONS)
    outer = nn.Sequential(nn.Identity(), model)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(outer, ["a name of the user's"])
    wrapper = DistributedDataParallel(outer)
    assert "a name of the user's" in wrapper.parameters_to_ignore
    return wrapper, model


def _shard_whole(model: Model) -> tuple[Any, Any]:
    return fully_shard(model), None


def _shard_whole_compiled(model: Model) -> tuple[Any, Any]:
    fully_shard(model).compile(**OPTIONS)
    return model, model


def _shard_dense_part(model: Model) -> tuple[Any, Any]:
    fully_shard(model.out)
    model.compile(**OPTIONS)
    return model, model


def _leave_tables_alone(device: str) -> list[str]:
    if device == "cuda":
        torch.cuda.set_device(0)
    before = Model().to(device)
    rows = before.buffers_of_tables()
    wrapper = DistributedDataParallel(before)
    assert all(torch.equal(t, rows[n]) for n, t in before.buffers_of_tables().items())
    assert float(before.scale) == 1.0  # other buffers are sent, as always
    assert list(wrapper.state_dict()) == [f"module.{n}" for n in before.state_dict()]
    check("eager", device, lambda model: (DistributedDataParallel(model), None), (False,))
    check("compiled inside", device, _compiled_inside)
    check("FSDP2", device, _shard_whole, (False,), sends=False)
    return sorted(wrapper.parameters_to_ignore)


@pytest.mark.parametrize("device", DEVICES)
def test_wrappers_leave_tables_alone(device):
    names = [f"deep.0.tables.{n}" for n in ("momentum", "weight")]
    names += [f"deep.0.user.{n}" for n in ("momentum", "squares", "steps", "weight")]
    assert run_ranks(_leave_tables_alone, 2, device, backend=BACKENDS[device]) == [names] * 2


def _other_wrappers(device: str) -> bool:
    if device == "cuda":
        torch.cuda.set_device(0)
    for wrap in (_compiled_around, _returned, _deep_inside, _shard_whole_compiled, _shard_dense_part):
        check(wrap.__name__, device, wrap, sends="shard" not in wrap.__name__)
        torch._dynamo.reset()
    return True


@pytest.mark.thorough
@pytest.mark.parametrize("device", DEVICES)
def test_wrappers_around_and_inside_what_is_compiled(device):
    assert run_ranks(_other_wrappers, 2, device, backend=BACKENDS[device]) == [True] * 2
