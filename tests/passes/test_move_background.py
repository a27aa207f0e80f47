"""Late gradients and early rows on a stream of their own: which graphs, the same bits, and what waits for them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import expecttest
import pytest
import torch
import torch.distributed as dist
from torch import fx, nn

import freescale.passes
from fake_world import golden_text, graphs_of
from freescale.config import Config
from freescale.kernels.ops.schemas import LATE
from freescale.passes.graph import argument, graph_text
from freescale.passes.move_background import move_background
from ranks import run_ranks

fs = torch.ops.freescale
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
ON_GPU = mock.patch("freescale.passes.move_background._is_on_gpu", lambda graph: True)  # for CPU graphs


class Model(nn.Module):
    """A table, which may be compiled alone, and a dense part."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        import freescale

        torch.manual_seed(0)
        self.item = freescale.ShardedEmbedding(512, 8, name="item", optimizer="rowwise_adagrad", lr=0.1, device=device)
        self.dense = nn.Linear(8, 8, device=device)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.tanh(self.dense(self.item(batch["item"]))).square().sum()


def _batches() -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(dist.get_rank())
    return [{"item": torch.randint(0, 400, (100 + 7 * i,), generator=g)} for i in range(8)]


def _train(model: Model, ahead: bool) -> list[torch.Tensor]:
    """Losses, the rows that are read in the middle of the loop and at its end, the other parameters."""
    import freescale

    found: list[torch.Tensor] = []
    device = model.dense.weight.device
    for i, batch in enumerate(freescale.LookaheadLoader(_batches(), model, overlap=ahead)):
        loss = model({k: v.to(device) for k, v in batch.items()})
        if i == 3:
            found.append(model.item.state_dict()["weight"].clone())  # before the backward pass
        if i == 4:
            with torch.no_grad():
                found.append(model({"item": torch.arange(300, device=device)}))
        if i != 5:  # a forward pass without a backward pass
            loss.backward()
        with torch.no_grad():
            for p in model.dense.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad
                    p.grad = None
        found.append(loss.detach())
    return [*found, model.item.state_dict()["weight"], *(p.detach() for p in model.dense.parameters())]


def _compiled(whole: bool, device: str = "cpu", codegen: str = "eager") -> Model:
    torch._dynamo.reset()
    model = Model(device)
    (model if whole else model.item).compile(backend="freescale", options={"codegen": codegen, "strict": True})
    return model


def _steps(model: Model) -> None:
    import freescale

    for batch in freescale.LookaheadLoader(_batches()[:3], model):
        model(batch).backward()


def _graph(whole: bool) -> dict[tuple[str, str], str]:
    with ON_GPU:
        return graphs_of(lambda: _steps(_compiled(whole)))


CALLS = re.compile(r"^\w+ = freescale\.(\w+)|^\w+ = _c10d_functional\.(\w+)", re.MULTILINE)


def _calls(text: str) -> list[str]:
    return ["".join(m.groups("")) for m in CALLS.finditer(text)]


def test_a_graph_with_compute_stays_as_it_is():
    for graphs in run_ranks(_graph, 2, True):
        assert graphs["forward", "move_background"] == graphs["forward", "lower_copies"]
        assert graphs["backward", "move_background"] == graphs["backward", "lower_copies"]


@golden_text
class Golden(expecttest.TestCase):
    maxDiff = None

    def test_a_collection_alone(self):
        (graphs,) = run_ranks(_graph, 1, False)
        found = "\n".join(_calls(graphs["forward", "move_background"]))
        self.assertExpectedInline(found, """\
expect_ids
all_to_all_rows_launch
wait_tensor
wait_tensor
all_to_all_background_launch""")
        assert "early rows" in graphs["forward", "move_background"]


