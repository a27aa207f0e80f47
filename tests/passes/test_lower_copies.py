"""lower_copies: which transport is chosen and why, what it does to the graph, and requests that cannot be met."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fake_world import fake_world, graphs_of
from freescale import config, driver
from freescale.kernels.transports import selection
from one_table import Model
from ranks import RankFailed, run_ranks_apart


def _graphs(**options):
    with fake_world(0, 4):
        model = torch.compile(Model(), backend="freescale", fullgraph=True, options={"codegen": "eager", **options})
        return graphs_of(lambda: model(torch.arange(5) % 3).backward())


def _launches(transport):
    """Without a GPU the launches cannot run; the graph is looked at before they do."""
    found = {}

    def keep(direction, name, graph):
        found[direction, name] = [dict(n.kwargs) for n in graph.nodes if "launch" in str(n.target)]

    end = driver.observe(keep)
    # No group of gloo among fake ranks: since torch 2.14 the process would die of it.
    no_group = mock.patch.object(dist, "new_group", side_effect=RuntimeError("no ranks"))
    with fake_world(0, 4), mock.patch.object(selection, "unsupported_reason", lambda *a: ""), no_group:
        model = torch.compile(
            Model(), backend="freescale", fullgraph=True, options={"codegen": "eager", "transport": transport}
        )
        with pytest.raises(Exception):  # noqa: B017  (whatever a launch of copies says without a device)
            model(torch.arange(5) % 3)
    end()
    return found


def _lowered_to_staged():
    return _launches("staged")


def test_launches_get_the_transport():
    (found,) = run_ranks_apart(_lowered_to_staged, [()])
    assert found["forward", "overlap_attention"] == [{}]
    assert found["forward", "lower_copies"] == [{"transport": "staged"}]


def _same_on_the_cpu():
    texts = _graphs(transport="auto")
    return texts["forward", "overlap_attention"] == texts["forward", "lower_copies"]


def test_on_the_cpu_nothing_changes():
    assert run_ranks_apart(_same_on_the_cpu, [()]) == [True]


def _refused():
    _graphs(transport="staged")


def test_a_request_that_cannot_be_met_is_an_error():
    with pytest.raises(RankFailed) as error:
        run_ranks_apart(_refused, [()])
    assert "FREESCALE_TRANSPORT=staged is not supported here: staged copies between GPUs and the rows are on the cpu" in str(error.value)


def test_the_choice_and_its_reason():
    assert selection.choose_transport("auto", "cpu") == ("c10d", "the rows are on the cpu")
    assert selection.choose_transport("auto", "cuda") == ("auto", "chosen at the first launch of its group")
    assert selection.choose_transport("c10d", "cuda") == ("c10d", "requested")


def _lowered_by_auto():
    with mock.patch.object(selection, "choose_transport", lambda *a: ("auto", "a GPU")):
        return _launches("auto")


def test_on_a_gpu_the_launch_itself_chooses():
    (found,) = run_ranks_apart(_lowered_by_auto, [()])
    assert found["forward", "lower_copies"] == [{"transport": "auto"}]


def test_a_cached_graph_serves_whatever_the_machines_are(monkeypatch):
    """What `auto` takes is not in a graph, so it is not in its key either."""
    keys = {driver.Driver(config.Config()).uuid()}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for world, gpus in ((8, 1), (16, 8)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda n=gpus: n)
        with fake_world(0, world):
            keys.add(driver.Driver(config.Config()).uuid())
    assert len(keys) == 1
