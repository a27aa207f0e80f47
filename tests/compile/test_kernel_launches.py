"""Kernels that Inductor has generated are launched without what it does before each launch, with the same arguments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from freescale.compat import kernel_launches
from ranks import run_ranks


class Static:
    """As torch's StaticallyLaunchedCudaKernel; `launched` are the arguments of its C function."""

    num_warps, shared, function = 4, 128, 77

    def __init__(self, types: str, global_scratch: bool, profile_scratch: bool) -> None:
        self.arg_tys, self.has_global_scratch, self.has_profile_scratch = types, global_scratch, profile_scratch
        self.launched: list[Any] = []
        self.C_impl = SimpleNamespace(_launch_kernel=lambda *args: self.launched.append(args))

    def run(self, x: int, y: int, z: int, stream: int, *args: Any) -> None:
        scratch = (None,) * (self.has_global_scratch + self.has_profile_scratch)
        types = self.arg_tys + "O" * len(scratch)
        address = (a.data_ptr() if isinstance(a, FakeTensor) else a for a in args)  # as C does
        self.C_impl._launch_kernel(
            self.function, x, y, z, self.num_warps, self.shared, types, (*address, *scratch), stream
        )


class FakeTensor(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True


class Autotuner:
    """As torch's CachingAutotuner, of a kernel of two tensors and a number."""

    triton_interpret = dump_launch_params = dump_launch_tensors = False

    def __init__(self, static: Static | None, **attributes: Any) -> None:
        names: dict[str, Any] = {"runner": (lambda *args: None) if static is None else static.run}
        exec("def launcher(a, b, n, stream): runner(-(n // -8), 1, 1, stream, a, b, n)", names)  # noqa: S102
        self.launcher = names["launcher"]
        self.launcher.__dict__.update(_is_static=static is not None, store_cubin=False)
        self.launchers = [self.launcher]
        self.runs, self.name = 0, "a kernel"
        self.__dict__.update(attributes)

    def run(self, *args: Any, stream: Any, **kwargs: Any) -> Any:
        self.runs += 1
        return self.launcher(*args, stream=stream)


@pytest.fixture(autouse=True)
def of_an_old_torch(monkeypatch):
    monkeypatch.setattr(kernel_launches, "_autotuner", lambda: Autotuner)


def shortened(kernel: Any) -> Any:
    names = {"kernel": kernel, "other": torch}
    kernel_launches.shorten(names)
    assert names["other"] is torch
    return names["kernel"]


@pytest.mark.parametrize("scratch", [(False, False), (True, False), (True, True)])
def test_the_same_arguments(scratch):
    static = Static("OOi", *scratch)
    kernel = Autotuner(static)
    short = shortened(kernel)
    a, b = (torch.zeros(20).as_subclass(FakeTensor) for _ in range(2))
    for _ in range(3):
        short.run(a, b, 20, stream=5)
    assert kernel.runs == 1 and len(static.launched) == 3 and len(set(static.launched)) == 1
    function, x, y, z, warps, shared, types, args, stream = static.launched[0]
    assert (function, x, y, z, warps, shared, stream) == (77, 3, 1, 1, 4, 128, 5)
    assert types == "OOi" + "O" * sum(scratch)
    assert args == (a.data_ptr(), b.data_ptr(), 20, *(None for s in scratch if s))
    assert short.name == "a kernel"


def test_under_a_profiler_it_is_as_ever():
    kernel = Autotuner(Static("OOi", True, False))
    short = shortened(kernel)
    a = torch.zeros(20).as_subclass(FakeTensor)
    short.run(a, a, 20, stream=5)
    with torch.profiler.profile():
        short.run(a, a, 20, stream=5)
    assert kernel.runs == 2
    short.run(a, a, 20, stream=5)
    assert kernel.runs == 2


@pytest.mark.parametrize("what", ["triton_interpret", "dump_launch_params", "dump_launch_tensors", "not static"])
def test_what_does_more_is_left_alone(what):
    static = None if what == "not static" else Static("OOi", False, False)
    kernel = Autotuner(static, **({what: True} if static else {}))
    short = shortened(kernel)
    a = torch.zeros(20).as_subclass(FakeTensor)
    for _ in range(3):
        short.run(a, a, 20, stream=5)
    assert kernel.runs == 3


def test_a_kernel_on_the_cpu_keeps_its_tensors():
    static = Static("OOi", False, False)
    short = shortened(Autotuner(static))
    a = torch.zeros(20)
    for _ in range(2):
        short.run(a, a, 20, stream=5)
    assert all(args[7] == (a, a, 20) for args in static.launched)


# ---- with a GPU ------------------------------------------------------------------------------------------------------


def _train_on_gpu() -> tuple[list[bool], bool, bool]:
    """Whether each step's launches were short; whether they can be; whether all steps have changed the table alike."""
    import freescale

    torch.cuda.set_device(0)
    device = torch.device("cuda", 0)
    table = freescale.ShardedEmbedding(20, 64, name="item", lr=0.5, device=device)
    dense = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.SiLU(), torch.nn.Linear(64, 1)).to(device)
    model = torch.nn.Sequential(table, dense)
    run = torch.compile(model, backend="freescale", fullgraph=True, options={"codegen": "inductor", "strict": True})
    autotuner = kernel_launches._autotuner()
    start, long, results = table.weight.clone(), [], []
    if autotuner is not None:
        ordinary = autotuner.run
        autotuner.run = lambda *args, **kwargs: (long.append(1), ordinary(*args, **kwargs))[1]

    def step() -> bool:
        table.weight.copy_(start)
        before = len(long)
        run(torch.tensor([3, 5, 3, 7], device=device)).sum().backward()
        results.append(table.weight.clone())
        return len(long) == before

    step()
    step()
    short = [step(), step()]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        short.append(step())
    short.append(step())
    same = all(torch.equal(r, results[0]) for r in results) and not torch.equal(start, results[0])
    return short, autotuner is not None, same


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_steps_on_a_gpu():
    ((short, can_be_short, same),) = run_ranks(_train_on_gpu, 1)
    assert same
    if can_be_short:
        assert short == [True, True, False, True]