def _sites_of(change: Callable[[fx.Graph, fx.Node, fx.Node], fx.Node]) -> tuple[int, bool]:
    """With a node added to a graph to which the pass would apply: its sites, and whether the graph stayed as it was."""
    found: list[tuple[int, bool]] = []

    def changed(gm: fx.GraphModule, cfg: Config) -> int:
        late = [n for n in gm.graph.nodes if n.target is fs.update_.default and argument(n, "priority") == LATE]
        if late:
            added = change(gm.graph, late[0], argument(late[0], "grad"))
            before = graph_text(gm.graph)
            found.append((move_background(gm, cfg), graph_text(gm.graph) == before))
            gm.graph.erase_node(added)
        return 0

    passes = (*freescale.passes.PASSES[:-1], ("move_background", changed))
    with ON_GPU, mock.patch("freescale.passes.PASSES", passes):
        _steps(_compiled(False))
    return found[-1]


def _add(graph: fx.Graph, after: fx.Node, op: Any, *args: fx.Node) -> fx.Node:
    with graph.inserting_after(after):
        node = graph.call_function(op, args)
    node.meta["val"] = args[0].meta["val"]
    return node


def _read_token(graph: fx.Graph, update: fx.Node, arrived: fx.Node) -> fx.Node:
    return _add(graph, update, torch.ops.aten.neg.default, update)


def _read_gradients(graph: fx.Graph, update: fx.Node, arrived: fx.Node) -> fx.Node:
    return _add(graph, arrived, torch.ops.aten.neg.default, arrived)


def _multiply(graph: fx.Graph, update: fx.Node, arrived: fx.Node) -> fx.Node:
    token = argument(update, "token")
    return _add(graph, token, torch.ops.aten.mm.default, token, token)


def _refused() -> list[tuple[int, bool]]:
    return [_sites_of(change) for change in (_read_token, _read_gradients, _multiply)]


def test_graphs_that_are_left_as_they_are():
    """Something else needs the update or the gradients, or there is compute to hide them under."""
    (found,) = run_ranks(_refused, 1)
    assert found == [(0, True)] * 3


def _both(device: str, codegen: str) -> None:
    plain = _train(_compiled(False, device, codegen), False)
    with ON_GPU:
        ahead = _train(_compiled(False, device, codegen), True)
    assert len(plain) == len(ahead) == 13
    assert all(map(torch.equal, plain, ahead)), [float((a - b).abs().max()) for a, b in zip(plain, ahead, strict=True)]
    assert float((plain[0] - plain[-3]).abs().max()) > 0


@pytest.mark.parametrize("codegen", ("eager", pytest.param("inductor", marks=pytest.mark.thorough)))
def test_same_bits(codegen):
    run_ranks(_both, 2, "cpu", codegen)


def _write_beside_an_update(device: str) -> None:
    """Forward without backward, then a write that nothing orders after the late gradients."""
    import freescale

    torch.cuda.set_device(0)
    model = _compiled(False, device)
    with pytest.raises(RuntimeError, match="wrote to a table before the gradients of an earlier step"):
        for i, batch in enumerate(freescale.LookaheadLoader(_batches(), model)):
            loss = model(batch)
            if i < 2:
                loss.backward()
            elif dist.get_rank() == 0:
                with torch.no_grad():
                    model.item.weight.mul_(0.5)


@pytest.mark.gpu
@needs_gpu
def test_a_write_beside_an_update():
    run_ranks(_write_beside_an_update, 2, "cuda", backend="cpu:gloo,cuda:nccl", timeout=150)


def _on_gpu(codegen: str) -> None:
    from freescale.kernels import background

    torch.cuda.set_device(0)
    _both("cuda", codegen)
    assert background._stream.cache_info().currsize == 1 and not background._pending


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("codegen", ("eager", "inductor"))
@pytest.mark.parametrize("transport", ("c10d", "staged"))
def test_same_bits_on_a_gpu(codegen, transport):
    env = {"FREESCALE_TRANSPORT": transport}
    run_ranks(_on_gpu, 2, codegen, backend="cpu:gloo,cuda:nccl", env=env, timeout=150)
