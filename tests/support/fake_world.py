"""A process that acts as one rank of a large world, for graphs and compile time. Nothing is sent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from freescale.compat import version

# For tests that compare the text of whole graphs.
golden_text = pytest.mark.skipif(
    version.torch_version() < "2.13", reason="2.11 and 2.12 number the same nodes differently"
)


def _answer_yourself(out, x, recv, send, group) -> None:
    """Simulated peers request as many rows as are requested from them, always row 0: a valid plan without peers."""
    if out.dim() == 2 and not (out.dtype == torch.uint8 and out.shape[1] == 8):  # in C, a row has eight bytes
        out.copy_(x)
    else:
        out.zero_()


@contextlib.contextmanager
def fake_world(rank: int, world: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from freescale.kernels.planning import rank_mesh
    from freescale.runtime import agreement

    torch._dynamo.reset()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        with (
            mock.patch.object(rank_mesh, "all_to_all_cpu", _answer_yourself),
            mock.patch.object(agreement, "agree", lambda *a, **k: None),
        ):
            yield
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()


def graphs_of(step) -> dict[tuple[str, str], str]:
    """Run `step` and return {(direction, pass): graph text} of the last graph of each."""
    from freescale import driver
    from freescale.passes.graph import graph_text

    found: dict[tuple[str, str], str] = {}

    def keep(way, name, graph):
        found[way, name] = graph_text(graph)

    stop = driver.observe(keep)
    try:
        step()
    finally:
        stop()
    return found
