"""Run a function on several ranks (gloo by default), and return the result of each.

Ranks come from a forkserver with torch preloaded and warmed up (warm_ranks.py), so they start in 0.1 s. They share
torch's caches, which start empty in every run (session_folder.py), so a graph shared by tests or ranks is compiled
once. Tests of compilation itself, and tests that change it, use `compiled_anew`.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import multiprocessing as mp
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import session_folder

# Importing Inductor touches the CUDA driver if there is one, even with hidden GPUs: it starts a thread, and a process
# forked after that cannot use CUDA. Spawn instead.
HAS_DRIVER = torch.backends.cuda.is_built() and ctypes.util.find_library("cuda") is not None
_context = mp.get_context("spawn" if torch.cuda.is_available() or HAS_DRIVER else "forkserver")
HAS_TORCHREC = all(importlib.util.find_spec(name) is not None for name in ("torchrec", "fbgemm_gpu"))


@cache
def warm() -> None:
    """Start the forkserver, which finds modules through PYTHONPATH only."""
    if _context.get_start_method() != "forkserver":
        return
    _context.set_forkserver_preload(["warm_ranks"])
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    with mock.patch.dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1", SYMPY_CACHE_SIZE="100000"):
        forkserver.ensure_running()


def _warnings_are_errors() -> None:
    """For warnings caused by freescale's lines. Warnings among torch and TorchRec are ignored."""
    warnings.filterwarnings("error", module=r"freescale\b")


def _keep_bytecode() -> None:
    """Cache bytecode of freescale and the tests for other ranks, even if Python is configured not to."""
    sys.pycache_prefix, sys.dont_write_bytecode = str(session_folder.path() / "bytecode"), False


class RankFailed(AssertionError):
    """A rank raised; the message has every failed rank's traceback."""


def nccl_environment(rank: int) -> dict[str, str]:
    """NCCL refuses two ranks on one GPU unless they appear to be on different hosts: then it uses sockets."""
    return {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def _rank(call, rank, world, backend, store, timeout, env, cached, pipe):
    os.environ.update({"OMP_NUM_THREADS": "1", **env})
    _keep_bytecode()
    _warnings_are_errors()
    import torch
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch._inductor.config.fx_graph_cache = torch._functorch.config.enable_autograd_cache = cached
    # With symbolic sizes, caching results of fake ops costs more than it saves: a tenth of compile time.
    torch._dynamo.config.fake_tensor_cache_enabled = False
    try:
        if "nccl" in backend:
            torch.cuda.set_device(0)
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout),
        )
        fn, args = pickle.loads(call)
        pipe.send((True, pickle.dumps(fn(*args))))  # plain pickle: tensors are sent by value
        if "nccl" in backend:
            time.sleep(timeout)  # to be killed: an NCCL thread may still be sending what another rank waits for
    except BaseException as error:  # noqa: BLE001
        pipe.send((False, (f"{type(error).__name__}: {error}", traceback.format_exc())))
    finally:
        pipe.close()
        os._exit(0)  # a rank whose peers are gone must not wait for them at exit


def run_ranks(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 240,
    env: dict[str, str] | None = None,
    env_of: dict[int, dict[str, str]] | None = None,
    expect_errors: bool = False,
    group_timeout: float | None = None,
    backend: str = "gloo",
    compiled_anew: bool = False,
) -> list[Any]:
    """`fn(*args)` on every rank. With `expect_errors`, returns each rank's error as text.

    `group_timeout`: of the process group, if different from `timeout`. `backend`: as for `init_process_group`; with
    NCCL, all ranks use the first GPU. `compiled_anew`: each rank compiles its own graphs, without shared caches.
    """
    warm()
    call = pickle.dumps((fn, args))
    with tempfile.TemporaryDirectory() as folder:
        pipes, ranks = [], []
        for rank in range(world):
            ours, theirs = _context.Pipe(duplex=False)
            own = {**(env or {}), **(env_of or {}).get(rank, {})}
            for_nccl = nccl_environment(rank) if "nccl" in backend else {}
            their_env = {"TORCHINDUCTOR_CACHE_DIR": str(session_folder.path() / "compiled"), **for_nccl, **own}
            store, seconds = os.path.join(folder, "store"), group_timeout or timeout
            arguments = (call, rank, world, backend, store, seconds, their_env, not compiled_anew, theirs)
            p = _context.Process(target=_rank, args=arguments, daemon=True)
            p.start()
            theirs.close()
            pipes.append(ours)
            ranks.append(p)
        try:
            return _collect(pipes, time.monotonic() + timeout, expect_errors)
        finally:
            for p in ranks:
                p.kill()
                p.join(10)


def _collect(pipes, end, expect_errors):
    results, failures = [], []
    for rank, pipe in enumerate(pipes):
        if not pipe.poll(max(0.0, end - time.monotonic())):
            failures.append((rank, f"rank {rank} did not finish in time"))
            results.append("did not finish in time")
            continue
        try:
            good, value = pipe.recv()
        except EOFError:
            good, value = False, ("died", "the process exited unexpectedly")
        if good:
            results.append(pickle.loads(value))
        else:
            results.append(value[0])
            failures.append((rank, value[1]))
    if failures and not expect_errors:
        raise RankFailed("\n".join(f"--- rank {rank}\n{text}" for rank, text in failures))
    if expect_errors and len(failures) != len(pipes):
        raise RankFailed(f"expected every rank to raise, found {results}")
    return results


def _alone(call, pipe):
    os.environ["OMP_NUM_THREADS"] = "1"
    _keep_bytecode()
    _warnings_are_errors()
    import torch

    torch.set_num_threads(1)
    try:
        fn, args = pickle.loads(call)
        pipe.send((True, pickle.dumps(fn(*args))))  # plain pickle: tensors are sent by value
    except BaseException as error:  # noqa: BLE001
        pipe.send((False, (f"{type(error).__name__}: {error}", traceback.format_exc())))
    finally:
        pipe.close()
        os._exit(0)


def run_ranks_apart(fn: Callable[..., Any], calls: list[tuple], timeout: float = 240) -> list[Any]:
    """`fn(*args)` for each of `calls`, each in a fresh process without a process group."""
    warm()
    results = []
    for args in calls:
        ours, theirs = _context.Pipe(duplex=False)
        p = _context.Process(target=_alone, args=(pickle.dumps((fn, args)), theirs), daemon=True)
        p.start()
        theirs.close()
        try:
            results += _collect([ours], time.monotonic() + timeout, False)
        finally:
            p.kill()
            p.join(10)
    return results
