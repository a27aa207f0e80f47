"""What `auto` may take and takes, from what the ranks see: stand-ins for hosts and GPUs. The docs' table is this one."""

from __future__ import annotations

import pytest

from freescale.kernels.transports import selection
from freescale.kernels.transports.selection import RankView
from repo import ROOT

NO_RDMA = "there is no RDMA device"


def ranks(*hosts: int, gpus: int = 0, first: int = 0, **view) -> list[RankView]:
    """So many ranks on each host, each with a GPU; or with `gpus` on each host for all its ranks."""
    views: list[RankView] = []
    for host, n in enumerate(hosts):
        for i in range(n):
            views.append(RankView(first + len(views), f"host {host}", f"{host}.{i % (gpus or n)}", **view))
    return views


def one_differs(views: list[RankView], index: int, **changes) -> list[RankView]:
    changed = {**vars(views[index]), **changes}
    return [RankView(**changed) if i == index else v for i, v in enumerate(views)]


CASES = {
    "one host": ranks(8),
    "one host, several ranks on a GPU": ranks(4, gpus=2),
    "one host, several ranks on a GPU, and NCCL is told so": ranks(4, gpus=2, nccl_shares_gpus=True),
    "one host, gloo carries the group": ranks(2, backend="gloo"),
    "one host, nothing of the group's own carries rows on a GPU": ranks(2, backend=""),
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
    names = [f"`{name}`" for name in (found.sm_free, "c10d" * found.has_c10d) if name]
    by_measuring = ", by measuring" if len(names) == 2 else ""
    taken = " or ".join(names) + by_measuring if names else f"an error: {found.no_c10d}"
    return f"| {case} | {taken} | {found.reason} |"


def test_the_table_of_the_docs():
    text = (ROOT / "docs/transports.md").read_text()
    table = text.split("<!-- auto -->\n")[1].split("<!-- /auto -->")[0].splitlines()
    assert table[2:] == [_row(case, views) for case, views in CASES.items()]


@pytest.mark.parametrize("case", CASES)
def test_the_choice_does_not_depend_on_which_rank_asks(case):
    """All ranks have the same list; another order of it changes nothing but the rank that is named."""
    found, reverse = (selection.candidates(views) for views in (CASES[case], CASES[case][::-1]))
    assert (found.sm_free, found.no_c10d) == (reverse.sm_free, reverse.no_c10d)


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
    assert words == "for 8 MiB the slowest rank takes: staged 2 ms, c10d 500 ms"


def test_rdma_is_a_device_with_an_active_port_that_may_be_used(tmp_path, monkeypatch):
    monkeypatch.setattr(selection.nixl, "version", lambda: "1.0")
    assert selection.no_rdma_reason(str(tmp_path)) == NO_RDMA
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port.parent / "2" / "state").mkdir(parents=True)  # one that cannot be read
    (port / "state").write_text("1: DOWN\n")
    assert selection.no_rdma_reason(str(tmp_path)) == "no port of an RDMA device is active"
    (port / "state").write_text("4: ACTIVE\n")
    assert selection.no_rdma_reason(str(tmp_path)) == "/dev/infiniband is missing, so RDMA devices cannot be used"
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    (tmp_path / "dev/infiniband/uverbs0").touch()
    assert selection.no_rdma_reason(str(tmp_path)) == ""
    monkeypatch.setattr(selection.nixl, "version", lambda: None)
    assert selection.no_rdma_reason(str(tmp_path)) == "NIXL is not installed"
