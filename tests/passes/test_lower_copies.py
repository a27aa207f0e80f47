"""lower_copies: which transport is chosen and why, what it does to the graph, and requests that cannot be met."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from fake_world import fake_world, graphs_of
from freescale import config, driver
from freescale.kernels.transports import selection
from one_table import Model
from ranks import RankFailed, run_ranks_apart


def _graphs(**options):
    with fake_world(0, 4):
        model = torch.compile(Model(), backend="freescale", fullgraph=True, options={"codegen": "eager", **options})
        return graphs_of(lambda: model(torch.arange(5) % 3).backward())


def _lowered_to_staged():
    """Without a GPU the launches cannot run; the graph is looked at before they do."""
    found = {}

    def keep(direction, name, graph):
        found[direction, name] = [str(n.target) for n in graph.nodes if "launch" in str(n.target)]

    end = driver.observe(keep)
    with fake_world(0, 4), mock.patch.object(selection, "unsupported_reason", lambda *a: ""):
        model = torch.compile(
            Model(), backend="freescale", fullgraph=True, options={"codegen": "eager", "transport": "staged"}
        )
        with pytest.raises(Exception):  # noqa: B017  (whatever a launch of copies says without a device)
            model(torch.arange(5) % 3)
    end()
    return found


def test_launches_become_the_transports_ops():
    (found,) = run_ranks_apart(_lowered_to_staged, [()])
    assert found["forward", "overlap_attention"] == ["freescale.all_to_all_rows_launch.default"]
    assert found["forward", "lower_copies"] == ["freescale.all_to_all_rows_launch_staged.default"]


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
    assert "FREESCALE_TRANSPORT=staged cannot be met: staged copies between GPUs and the rows are on the cpu" in str(error.value)


def test_the_choice_and_its_reason():
    assert selection.choose_transport("auto", "0", "cpu") == ("c10d", "the rows are on the cpu")
    assert selection.choose_transport("c10d", "0", "cuda") == ("c10d", "it was asked for")


@pytest.mark.parametrize("ranks, joined, local, expected", (
    ([0, 1], 2, "", ("peer", "every rank's GPU can write into every other's")),
    ([0, 1], 8, "2", ("peer", "every rank's GPU can write into every other's")),
    ([4, 5, 6, 7], 4, "4", ("peer", "every rank's GPU can write into every other's")),
    ([0, 1], 1, "", ("staged", "the ranks' GPUs cannot all reach each other")),
    ([0, 1, 2], 2, "3", ("staged", "the ranks' GPUs cannot all reach each other")),
    ([0], 8, "", ("staged", "the ranks' GPUs cannot all reach each other")),
    ([0, 1], 8, "1", ("staged", "the ranks are on several hosts")),
    ([3, 4], 8, "4", ("staged", "the ranks are on several hosts")),
))  # fmt: skip
def test_the_choice_on_gpus(monkeypatch, ranks, joined, local, expected):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.setattr(selection, "peer_accessible_gpus", lambda: joined)
    monkeypatch.setattr(selection.distributed, "group_by_name", lambda name: None)
    monkeypatch.setattr(selection.dist, "get_process_group_ranks", lambda group: ranks)
    assert selection.choose_transport("auto", "0", "cuda") == expected


def test_peer_accessible_gpus(monkeypatch):
    islands = {0: 0, 1: 0, 2: 0, 3: 1}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(islands))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: islands[a] == islands[b])
    selection.peer_accessible_gpus.cache_clear()
    assert selection.peer_accessible_gpus() == 3
    selection.peer_accessible_gpus.cache_clear()


def test_a_cached_graph_is_for_the_same_selection_facts(monkeypatch):
    keys = {driver.Driver(config.Config()).uuid()}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for world, joined, local in ((8, 1, "1"), (8, 8, "1"), (8, 8, "8"), (16, 8, "8")):
        monkeypatch.setattr(selection, "peer_accessible_gpus", lambda n=joined: n)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        with fake_world(0, world):
            keys.add(driver.Driver(config.Config()).uuid())
    assert len(keys) == 5
