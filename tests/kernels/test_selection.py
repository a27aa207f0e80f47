"""What `auto` may take and takes, from what the ranks see: stand-ins for hosts and GPUs. The docs' table is this one."""

from __future__ import annotations

import pytest
import torch

from freescale.kernels.transports import rank_view, selection
from freescale.kernels.transports.rank_view import RankView
from repo import ROOT

NO_RDMA = "there is no RDMA device"


def ranks(*hosts: int, gpus: int = 0, joined: bool = True, first: int = 0, **view) -> list[RankView]:
    """So many ranks on each host, each with a GPU; or with `gpus` on each host for all its ranks."""
    views: list[RankView] = []
    for host, n in enumerate(hosts):
        names = [f"{host}.{i}" for i in range(n)]
        for i in range(n):
            own = names[i % gpus if gpus else i]
            reaches = frozenset(names) - {own} if joined else frozenset()
            views.append(RankView(first + len(views), f"host {host}", own, reaches, **view))
    return views


def one_differs(views: list[RankView], index: int, **changes) -> list[RankView]:
    changed = {**vars(views[index]), **changes}
    return [RankView(**changed) if i == index else v for i, v in enumerate(views)]


CASES = {
    "one host, all GPUs reach each other": ranks(8),
    "one host, the GPU of rank 2 does not": one_differs(ranks(4), 2, reaches=frozenset()),
    "one host, a rank sees its own GPU alone": ranks(4, joined=False),
    "one host, several ranks on a GPU": ranks(4, gpus=2),
    "one host, gloo carries the group": ranks(2, joined=False, backend="gloo"),
    "one host, nothing of the group's own carries rows on a GPU": ranks(2, joined=False, backend=""),
    "several hosts, no RDMA": ranks(8, 8, no_rdma=NO_RDMA),
    "several hosts, NIXL and RDMA": ranks(8, 8),
    "several hosts, rank 11 has no NIXL": one_differs(ranks(8, 8), 11, no_rdma="NIXL is not installed"),
    "several hosts, with 8 and 3 ranks": ranks(8, 3, no_rdma=NO_RDMA),
    "several hosts, no RDMA, gloo carries the group": ranks(2, 2, no_rdma=NO_RDMA, backend="gloo"),
    "several hosts, no RDMA, several ranks on a GPU": ranks(2, 2, gpus=1, no_rdma=NO_RDMA),
    "ranks 4 to 7 of 16, which are one host": ranks(4, first=4),
    "a group of one rank": ranks(1),
}


def _row(case: str, views: list[RankView]) -> str:
    found = selection.candidates(views)
    copies = ", else ".join(f"`{name}`" for name in found.without_sms)
    taken = f"{copies}; or `c10d`, by measuring" if found.compare else copies or "`c10d`"
    return f"| {case} | {taken} | {found.reason} |"


def test_the_table_of_the_docs():
    text = (ROOT / "docs/transports.md").read_text()
    table = text.split("<!-- auto -->\n")[1].split("<!-- /auto -->")[0].splitlines()
    assert table[2:] == [_row(case, views) for case, views in CASES.items()]


@pytest.mark.parametrize("case", CASES)
def test_the_choice_does_not_depend_on_which_rank_asks(case):
    """All ranks have the same list; another order of it changes nothing but the rank that is named."""
    found, reverse = (selection.candidates(views) for views in (CASES[case], CASES[case][::-1]))
    assert (found.without_sms, found.compare) == (reverse.without_sms, reverse.compare)


@pytest.mark.parametrize("reached", ({"0.0"}, {"0.0", "0.3"}))
def test_a_gpu_that_reaches_some_of_the_others_is_no_peer(reached):
    found = selection.candidates(one_differs(ranks(4), 2, reaches=frozenset(reached)))
    assert found.without_sms == ("staged",) and found.reason == "the GPU of rank 2 does not reach all others"


@pytest.mark.parametrize("staged, c10d, taken", (
    ([1.0, 1.0], [2.0, 2.0], "staged"),
    ([1.19, 1.0], [1.0, 1.0], "staged"),  # without SMs, and nearly as fast
    ([1.21, 1.0], [1.0, 1.0], "c10d"),
    ([1.0, 1.0], [0.1, 0.9], "staged"),  # the slowest rank counts
    ([float("inf"), 1.0], [5.0, 5.0], "c10d"),  # it failed on a rank
    ([1.0, 1.0], [float("inf"), 1.0], "staged"),
    ([float("inf")], [float("inf")], "c10d"),
))  # fmt: skip
def test_the_fastest_and_what_is_nearly_as_fast(staged, c10d, taken):
    assert selection.fastest({"staged": staged, "c10d": c10d}) == taken


def test_the_figures_in_words():
    words = selection.figures({"staged": [1e-3, 2e-3], "c10d": [0.5, 0.25]}, 8 << 20)
    assert words == "for 8 MiB the slowest rank takes over staged 2 ms, over c10d 500 ms"


def test_rdma_is_a_device_with_an_active_port_that_may_be_used(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_view.nixl, "version", lambda: "1.0")
    assert rank_view.no_rdma_reason(str(tmp_path)) == NO_RDMA
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port.parent / "2" / "state").mkdir(parents=True)  # one that cannot be read
    (port / "state").write_text("1: DOWN\n")
    assert rank_view.no_rdma_reason(str(tmp_path)) == "no port of an RDMA device is active"
    (port / "state").write_text("4: ACTIVE\n")
    assert rank_view.no_rdma_reason(str(tmp_path)) == "/dev/infiniband is missing, so RDMA devices cannot be used"
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    (tmp_path / "dev/infiniband/uverbs0").touch()
    assert rank_view.no_rdma_reason(str(tmp_path)) == ""
    monkeypatch.setattr(rank_view.nixl, "version", lambda: None)
    assert rank_view.no_rdma_reason(str(tmp_path)) == "NIXL is not installed"


def test_what_a_rank_sees_of_gpus(monkeypatch):
    islands = {0: 0, 1: 0, 2: 0, 3: 1}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(islands))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: islands[a] == islands[b])
    rank_view.peer_accessible_gpus.cache_clear()
    assert rank_view.peer_accessible_gpus() == 3
    rank_view.peer_accessible_gpus.cache_clear()
    assert [rank_view._reachable_from(i) for i in (1, 3)] == [[0, 2], []]
